"""A run at a URL: the files of its --output-dir, wherever fsspec writes, and a manifest that names the complete ones.

URL/checkpoints/step-00000100.safetensors, URL/metrics.jsonl, URL/summary.json    as in --output-dir
URL/mirror.json    {"run": ..., "checkpoints": {"step-00000100.safetensors": {"sha256": ..., "best": ...}}}

Data come first and the manifest last, and it never names a file that is being written. So what it names is complete,
whenever a writer was killed. Does not import torch.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hvdtrain.engines import atomic, files
from hvdtrain.engines.errors import UserError, one_line
from hvdtrain.output.best import best_of

NAME = re.compile(r"step-(\d{8,})\.safetensors")
MANIFEST, CHECKPOINTS, METRICS, SUMMARY = "mirror.json", "checkpoints", "metrics.jsonl", "summary.json"
CHUNK = 2**20  # bytes
Entry = dict[str, Any]


class Differs(Exception):
    """What was read back, or downloaded, does not have the checksum of what was written."""


def step_of(name: str) -> int:
    """Return the step of a checkpoint of this name. Raises ValueError."""
    if (match := NAME.fullmatch(name)) is None:
        raise ValueError(f"{name} is no checkpoint")
    return int(match[1])


def newest_first(checkpoints: dict[str, Entry]) -> dict[str, Entry]:
    """Return the entries of a manifest, sorted. Raises ValueError: a name may come from a stranger, and lead elsewhere."""
    return {name: checkpoints[name] for name in sorted(checkpoints, key=step_of, reverse=True)}


def sha256_of(file: Any) -> str:
    """Return the SHA-256 of what is left to read in a binary file."""
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def identity(directory: Path) -> str | None:
    """Return what tells the run in an output directory from others: the SHA-256 of the first line of its record."""
    with contextlib.suppress(OSError), files.opened(directory / METRICS) as file:
        line = file.readline()
        return hashlib.sha256(line).hexdigest() if line.endswith(b"\n") else None
    return None


def reason(error: BaseException) -> str:
    """Return why the place cannot be read or written, in a few words; libraries wrap the cause in long messages."""
    return one_line(str(error))[:300] or type(error).__name__


class Remote:
    """The run at a URL. Methods raise whatever fsspec and its file systems raise."""

    def __init__(self, url: str):
        import fsspec

        self.url = url.rstrip("/")
        # Listings are cached otherwise, also that a file is absent.
        self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        # Trap: object stores have none, and s3fs would create a misspelt bucket. Their clients are asynchronous.
        self._has_directories = not self._fs.async_impl
        self.run: str | None = None  # its `identity`
        self.checkpoints: dict[str, Entry] = {}  # complete ones, by name, newest first

    def read(self) -> None:
        """Read the manifest. If there is none, there are no checkpoints."""
        try:
            text = self._fs.cat_file(self._path(MANIFEST))
        except FileNotFoundError:
            return
        try:
            held = json.loads(text)
            self.run, self.checkpoints = held["run"], newest_first(held["checkpoints"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.url}/{MANIFEST} is not of a run: name another place, or remove it") from error

    def make(self) -> None:
        """Create the directories, where there are any, and write the manifest. Raises if it cannot be written."""
        if self._has_directories:
            self._fs.makedirs(self._path(CHECKPOINTS), exist_ok=True)
        self.write()
        self.tidy()

    def tidy(self) -> None:
        """Remove checkpoints that the manifest does not name, as of writers that were killed."""
        with contextlib.suppress(FileNotFoundError):  # an object store has no directory without an object
            for path in self._fs.ls(self._path(CHECKPOINTS), detail=False):
                name = path.rpartition("/")[2]
                if NAME.fullmatch(name) and name not in self.checkpoints:
                    self._fs.rm_file(path)

    def write(self) -> None:
        """Write the manifest."""
        self.checkpoints = newest_first(self.checkpoints)
        self.put_small(MANIFEST, json.dumps({"run": self.run, "checkpoints": self.checkpoints}, indent=1).encode())

    def put_small(self, name: str, content: bytes) -> None:
        """Write a small file, so that a reader sees either the old or the new one."""
        temporary = f".{name}{atomic.PARTIAL}" if self._has_directories else name  # an object appears when it is whole
        self._fs.pipe_file(self._path(temporary), content)
        if temporary != name:
            self._fs.mv(self._path(temporary), self._path(name))

    def put(self, path: Path) -> None:
        """Write a checkpoint, read it back, and enter it in the manifest. Raises Differs, and OSError if `path` is gone."""
        with files.opened(path) as file:
            sha256 = sha256_of(file)
        best = best_in(path)
        held = self.checkpoints.get(path.name)
        if held is not None:
            if held["sha256"] == sha256:
                return
            del self.checkpoints[path.name]  # another attempt has written this step
            self.write()
        there = self._path(CHECKPOINTS, path.name)
        self._fs.put_file(os.fspath(path), there)
        with self._fs.open(there, "rb") as file:
            if sha256_of(file) != sha256:
                raise Differs(f"{path.name} is not there what it is here")
        self.checkpoints[path.name] = {"sha256": sha256, "best": best}
        self.write()

    def remove(self, names: list[str]) -> None:
        """Remove checkpoints: first from the manifest, then the files."""
        for name in names:
            del self.checkpoints[name]
        self.write()
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(CHECKPOINTS, name))

    def get(self, name: str, directory: Path) -> Path:
        """Copy a checkpoint to `directory` and return its path. It appears there complete or not at all. Raises Differs."""
        path = directory / name
        with atomic.replacing(path, "wb", sync=True) as file:
            digest = hashlib.sha256()
            with self._fs.open(self._path(CHECKPOINTS, name), "rb") as source:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
            if digest.hexdigest() != self.checkpoints[name]["sha256"]:
                raise Differs(f"{self.url}/{CHECKPOINTS}/{name} does not have the checksum in {MANIFEST}")
        return path

    def get_small(self, name: str) -> bytes | None:
        """Return the content of a file beside the manifest; None if there is none."""
        try:
            content: bytes = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return content

    def best(self) -> list[str]:
        """Return the checkpoints that were evaluated, the best first."""
        return best_of(self.checkpoints)

    def get_first(self, names: Iterable[str], directory: Path, warn: Callable[[str], None]) -> Path | None:
        """Copy the first of these checkpoints that is undamaged to `directory`. Return its path; None if there is none."""
        for name in names:
            try:
                return self.get(name, directory)
            except (Differs, FileNotFoundError) as error:
                warn(f"{reason(error)}; trying the next one")
        return None

    def _path(self, *names: str) -> str:
        return "/".join([self._root.rstrip("/"), *names])


def best_in(path: Path) -> Entry | None:
    """Return metric, direction and value of the evaluation that a checkpoint follows, if it follows one."""
    import safetensors

    with safetensors.safe_open(path, framework="np") as file:  # not torch, which is not imported
        held: Entry | None = json.loads((file.metadata() or {})["facts"]).get("best")
    return held


@contextlib.contextmanager
def readable(url: str, flag: str) -> Iterator[Remote]:
    """Context manager that gives the run at `url`, its manifest read; what its library raises becomes a UserError."""
    try:
        remote = Remote(url)
        remote.read()
        yield remote
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{flag} {url}: {reason(error)}: pip install 'hvdtrain[mirror]'") from error
    except Exception as error:  # of any library: wrong credentials, no such bucket, no answer
        remedy = "check the name, the credentials and the network"
        raise UserError(f"{flag} {url} cannot be used ({reason(error)}): {remedy}") from error


@contextlib.contextmanager
def local(place: str | Path, flag: str, warn: Callable[[str], None], *, best: bool = False) -> Iterator[Path]:
    """Context manager that gives a path as it is; of a run at a URL, a copy of the newest checkpoint, or of the best one.

    flag: how the user named it, for messages. Raises UserError.
    """
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as directory:
        with readable(place, flag) as remote:
            found = remote.get_first(remote.best() if best else remote.checkpoints, Path(directory), warn)
            if found is None:
                raise UserError(f"{flag} {place} has no{' evaluated' * best} checkpoint: name another place")
        yield found
