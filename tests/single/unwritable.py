"""Standard streams to which nothing can be written."""

import os
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
