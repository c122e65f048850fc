"""--mirror, and --resume with a URL: a run at a URL, which is the files of its --output-dir wherever fsspec writes.

URL/checkpoints/step-00000100.safetensors, URL/metrics.jsonl, URL/summary.json    as in --output-dir
URL/mirror.json    {"run": ..., "writer": ..., "checkpoints": {"step-00000100.safetensors": {"sha256": ..., "best": ...}}}

Data come first and the manifest last, and it never names a file that is being written. So what it names is complete,
whenever a writer was killed. Who begins to write there enters a name of its own as "writer", and reads the manifest again
before each write: of two runs with one URL, the one that began first ends.
"""

import contextlib
import hashlib
import json
import os
import secrets
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import checkpoint
from hvdtrain.engines import atomic, files, lines
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError, one_line
from hvdtrain.flags import is_url
from hvdtrain.output.metric_names import best_of
from hvdtrain.output.records import make_room_for_summary
from hvdtrain.output.run_output import RunOutput

MANIFEST, CHECKPOINTS, METRICS, SUMMARY = "mirror.json", "checkpoints", "metrics.jsonl", "summary.json"
MOST_MANIFEST_BYTES = 2**24  # of a manifest
CHUNK_BYTES = 2**20
RETRY_SECONDS = 10.0  # after a failure
RECORD_SECONDS = 60.0  # between two copies of the record without a new checkpoint
OTHER_RUN_REMEDY = "name another --mirror, or remove it"


class Differs(Exception):
    """What was read back, or downloaded, does not have the checksum of what was written."""


def by_step(name: str) -> tuple[int, str]:
    """Return what sorts the names of checkpoints: steps have at least eight digits."""
    return len(name), name


def run_identity(directory: Path) -> str | None:
    """Return what tells the run in an output directory from others: the SHA-256 of the first line of its record."""
    with contextlib.suppress(OSError), files.opened_for_reading(directory / METRICS) as file:
        line = file.readline()
        return hashlib.sha256(line).hexdigest() if line.endswith(b"\n") else None
    return None


def size_and_time(path: Path) -> tuple[int, int] | None:
    """Return size and time of change of a file; None if it is not there."""
    with contextlib.suppress(OSError):
        return (about := path.stat()).st_size, about.st_mtime_ns
    return None


def reason(error: BaseException) -> str:
    """Return why the place cannot be read or written, in a few words; libraries wrap the cause in long messages."""
    return one_line(str(error))[:300] or type(error).__name__


class Remote:
    """The run at a URL. Methods raise whatever fsspec and its file systems raise."""

    def __init__(self, url: str):
        import fsspec

        self.url, self._writer = url.rstrip("/"), secrets.token_hex(8)
        # Listings are cached otherwise, also that a file is absent.
        self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        # Trap: object stores have none, and s3fs would create a misspelt bucket. Their clients are asynchronous.
        self._has_directories = not self._fs.async_impl
        self.run: str | None = None  # its `run_identity`
        self.checkpoints: dict[str, dict[str, Any]] = {}  # complete ones, by name, newest first
        self.damaged: list[str] = []  # those of them that `get_first` could not read

    def is_at(self, directory: Path) -> bool:
        """Return whether the URL is that of a directory here."""
        return "file" in self._fs.protocol and os.path.realpath(self._root) == os.path.realpath(directory)

    def _path(self, *names: str) -> str:
        return "/".join([self._root.rstrip("/"), *names])

    def _open(self, *names: str, most: float = float("inf")) -> Any:
        """Open a file for reading. Raises UserError for what might never end, such as a pipe."""
        about = self._fs.info(self._path(*names))
        if about["type"] != "file" or (about["size"] or 0) > most:
            kind = "a file" if about["type"] != "file" else "of a run: it is too large"
            raise UserError(f"{'/'.join([self.url, *names])} is not {kind}: name another place, or remove it")
        return self._fs.open(self._path(*names), "rb")

    def _manifest(self) -> tuple[str | None, str | None, dict[str, dict[str, Any]]]:
        """Return run, writer and checkpoints. Raises FileNotFoundError, and UserError if it is of something else."""
        with self._open(MANIFEST, most=MOST_MANIFEST_BYTES) as file:
            content = file.read(MOST_MANIFEST_BYTES)
        try:
            held = json.loads(content)
            named = {name: dict(held["checkpoints"][name]) for name in sorted(held["checkpoints"], key=by_step)[::-1]}
            # A name may come from a stranger, and lead elsewhere.
            if all(map(checkpoint.CHECKPOINT_NAME.fullmatch, named)):
                return held["run"], held["writer"], named
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        raise UserError(f"{self.url}/{MANIFEST} is not of a run: name another place, or remove it")

    def read(self) -> None:
        """Read the manifest. If there is none, there are no checkpoints."""
        with contextlib.suppress(FileNotFoundError):
            self.run, _, self.checkpoints = self._manifest()

    def begin(self) -> None:
        """Enter this process as the writer. Raises if nothing can be written."""
        if self._has_directories:
            self._fs.makedirs(self._path(CHECKPOINTS), exist_ok=True)
        self._write()
        self.tidy()

    def require_writer(self) -> None:
        """Raise UserError if another run has begun to write there."""
        # Object stores have no locks. Of two runs with one URL,
        # the one that began first finds another writer here, and ends.
        if self._manifest()[1] != self._writer:
            raise UserError(f"--mirror {self.url}: another run writes there now: name another --mirror for one of them")

    def _write(self) -> None:
        self.checkpoints = {name: self.checkpoints[name] for name in sorted(self.checkpoints, key=by_step)[::-1]}
        manifest = {"run": self.run, "writer": self._writer, "checkpoints": self.checkpoints}
        self.put_small(MANIFEST, json.dumps(manifest, indent=1).encode())

    def put_small(self, name: str, content: bytes) -> None:
        """Write a small file, so that a reader sees either the old or the new one."""
        if not self._has_directories:  # an object appears when it is whole
            self._fs.pipe_file(self._path(name), content)
            return
        temporary = self._path(f".{name}.{self._writer}{atomic.PARTIAL}")
        self._fs.pipe_file(temporary, content)
        self._fs.mv(temporary, self._path(name))

    def put(self, path: Path) -> None:
        """Write a checkpoint, read it back, and enter it in the manifest. Raises Differs, and OSError if `path` is gone."""
        with files.opened_for_reading(path) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        entry = {"sha256": sha256, "best": checkpoint.read_facts(path).get("best")}
        if self.checkpoints.get(path.name) == entry:
            return
        if self.checkpoints.pop(path.name, None) is not None:  # another attempt has written this step
            self._write()
        self._fs.put_file(os.fspath(path), self._path(CHECKPOINTS, path.name))
        # A store may have lost a part. What counts is what can be read there.
        with self._open(CHECKPOINTS, path.name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise Differs(f"{path.name} is not there what it is here")
        self.require_writer()  # all this may have taken long
        self.checkpoints[path.name] = entry
        self._write()

    def remove(self, names: Iterable[str]) -> None:
        """Remove checkpoints: first from the manifest, then the files."""
        for name in names:
            del self.checkpoints[name]
        self._write()
        self.tidy()

    def tidy(self) -> None:
        """Remove what the manifest does not name: checkpoints and temporary files, as of writers that were killed."""
        for folder in ([], [CHECKPOINTS]):
            with contextlib.suppress(FileNotFoundError):  # an object store has no directory without an object
                # Nobody else removes what writers that were killed have left.
                for path in self._fs.ls(self._path(*folder), detail=False):
                    name = path.rpartition("/")[2]
                    unnamed = (
                        bool(folder and checkpoint.CHECKPOINT_NAME.fullmatch(name)) and name not in self.checkpoints
                    )
                    if unnamed or name.startswith((f".{MANIFEST}.", f".{METRICS}.", f".{SUMMARY}.")):
                        self._fs.rm_file(path)

    def get(self, directory: Path, *names: str) -> Path:
        """Copy a file to `directory` and return its path. It appears there complete or not at all. Raises Differs."""
        path, digest = directory / names[-1], hashlib.sha256()
        with atomic.replacing(path, "wb", sync=True) as file, self._open(*names) as source:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
            if names[0] == CHECKPOINTS and digest.hexdigest() != self.checkpoints[names[-1]]["sha256"]:
                raise Differs(f"{self.url}/{'/'.join(names)} does not have the checksum in {MANIFEST}")
        return path

    def get_first(self, names: Iterable[str], directory: Path) -> Path | None:
        """Copy the first of these checkpoints that is undamaged to `directory`. Return its path; None if there is none."""
        for name in names:
            try:
                return self.get(directory, CHECKPOINTS, name)
            except (Differs, FileNotFoundError) as error:
                self.damaged.append(name)
                lines.warn(f"{reason(error)}; it is left out")
        return None


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
def local(place: str | Path, flag: str, *, best: bool = False) -> Iterator[Path]:
    """Context manager that gives a path as it is; of a run at a URL, a copy of the newest checkpoint, or of the best one.

    flag: how the user named it, for messages. Raises UserError.
    """
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as directory:
        with readable(place, flag) as remote:
            names = best_of(remote.checkpoints) if best else list(remote.checkpoints)
            copied = remote.get_first(names, Path(directory))
            if copied is None:
                raise UserError(f"{flag} {place} has no{' evaluated' * best} checkpoint: name another place")
        yield copied


def restore_from_mirror(remote: Remote, output_dir: Path, flag: str) -> None:
    """Copy the run to an output directory that lacks it, or has an earlier state of it: newest checkpoint, best, ends of
    loops, records.

    Raises UserError if another run is there.
    """
    checkpoints = output_dir / CHECKPOINTS
    here = checkpoint.checkpoints_in(checkpoints)
    if here and run_identity(output_dir) != remote.run:
        raise UserError(f"{flag} {remote.url} has another run than {output_dir}: name another --output-dir")
    if here and by_step(here[0].name) >= by_step(next(iter(remote.checkpoints))):
        return
    files.make_directory(checkpoints)
    atomic.remove_partial(checkpoints)
    record = output_dir / METRICS
    if os.path.lexists(record) and run_identity(output_dir) != remote.run:
        record.rename(files.unused_name(record))
    make_room_for_summary(output_dir / SUMMARY)
    try:
        remote.get(output_dir, METRICS)  # first: a checkpoint without a record would be another run's
    except FileNotFoundError as error:
        raise UserError(f"{flag} {remote.url} lacks {METRICS}: put it back, or name another place") from error
    with contextlib.suppress(FileNotFoundError):
        remote.get(output_dir, SUMMARY)
    newest = remote.get_first(remote.checkpoints, checkpoints)
    if newest is None:
        raise UserError(f"{flag} {remote.url} has no undamaged checkpoint: name another place")
    ends = map(checkpoint.name_of, checkpoint.read_facts(newest).get("loops") or ())  # of loops over epochs
    for name in (*best_of(remote.checkpoints)[:1], *ends):
        if name in remote.checkpoints and name not in remote.damaged and not (checkpoints / name).exists():
            remote.get_first([name], checkpoints)
    lines.say(f"{newest.name} copied from {remote.url}")


def prepare_mirror(output_dir: Path, mirror: str | None, resume: str) -> Remote | None:
    """Copy the run here, if it is there, and return the place to copy it to. Raises UserError.

    resume: "auto", a URL, at which there must be a run, or whatever else starts another run.
    """
    places = {mirror: "--mirror"} if mirror is not None and (resume == "auto" or is_url(resume)) else {}
    if is_url(resume):
        places.setdefault(resume, "--resume")
    damaged = set[str]()
    for url, flag in places.items():
        with readable(url, flag) as remote:
            if remote.checkpoints:
                restore_from_mirror(remote, output_dir, flag)
                damaged |= {*remote.damaged} if url == mirror else set()
            elif flag == "--resume":
                raise UserError(f"--resume {url} has no run: name another place, or leave it out")
    if mirror is None:
        return None
    with readable(mirror, "--mirror") as remote:
        if remote.is_at(output_dir) or remote.is_at(output_dir / CHECKPOINTS):
            raise UserError(f"--mirror {mirror} is the run's own place: name another one, best on another disk")
        if remote.checkpoints and not places:
            raise UserError(f"--mirror {mirror} has a run, and --resume starts another: {OTHER_RUN_REMEDY}")
        if remote.checkpoints and remote.run != run_identity(output_dir):
            raise UserError(f"--mirror {mirror} has another run than {output_dir}: {OTHER_RUN_REMEDY}")
        for name in damaged:  # the same step is copied again
            del remote.checkpoints[name]
        remote.begin()
        return remote


class Mirror:
    """Keeps the run at a URL like the one in --output-dir, in a thread of rank 0.

    The constructor copies the run here, if it is there: before the checkpoint to resume from is looked for. A collective;
    raises UserError on every rank. Flags used: mirror, mirror_timeout, resume, output_dir, keep.
    """

    def __init__(self, engine: Engine, flags: Namespace, output: RunOutput):
        self._engine, self._output, self._flags = engine, output, flags
        self._remote: Remote | None = None
        with engine.raising_together("mirror"):
            if engine.rank == 0:
                self._remote = prepare_mirror(flags.output_dir, flags.mirror, flags.resume)
        if is_url(flags.resume):
            # The run has been copied here, and is resumed from here.
            flags.resume = "auto"
        self._copied: dict[str, tuple[int, int] | None] = {}  # by name: the files that are there, as they were here
        self._failed = False  # a part of a checkpoint may be there
        self._outage_began: float | None = None  # on the monotonic clock
        self._refusal = ""  # why nothing is copied any more
        self._wake, self._is_over = threading.Event(), False
        self._thread: threading.Thread | None = None
        if self._remote is not None:
            output.listeners.append(self._event)

    def _event(self, name: str, fields: dict[str, object]) -> None:
        """Copy what is new. Before "start", the files may be of a run that is about to be put aside."""
        if name == "start" and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
            self._thread.start()
        if name == "checkpoint":
            self._wake.set()

    def _work(self) -> None:
        while True:
            self._wake.clear()
            # In this order: what is written before the end of the run is copied by a look that begins after it.
            last, complete = self._is_over, self.look()
            if self._refusal or (complete and last):
                return
            self._wake.wait(RECORD_SECONDS if complete else RETRY_SECONDS)

    def look(self) -> bool:
        """Copy what is new. Return whether all of it is there. Says once that it cannot, and once that it can again."""
        try:
            self._copy()
        except UserError as error:
            self._refusal = str(error)
            return False
        except Exception as error:  # of any library: an outage, credentials that have expired, a full disk
            if self._outage_began is None:
                self._outage_began = time.monotonic()
                remedy = "training continues, and what is missing is copied later"
                self._warn(f"--mirror {self._flags.mirror} cannot be written for now ({reason(error)}): {remedy}")
            return False
        if self._outage_began is not None:
            seconds, self._outage_began = time.monotonic() - self._outage_began, None
            self._output.say(f"--mirror {self._flags.mirror}: all that was missing for {seconds:.0f} s is there")
        return True

    def _copy(self) -> None:
        remote, directory = self._remote, self._flags.output_dir / CHECKPOINTS
        assert remote is not None
        remote.require_writer()
        remote.run = run_identity(self._flags.output_dir)
        # First: a checkpoint without a record would be of an unknown run.
        for record in filter(self._is_new, (self._flags.output_dir / METRICS, self._flags.output_dir / SUMMARY)):
            state, content = size_and_time(record), files.read_bytes(record)
            # The run appends meanwhile: its last line may be half there.
            remote.put_small(record.name, content[: content.rfind(b"\n") + 1])
            self._copied[record.name] = state
        while (new := next(filter(self._is_new, checkpoint.checkpoints_in(directory)), None)) is not None:
            state = size_and_time(new)  # before: it may be written again meanwhile
            try:
                remote.put(new)
                self._copied[new.name] = state
            except UserError:
                raise
            except Exception:  # of any library
                self._failed = True
                if new.exists():
                    raise  # else it was removed here while it was read
        here = {path.name for path in checkpoint.checkpoints_in(directory)}
        gone = [name for i, name in enumerate(remote.checkpoints) if i >= self._flags.keep and name not in here]
        if gone or self._failed:
            remote.remove(gone)
            self._failed = False

    def _is_new(self, path: Path) -> bool:
        return size_and_time(path) != self._copied.get(path.name)

    def _warn(self, line: str) -> None:
        lines.warn(line)
        self._output.event("error", kind="mirror", message=line)

    def require_own(self) -> None:
        """Raise UserError on every rank if another run has begun to write there. A collective."""
        with self._engine.raising_together("mirror"):
            if self._refusal:
                self._thread = None
                raise UserError(self._refusal)

    def end(self, heartbeat: Callable[[], None]) -> None:
        """Wait until all of the run is at the URL, for a limited time. `heartbeat` is called meanwhile. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        until = time.monotonic() + self._flags.mirror_timeout
        self._is_over = True
        self._wake.set()
        while thread.is_alive() and time.monotonic() < until:
            heartbeat()
            thread.join(min(1.0, max(0.0, until - time.monotonic())))
        if self._refusal:
            self._warn(self._refusal)
        elif thread.is_alive():
            self._refusal = "the run has ended"
            remedy = "--output-dir has all of it; the same command copies the rest"
            message = f"not all of the run could be copied within {self._flags.mirror_timeout:g} s (--mirror-timeout)"
            self._warn(f"--mirror {self._flags.mirror}: {message}: {remedy}")
