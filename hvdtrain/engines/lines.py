"""Write output line by line, so that launchers put their tag only at the beginning of each line."""

import contextlib
import sys


def write_whole_lines() -> None:
    """Make stdout and stderr write each line with one system call. Idempotent.

    Trap: with PYTHONUNBUFFERED=1, which is common in container images, `print` writes a line and its line break separately.
    Open MPI tags both, and another rank's line may come between them.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # the stream was replaced or closed
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
