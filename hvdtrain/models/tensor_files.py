"""Files of tensors, before they are opened: no pipe that nobody writes to, no header that would fill the memory."""

import stat
from pathlib import Path

MOST_HEADER_BYTES = 2**26
MOST_TENSORS = 100_000  # of 67 MB, a million tensors without content took 33 s and 2 GB


def require_file(path: Path) -> None:
    """Raise ValueError where `path` is a pipe, a device or a directory: opening it might wait for ever. Raises OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")


def refuse_large_header(path: Path) -> None:
    """Raise ValueError where a safetensors file names more tensors than any model has: the library would make an object of
    each. Raises OSError where it cannot be read."""
    require_file(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MOST_HEADER_BYTES:
            raise ValueError(f"its header of {length:,} bytes is larger than {MOST_HEADER_BYTES:,}")
        count = file.read(length).count(b'"dtype"')  # within a text, its quotation marks would be escaped
    if count > MOST_TENSORS:
        raise ValueError(f"it names {count:,} tensors, more than {MOST_TENSORS:,}")
