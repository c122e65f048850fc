"""What is shown while a run goes on: shares, hints, the slowest rank, the plain line, the clock."""

import errno
import io
import os
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
from hvdtrain.output import terminal
from hvdtrain.output.clock import Clock
from hvdtrain.output.progress import Display, hint, line, remedies, slowest
from hvdtrain.output.rank_times import RankTimes, Window, seconds_without_core, shares
from hvdtrain.output.run_output import RunOutput, automatic

FIGURES = ["loss 0.2500", "accuracy 50.0%"]
REMEDIES = {"loading": "more workers", "communication": "a larger batch"}


def rank(loading=0.0, compute=1.0, communication=0.0, elapsed=10.0, resident=5e8, cuda=0.0) -> RankTimes:
    return RankTimes(loading, compute, communication, elapsed, 0.0, resident, cuda)


def window(*ranks: RankTimes, steps=50, rate=1234.5) -> Window:
    return Window(steps, list(ranks), {"samples_per_second": rate})


def test_shares_are_of_all_ranks_time():
    assert shares([rank(1, 6, 3), rank(3, 6, 1)]) == {
        "loading_share": 0.2,
        "compute_share": 0.6,
        "communication_share": 0.2,
    }


@pytest.mark.parametrize(
    ("computes", "expected"),
    [
        ([5.0], None),
        ([5.0, 5.4], None),  # a tenth is not yet more than a tenth
        ([5.0, 5.6], (1, 0.12)),
        ([6.0, 5.0], (0, 0.2)),
        ([5.0, 5.0, 5.0, 10.0], (3, 1.0)),
        ([10.0, 10.0, 5.0, 5.0], (0, 1.0)),  # half of them slow: the faster half is what could be
        ([2.0, 5.0, 5.0, 5.0], None),  # one that is quicker makes nobody slow
    ],
)
def test_slowest_rank(computes, expected):
    found = slowest([rank(compute=seconds) for seconds in computes])
    assert found == (expected if expected is None else (expected[0], pytest.approx(expected[1])))


def test_no_hint_before_enough_was_measured():
    slow_wire = [rank(compute=4, communication=6)] * 2
    assert hint(slow_wire, 100, REMEDIES) is not None
    assert hint(slow_wire, display.ENOUGH_STEPS - 1, REMEDIES) is None
    assert hint([r._replace(elapsed=4.9, compute=1.9, communication=3) for r in slow_wire], 100, REMEDIES) is None


@pytest.mark.parametrize(
    ("ranks", "known", "expected"),
    [
        ([rank(0, 5.2, 4.8)] * 2, REMEDIES, ("communication", "communication 48% of the time: a larger batch")),
        ([rank(6, 4, 0)] * 2, REMEDIES, ("loading", "loading 60% of the time: more workers")),
        ([rank(6, 4, 0)] * 2, {"communication": "a larger batch"}, None),  # MNIST has no --workers
        ([rank(2, 5, 3)] * 2, REMEDIES, None),
        # Waiting for a slow rank is not blamed on the wire.
        ([rank(0, 2, 8), rank(0, 2, 8), rank(0, 9, 1)], REMEDIES, ("communication", "communication 57% of the time, "
         "most of it waiting for rank 2: see what slows that one down")),
        # Here it computes longer too, but most of the communication is its own as well.
        ([rank(0, 2, 8), rank(0, 3, 7)], REMEDIES, ("communication", "communication 75% of the time: a larger batch")),
    ],
)  # fmt: skip
def test_hints_name_share_and_remedy(ranks, known, expected):
    assert hint(ranks, 100, known) == expected


@pytest.mark.parametrize(
    ("config", "hosts", "device", "phase", "expected"),
    [
        ({"compression": "none"}, 2, "cpu", "communication", "try --compression fp16 or a larger --batch-size"),
        ({"compression": "none"}, 1, "cuda", "communication", "try --compression fp16 or a larger --batch-size"),
        ({"compression": "none"}, 1, "cpu", "communication", "try a larger --batch-size"),
        ({"compression": "fp16"}, 2, "cpu", "communication", "try a larger --batch-size"),
        ({"workers": 2}, 1, "cpu", "loading", "try more --workers (now 2), or storage nearer to this host"),
        ({}, 1, "cpu", "loading", None),
        ({"workers": 2, "dataset": "synthetic"}, 1, "cpu", "loading", None),
    ],
)
def test_remedies_are_flags_that_the_script_has_and_that_would_help(config, hosts, device, phase, expected):
    assert remedies(config, hosts, device).get(phase) == expected


def test_plain_line():
    both = window(rank(1, 6, 3, resident=4e8), rank(1, 7, 2, resident=6e8))
    assert line(FIGURES, both, 83.4, ["a", "b"]) == (
        "loss 0.2500  0:01:23 left  accuracy 50.0%  1,234 samples/s  loading 10%  compute 65%  communication 25%  "
        "0.6 GB/rank  slowest: rank 1 on b, computes 17% longer"
    )
    alone = line(FIGURES, window(rank(cuda=3e9)), None, ["a"])
    assert "left" not in alone
    assert "slowest" not in alone
    assert alone.endswith("GPU 3.0 GB")


def shown(
    monkeypatch, windows: list[Window], screen: terminal.Screen | None = None, seconds: float = 11.0
) -> list[str]:
    """Show each window, 11 seconds apart, and return the lines."""
    lines: list[str] = []
    now = [time.monotonic()]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(terminal, "find", lambda: screen)
    shows = Display(lines.append)
    shows.hosts, shows.remedies = ["a", "b"], dict(REMEDIES)
    for i, seen in enumerate(windows):
        now[0] += seconds
        shows.show("epoch 1/2", 1 + 50 * i, 1000, ["loss 0.5000", "accuracy 50.0%"], seen)
    shows.close()
    return lines


def test_a_hint_is_given_once_and_the_first_window_left_out(monkeypatch):
    slow_wire = window(rank(0, 4, 6), rank(0, 4, 6))
    lines = shown(monkeypatch, [slow_wire] * 4)
    assert [text.partition(":")[0] for text in lines if text.startswith("hint")] == ["hint"]
    assert [text.startswith("hint") for text in lines] == [False, True, False, False, False]
    starting_up = window(rank(0, 0, 100, elapsed=100), rank(0, 0, 100, elapsed=100))
    fine = window(rank(0, 9, 1), rank(0, 9, 1))
    assert not [text for text in shown(monkeypatch, [starting_up, fine, fine]) if text.startswith("hint")]


def test_time_left_is_what_the_steps_so_far_took(monkeypatch):
    fine = window(rank(0, 9, 1), rank(0, 9, 1))
    lines = shown(monkeypatch, [fine] * 3)
    assert lines[0].startswith("epoch 1/2  step 1/1000  loss 0.5000")
    assert " left" not in lines[0]
    assert "  step 101/1000  " in lines[2]
    assert "  0:03:18 left  " in lines[2]  # 11 s for 50 steps; 900 remain


def test_plain_lines_keep_their_distance(monkeypatch):
    monkeypatch.setattr(display, "PLAIN_LINE_SECONDS", 20.0)
    assert len(shown(monkeypatch, [window(rank(0, 9, 1))] * 6)) == 3


class Terminal(io.StringIO):
    """What a terminal is sent; 60 or 120 columns wide."""

    def __init__(self, columns: int, monkeypatch) -> None:
        super().__init__()
        monkeypatch.setattr(terminal.os, "get_terminal_size", lambda device: os.terminal_size((columns, 24)))


@pytest.mark.parametrize("columns", [60, 120])
def test_the_bar_is_drawn_in_one_line_and_taken_away(monkeypatch, columns):
    screen = terminal.Screen(Terminal(columns, monkeypatch), 7)
    assert shown(monkeypatch, [window(rank(0, 9, 1))] * 3, screen) == []
    sent = screen.stream.getvalue()
    assert "\n" not in sent
    drawn = [text.removesuffix("\x1b[K") for text in sent.split("\r")[1:]]
    assert max(map(len, drawn)) < columns
    assert ("[#" in drawn[2] or "[." in drawn[2]) == (columns == 120)
    assert drawn[2].startswith("epoch 1/2  10%")
    assert "0:03:18 left" in drawn[2]
    assert drawn[3] == ""


def test_a_line_is_said_above_the_bar(engine, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal(80, monkeypatch))
    monkeypatch.setattr(terminal, "find", lambda: terminal.Screen(sys.stdout, 7))
    with RunOutput(engine, None, progress=True) as output:
        output.progress("epoch 1/2", 1, 100, FIGURES, window(rank(0, 9, 1)))
        output.say("a line")
    before, _, after = capsys.readouterr().out.partition("a line\n")
    assert before.endswith("\r\x1b[K")
    assert after.startswith("\repoch 1/2")
    assert after.endswith("\r\x1b[K")


def test_a_reader_that_is_gone_does_not_end_the_run_and_is_said_once(engine, monkeypatch, capsys):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(terminal, "find", lambda: terminal.Screen(sys.stdout, 7))
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
        "automatic: A=1",
        "           malloc keeps freed memory",
        "           GPU left idle",
    ]
    assert automatic(["GPU left idle"], verbose=False) == ["automatic: GPU left idle"]
    assert automatic([], verbose=False) == []


class Pair(SerialEngine):
    """Two ranks, of which the other one reports the same and 100 bytes more."""

    def all_gather(self, tensor, name):
        return torch.stack([tensor, tensor + torch.tensor([0, 0, 0, 0, 0, 100.0, 0], dtype=tensor.dtype)])


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
    assert seen.steps == 1
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


def test_a_data_loader_that_reads_another_one_counts_once():
    """As hvdtrain.tuned sees it: the inner one has returned a batch before the outer one does."""
    clock = Clock()
    began = time.perf_counter()
    for start, end in ((began + 2, began + 4), (began + 1, began + 5)):
        clock.mark("compute", start)
        clock.mark("loading", end)
    times = clock.times(torch.device("cpu"))
    assert (times.loading, times.compute) == pytest.approx((3, 2), abs=0.5)


def test_ranks_that_wait_for_cores_are_told_so_before_anything_else():
    waits = [rank(0, 4, 6)._replace(without_core=3.0), rank(0, 4, 6)._replace(without_core=2.1)]
    both = REMEDIES | remedies({"threads": None}, 1, "cpu")
    said = "ranks waited for a core 26% of the time: this host runs more threads than it has cores"
    assert hint(waits, 100, both) == ("cores", f"{said}: try --threads 1, fewer ranks, or another host")
    assert hint(waits, 100, remedies({"threads": 1}, 1, "cpu"))[1] == f"{said}: try fewer ranks, or another host"
    waits[1] = waits[1]._replace(without_core=1.9)
    assert hint(waits, 100, both)[0] == "communication"


def test_seconds_without_a_core_are_read_from_the_kernel(tmp_path):
    assert seconds_without_core(tmp_path) == 0.0
    (tmp_path / str(os.getpid())).mkdir()
    (tmp_path / str(os.getpid()) / "schedstat").write_text("5000000000 2500000000 7\n")
    assert seconds_without_core(tmp_path) == 2.5


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
        monkeypatch.setattr(terminal.processes, "launchers", lambda: found)
        looking = threading.Thread(target=terminal.find, daemon=True)
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
        monkeypatch.setattr(terminal.processes, "launchers", lambda: found)
        monkeypatch.setattr(terminal.processes, "command_line", lambda pid: words.split())
        screen = terminal.find()
        launcher.kill()
    assert (screen is not None) == draws
    for descriptor in (ours, its, *([screen.device] if screen else [])):
        os.close(descriptor)
