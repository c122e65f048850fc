"""Standard streams to which nothing can be written, and a disk without room."""

import contextlib
import os
import resource
from pathlib import Path


class Odd:
    def write(self, text):
        raise ZeroDivisionError


def without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def closed():
    stream = Path(os.devnull).open("w")  # noqa: SIM115
    stream.close()
    return stream


UNWRITABLE = {
    "a full disk": lambda: Path("/dev/full").open("w"),  # noqa: SIM115
    "no reader": without_reader,
    "closed": closed,
    "missing": lambda: None,
    "the program's own": Odd,
}


@contextlib.contextmanager
def no_room(most: int = 1000):
    """Context manager in which this process can write no file of more than `most` bytes: "File too large" for "No space"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_pipe():
    """Return the ends of a pipe to which nothing more can be written, as under a paused pager."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    return reader, writer
