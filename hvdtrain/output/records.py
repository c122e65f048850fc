"""metrics.jsonl: its events, and their text, which any program can read: JSON has no NaN and no infinity.

Does not import torch.
"""

import contextlib
import errno
import json
import math
import os
import stat
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from hvdtrain.engines import files, lines

# As Python, JavaScript and others turn them back into numbers: float("NaN"), Number("Infinity").
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def json_text(value: object, indent: int | None = None) -> str:
    """Return `value` as JSON. Numbers that are not finite become the strings of WORDS."""
    try:
        return json.dumps(value, indent=indent, default=json_value, allow_nan=False)
    except ValueError:
        # JSON has neither NaN nor infinity. `parse_constant` is called for them alone, and makes text of them.
        return json.dumps(json.loads(json.dumps(value, default=json_value), parse_constant=str), indent=indent)


def parsed(content: str) -> dict[str, Any] | None:
    """Return a JSON object with numbers for the strings of WORDS; None if `content` is not one."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return {name: WORDS.get(field, field) if isinstance(field, str) else field for name, field in value.items()}


def json_value(value: Any) -> object:
    """Return what stands in JSON for a value that it does not have: numbers for a tensor or an array, else text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def make_room_for_summary(path: Path) -> None:
    """Remove summary.json of an earlier attempt: it would say that this one has ended. What else is there gets another name.
    Raises OSError."""
    with contextlib.suppress(OSError):  # no file, or a link to none, a directory, a pipe
        if (summary := parsed(files.read_text(path))) and summary.keys() >= {"world_size", "samples_per_second"}:
            path.unlink()
    if os.path.lexists(path):
        path.rename(files.unused_name(path))


class Events:
    """Appends events to metrics.jsonl, if it was opened, and hands them to listeners. began: when this process did, on the
    monotonic clock."""

    def __init__(self, began: float):
        self.listeners: list[Callable[[str, dict[str, object]], None]] = []  # called with the name and the fields
        self._began = began
        self._lock = threading.Lock()
        self._path = Path()
        self._file: FileIO | None = None
        self._missing = 0  # lines that could not be written since the last successful write

    def open_events(self, path: Path, *, continued: bool) -> None:
        """Open `path`. Raises OSError. continued: append to the file that is there; otherwise, that is renamed."""
        if os.path.lexists(path) and not (continued and stat.S_ISREG(path.lstat().st_mode)):
            path.rename(files.unused_name(path))  # a file of an earlier run, or a link, a pipe or a device
        self._path, self._file = path, files.open_to_append(path)

    def event(self, name: str, **fields: object) -> None:
        """Append an event, as one line of JSON. Thread-safe."""
        line = json_text({"event": name, **self._now(), **fields}) + "\n"
        with self._lock:  # the checkpoint writer and the watchdog call this from their threads
            self._append(line)
        for listener in self.listeners:
            listener(name, fields)

    def _now(self) -> dict[str, float]:
        """Return the time of day, and the seconds since this process started, on a monotonic clock."""
        return {"time": time.time(), "elapsed": round(time.monotonic() - self._began, 3)}

    def _append(self, line: str) -> None:
        """Append a complete line, or nothing. On a full disk, the line is lost and training continues."""
        if self._file is None:
            return
        if self._missing:
            gap = f"{self._missing} line{'s'[: self._missing > 1]} before this one could not be written"
            line = json_text({"event": "error", **self._now(), "kind": "record", "message": gap}) + "\n" + line
        content, end = line.encode(), None
        try:
            self._reopen_if_removed()
            end = self._file.seek(0, os.SEEK_END)
            # A full disk may take a part of a line. It is cut off again, as a half line would spoil the next one.
            if self._file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._missing = 0
        except OSError as error:
            with contextlib.suppress(OSError):
                if end is not None:
                    self._file.truncate(end)
            if not self._missing:
                lines.warn(f"{self._path} cannot be written for now ({error.strerror})")
            self._missing += 1

    def _reopen_if_removed(self) -> None:
        """Begin the file anew where it was removed. Raises OSError, also if another run has begun one there since."""
        assert self._file is not None
        # A file without a name was removed: what is appended to it is lost with it, without an error.
        if os.fstat(self._file.fileno()).st_nlink:
            return
        removed, there = self._file, files.open_to_append(self._path)
        first, now = (os.pread(one.fileno(), files.SMALL, 0).partition(b"\n")[0] for one in (removed, there))
        if now not in (b"", first):  # an editor leaves the first line as it was
            there.close()
            raise OSError(errno.EBUSY, "another run writes there now")
        self._file = there
        removed.close()
        if not now:
            lines.warn(f"{self._path} was removed while this run writes it: it begins anew, without what was in it")

    def close_events(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
