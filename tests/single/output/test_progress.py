"""What is shown while a run goes on: shares, the plain line, the bar, the clock."""

import errno
import io
import os
import re
import subprocess
import sys
import threading
import time

import pytest
import torch

from hvdtrain.engines.base import Setting
from hvdtrain.engines.single import SerialEngine
from hvdtrain.launching import processes
from hvdtrain.output import progress as display
from hvdtrain.output.clock import Clock, RankTimes, Window, seconds_without_core, shares
from hvdtrain.output.progress import Display, Screen, find_screen
from hvdtrain.output.run_output import RunOutput, automatic

FIGURES = ["loss 0.2500", "accuracy 50.0%"]


def rank(loading=0.0, compute=1.0, communication=0.0, elapsed=10.0, resident=5e8, cuda=0.0) -> RankTimes:
    return RankTimes(loading, compute, communication, elapsed, 0.0, resident, cuda)


def window(*ranks: RankTimes, rate=1234.5) -> Window:
    return Window(list(ranks), {"samples_per_second": rate})


def test_shares_are_of_all_ranks_time():
    assert shares([rank(1, 6, 3), rank(3, 6, 1)]) == {
        "loading_share": 0.2, "compute_share": 0.6, "communication_share": 0.2,
    }  # fmt: skip


def shown(monkeypatch, windows: list[Window], screen: Screen | None = None, seconds: float = 11.0) -> list[str]:
    """Show each window, 11 seconds apart, and return the lines."""
    lines: list[str] = []
    now = [time.monotonic()]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(display, "find_screen", lambda: screen)
    shows = Display(lines.append)
    for i, seen in enumerate(windows):
        now[0] += seconds
        shows.show("epoch 1/2", 1 + 50 * i, 1000, ["loss 0.5000", "accuracy 50.0%"], seen)
    shows.close()
    return lines


def test_plain_lines_keep_their_distance_and_tell_the_time_left(monkeypatch):
    both = window(rank(1, 6, 3, resident=4e8), rank(1, 7, 2, resident=6e8))
    measured = "1,234 samples/s  loading 10%  compute 65%  communication 25%  0.6 GB/rank"
    lines = shown(monkeypatch, [both] * 3)
    assert lines[0] == f"epoch 1/2  step 1/1000  loss 0.5000  accuracy 50.0%  {measured}"
    # 11 s for 50 steps; 900 remain
    assert lines[2] == f"epoch 1/2  step 101/1000  loss 0.5000  0:03:18 left  accuracy 50.0%  {measured}"
    alone = shown(monkeypatch, [window(rank(cuda=3e9))])
    assert alone[0].endswith("0.5 GB/rank  GPU 3.0 GB")
    monkeypatch.setattr(display, "PLAIN_LINE_SECONDS", 20.0)
    assert len(shown(monkeypatch, [both] * 6)) == 3


class Terminal(io.StringIO):
    """What a terminal is sent; 60 or 120 columns wide."""

    def __init__(self, columns: int, monkeypatch) -> None:
        super().__init__()
        monkeypatch.setattr(display.os, "get_terminal_size", lambda device: os.terminal_size((columns, 24)))


@pytest.mark.parametrize("columns", [60, 120])
def test_the_bar_is_drawn_in_one_line_and_taken_away(monkeypatch, columns):
    screen = Screen(Terminal(columns, monkeypatch), 7)
    assert shown(monkeypatch, [window(rank(0, 9, 1))] * 3, screen) == []
    sent = screen.stream.getvalue()
    assert "\n" not in sent
    drawn = [text.rstrip() for text in sent.split("\r") if text.strip()]
    assert max(map(len, drawn)) < columns
    assert drawn[-1].startswith("epoch 1/2  10% |#.........| 101/1000  ")
    assert ("loss 0.5000  accuracy 50.0%  1,234 samples/s" in drawn[-1]) == (columns == 120)
    assert sent.endswith(f"\r{' ' * len(drawn[-1])}\r")


def test_a_line_is_said_above_the_bar(engine, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal(80, monkeypatch))
    monkeypatch.setattr(display, "find_screen", lambda: Screen(sys.stdout, 7))
    with RunOutput(engine, None, progress=True) as output:
        output.progress("epoch 1/2", 1, 100, FIGURES, window(rank(0, 9, 1)))
        output.say("a line")
    before, _, after = capsys.readouterr().out.partition("a line\n")
    assert re.search(r"\repoch 1/2 .*\r +\r$", before)
    assert re.search(r"^\repoch 1/2 .*\r +\r$", after)


def test_a_reader_that_is_gone_does_not_end_the_run_and_is_said_once(engine, monkeypatch, capsys):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(display, "find_screen", lambda: Screen(sys.stdout, 7))
    with RunOutput(engine, None, progress=True) as output:
        output.say("a line")
        output.say("a line")
        output.progress("epoch 1/2", 1, 100, FIGURES, window(rank(0, 9, 1)))
    said = "warning: standard output cannot be written for now (Input/output error): training continues\n"
    assert capsys.readouterr().err == said


def test_settings_are_counted_and_said_in_full_where_asked_for():
    notes = [Setting("A=1"), "GPU left idle", Setting("malloc keeps freed memory")]
    assert automatic(notes, verbose=False) == [
        "automatic: 2 settings for speed (-v: which)",
        "           GPU left idle",
    ]
    assert automatic(notes, verbose=True) == [
        "automatic: A=1", "           malloc keeps freed memory", "           GPU left idle",
    ]  # fmt: skip
    assert automatic(["GPU left idle"], verbose=False) == ["automatic: GPU left idle"]
    assert automatic([], verbose=False) == []


class Pair(SerialEngine):
    """Two ranks, of which the other one reports the same and 100 bytes more."""

    def all_gather(self, tensor, name):
        return torch.stack([tensor, tensor + torch.tensor([0, 0, 0, 0, 0, 100.0, 0, 0], dtype=tensor.dtype)])


def test_the_clock_measures_all_ranks():
    engine = Pair(tuning=False, rank=0, size=1, launcher="none")
    engine.device = torch.device("cpu")
    earliest = time.perf_counter()
    clock = Clock()
    began = time.perf_counter()
    clock.mark("loading", at=began + 1)
    clock.mark("communication", at=began + 3)
    clock.end_step(20, 10)
    seen = clock.measure(engine)
    assert seen.rates["communication_seconds"] == pytest.approx(0.2)
    assert 1 <= seen.ranks[0].loading <= 1 + began - earliest + 1e-6
    assert seen.ranks[1].resident_bytes - seen.ranks[0].resident_bytes == 100
    assert seen.ranks[0].resident_bytes > 1e7
    clock.mark("communication", at=time.perf_counter() + 4)
    clock.measure(engine)
    assert clock.per_rank()["communication_seconds"] == pytest.approx([6, 6], abs=0.5)
    assert set(clock.per_rank()) == {
        *("loading_seconds", "compute_seconds", "communication_seconds", "elapsed_seconds"),
        *("resident_bytes", "cuda_bytes", "without_core_seconds"),
    }


def test_a_program_may_let_its_clock_stand_still(monkeypatch):
    """As freezegun does: a ZeroDivisionError."""
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    assert Clock().rates()["samples_per_second"] == 0


def test_a_data_loader_that_reads_another_one_counts_once():
    """As hvdtrain.tuned sees it: the inner one has returned a batch before the outer one does."""
    clock = Clock()
    began = time.perf_counter()
    for start, end in ((began + 2, began + 4), (began + 1, began + 5)):
        clock.mark("compute", start)
        clock.mark("loading", end)
    times = clock.times(torch.device("cpu"))
    assert (times.loading, times.compute) == pytest.approx((3, 2), abs=0.5)


def test_seconds_without_a_core_are_read_from_the_kernel(monkeypatch):
    for turns, seconds in ((None, 0.0), (processes.Turns(5.0, 2.5, 7), 2.5)):
        monkeypatch.setattr(processes, "turns", lambda thread, turns=turns: turns)
        assert seconds_without_core() == seconds


def test_a_launcher_whose_output_nobody_reads_is_not_waited_for(monkeypatch, tmp_path):
    """Opening its pipe waited for a reader, for ever."""
    os.mkfifo(tmp_path / "pipe")
    read = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write = os.open(tmp_path / "pipe", os.O_WRONLY)
    os.close(read)
    words = [sys.executable, "-c", "import time; time.sleep(100)", "mpirun"]
    with subprocess.Popen(words, stdout=write) as launcher:
        os.close(write)
        found = [processes.Process(launcher.pid, 0, "mpirun")]
        monkeypatch.setattr(display.processes, "launchers", lambda: found)
        looking = threading.Thread(target=find_screen, daemon=True)
        looking.start()
        looking.join(10)
        launcher.kill()
        assert not looking.is_alive()


@pytest.mark.parametrize(
    ("words", "draws"),
    [
        ("mpirun -np 2 python x.py --output-dir out", True),
        ("mpirun --tag-output -np 2 python x.py", False),
        ("mpirun --output tag -np 2 python x.py", False),
        ("mpirun --output=tag -np 2 python x.py", False),
        ("mpirun --output-filename logs -np 2 python x.py", False),
    ],
)
def test_a_bar_is_drawn_where_mpirun_passes_lines_on_unchanged(words, draws, monkeypatch):
    ours, its = os.openpty()
    with subprocess.Popen(["sleep", "100"], stdout=its) as launcher:
        found = [processes.Process(launcher.pid, 0, "mpirun")]
        monkeypatch.setattr(display.processes, "launchers", lambda: found)
        monkeypatch.setattr(display.processes, "command_line", lambda pid: words.split())
        screen = find_screen()
        launcher.kill()
    assert (screen is not None) == draws
    for descriptor in (ours, its, *([screen.device] if screen else [])):
        os.close(descriptor)
