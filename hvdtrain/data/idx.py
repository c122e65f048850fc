"""MNIST, Fashion-MNIST or the embedded digits, whole, in memory.

    from hvdtrain.data import idx
    data = idx.load("auto", data_dir=None)
    print(data.reason)

Every rank of a host calls this at once with the same arguments; none needs to know which it is. Where something must be
downloaded, unpacked or verified, the first one does it and the others wait for it (cache.py, download.py).

What is loaded as MNIST or Fashion-MNIST *is* it: the content of every file has the published sha256, compressed or not,
or the file is named together with what is wrong with it (published.py). So ranks on several hosts, each of which looks
for itself, need to compare `name` and no more.
"""

import hashlib
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
from hvdtrain.engines.errors import UserError

NAMES = ("auto", "mnist", "fashion-mnist", "digits")
LOCK_SECONDS = 60.0  # then a process verifies for itself


@dataclass(frozen=True, eq=False)
class Dataset:
    """A whole dataset. Do not write into the images: they may be a file's pages, shared with the host's other ranks."""

    name: str  # "mnist", "fashion-mnist" or "digits", never "auto"
    train_images: Tensor  # uint8 [n, 1, 28, 28]
    train_labels: Tensor  # int64 [n], 0 to 9
    test_images: Tensor  # uint8 [m, 1, 28, 28]
    test_labels: Tensor  # int64 [m]
    reason: str  # one line: which data this is, and why


class NotThere(Exception):
    """The dataset is neither here nor to be had. One line, without a remedy: that depends on what was asked for."""


@dataclass(frozen=True)
class Located:
    """Where a dataset is: verified and ready to be read."""

    name: str  # as Dataset.name
    sources: tuple[Path | bytearray, ...]  # uncompressed files, or their content where no copy could be kept
    reason: str  # as Dataset.reason

    def read(self) -> Dataset:
        """Map or take the content: milliseconds. Raises UserError where a file changed since it was located."""
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
    """The dataset `name`: locate() and read it. Raises UserError."""
    return locate(name, data_dir, download=download, say=say).read()


def locate(
    name: str = "auto",
    data_dir: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    say: Callable[[str], None] | None = None,
) -> Located:
    """Find, or download, and verify the dataset `name`, one of NAMES. Needs no engine: call it before the ranks meet.

    data_dir, or $HVDTRAIN_DATA: the only place to look in and to download to. Without either: ./data, then the cache,
    which downloads go to. "auto" takes MNIST if it can be had and the embedded digits if not; a damaged file in a
    directory that was named is an error all the same.
    say: told in one line that a download begins or is waited for; pass it on the rank that speaks.

    Raises UserError. Bounded in time: seconds without a network, download.TOTAL_SECONDS with a slow one.
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
            return Located(
                "digits", (), f"embedded digits (1,797 scans from the UCI set), because MNIST is missing: {why}"
            )
        remedy = f"give the directory that has {published.title}'s four files with --data-dir, or take --dataset digits"
        raise UserError(f"{why}; {remedy}") from None


def _named_directory(data_dir: str | os.PathLike[str] | None) -> Path | None:
    named, by = (data_dir, "--data-dir") if data_dir is not None else (os.environ.get("HVDTRAIN_DATA"), "HVDTRAIN_DATA")
    if named is None:
        return None
    if not os.fspath(named):
        raise UserError(f"{by} is empty: name the directory that has the data, or leave it out")
    try:
        root = Path(named).expanduser()  # --data-dir=~/x reaches us as written
    except RuntimeError:
        root = Path(named)
    if not os.path.isdir(root):  # noqa: PTH112 (Path's own raises where the name is too long)
        what = "is not a directory" if os.path.lexists(root) else "does not exist"
        raise UserError(f"{by}: {show(root)} {what}: name the directory that has the data, or leave it out")
    if not os.access(root, os.R_OK | os.X_OK):
        raise UserError(f"{by}: {show(root)} may not be read: check its permissions")
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
            except BadFile as error:  # not asked for, so no reason to stop; and no reason to hide it
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
                raise NotThere(f"{said}, and no place to download to (XDG_CACHE_HOME can name one that is writable)")
            _download(published, found, target, shared, said, say)
            found = _find(published, places)
            if None in found:
                raise NotThere(_lacks(published, target, found) + " right after they were downloaded")
        try:
            return _located(published, found, shared)
        except BadFile:
            if root is not None:
                raise
            # A damaged file in the cache was removed under the lock (_verify): download it again.
    raise NotThere(f"{said}, and files in {show(target)} change while they are read")


def _places(published: Published, root: Path) -> list[Path]:
    return [root, root / published.folder / "raw"]


def _find(published: Published, places: Sequence[Path]) -> list[Path | None]:
    """For each file its path, uncompressed before compressed, or None. Only regular files: a pipe would never end."""
    forms = [(place, form) for place in places for form in ("", ".gz")]
    paths = ([place / (file.name + form) for place, form in forms] for file in published.files)
    return [next(filter(_is_file, candidates), None) for candidates in paths]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a directory on the way that may not be searched
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
        problem = problem or problem_of(published, missing[name], content, hashlib.sha256(content).hexdigest())
        if problem:
            raise https.DownloadFailed(f"{name}.gz {problem}")
        return content

    say(f"{said}: downloading it to {show(target)}, one process per host")
    try:
        https.download(published.mirrors, {name: file.size for name, file in missing.items()}, target, shared, unpack)
    except https.DownloadFailed as error:
        raise NotThere(f"{said}, and no download ({error})") from None


def _located(published: Published, paths: Sequence[Path | None], shared: Path | None) -> Located:
    sources = _verify(published, [path for path in paths if path is not None], shared)
    folders = ", ".join(dict.fromkeys(show(path.parent) for path in paths if path is not None))
    return Located(published.name, tuple(sources), f"{published.title} from {folders} (content verified)")


def _verify(published: Published, paths: Sequence[Path], shared: Path | None) -> list[Path | bytearray]:
    """For each file what to read it from, its content verified now or earlier. Raises BadFile."""
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
        cache.sweep(shared)
        for file, path in pairs:
            source: Path | bytearray | None = _known(shared, notes, file, path)
            if source is None:
                try:
                    content, stat = content_of(published, file, path)
                except BadFile:
                    if path.parent == shared:  # ours, and under the lock: no process has just replaced it
                        with suppress(OSError):
                            path.unlink()
                    raise
                cache.note(notes, path, stat, file.sha256)
                source = path if path.suffix != ".gz" else _keep(shared, notes, file, content)
            sources.append(source)
        with suppress(OSError):  # full: the next process verifies again
            cache.write_notes(shared, notes)
        return sources


def _known(shared: Path, notes: cache.Notes, file: File, path: Path) -> Path | None:
    """What to read in place of `path`, where the notes vouch for it."""
    if not cache.is_noted(notes, path, file.sha256):
        return None
    if path.suffix != ".gz":
        return path
    copy = shared / file.name
    return copy if cache.is_noted(notes, copy, file.sha256) else None


def _keep(shared: Path, notes: cache.Notes, file: File, content: bytes) -> Path | bytearray:
    """Put unpacked content into the cache. Where that cannot be done: the content."""
    copy = shared / file.name
    try:
        if not cache.is_noted(notes, copy, file.sha256):
            cache.write(copy, content)
            cache.note(notes, copy, copy.stat(), file.sha256)
        return copy
    except OSError:
        return bytearray(content)


def _tensor(file: File, source: Path | bytearray) -> Tensor:
    """uint8 [n, 1, 28, 28] or int64 [n]."""
    buffer: bytearray | mmap.mmap
    if isinstance(source, bytearray):
        buffer = source
    else:
        try:
            with source.open("rb") as stream:
                # Private: writing to the tensor changes this process's memory and no file.
                buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: emptied meanwhile
            raise UserError(f"{show(source)} cannot be read ({error}): start again") from None
        if len(buffer) != file.size:  # beyond a shortened file's end lies a bus error, not an exception
            raise UserError(f"{show(source)} changed since it was verified: start again")
    tensor = torch.frombuffer(buffer, dtype=torch.uint8, offset=file.header)
    return tensor.view(file.count, 1, SIDE, SIDE) if len(file.shape) == 3 else tensor.long()
