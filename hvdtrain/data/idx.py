"""Loads MNIST, Fashion-MNIST or the embedded digits into memory.

    from hvdtrain.data import idx
    data = idx.load("auto", data_dir=None)
    print(data.reason)

Every rank on a host calls this with the same arguments. If files must be downloaded, unpacked or verified, the first process
does so and the others wait (cache.py, download.py).

The content of every MNIST and Fashion-MNIST file is compared with its published SHA-256; a file that differs is an error
(published.py). Therefore ranks on different hosts only need to compare `name`.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hvdtrain.data import cache
from hvdtrain.data.corrupt import why
from hvdtrain.data.published import PUBLISHED, UNSOUND, DownloadFailed, Published, unpacked
from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError

NAMES = ("auto", "mnist", "fashion-mnist", "digits")
LOCK_SECONDS = 60.0  # how long a process waits for another one to verify the files, before it does so itself
CONTENT = "content"  # in the cache: of a data set's files


@dataclass(frozen=True, eq=False)
class Dataset:
    """A complete dataset. Do not modify the images: they may be a memory-mapped file, shared with other ranks."""

    name: str  # "mnist", "fashion-mnist" or "digits", never "auto"
    reason: str  # one line: which data this is, and why it was chosen
    train_images: Tensor  # uint8 [n, 1, 28, 28]
    train_labels: Tensor  # int64 [n], 0 to 9
    test_images: Tensor  # uint8 [m, 1, 28, 28]
    test_labels: Tensor  # int64 [m]


class NotThere(Exception):
    """The dataset was not found and could not be downloaded. The message is one line without a remedy."""


def load(
    name: str = "auto",
    data_dir: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Dataset:
    """Find or download, verify and read the dataset `name`, one of NAMES. Needs no engine.

    data_dir: the only directory to search and to download to. Default: search ./data, then the cache directory, and
    download to the cache. "auto" uses MNIST if available, otherwise the embedded digits; a damaged file is an error.
    say: called with one line when a download begins; pass it on the rank that prints.

    Raises UserError. Takes a few seconds without a network, at most about download.TOTAL_SECONDS with a slow one.
    """
    if name not in NAMES:
        raise UserError(f"there is no dataset {name!r}: choose one of {', '.join(NAMES)}")
    root = None if data_dir is None else _named_directory(data_dir)
    because = "as asked"
    if name != "digits":
        published = PUBLISHED["mnist" if name == "auto" else name]
        try:
            return _load(published, root, download, say)
        except NotThere as error:
            if name != "auto":
                how = f"give the directory that has {published.title}'s four files with --data-dir"
                raise UserError(f"{error}; {how}, or use --dataset digits") from None
            because = f"because MNIST is missing: {error}"
    from hvdtrain.data import digits

    return Dataset("digits", f"embedded digits (1,797 scans from the UCI set), {because}", *digits.load())


def _named_directory(data_dir: str | os.PathLike[str]) -> Path:
    how = "name the directory that has the data, or leave it out"
    if not os.fspath(data_dir):
        raise UserError(f"--data-dir is empty: {how}")
    root = Path(os.path.expanduser(data_dir))  # noqa: PTH111 # the shell does not expand --data-dir=~/x
    if not os.path.isdir(root):  # noqa: PTH112 (Path's own raises where the name is too long)
        what = "is not a directory" if os.path.lexists(root) else "does not exist"
        raise UserError(f"--data-dir: {root} {what}: {how}")
    if not os.access(root, os.R_OK | os.X_OK):
        raise UserError(f"--data-dir: {root} is not readable: check its permissions")
    return root


def _load(published: Published, root: Path | None, may_download: bool, say: Callable[[str], None]) -> Dataset:
    """Return the dataset. Raises NotThere, and UserError for a damaged file."""
    shared = cache.directory(published.name)
    given = Path("data") if root is None else root
    places = [given, given / published.folder / "raw"]  # torchvision's
    target: Path | None = places[1]
    if root is None:
        target = shared
        places += [shared] if shared else []
    found = _find(published, places)
    if None in found:
        missing = [file.name for file, path in zip(published.files, found, strict=True) if path is None]
        lacks = f"{given} lacks {', '.join(missing)} (plain or .gz, there or in {published.folder}/raw)"
        nothing = f"no {published.title} in {'./data or the cache' if root is None else root}"
        said = lacks if any(found) else nothing
        if not may_download:
            raise NotThere(f"{said}, and downloads are off")
        if target is None:
            how = "XDG_CACHE_HOME can name one that is writable"
            raise NotThere(f"{said}, and there is no directory to download to ({how})")
        say(f"{said}: downloading it to {target}, one process per host")
        try:
            _download(published, places, target, shared or target)
        except DownloadFailed as error:
            raise NotThere(f"{said}, and the download failed ({error})") from None
        except OSError as error:
            raise NotThere(f"{said}, and {target} cannot be written ({why(error)})") from None
        found = _find(published, places)
    paths = [path for path in found if path is not None]
    if len(paths) < len(found):
        raise NotThere(f"files in {target} were removed right after they were downloaded")
    content = _content(published, paths, shared).split([file.size for file in published.files])
    bodies = [part[file.header :].view(file.shape) for file, part in zip(published.files, content, strict=True)]
    reason = f"{published.title} from {', '.join(dict.fromkeys(str(path.parent) for path in paths))} (content verified)"
    return Dataset(published.name, reason, bodies[0], bodies[1].long(), bodies[2], bodies[3].long())


def _find(published: Published, places: Sequence[Path]) -> list[Path | None]:
    """Return the path of each file, or None. Uncompressed files are preferred. Only regular files are considered."""
    forms = [(place, form) for place in places for form in ("", ".gz")]
    paths = ([place / (file.name + form) for place, form in forms] for file in published.files)
    # Path's own raises where a parent directory may not be read.
    return [next(filter(os.path.isfile, candidates), None) for candidates in paths]


def _download(published: Published, places: Sequence[Path], target: Path, state: Path) -> None:
    """Download what no other process of the host has downloaded meanwhile. Raises OSError, DownloadFailed."""
    from hvdtrain.data.download import TOTAL_SECONDS, download, last_failure

    before = last_failure(state)
    target.mkdir(parents=True, exist_ok=True)
    with cache.locked(state, TOTAL_SECONDS + 30):
        found = _find(published, places)
        missing = [file for file, path in zip(published.files, found, strict=True) if path is None]
        if missing:
            download(published, missing, target, state, before)


def _content(published: Published, paths: Sequence[Path], shared: Path | None) -> Tensor:
    """Return the verified content of the files, one after the other, as uint8 [n]. Raises UserError."""
    if shared is not None:
        with suppress(OSError, RuntimeError):  # such as a full disk; RuntimeError: torch cannot map it
            return _mapped(published, paths, shared)
    return torch.frombuffer(bytearray(_verified(published, paths)), dtype=torch.uint8)


def _mapped(published: Published, paths: Sequence[Path], shared: Path) -> Tensor:
    """Return the same as a mapped file in the cache, which the first process writes there. Raises OSError, UserError."""
    sources = json.dumps([[str(path.absolute()), *_identity(path.stat())] for path in paths])
    # Hosts may have files of their own, and the cache in common: a note for each. The one copy may be mapped elsewhere.
    note = shared / f"verified-{hashlib.sha256(sources.encode()).hexdigest()[:16]}.json"
    content = shared / CONTENT

    def seen() -> bytes:
        """Return what says that the copy has not changed since. Raises OSError."""
        return json.dumps(_identity(content.stat())).encode()

    def there() -> bool:
        with suppress(OSError):
            return files.read_small(note) == seen()
        return False

    if not there():
        with cache.locked(shared, LOCK_SECONDS):
            if not there():
                files.remove_partial(shared, cache.STALE_SECONDS)
                verified = _verified(published, paths)
                if not (content.is_file() and content.read_bytes() == verified):
                    files.write(content, verified)
                files.write(note, seen())
    size = sum(file.size for file in published.files)
    return torch.from_file(str(content), shared=False, size=size, dtype=torch.uint8)  # writing to it is private


def _verified(published: Published, paths: Sequence[Path]) -> bytes:
    """Return the content of the files, one after the other. Raises UserError for one that is not the published one."""
    contents = []
    for file, path in zip(published.files, paths, strict=True):
        try:
            with files.opened(path) as stream:
                contents.append(unpacked(published, file, stream.read(file.most_bytes)))
        except UNSOUND as error:
            raise UserError(f"{path} cannot be used ({why(error)}): check it, replace it, or remove it") from None
    return b"".join(contents)


def _identity(status: os.stat_result) -> list[int]:
    """Return values that change when the content of a file changes."""
    # ctime also changes if mtime is restored. The device number differs between hosts on a shared file system.
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
