"""How the audited program is started, ended and read: with shells in its place, which import nothing."""

import io
import json
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.audit.attempts import NotAudited, Program, copy, members, traces

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def shell(folder, script, name="run", seconds=60.0, kill=None, grace=20.0, leaving=2.0, **other):
    """Run a script of sh, which has {out} as $0; $LOG begins the names of what a recorder writes."""
    program = Program(["sh", "-c", f"LOG={folder}/{name}; {script}", "{out}"], "none", folder, grace, **other)
    program.leaving_seconds = leaving
    began = time.monotonic()
    return program.run(name, folder / "out", 1, seconds, kill), time.monotonic() - began


@pytest.mark.parametrize(
    ("launcher", "command", "line"),
    [
        ("none", ["train.py", "{out}"], [sys.executable, "train.py", "here"]),
        ("none", ["-m", "train", "--out={out}/a"], [sys.executable, "-m", "train", "--out=here/a"]),
        ("none", ["accelerate", "launch", "train.py"], ["accelerate", "launch", "train.py"]),
        ("torchrun", ["train.py"], [*TORCHRUN, "train.py"]),
        ("torchrun", ["-m", "train"], [*TORCHRUN, "-m", "train"]),
        ("torchrun", ["train", "{out}"], [*TORCHRUN, "--no-python", "train", "here"]),
        ("mpirun", ["train.py"], ["mpirun", "-np", "2", sys.executable, "train.py"]),
        ("horovodrun", ["train"], ["horovodrun", "-np", "2", "train"]),
    ],
)
def test_the_command_line(launcher, command, line, tmp_path):
    assert Program(command, launcher, tmp_path, 1.0).words(2, Path("here")) == line


def test_what_it_says_and_writes_and_how_it_ends(tmp_path):
    script = "mkdir $0; echo x=1 x=2; echo x=3 > $0/log; echo last >&2; echo ====; exit 3"
    run, _ = shell(tmp_path, script, metric_regex="x=(.)")
    assert (run.code, run.left, run.files, run.in_grace, run.steps) == (3, [], {"log": 4}, True, 0)
    assert (run.metrics, run.last_line()) == ({"its output": "2", "log": "3"}, "last")
    run, seconds = shell(tmp_path, "sleep 99", "hung", 0.5)
    assert (run.code, run.last_line(), run.metrics, seconds < 60) == (None, "it said nothing", None, True)
    assert 0.5 <= run.seconds <= seconds


def test_what_it_says_is_read_where_a_disk_has_no_room(tmp_path):
    """Else it would wait for a reader."""
    said = io.BytesIO(bytes(1 << 20))
    copy(said, Path("/dev/full"), tmp_path / "lost")
    assert (said.read(), (tmp_path / "lost").exists()) == (b"", True)


def test_processes_that_stay_are_told_and_ended(tmp_path):
    run, _ = shell(tmp_path, "sleep 71 & exit 0", "stays", leaving=0.2)
    assert run.left == ["sleep 71 "]
    assert list(members(tmp_path / "stays")) == []
    run, seconds = shell(tmp_path, "sleep 1 & exit 0", "soon", leaving=90.0)
    assert (run.left, seconds < 60) == ([], True)


def test_kills(tmp_path):
    asks = "touch $LOG.asked; while [ ! -e $LOG.sent ]; do sleep 0.05; done; sleep 99"
    run, _ = shell(tmp_path, f"trap 'exit 75' TERM; {asks} & wait", "term", kill={"how": "term"})
    assert (run.code, run.in_grace) == (75, True)
    run, seconds = shell(tmp_path, f"trap '' TERM; {asks}", "deaf", kill={"how": "term"}, grace=0.3)
    assert (run.code, run.in_grace, seconds < 60) == (-9, False, True)
    run, seconds = shell(tmp_path, f"sleep 99 & {asks}", "all", kill={"how": "all"})
    assert (run.code, run.left, run.in_grace, seconds < 60) == (-9, [], True, True)
    assert not (tmp_path / "all.sent").exists()


def log(folder, rank, pid, *lines, cut=""):
    (folder / f"run.{rank}.{pid}").write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)


def test_what_ranks_have_recorded(tmp_path):
    evaluation = {"kind": "evaluation", "call": ["i", "o"]}
    steps = [{"kind": "step", "time": float(at)} for at in range(6)]
    log(tmp_path, 0, 99, steps[0], steps[1], evaluation, cut='{"kind": "st')  # killed, while it wrote
    log(tmp_path, 0, 11, steps[4], evaluation, evaluation, {"kind": "unreadable", "error": "e"})  # a second process
    log(tmp_path, 1, 12, steps[2] | {"contents": "07000000ffffffff", "indices": [5, None]})
    (tmp_path / "run.asked").touch()
    (tmp_path / "run.0.txt").write_text("of another kind")
    ranks = traces(tmp_path / "run")
    assert [[line["time"] for line in ranks[rank].steps] for rank in (0, 1)] == [[0, 1, 4], [2]]
    assert ranks[0].evaluations == {2: [["i", "o"]], 3: [["i", "o"]] * 2}
    assert (ranks[0].unreadable, sorted(ranks)) == (["e"], [0, 1])
    assert ranks[1].steps[0]["rows"] == [(7, 5), (2**32 - 1, None)]
    log(tmp_path, 1, 13, steps[1], steps[3])
    with pytest.raises(NotAudited, match="call themselves rank 1"):
        traces(tmp_path / "run")
