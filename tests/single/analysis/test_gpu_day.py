"""hvdtrain.gpu_day without GPUs: the table, the page, what becomes of rows that fail, and a day that is interrupted."""

import errno
import json
import signal
import sys
import time
from pathlib import Path

import pytest

from hvdtrain import gpu_day
from hvdtrain.analysis import gpu_probes, gpu_rows
from hvdtrain.analysis.gpu_rows import ROWS, Day, Failed, NotRun, Row, Showed
from hvdtrain.engines.errors import UserError
from hvdtrain.gpu_day import NOT_COME_TO, NOT_OK, NOT_RUN, OK
from tests.gpu.test_on_a_gpu import JUDGED

ROOT = Path(__file__).resolve().parents[3]
FACTS = {"device": "cuda", "quick": False, "on": "1 x H100"}


@pytest.fixture
def day(tmp_path):
    day = Day(tmp_path, "cpu", True, 0, time.monotonic() + 3600)
    day.begin("row")
    return day


def raising(error: BaseException):
    def run(day: Day) -> Showed:
        raise error

    return run


# ---- table and page


def test_each_row_has_a_name_of_its_own_a_claim_on_a_page_and_something_to_show():
    assert len({row.name for row in ROWS}) == len(ROWS) > 20
    assert set(JUDGED) < {row.name for row in ROWS}
    for row in ROWS:
        page = row.claim.partition(":")[0]
        assert (ROOT / (f"{page}.md" if page == "README" else page)).is_file(), row


def test_the_page_has_every_row_and_is_read_again(tmp_path):
    run = raising(AssertionError())
    table = [
        Row("a", run, "docs/x.md: it | works", "works", "9 images/s"),
        Row("b", run, "README: b", "b"),
        Row("c", run, "d", "e"),
    ]
    outcomes = {
        "a": dict(verdict=OK, showed="8\nimages/s", seconds=61.4, commands=["python -m a"]),
        "b": dict(verdict=NOT_OK, showed="exit code 1", seconds=2.0, commands=["A=1 python -m b", "python -m c"]),
    }
    gpu_day.write(tmp_path, table, outcomes, FACTS)
    text = (tmp_path / gpu_day.PAGE).read_text()
    assert "1 ok, 1 not ok, 1 not run. On: 1 x H100." in text
    assert "| a | docs/x.md: it \\| works | works | 8 images/s | 9 images/s | ok |" in text
    assert "| b | README: b | b | exit code 1 |   | **not ok** |" in text
    assert "| c | d | e | not come to |   | **not run** |" in text
    assert "**a**, 61 s\n\n```\npython -m a\n```" in text
    assert "processor" not in text
    assert gpu_day.earlier(tmp_path, FACTS) == outcomes | {"c": NOT_COME_TO}
    assert "A rehearsal on the processor" in gpu_day.markdown(table, outcomes, FACTS | {"device": "cpu"})


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
        written = json.loads((tmp_path / "out" / gpu_day.RECORD).read_text())["rows"]
        return code, {row["name"]: (row["verdict"], row["showed"]) for row in written}

    before = signal.getsignal(signal.SIGTERM)
    yield start
    signal.signal(signal.SIGTERM, before)


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


def test_a_full_disk_or_a_damaged_record_is_one_line_and_keeps_what_was_written(started, tmp_path):
    started({"a": lambda day: Showed(True, "x"), "b": raising(NotRun("later"))})
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(
        UserError, match=r"cannot be written \(No space left on device\): name another directory, or free"
    ):
        started({"a": full, "b": full})
    assert gpu_day.earlier(tmp_path / "out", FACTS)["a"]["verdict"] == OK
    (tmp_path / "out" / gpu_day.RECORD).write_text("{")
    with pytest.raises(UserError, match=r"gpu-day.json is damaged .*: name another --output-dir"):
        started({"a": full})


def test_without_a_gpu_it_says_so_at_once(tmp_path, monkeypatch):
    facts = {"gpus": [], "torch": "2.9"}
    monkeypatch.setattr(Day, "probe", lambda *words: facts)
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--output-dir", str(tmp_path)])
    with pytest.raises(UserError, match=r"torch 2.9 sees no GPU here: start it on a GPU node"):
        gpu_day.main()
    assert not (tmp_path / gpu_day.PAGE).exists()


def test_less_time_than_a_command_takes_is_refused(tmp_path, monkeypatch):
    flags = ["--device", "cpu", "--minutes", "0.1", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", *flags])
    with pytest.raises(UserError, match=r"^--minutes is less than one command may take \(20 s\): give more$"):
        gpu_day.main()


def test_the_list_needs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--list"])
    monkeypatch.setattr(gpu_day, "look", lambda day: pytest.fail("it looked for GPUs"))
    assert gpu_day.main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [row.name for row in ROWS]


def test_minutes_and_quick_are_those_of_the_day(started):
    seen = []

    def run(day: Day) -> Showed:
        seen.append((round((day.until - time.monotonic()) / 60), day.quick, day.counts))
        return Showed(True, "x")

    started({"a": run}, "--only", "a")
    started({"a": run}, "--only", "a", "--minutes", "7", "--quick")
    assert seen == [(55, False, [2, 4, 8]), (7, True, [2])]


def test_rows_that_need_more_gpus_than_there_are_say_so(day):
    day.device, day.gpus = "cuda", 1
    outcome = gpu_day.outcome_of(Row("x", raising(AssertionError()), "c", "m", gpus=2), day)
    assert (outcome["verdict"], outcome["showed"]) == (NOT_RUN, "needs 2 GPUs")


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


@pytest.mark.parametrize("used", [(4, 20), (4, 0), (4, 904), (None, None)], ids=str)
def test_a_rank_is_struck_once_and_what_it_leaves_on_gpus_is_seen(used, day, monkeypatch):
    struck, left = [], iter(used)
    monkeypatch.setattr(gpu_rows, "on_gpus", lambda: next(left))
    monkeypatch.setattr(gpu_rows.os, "kill", lambda *words: struck.append(words))
    (day.out("ended") / "checkpoints").mkdir(parents=True)

    def train(self, name, count, flags, meanwhile, code):
        meanwhile("job")
        assert struck == []  # there is no checkpoint yet
        (day.out(name) / "checkpoints" / "step-1.safetensors").touch()
        ranks = [{"rank": rank, "pid": 100 + rank} for rank in range(2)]
        (day.out(name) / "metrics.jsonl").write_text(json.dumps({"event": "start", "ranks": ranks}) + "\n{}\n")
        for _ in range(2):
            meanwhile("job")
        return gpu_rows.Done(day.out(name), "rank 1 hangs", 1.0, 0), {}

    monkeypatch.setattr(Day, "train", train)
    showed = gpu_rows.stopped(day)
    assert struck == [(101, signal.SIGSTOP)]
    assert showed.ok == (used != (4, 904)), showed
    more = {20: "16 MiB more on the GPUs", 0: "0 MiB more on the GPUs", 904: "900 MiB more on the GPUs"}
    assert f"; {more.get(used[1], 'no nvidia-smi to ask')}" in showed.text


def test_several_ranks_share_one_gpu_and_only_then(day, monkeypatch):
    said = []
    monkeypatch.setattr(Day, "run", lambda self, name, words, **options: said.append((words[-4:-2], options)))
    for device, gpus, count in (("cuda", 1, 1), ("cuda", 1, 2), ("cuda", 8, 8), ("cpu", 0, 2)):
        day.device, day.gpus = device, gpus
        day.ranks("x", count, "hvdtrain.reduce", "")
    assert said == [
        (["--device", "cuda"], {}),
        (["--device", "cuda"], {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        (["--device", "cuda"], {}),
        (["--device", "cpu"], {}),
    ]
    day.quick = False
    assert [setattr(day, "gpus", gpus) or day.counts for gpus in (1, 2, 4, 8)] == [[2, 4, 8], [2], [2, 4], [2, 4, 8]]


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
    monkeypatch.setattr(gpu_probes.warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    with pytest.raises(SystemExit) as ended, gpu_probes.warnings.catch_warnings():
        gpu_probes.count_reads("hvdtrain_reads.program", ["3"], tmp_path / "reads.json")
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
    showed = gpu_rows.host_reads(day)
    assert not showed.ok
    assert showed.text == "1 per step at lm: step.py:1 look; 2 per step at lm: lm.py:2"
