"""The process that copies a run to --mirror: started by rank 0 (mirror.py), which it tells what to print.

Not a thread of rank 0: hashes and libraries would take Python's lock from the steps. It knows of the run what is in its
output directory. END on standard input says that the run is over. Each line on standard output is a JSON list
[KIND, TEXT], which rank 0 prints. Does not import torch.
"""

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.remote import (
    CHECKPOINTS,
    METRICS,
    NAME,
    SUMMARY,
    Remote,
    identity,
    readable,
    reason,
    step_of,
)
from hvdtrain.engines import atomic, files
from hvdtrain.engines.errors import UserError
from hvdtrain.launching.attendant import attend

LOOK_SECONDS = 1.0  # between two looks at the output directory
RETRY_SECONDS = 10.0  # after a failure
RECORD_SECONDS = 60.0  # between two copies of the record without a new checkpoint
OTHERS = "name another --mirror, or remove it"
END = b"."
Mark = tuple[int, int, int]


def tell(kind: str, text: str = "") -> None:
    """Tell rank 0. kind: "ready", "error" (bad input), "say" or "warn"."""
    os.write(1, (json.dumps([kind, text]) + "\n").encode())


def mark_of(path: Path) -> Mark:
    """Return what tells a file from another of its name, and from a later state of it: inode, size and time of change."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def listed(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints of the run, newest first."""
    try:
        found = [path for path in (output_dir / CHECKPOINTS).iterdir() if NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: step_of(path.name), reverse=True)


def restore(remote: Remote, output_dir: Path, flag: str) -> None:
    """Copy the run to an output directory that lacks it, or has an earlier state of it: newest checkpoint, best, records.

    Raises UserError if another run is there.
    """
    here = listed(output_dir)
    if here and identity(output_dir) != remote.run:
        raise UserError(f"{flag} {remote.url} has another run than {output_dir}: name another --output-dir")
    if here and step_of(here[0].name) >= step_of(next(iter(remote.checkpoints))):
        return
    checkpoints = output_dir / CHECKPOINTS
    checkpoints.mkdir(parents=True, exist_ok=True)
    atomic.remove_partial(checkpoints)
    record = output_dir / METRICS
    if os.path.lexists(record) and identity(output_dir) != remote.run:
        record.rename(files.unused(record))
    for name in (METRICS, SUMMARY):  # first: a checkpoint without a record would be another run's
        if (content := remote.get_small(name)) is not None:
            atomic.write(output_dir / name, content)
    newest = remote.get_first(remote.checkpoints, checkpoints, lambda line: tell("warn", line))
    if newest is None:
        raise UserError(f"{flag} {remote.url} has no undamaged checkpoint: name another place")
    for best in remote.best()[:1]:
        if not (checkpoints / best).exists():
            remote.get(best, checkpoints)
    tell("say", f"{newest.name} copied from {remote.url}")


class Mirror:
    """Keeps the run at a URL like the one in an output directory."""

    def __init__(self, remote: Remote, output_dir: Path, keep: int):
        self._remote, self._output_dir, self._keep = remote, output_dir, keep
        self._copied: dict[str, Mark] = {}  # what is there, as it was here
        self._recorded = 0.0  # when the record was last copied
        # Until metrics.jsonl changes, training has not begun: the files may be of a run that is about to be put aside.
        self._earlier = mark_of(output_dir / METRICS)
        self._untidy = False  # a copy has failed, and a part of it may be there
        self._since = 0.0  # beginning of an outage, on the monotonic clock; 0: none

    def begin(self, resume: str) -> None:
        """Find out whether the URL can be written, and is this run's. Raises UserError."""
        remote = self._remote
        if remote.checkpoints and resume == "anew":
            raise UserError(f"--mirror {remote.url} has a run, and --resume starts another: {OTHERS}")
        self._require_own(identity(self._output_dir))
        remote.make()

    def _require_own(self, run: str | None) -> None:
        if self._remote.checkpoints and self._remote.run != run:
            raise UserError(f"--mirror {self._remote.url} has another run than {self._output_dir}: {OTHERS}")

    def look(self, *, last: bool = False) -> bool:
        """Copy what is new. Return whether all of it is there. Says once that it cannot, and once that it can again."""
        try:
            self._copy(last)
        except Exception as error:  # of any library: an outage, credentials that have expired, a full disk
            if not self._since:
                self._since = time.monotonic()
                remedy = "training continues, and what is missing is copied later"
                tell("warn", f"--mirror {self._remote.url} cannot be written for now ({reason(error)}): {remedy}")
            return False
        if self._since:
            seconds = time.monotonic() - self._since
            self._since = 0.0
            tell("say", f"--mirror {self._remote.url}: all that was missing for {seconds:.0f} s is there")
        return True

    def _copy(self, last: bool) -> None:
        remote, run = self._remote, identity(self._output_dir)
        if run is None or mark_of(self._output_dir / METRICS) == self._earlier:
            return
        self._require_own(run)
        remote.run = run
        while new := next(filter(self._is_new, listed(self._output_dir)), None):  # a newer one may come meanwhile
            mark = mark_of(new)
            try:
                self._copy_record()  # first: a checkpoint without a record would be of an unknown run
                remote.put(new)
            except Exception:  # of any library
                self._untidy = True
                if new.exists() and mark_of(new) == mark:
                    raise
                continue  # it was removed or replaced here while it was read
            self._copied[new.name] = mark
        if self._untidy:
            remote.tidy()
            self._untidy = False
        here = {path.name for path in listed(self._output_dir)}
        if gone := [name for i, name in enumerate(remote.checkpoints) if i >= self._keep and name not in here]:
            remote.remove(gone)
        if last or time.monotonic() - self._recorded >= RECORD_SECONDS:
            self._copy_record()

    def _copy_record(self) -> None:
        for name in (METRICS, SUMMARY):
            path = self._output_dir / name
            if path.exists() and self._is_new(path):
                mark, content = mark_of(path), files.read_bytes(path)
                self._remote.put_small(name, content[: content.rfind(b"\n") + 1])
                self._copied[name] = mark
        self._recorded = time.monotonic()

    def _is_new(self, path: Path) -> bool:
        return self._copied.get(path.name) != mark_of(path)


def next_word(seconds: float | None) -> bytes | None:
    """Return the next word of rank 0; None after so many seconds. Exits if rank 0 has ended."""
    if not select.select([0], [], [], seconds)[0]:
        return None
    if word := os.read(0, 1):
        return word
    sys.exit(1)


def prepare(output_dir: Path, mirror: str | None, resume: str, keep: int) -> Mirror | None:
    """Copy the run here, if it is there, and return what keeps it there. Raises UserError.

    resume: "auto", "anew", or a URL, at which there must be a run.
    """
    places = {} if mirror is None or resume == "anew" else {mirror: "--mirror"}
    if resume not in ("auto", "anew"):
        places.setdefault(resume, "--resume")
    for url, flag in places.items():
        with readable(url, flag) as remote:
            if remote.checkpoints:
                restore(remote, output_dir, flag)
            elif flag == "--resume":
                raise UserError(f"--resume {url} has no run: name another place, or leave it out")
    if mirror is None:
        return None
    with readable(mirror, "--mirror") as remote:
        kept = Mirror(remote, output_dir, keep)
        kept.begin(resume)
        return kept


def main(parent: int, output_dir: str, **asked: Any) -> int:
    """Do the work. Returns the exit code."""
    attend(parent)
    try:
        mirror = prepare(Path(output_dir), **asked)
    except UserError as error:
        tell("error", str(error))
        return 2
    tell("ready")
    over, complete = mirror is None, True
    while mirror is not None and not (over and complete):
        over |= next_word(LOOK_SECONDS if complete else RETRY_SECONDS) == END
        complete = mirror.look(last=over)
    return 0


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
