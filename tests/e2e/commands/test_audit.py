"""hvdtrain.audit from its command line to its exit code. Faults and verdicts: tests/single/audit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.audited import forked, serving
from tests.e2e.launchers import environment
from tests.waiting import wait_for

PROGRAM = forked.__file__.replace("forked", "program")
ROOT = Path(__file__).resolve().parents[3]
SECONDS = 380


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server")) as socket:
        yield socket


def audit(folder, *words, **extra):
    env = environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), **extra)
    line = [sys.executable, "-m", "hvdtrain.audit", *words]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS)


def forked_program(server, fault, ranks=1):
    return ["--", sys.executable, forked.__file__, "run", server, str(ranks), PROGRAM, "{out}", fault]


def test_a_sound_program(server, tmp_path):
    done = audit(
        tmp_path, "--metric-regex", r"accuracy: (\S+)", "--junit", "junit.xml", *forked_program(server, "none")
    )
    assert done.returncode == 0, done
    assert "1 rank, 36 steps" in done.stdout
    assert "two whole runs: the same bits" in done.stdout
    assert "All that was seen held, in 4 kills. Seed 1" in done.stdout
    result = json.loads((tmp_path / "audit/audit.json").read_text())
    assert [kill["kill"].rpartition(", ")[2] for kill in result["kills"]] == [
        "SIGKILL of rank 0", "SIGTERM to the launcher", "SIGKILL of rank 0", "SIGXFSZ in the middle of a write",
    ]  # fmt: skip
    assert result["kills"][3]["note"] == "torn: checkpoint.pt.tmp"
    assert {verdict["status"] for kill in result["kills"] for verdict in kill["verdicts"].values()} <= {
        "ok",
        "not seen",
    }
    assert result["kills"][0]["verdicts"]["metrics"]["status"] == "ok"
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().attrib["failures"] == "0"
    assert not list((tmp_path / "audit/out").iterdir())


@pytest.mark.slow  # each verdict by itself: tests/single/audit
def test_a_fault_with_the_command_that_repeats_its_kill(server, tmp_path):
    words = ["--kills", "1", "--seed", "5", "--junit", "junit.xml", *forked_program(server, "scheduler")]
    done = audit(tmp_path, *words)
    assert done.returncode == 1, done
    assert "learning rates    FAILS     1 of 1   kill 1: step " in done.stdout
    cause = "learning rates: the scheduler's state_dict is not in the checkpoint: its schedule starts again.\n    "
    command = done.stdout.partition(cause)[2].partition("\n")[0]
    assert command.startswith("python -m hvdtrain.audit --kills 1 --junit junit.xml --only-kill 1 --seed 5 -- ")
    assert int(ElementTree.parse(tmp_path / "junit.xml").getroot().attrib["failures"]) == 4
    env = environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    again = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert again.stdout.partition("guarantee")[2] == done.stdout.partition("guarantee")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which program? python -m hvdtrain.audit [OPTIONS] -- train.py --out {out}"),
        (["train.py", "{out}"], "unrecognized arguments: train.py {out}"),
        (["--", "train.py"], "put {out} into the command"),
        (["--resume-command", "train.py", "--", "train.py", "{out}"], "put {out} into --resume-command"),
        (["--kills", "0", "--", "train.py", "{out}"], "argument --kills: invalid count value: '0'"),
        (["--signals", "kill", "--", "train.py", "{out}"], "'kill': some of one,all,term, with commas"),
        (["--metric-regex", "(", "--", "train.py", "{out}"], "--metric-regex: missing )"),
        (["--output-dir", ".", "--", "train.py", "{out}"], "has something else in it: choose another --output-dir"),
        (["--", "absent.py", "{out}"], "the program itself ends with 2, without any kill"),
        (["--", "absent-program", "{out}"], "absent-program can't be started: No such file or directory"),
        (["--", "true", "{out}"], "no optimizer made a step that could be seen"),
        (["--timeout", "0.2", "--", "sh", "-c", "sleep 60; {out}"], "the program has not ended after"),
    ],
)
def test_what_cannot_be_run(words, said, tmp_path):
    (tmp_path / "something").touch()
    done = audit(tmp_path, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_program_that_writes_elsewhere(server, tmp_path):
    done = audit(tmp_path, *forked_program(server, "elsewhere"))
    assert done.returncode == 2
    assert "the program keeps its state elsewhere, not under {out}" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_audit_that_is_ended_leaves_no_process(number, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    line = [sys.executable, "-m", "hvdtrain.audit", "--", "slow.py", "{out}"]
    process = subprocess.Popen(
        line, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), stderr=subprocess.PIPE, text=True
    )
    said = tmp_path / "audit/whole.txt"
    wait_for(lambda: said.exists() and said.read_text(), "the program does not start")
    process.send_signal(number)
    assert process.wait(60) == 2
    assert "interrupted: no verdict, and no process is left" in process.stderr.read()
    mark = f"{tmp_path}/audit".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert mark not in (folder / "environ").read_bytes(), folder
        except OSError:
            continue


def test_the_same_bits_with_and_without_it(tmp_path):
    """The recorder changes nothing, and a sitecustomize of the environment runs as without it."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("import sys\nsys.own = 1\n")
    (tmp_path / "program.py").write_text(
        f"import runpy, sys\nassert sys.own\nimport torch\nrunpy.run_path({PROGRAM!r}, run_name='__main__')\n"
        "import hashlib, random\nstate = torch.load(sys.argv[1] + '/checkpoint.pt', weights_only=False)\n"
        "bytes = b''.join(v.numpy().tobytes() for v in state['model'].values()) + torch.get_rng_state().numpy().tobytes()\n"
        "print(hashlib.sha256(bytes).hexdigest())\n"
    )
    hashes = []
    for name in ("with", "without"):
        path = os.pathsep.join(
            [*([str(ROOT / "hvdtrain/audit/boot")] if name == "with" else []), str(tmp_path / "own")]
        )
        extra = {
            "HVDTRAIN_AUDIT": json.dumps({"log": f"{tmp_path}/log", "out": str(tmp_path), "whole": True, "kill": None})
        }
        env = environment(OMP_NUM_THREADS="1", PYTHONPATH=path, **(extra if name == "with" else {}))
        line = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / name), "none"]
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done
        hashes.append(done.stdout.splitlines()[-1])
    assert hashes[0] == hashes[1]
    assert len(next(tmp_path.glob("log.0.*")).read_text().splitlines()) == 36 + 12


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "none"])
def test_two_ranks(launcher, server, tmp_path):
    command = ["--", PROGRAM, "{out}", "none"] if launcher == "torchrun" else forked_program(server, "none", 2)
    done = audit(tmp_path, "-np", "2", "--launcher", launcher, "--kills", "4", *command)
    assert done.returncode == 0, done
    assert "All that was seen held, in 4 kills" in done.stdout


@pytest.mark.slow
@pytest.mark.leaves("vader_segment", "ompi.")  # Open MPI's, where all of a job are killed
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_hvdtrain_resumes(launcher, tmp_path):
    words = "-m hvdtrain.mnist --dataset digits --epochs 2 --checkpoint-steps 3 --no-progress --output-dir {out}"
    done = audit(tmp_path, "-np", "2", "--launcher", launcher, "--kills", "4", "--", *words.split())
    assert done.returncode == 0, done
