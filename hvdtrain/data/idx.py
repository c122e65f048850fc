"""Loads MNIST, Fashion-MNIST or the embedded digits into memory.

    from hvdtrain.data import idx
    data = idx.load("auto", data_dir=None)
    print(data.reason)

Every rank on a host calls this with the same arguments. If files must be downloaded, unpacked or verified, the first process
does so and the others wait (cache.py, download.py).

The content of every MNIST and Fashion-MNIST file is compared with its published SHA-256; a file that differs is an error
(published.py). Therefore ranks on different hosts only need to compare `name`.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hvdtrain.data import cache
from hvdtrain.data.published import PUBLISHED, SIDE, BadFile, File, Published, content_of, gunzip, problem_of, show
from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError

NAMES = ("auto", "mnist", "fashion-mnist", "digits")
LOCK_SECONDS = 60.0  # how long a process waits for another one to verify the files, before it does so itself


@dataclass(frozen=True, eq=False)
class Dataset:
    """A complete dataset. Do not modify the images: they may be a memory-mapped file, shared with other ranks."""

    name: str  # "mnist", "fashion-mnist" or "digits", never "auto"
    train_images: Tensor  # uint8 [n, 1, 28, 28]
    train_labels: Tensor  # int64 [n], 0 to 9
    test_images: Tensor  # uint8 [m, 1, 28, 28]
    test_labels: Tensor  # int64 [m]
    reason: str  # one line: which data this is, and why it was chosen


class NotThere(Exception):
    """The dataset was not found and could not be downloaded. The message is one line without a remedy."""


@dataclass(frozen=True)
class Located:
    """The location of a verified dataset."""

    name: str  # as Dataset.name
    sources: tuple[Path | bytearray, ...]  # uncompressed files, or their content if it could not be cached
    reason: str  # as Dataset.reason

    def read(self) -> Dataset:
        """Return the dataset, memory-mapped if possible. Takes milliseconds. Raises UserError if a file has changed."""
        if self.name == "digits":
            from hvdtrain.data import digits

            images, labels, test_images, test_labels = digits.load()
        else:
            pairs = zip(PUBLISHED[self.name].files, self.sources, strict=True)
            images, labels, test_images, test_labels = (_tensor(file, source) for file, source in pairs)
        return Dataset(self.name, images, labels, test_images, test_labels, reason=self.reason)


def load(
    name: str = "auto",
    data_dir: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    say: Callable[[str], None] | None = None,
) -> Dataset:
    """Locate the dataset `name`, read it and return it. Raises UserError. Arguments: see `locate`."""
    return locate(name, data_dir, download=download, say=say).read()


def locate(
    name: str = "auto",
    data_dir: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    say: Callable[[str], None] | None = None,
) -> Located:
    """Find or download, and verify, the dataset `name`, one of NAMES. Needs no engine.

    data_dir: the only directory to search and to download to. Default: search ./data, then the cache directory, and
    download to the cache. "auto" uses MNIST if available, otherwise the embedded digits; a damaged file in a directory given
    by the user is still an error.
    say: called with one line when a download begins; pass it on the rank that prints.

    Raises UserError. Takes a few seconds without a network, at most about download.TOTAL_SECONDS with a slow one.
    """
    if name not in NAMES:
        raise UserError(f"there is no dataset {name!r}: choose one of {', '.join(NAMES)}")
    root = _named_directory(data_dir)
    if name == "digits":
        return Located("digits", (), "embedded digits (1,797 scans from the UCI set), as asked")
    published = PUBLISHED["mnist" if name == "auto" else name]
    try:
        return _locate(published, root, download, say or (lambda line: None))
    except NotThere as why:
        if name == "auto":
            because = f"embedded digits (1,797 scans from the UCI set), because MNIST is missing: {why}"
            return Located("digits", (), because)
        remedy = f"give the directory that has {published.title}'s four files with --data-dir, or use --dataset digits"
        raise UserError(f"{why}; {remedy}") from None


def _named_directory(data_dir: str | os.PathLike[str] | None) -> Path | None:
    if data_dir is None:
        return None
    if not os.fspath(data_dir):
        raise UserError("--data-dir is empty: name the directory that has the data, or leave it out")
    try:
        root = Path(data_dir).expanduser()  # the shell does not expand --data-dir=~/x
    except RuntimeError:
        root = Path(data_dir)
    if not os.path.isdir(root):  # noqa: PTH112 (Path's own raises where the name is too long)
        what = "is not a directory" if os.path.lexists(root) else "does not exist"
        raise UserError(f"--data-dir: {show(root)} {what}: name the directory that has the data, or leave it out")
    if not os.access(root, os.R_OK | os.X_OK):
        raise UserError(f"--data-dir: {show(root)} is not readable: check its permissions")
    return root


def _locate(published: Published, root: Path | None, may_download: bool, say: Callable[[str], None]) -> Located:
    shared = cache.directory(published.name)
    said = f"no {published.title} in {'./data or the cache' if root is None else show(root)}"
    places: list[Path]
    target: Path | None
    if root is not None:
        places, target = _places(published, root), root / published.folder / "raw"
    else:
        local = _find(published, _places(published, Path("data")))
        if None not in local:
            try:
                return _located(published, local, shared)
            except BadFile as error:  # ./data was not requested: continue, and mention the problem
                said = str(error)
        elif any(local):
            said = _lacks(published, Path("data"), local)
        places, target = ([shared] if shared else []), shared
    for _ in range(3):
        found = _find(published, places)
        if None in found:
            if root is not None and any(found):
                said = _lacks(published, root, found)
            if not may_download:
                raise NotThere(f"{said}, and downloads are off")
            if target is None:
                how = "XDG_CACHE_HOME can name one that is writable"
                raise NotThere(f"{said}, and there is no directory to download to ({how})")
            _download(published, found, target, shared, said, say)
            found = _find(published, places)
            if None in found:
                raise NotThere(_lacks(published, target, found) + " right after they were downloaded")
        try:
            return _located(published, found, shared)
        except BadFile:
            if root is not None:
                raise
            # `_verify` has removed a damaged file from the cache: download it again.
    raise NotThere(f"{said}, and files in {show(target)} change while they are read")


def _places(published: Published, root: Path) -> list[Path]:
    return [root, root / published.folder / "raw"]


def _find(published: Published, places: Sequence[Path]) -> list[Path | None]:
    """Return the path of each file, or None. Uncompressed files are preferred. Only regular files are considered."""
    forms = [(place, form) for place in places for form in ("", ".gz")]
    paths = ([place / (file.name + form) for place, form in forms] for file in published.files)
    return [next(filter(_is_file, candidates), None) for candidates in paths]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no permission for a parent directory
        return False


def _lacks(published: Published, root: Path, found: Sequence[Path | None]) -> str:
    missing = [file.name for file, path in zip(published.files, found, strict=True) if path is None]
    return f"{show(root)} lacks {', '.join(missing)} (plain or .gz, there or in {published.folder}/raw)"


def _download(
    published: Published,
    found: Sequence[Path | None],
    target: Path,
    shared: Path | None,
    said: str,
    say: Callable[[str], None],
) -> None:
    from hvdtrain.data import download as https

    missing = {file.name: file for file, path in zip(published.files, found, strict=True) if path is None}

    def unpack(name: str, packed: bytes) -> bytes:
        content, problem = gunzip(packed, missing[name].size + 1)
        problem = problem or problem_of(published, missing[name], content)
        if problem:
            raise https.DownloadFailed(f"{name}.gz {problem}")
        return content

    say(f"{said}: downloading it to {show(target)}, one process per host")
    try:
        https.download(published.mirrors, {name: file.size for name, file in missing.items()}, target, shared, unpack)
    except https.DownloadFailed as error:
        raise NotThere(f"{said}, and the download failed ({error})") from None


def _located(published: Published, paths: Sequence[Path | None], shared: Path | None) -> Located:
    sources = _verify(published, [path for path in paths if path is not None], shared)
    folders = ", ".join(dict.fromkeys(show(path.parent) for path in paths if path is not None))
    return Located(published.name, tuple(sources), f"{published.title} from {folders} (content verified)")


def _verify(published: Published, paths: Sequence[Path], shared: Path | None) -> list[Path | bytearray]:
    """Return the source of each file, verified now or earlier. Raises BadFile."""
    pairs = list(zip(published.files, paths, strict=True))
    if shared is None:
        return [bytearray(content_of(published, file, path)[0]) for file, path in pairs]
    notes = cache.read_notes(shared)
    known = [at for file, path in pairs if (at := _known(shared, notes, file, path))]
    if len(known) == len(pairs):
        return list(known)
    with cache.locked(shared, LOCK_SECONDS) as problem:
        if problem:
            return [bytearray(content_of(published, file, path)[0]) for file, path in pairs]
        notes = cache.read_notes(shared)
        sources: list[Path | bytearray] = []
        files.remove_partial(shared, cache.STALE_SECONDS)
        for file, path in pairs:
            source: Path | bytearray | None = _known(shared, notes, file, path)
            if source is None:
                try:
                    content, stat = content_of(published, file, path)
                except BadFile:
                    if path.parent == shared:  # in the cache, and locked: no other process has replaced it
                        with suppress(OSError):
                            path.unlink()
                    raise
                cache.note(notes, path, stat, file.sha256)
                source = path if path.suffix != ".gz" else _keep(shared, notes, file, content)
            sources.append(source)
        with suppress(OSError):  # disk full: the next process verifies again
            cache.write_notes(shared, notes)
        return sources


def _known(shared: Path, notes: cache.Notes, file: File, path: Path) -> Path | None:
    """Return the file to read for `path` if the notes show that it was verified; else None."""
    if not cache.is_noted(notes, path, file.sha256):
        return None
    if path.suffix != ".gz":
        return path
    copy = shared / file.name
    return copy if cache.is_noted(notes, copy, file.sha256) else None


def _keep(shared: Path, notes: cache.Notes, file: File, content: bytes) -> Path | bytearray:
    """Write unpacked content to the cache and return its path. If that fails, return the content."""
    copy = shared / file.name
    try:
        if not cache.is_noted(notes, copy, file.sha256):
            files.write(copy, content)
            cache.note(notes, copy, copy.stat(), file.sha256)
        return copy
    except OSError:
        return bytearray(content)


def _tensor(file: File, source: Path | bytearray) -> Tensor:
    """Return images as uint8 [n, 1, 28, 28], or labels as int64 [n]. Raises UserError."""
    buffer: bytearray | mmap.mmap
    if isinstance(source, bytearray):
        buffer = source
    else:
        try:
            with source.open("rb") as stream:
                # A private mapping: writing to the tensor does not change the file.
                buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: the file is now empty
            raise UserError(f"{show(source)} cannot be read ({error}): start again") from None
        if len(buffer) != file.size:  # reading past the end of a truncated file would raise SIGBUS
            raise UserError(f"{show(source)} changed since it was verified: start again")
    tensor = torch.frombuffer(buffer, dtype=torch.uint8, offset=file.header)
    return tensor.view(file.count, 1, SIDE, SIDE) if len(file.shape) == 3 else tensor.long()
