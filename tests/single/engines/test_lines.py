"""What a process writes before it ends does not keep it from ending."""

import io
import os
import sys
import threading

import pytest

from hvdtrain import benchmark, reduce
from hvdtrain.checks import findings
from hvdtrain.engines.errors import Failure
from hvdtrain.engines.lines import put_line, result, say_within, within, write_whole_lines
from hvdtrain.engines.single import SerialEngine
from tests.single.unwritable import UNWRITABLE, full_pipe

SMALL = "--engine serial --threads 1 --device cpu"
SEVERAL_LINES = {
    "reduce": lambda: reduce.main(),
    "benchmark --collectives --min-bytes 4 --max-bytes 4 --seconds-per-size 0.01": lambda: benchmark.main(),
    "benchmark --model convnet --batch-size 1 --steps 1 --repeats 1 --warmup-steps 1": lambda: benchmark.main(),
    "doctor": lambda: findings.show([dict(level="ok", what="a", why="", do="", ranks=[0])], 1, as_json=True),
}


class Writes(io.RawIOBase):
    """What reaches the operating system, call by call."""

    def __init__(self):
        self.seen = []

    def writable(self):
        return True

    def write(self, content):
        self.seen.append(bytes(content).decode())
        return len(content)


@pytest.mark.parametrize("command", SEVERAL_LINES)
def test_a_text_of_several_lines_is_written_in_whole_lines(command, monkeypatch):
    """Else mpirun puts a tag, or another rank's line, before the last line break."""
    writes = Writes()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(writes), write_through=True))
    monkeypatch.setattr(SerialEngine, "all_gather_object", lambda engine, value, name: [value, value])
    monkeypatch.setattr(sys, "argv", f"{command} {SMALL}".split())
    write_whole_lines()
    SEVERAL_LINES[command]()
    assert "".join(writes.seen).count("\n") > 1
    assert all(each.endswith("\n") for each in writes.seen)


def test_a_line_is_written_whole(capfd):
    assert say_within("error: ä\n" * 3)
    assert capfd.readouterr().err == "error: ä\n" * 3


def test_no_character_of_a_line_ends_the_run(monkeypatch, tmp_path):
    """A file name that is not UTF-8; a terminal of another encoding."""
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        write_whole_lines()
        print(os.fsdecode(b"\xff"), "ä")
    assert (tmp_path / "out").read_text() == "\\udcff \\xe4\n"


@pytest.fixture(params=UNWRITABLE)
def unwritable(request):
    return UNWRITABLE[request.param]()


def test_a_line_that_cannot_be_written_is_lost_and_nothing_else(unwritable):
    assert isinstance(put_line(unwritable, "line\n"), Exception)
    if hasattr(unwritable, "close"):
        unwritable.close()  # raises if it has kept the line: then the exit code is 120


def test_the_result_of_a_command_that_cannot_be_written_is_a_failure(unwritable, monkeypatch):
    monkeypatch.setattr("sys.stdout", unwritable)
    with pytest.raises(Failure, match=r"^standard output cannot be written \("):
        result("line")


def test_what_the_program_has_printed_comes_first(tmp_path):
    with (tmp_path / "out").open("w") as stream:
        stream.write("first\n")
        assert put_line(stream, "second\n") is None
        assert (tmp_path / "out").read_text() == "first\nsecond\n"


def test_a_pipe_that_another_process_has_made_nonblocking_gets_the_whole_line():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    text, read = "x" * 10**6 + "\n", bytearray()
    with os.fdopen(writer, "w") as stream:
        parts = iter(lambda: os.read(reader, 65536), b"")
        thread = threading.Thread(target=lambda: [read.extend(part) for part in parts])
        thread.start()
        assert put_line(stream, text) is None
    thread.join(60)
    os.close(reader)
    assert read.decode() == text


def test_a_stream_without_a_file_is_written_too(capsys):
    assert say_within("error\n")
    assert capsys.readouterr().err == "error\n"


def test_a_reader_that_does_not_read_is_waited_for_no_longer_than_said(monkeypatch):
    """A full pipe, as under a paused pager."""
    reader, writer = full_pipe()
    monkeypatch.setattr("sys.stderr", os.fdopen(writer, "w", buffering=1, closefd=False))
    assert not say_within("error\n", 0.2)  # that it comes back is the test
    os.close(reader)  # what still waits for it fails


def test_an_error_of_what_is_called_is_nobodys():
    assert within(20.0, lambda: {}[0])


def test_without_another_thread_a_line_is_said_where_it_is_taken(monkeypatch, capfd):
    """A user who may have no more threads was told nothing, with exit code 2."""

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    assert say_within("error\n")
    assert capfd.readouterr().err == "error\n"
    reader, writer = full_pipe()
    saved = os.dup(2)
    os.dup2(writer, 2)
    try:
        assert not say_within("error\n", 0.2)
    finally:
        os.dup2(saved, 2)
        for one in (reader, writer, saved):
            os.close(one)
