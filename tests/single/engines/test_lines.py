"""One write per line: what launchers tag, and where."""

import io
import sys

import pytest

from hvdtrain.engines.lines import write_whole_lines


class Writes(io.RawIOBase):
    """Keeps each write apart, as a pipe's reader may see them."""

    def __init__(self) -> None:
        self.all: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.all.append(bytes(data))
        return len(self.all[-1])


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_print_writes_a_line_at_once(name, monkeypatch):
    writes = Writes()
    monkeypatch.setattr(sys, name, io.TextIOWrapper(writes, write_through=True))  # as PYTHONUNBUFFERED=1 has it
    print("as it comes", file=getattr(sys, name), flush=True)
    assert writes.all == [b"as it comes", b"\n"]  # else there is nothing to do
    writes.all.clear()
    for _ in range(2):
        write_whole_lines()
    print("one", "line", file=getattr(sys, name))
    print("another", file=getattr(sys, name), flush=True)
    assert writes.all == [b"one line\n", b"another\n"]


def test_streams_that_are_something_else_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)
    write_whole_lines()
    print("still there")
    assert sys.stdout.getvalue() == "still there\n"
