"""hvdtrain.gpu_day without GPUs: the table, the page, what becomes of rows that fail, and a day that is interrupted."""

import errno
import json
import signal
import sys
import time
from pathlib import Path

import pytest

from hvdtrain import gpu_day
from hvdtrain.analysis.gpu_day import probes, results, rows
from hvdtrain.analysis.gpu_day.day import Day, Failed, NotRun, OnGpus, SignalRank, left_on_gpus
from hvdtrain.analysis.gpu_day.results import NOT_OK, NOT_RUN, OK, Outcome, Row, Showed
from hvdtrain.engines.errors import UserError
from tests.gpu.test_on_a_gpu import JUDGED

ROOT = Path(__file__).resolve().parents[3]
FACTS = {"device": "cuda", "quick": False, "on": "1 x H100"}


@pytest.fixture
def day(tmp_path):
    day = Day(tmp_path, "cpu", True, 0, time.monotonic() + 3600)
    day.begin("row")
    return day


# ---- table and page


def test_each_row_has_a_name_of_its_own_a_claim_on_a_page_and_something_to_show():
    assert len({row.name for row in rows.ROWS}) == len(rows.ROWS) > 20
    assert set(JUDGED) < {row.name for row in rows.ROWS}
    for row in rows.ROWS:
        page = row.claim.partition(":")[0]
        assert (ROOT / (f"{page}.md" if page == "README" else page)).is_file(), row
        assert row.must, row
    assert {row.name for row in rows.ROWS if row.predicted} == {
        "resnet50", "resnet50-amp", "resnet50-batch", "resnet50-compile", "gpt2", "gpt2-compile",
    }  # fmt: skip


def test_the_page_has_every_row_and_is_read_again(tmp_path):
    run = raising(AssertionError())
    table = [
        Row("a", run, "docs/x.md: it | works", "works", "9 images/s"),
        Row("b", run, "README: b", "b"),
        Row("c", run, "d", "e"),
    ]
    outcomes = {
        "a": Outcome(OK, "8\nimages/s", 61.4, ("python -m a",), {"per_second": 8.0}),
        "b": Outcome(NOT_OK, "exit code 1", 2.0, ("A=1 python -m b", "python -m c")),
    }
    results.write(tmp_path, table, outcomes, FACTS)
    text = (tmp_path / results.PAGE).read_text()
    assert "1 ok, 1 not ok, 1 not run. On: 1 x H100." in text
    assert "| a | docs/x.md: it \\| works | works | 8 images/s | 9 images/s | ok |" in text
    assert "| b | README: b | b | exit code 1 |   | **not ok** |" in text
    assert "| c | d | e | not come to |   | **not run** |" in text
    assert "**a**, 61 s\n\n```\npython -m a\n```" in text
    assert "processor" not in text
    facts, again = results.read(tmp_path)
    assert facts == FACTS
    assert (again["a"], again["b"], again["c"].verdict) == (outcomes["a"], outcomes["b"], NOT_RUN)
    assert "A rehearsal on the processor" in results.markdown(table, outcomes, FACTS | {"device": "cpu"})
    assert results.read(tmp_path / "nowhere") == ({}, {})


# ---- a day


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Start the command on rows that are functions; return its exit code, with each row's verdict and what it showed."""

    def start(functions: dict, *flags: str) -> tuple[int, dict[str, tuple[str, str]]]:
        table = [Row(name, run, "README: x", "must") for name, run in functions.items()]
        monkeypatch.setattr(gpu_day, "ROWS", table)
        monkeypatch.setattr(gpu_day, "look", lambda day: FACTS)
        monkeypatch.setattr(
            sys, "argv", ["gpu_day.py", "--output-dir", str(tmp_path / "out"), "--device", "cpu", *flags]
        )
        code = gpu_day.main()
        written = json.loads((tmp_path / "out" / results.RECORD).read_text())["rows"]
        return code, {row["name"]: (row["verdict"], row["showed"]) for row in written}

    before = signal.getsignal(signal.SIGTERM)
    yield start
    signal.signal(signal.SIGTERM, before)


def raising(error: BaseException):
    def run(day: Day) -> Showed:
        raise error

    return run


def test_a_row_that_fails_does_not_hide_the_others(started):
    code, found = started({
        "fails": raising(Failed("exit code 7")),
        "refused": raising(UserError("no launcher: load it")),
        "lacks": raising(KeyError("rate")),
        "not here": raising(NotRun("no nvidia-smi on PATH")),
        "false": lambda day: Showed(False, "3, not 10"),
        "true": lambda day: Showed(True, "10"),
    })  # fmt: skip
    assert code == 1
    assert found == {
        "fails": (NOT_OK, "exit code 7"),
        "refused": (NOT_OK, "no launcher: load it"),
        "lacks": (NOT_OK, "the row itself failed: KeyError: 'rate'"),
        "not here": (NOT_RUN, "no nvidia-smi on PATH"),
        "false": (NOT_OK, "3, not 10"),
        "true": (OK, "10"),
    }


def test_started_again_it_goes_on_and_only_runs_what_was_named(started, capsys):
    calls: list[str] = []

    def counted(name: str, error: BaseException | None = None):
        def run(day: Day) -> Showed:
            calls.append(name)
            if error:
                raise error
            return Showed(True, f"call {len(calls)}")

        return run

    first = {"a": counted("a"), "b": counted("b", KeyboardInterrupt()), "c": counted("c")}
    code, found = started(first)
    assert (code, calls) == (130, ["a", "b"])
    assert found["a"] == (OK, "call 1")
    assert found["b"][0] == found["c"][0] == NOT_RUN
    assert "kept the rows so far" in capsys.readouterr().err
    whole = {name: counted(name) for name in "abc"}
    code, found = started(whole)
    assert (code, calls) == (0, ["a", "b", "b", "c"])
    assert [verdict for verdict, _ in found.values()] == [OK] * 3
    assert started(whole)[0] == 0
    assert len(calls) == 4
    assert started(whole, "--only", "c,a")[1]["c"] == (OK, "call 6")
    assert calls[4:] == ["a", "c"]


def test_a_page_of_something_else_is_not_continued(started, monkeypatch):
    started({"a": lambda day: Showed(True, "x")})
    monkeypatch.setitem(FACTS, "on", "8 x B200")
    with pytest.raises(UserError, match=r"has a page of something else \(1 x H100\): name another --output-dir"):
        started({"a": lambda day: Showed(True, "x")})


def test_a_full_disk_is_one_line_and_keeps_what_was_written(started, tmp_path, monkeypatch):
    started({"a": lambda day: Showed(True, "x"), "b": raising(NotRun("later"))})
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(UserError, match=r"cannot be used \(No space left on device\): free some space"):
        started({"a": full, "b": full})
    assert results.read(tmp_path / "out")[1]["a"].verdict == OK
    (tmp_path / "out" / results.RECORD).write_text("{")
    with pytest.raises(UserError, match=r"gpu-day.json is damaged"):
        started({"a": full})


def test_without_a_gpu_it_says_so_at_once(tmp_path, monkeypatch):
    facts = {"gpus": [], "torch": "2.9"}
    monkeypatch.setattr(Day, "probe", lambda *words: facts)
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--output-dir", str(tmp_path)])
    with pytest.raises(UserError, match=r"torch 2.9 sees no GPU here: start it on a GPU node"):
        gpu_day.main()
    assert not (tmp_path / results.PAGE).exists()


def test_the_list_needs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--list"])
    monkeypatch.setattr(gpu_day, "look", lambda day: pytest.fail("it looked for GPUs"))
    assert gpu_day.main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [row.name for row in rows.ROWS]


def test_minutes_and_quick_are_those_of_the_day(started):
    seen = []

    def run(day: Day) -> Showed:
        seen.append((round((day.until - time.monotonic()) / 60), day.quick, day.counts))
        return Showed(True, "x")

    started({"a": run}, "--only", "a")
    started({"a": run}, "--only", "a", "--minutes", "7", "--quick")
    assert seen == [(55, False, [2, 4, 8]), (7, True, [2])]


def test_a_program_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--nccl-tests", "/nowhere", "--output-dir", str(tmp_path)])
    with pytest.raises(UserError, match="/nowhere is no program: name nccl-tests' all_reduce_perf"):
        gpu_day.main()


def test_rows_that_need_more_gpus_than_there_are_say_so(day):
    day.device, day.gpus = "cuda", 1
    outcome = gpu_day.outcome_of(Row("x", raising(AssertionError()), "c", "m", gpus=2), day)
    assert outcome == Outcome(NOT_RUN, "needs 2 GPUs")


# ---- its commands


def test_a_command_ends_as_it_must_or_the_row_fails(day, tmp_path):
    shell = ["/bin/sh", "-c"]
    done = day.run("good", [*shell, "echo $NAME"], NAME="value")
    assert (done.log, done.left) == ("value\n", 0)
    assert day.commands == ["NAME=value /bin/sh -c 'echo $NAME'"]
    with pytest.raises(Failed, match=r"exit code 3: hvdtrain: error: it is broken; see .*/runs/row/bad/log"):
        day.run("bad", [*shell, "echo; echo hvdtrain: error: it is broken; echo Error of the launcher; exit 3"])
    day.run("stopped", [*shell, "exit 75"], code=75)
    with pytest.raises(Failed, match="exit code 0 instead of an error: no line says why"):
        day.run("killed", [*shell, "exit 0"], code=None)
    with pytest.raises(Failed, match="not over after 1 s, killed"):
        day.run("slow", [*shell, "sleep 60"], seconds=1)
    with pytest.raises(Failed, match="cannot be read"):
        done.json("summary.json")
    day.until = time.monotonic() + 1
    with pytest.raises(NotRun, match="no time left"):
        day.run("late", [*shell, "exit 0"])
    day.begin("row")
    assert (day.commands, [*(tmp_path / "runs").iterdir()]) == ([], [])


def test_what_a_launcher_leaves_behind_is_counted(day, monkeypatch):
    monkeypatch.setattr("hvdtrain.analysis.launching.TERM_SECONDS", 0.3)
    assert day.run("left", ["/bin/sh", "-c", "sleep 60 & exit 0"]).left == 1


def test_a_signal_goes_to_one_rank_once(day, tmp_path):
    """To the program of that rank: not to the other rank, nor to the launcher, whose command line has its name, too."""
    program = (
        "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: print('got', sys.argv[2], flush=True)); "
    )
    program += "print('up', flush=True); time.sleep(3)"
    python = f'"{sys.executable}" -c "{program}" hvdtrain.mnist'
    both = " & ".join(f"HOROVOD_RANK={rank} HOROVOD_SIZE=2 {python} {rank}" for rank in range(2))
    log = day.directory / "runs" / "row" / "run" / "log"
    send = SignalRank(1, signal.SIGUSR1, "hvdtrain.mnist", lambda: log.read_text().count("up") == 2)
    done = day.run("run", ["/bin/sh", "-c", f"{both} & wait"], meanwhile=send)
    assert send.sent
    assert [line for line in done.log.splitlines() if line != "up"] == ["got 1"]


def test_several_ranks_share_one_gpu_and_only_then(day, monkeypatch):
    said = []
    monkeypatch.setattr(Day, "run", lambda self, name, words, **options: said.append((words[-2:], options)))
    for device, gpus, count in (("cuda", 1, 1), ("cuda", 1, 2), ("cuda", 8, 8), ("cpu", 0, 2)):
        day.device, day.gpus = device, gpus
        day.ranks("x", count, "hvdtrain.reduce")
    assert said == [
        (["--device", "cuda"], {}),
        (["--device", "cuda"], {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        (["--device", "cuda"], {}),
        (["--device", "cpu"], {}),
    ]
    day.quick = False
    assert [setattr(day, "gpus", gpus) or day.counts for gpus in (1, 2, 4, 8)] == [[2, 4, 8], [2], [2, 4], [2, 4, 8]]


@pytest.mark.parametrize(
    ("before", "after", "nothing", "said"),
    [
        (OnGpus({7}, 4), OnGpus({7}, 20), True, "nothing left"),
        (OnGpus({7}, 4), OnGpus(set(), 0), True, "nothing left"),
        (OnGpus({7}, 4), OnGpus({7, 9, 8}, 904), False, "900 MiB more than before, processes 8, 9"),
        (OnGpus(set(), 4), OnGpus(set(), 504), False, "500 MiB more than before, processes not listed"),  # a container
        (None, None, True, "no nvidia-smi to ask"),
    ],
)
def test_what_ranks_left_on_gpus(before, after, nothing, said):
    assert left_on_gpus(before, after) == (nothing, f"; {'nvidia-smi: ' if before else ''}{said}")


# ---- what is read from others


def test_reads_are_counted_by_the_line_of_ours_that_led_to_them(tmp_path, monkeypatch):
    """On a processor torch warns of none: the program warns as torch does."""
    package = tmp_path / "hvdtrain" / "hvdtrain_reads"  # what is below a folder of this name is ours
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "program.py").write_text(
        "import sys, warnings\n"
        "def read():\n    warnings.warn('called a synchronizing CUDA operation (Triggered internally at x.cpp:1)')\n"
        "for _ in range(int(sys.argv[1])):\n    read()\nwarnings.warn('of something else', stacklevel=1)\nsys.exit(5)\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    shown: list[str] = []
    monkeypatch.setattr(probes.warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    with pytest.raises(SystemExit) as ended, probes.warnings.catch_warnings():
        probes.count_reads("hvdtrain_reads.program", ["3"], tmp_path / "reads.json")
    assert ended.value.code == 5
    (line,) = (counts := json.loads((tmp_path / "reads.json").read_text()))
    assert "hvdtrain_reads/program.py:3 warnings.warn(" in line
    assert counts[line] == 3
    assert shown == ["of something else"]


def test_only_what_each_step_reads_is_a_read_of_a_quiet_step(day, monkeypatch):
    day.device, day.quick = "cuda", False

    def probe(self, name: str, *words: str, **options) -> dict[str, int]:
        steps = int(name.rpartition("-")[2])
        return {"run.py:7 start": 5} | ({"step.py:1 look": steps, "lm.py:2": 2 * steps} if "lm" in name else {})

    monkeypatch.setattr(Day, "probe", probe)
    showed = rows.host_reads(day)
    assert not showed.ok
    assert showed.text == "1 per step at lm: step.py:1 look; 2 per step at lm: lm.py:2"


# Its own format, from its README; the figures are made up.
NCCL_TESTS = """
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    42.91   24.44   42.76      0    41.99   24.97   43.70      0
   268435456      67108864     float     sum      -1   1181.3  227.24  397.67      0   1179.0  227.68  398.44      0
# Avg bus bandwidth    : 220.9
"""


def test_the_table_of_nccl_tests():
    assert rows.bus_bandwidth(NCCL_TESTS) == {1048576: 42.76, 268435456: 397.67}


@pytest.mark.parametrize(("ours", "ok"), [(0.81, True), (0.79, False)])
def test_the_all_reduce_is_compared_with_the_program_that_was_named(day, monkeypatch, ours, ok):
    program = day.directory / "all_reduce_perf"
    program.write_text(f"#!/bin/sh\necho $* >&2\ncat <<E{NCCL_TESTS}E\n")
    program.chmod(0o755)
    table = [{"bytes": size, "bus_bytes_per_second": ours * 397.67e9} for size in (2**20, 2**28)]
    monkeypatch.setattr(Day, "ranks", lambda *_, **__: None)
    monkeypatch.setattr("hvdtrain.analysis.gpu_day.rows.swept", lambda done: table)
    day.gpus, day.nccl_tests = 8, program
    showed = rows.all_reduce(day)
    assert (showed.ok, f"{ours:.2f} of nccl-tests' 398" in showed.text) == (ok, True), showed
    assert day.commands[-1].endswith("all_reduce_perf -b 1M -e 256M -f 2 -g 8")
    day.nccl_tests = None
    assert "not compared with nccl-tests: no all_reduce_perf" in rows.all_reduce(day).text
