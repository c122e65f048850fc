"""One write per line, so that launchers put their tag before each line and nowhere else."""

import contextlib
import sys


def write_whole_lines() -> None:
    """Make this process write its standard streams line by line, each in one piece. Doing it twice is fine.

    Trap: with PYTHONUNBUFFERED=1, common in images, `print` writes a line and its end apart; Open MPI tags both, and
    another rank's line may come between them.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # replaced by something else, or closed
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
