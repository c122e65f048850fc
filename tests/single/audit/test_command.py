"""hvdtrain.audit from its command line to its exit code, in this process. Faults and verdicts: test_faults.py."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hvdtrain import audit
from hvdtrain.audit import __main__ as command
from hvdtrain.audit.verdicts import fails
from tests.audited import forked
from tests.e2e.launchers import environment

PROGRAM = forked.__file__.replace("forked", "program")
BOOT = Path(audit.__file__).parent / "boot"


@pytest.fixture
def audited(monkeypatch, tmp_path, capsys):
    """Return a function that performs an audit in tmp_path: exit code, and what was said on both streams."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def perform(*words):
        monkeypatch.setattr(sys, "argv", ["audit", *words])
        try:
            code = command.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    yield perform
    for number, handler in handlers.items():
        signal.signal(number, handler)


def program(server, fault, ranks=1, file=PROGRAM):
    return [sys.executable, forked.__file__, "run", server, str(ranks), file, "{out}", fault]


def test_a_sound_program(server, audited, tmp_path):
    words = ["--metric-regex", r"accuracy: (\S+)", "--junit", "junit.xml", "--", *program(server, "none")]
    code, said, progress = audited(*words)
    assert code == 0, (said, progress)
    assert "1 rank, 36 steps" in said
    assert "two whole runs: the same bits" in said
    assert "All that was seen held, in 5 kills. Seed 1" in said
    assert "kill 4 of 5: while a file is written after step " in progress
    result = json.loads((tmp_path / "audit/audit.json").read_text())
    assert [kill["kill"].rpartition(", ")[2] for kill in result["kills"]] == [
        "SIGKILL of rank 0", "SIGTERM to the launcher", "SIGKILL of rank 0", "SIGXFSZ in the middle of a write",
        "SIGTERM to the launcher",
    ]  # fmt: skip
    assert result["kills"][3]["note"] == "torn: checkpoint.pt.tmp"
    assert {v["status"] for kill in result["kills"] for v in kill["verdicts"].values()} <= {"ok", "not seen"}
    assert result["kills"][0]["verdicts"]["metrics"]["status"] == "ok"
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().attrib["failures"] == "0"
    assert not list((tmp_path / "audit/out").iterdir())


def test_lines_for_which_a_disk_has_no_room_are_missed(server, audited, tmp_path):
    """Else steps that were recorded in part are judged."""
    (tmp_path / "own.py").write_text("""if True:
        import errno, os, torch
        w, write = torch.nn.Parameter(torch.ones(1)), os.write
        for step in range(9):
            os.write = write if step < 4 else lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no room"))
            w.square().sum().backward()
            torch.optim.SGD([w], 0.1).step()
    """)
    code, _, progress = audited("--", *program(server, "none", file="own.py"))
    assert (code, "audit is full, and what a rank did is not known: choose" in progress) == (2, True), progress


def test_another_command_goes_on_with_another_number_of_ranks(server, audited, tmp_path):
    """The first command line can't: it would start as many ranks again. What the runs wrote is kept."""
    again = " ".join(program(server, "none", 2))
    words = ["--then-np", "2", "--resume-command", again, "--kills", "1", "--keep", "--from-step", "33"]
    words += ["--", *program(server, "none")]
    code, said, progress = audited(*words)
    assert code == 0, (said, progress)
    (kill,) = json.loads((tmp_path / "audit/audit.json").read_text())["kills"]
    assert int(kill["kill"].split()[2].rstrip(",")) >= 33
    assert kill["verdicts"]["samples"]["text"] == "each as often; their order is left out"
    assert kill["verdicts"]["final weights"] == {"status": "left out", "text": "another number of ranks", "step": None}
    assert len(list((tmp_path / "audit").glob("kill-1-resumed.[01].*"))) == 2
    kept = {path.name for path in (tmp_path / "audit/out").iterdir() if (path / "checkpoint.pt").exists()}
    assert kept == {"whole", "again", "kill-1"}


def test_the_folder_is_a_package_of_its_own(server, tmp_path):
    """Copied elsewhere, it needs nothing of hvdtrain. The command that it prints for a kill repeats that kill."""
    shutil.copytree(Path(audit.__file__).parent, tmp_path / "audit", ignore=shutil.ignore_patterns("__pycache__"))
    sources = [path.read_text() for path in (tmp_path / "audit").rglob("*.py")]
    assert not [text for text in sources if re.search(r"^ *(from|import) hvdtrain", text, re.M)]
    env = environment(OMP_NUM_THREADS="1", PYTHONPATH=str(tmp_path))
    start = ["python", "-m", "audit", "--output-dir", "out", "--kills", "1", "--seed", "5", "--junit", "j.xml", "--"]
    run = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([*start, *program(server, "scheduler")], **run)
    assert done.returncode == 1, done
    assert "learning rates    FAILS     1 of 1   kill 1: step " in done.stdout
    causes = "learning rates: the scheduler's state_dict is not in the checkpoint: its schedule starts again.\nlosses: "
    assert causes in done.stdout
    (line,) = re.findall("^ {4}(python -m audit .*)", done.stdout, re.M)
    assert line.startswith("python -m audit --output-dir out --kills 1 --seed 5 --junit j.xml --only-kill=1 -- ")
    assert int(ElementTree.parse(tmp_path / "j.xml").getroot().attrib["failures"]) == 4
    again = subprocess.run(line, shell=True, **run)
    assert again.stdout.partition("guarantee")[2] == done.stdout.partition("guarantee")[2]


def test_a_junit_file_can_be_read_whatever_the_program_has_said(tmp_path):
    verdicts = {"resumes": fails("it ends with 1: \x1b[31mno file \udcff\x1b[0m")}
    command.junit([{"number": 1, "kill": "SIGKILL of rank 0", "verdicts": verdicts}], f"{tmp_path}/j.xml")
    (failure,) = ElementTree.parse(tmp_path / "j.xml").findall(".//failure")
    assert failure.attrib["message"] == "it ends with 1: ?[31mno file ??[0m"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which program? python -m hvdtrain.audit [OPTIONS] -- train.py --out {out}"),
        (["train.py", "{out}"], "unrecognized arguments: train.py {out}"),
        (["--", "train.py"], "put {out} into the command"),
        (["--resume-command", "train.py", "--", "train.py", "{out}"], "put {out} into --resume-command"),
        (["--resume-command", "'{out}", "--", "train.py", "{out}"], "--resume-command: No closing quotation"),
        (["--then-np", "2", "--", "train.py", "{out}"], "--launcher none starts what the command says: give"),
        (["--kills", "0", "--", "train.py", "{out}"], "argument --kills: '0' is not above 0 and below 10,000"),
        (["--signals", "kill", "--", "train.py", "{out}"], "'kill': some of one,all,term, with commas"),
        (["--metric-regex", "(", "--", "train.py", "{out}"], "--metric-regex: missing )"),
        (["--metric-regex", "loss", "--", "train.py", "{out}"], "--metric-regex has no group"),
        (["--junit", "absent/a.xml", "--", "train.py", "{out}"], "--junit absent/a.xml: there is no such folder"),
        (["--output-dir", ".", "--", "train.py", "{out}"], "has something else in it: choose another --output-dir"),
        (["--", "absent.py", "{out}"], "the program itself ends with 2, without any kill"),
        (["--", "absent-program", "{out}"], "absent-program can't be started: No such file or directory"),
        (["--", "true", "{out}"], "no optimizer made a step that could be seen"),
        (["--timeout", "0.2", "--", "sh", "-c", "sleep 60; {out}"], "the program has not ended after"),
    ],
)
def test_what_cannot_be_run(words, said, audited, tmp_path):
    (tmp_path / "something").touch()
    code, _, line = audited(*words)
    assert code == 2
    assert said in line
    assert line.count("\n") == 1


def test_a_working_directory_that_was_removed(audited, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, _, line = audited("--", "train.py", "{out}")
    monkeypatch.chdir(tmp_path)
    assert (code, line.count("\n")) == (2, 1)
    assert "the working directory cannot be found (No such file or directory): cd to one that exists" in line


def test_nohup_holds(audited):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    audited("--output-dir", ".", "--", "true", "{out}")
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_program_that_writes_elsewhere(server, audited):
    code, _, progress = audited("--", *program(server, "elsewhere"))
    assert code == 2
    assert "the program keeps its state elsewhere, not under {out}" in progress


def test_a_first_step_with_a_rate_of_0_leaves_the_weights_of_the_beginning(server, audited):
    code, said, progress = audited("--kills", "1", "--", *program(server, "warm"))
    assert (code, "All that was seen held, in 1 kill." in said) == (0, True), (said, progress)


@pytest.mark.parametrize(
    ("fault", "words", "expected", "said"),
    [
        ("bare", ["--kills", "1"], 1, "Not judged: weights, optimizer state, learning rates, gradient scaler, random"),
        # The only checkpoint, torn: what was saved before, the program never loads again.
        ("once", ["--only-kill", "4"], 2, "No kill came after a checkpoint: nothing is known."),
    ],
)
def test_nothing_is_ok_of_what_is_restored_where_nothing_was(fault, words, expected, said, server, audited, tmp_path):
    """A training that starts over and repeats ends with the bits of the whole run."""
    code, table, _ = audited(*words, "--", *program(server, fault))
    assert (code, said in table) == (expected, True), table
    (kill,) = json.loads((tmp_path / "audit/audit.json").read_text())["kills"]
    seen = {name: verdict["status"] for name, verdict in kill["verdicts"].items() if verdict["status"] != "not seen"}
    fails = {"resumes": "fails", "work repeated": "fails"} if fault == "bare" else {}
    assert seen == {**fails, "exit codes": "ok", "left behind": "ok"}, seen


def test_the_same_bits_with_and_without_it(server, tmp_path):
    """The recorder changes nothing, and a sitecustomize of the environment runs as without it."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("import sys\nsys.own = 1\n")
    (tmp_path / "program.py").write_text(
        f"import runpy, sys\nimport torch\nrunpy.run_path({PROGRAM!r}, run_name='__main__')\n"
        "import hashlib\nstate = torch.load(sys.argv[1] + '/checkpoint.pt', weights_only=False)\n"
        "bytes = b''.join(v.numpy().tobytes() for v in state['model'].values()) + torch.get_rng_state().numpy().tobytes()\n"
        "print(hashlib.sha256(bytes).hexdigest(), hasattr(sys, 'own'))\n"
    )
    order = {"log": f"{tmp_path}/log", "out": str(tmp_path), "whole": True, "kill": None}
    path = os.pathsep.join([str(BOOT), str(tmp_path / "own")])
    start = [str(tmp_path / "program.py"), str(tmp_path / "with"), "none"]
    env = environment(OMP_NUM_THREADS="1", PYTHONPATH=path, HVDTRAIN_AUDIT=json.dumps(order))
    again = [forked.__file__, "run", server, "1", start[0], str(tmp_path / "without"), "none"]
    starts = ((start, env), (again, environment()))
    said = [subprocess.check_output([sys.executable, *words], env=env, text=True, timeout=300) for words, env in starts]
    (recorded, own), (plain, _) = (text.splitlines()[-1].split() for text in said)
    assert (recorded, own) == (plain, "True")
    assert len(next(tmp_path.glob("log.0.*")).read_text().splitlines()) == 36 + 12
