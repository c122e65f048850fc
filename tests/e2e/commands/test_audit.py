"""hvdtrain.audit with real launchers, and ended by a signal. All else: tests/single/audit."""

import shlex
import signal
import subprocess
import sys

import pytest

from hvdtrain.audit.attempts import members
from tests.audited import audit, forked
from tests.e2e.launchers import ROOT, environment
from tests.waiting import wait_for

PROGRAM = forked.__file__.replace("forked", "program")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_audit_that_is_ended_leaves_no_process(number, tmp_path):
    child = (
        "" if number == signal.SIGKILL else "subprocess.Popen(['sleep', '600'])\n"
    )  # the kernel ends the program alone
    (tmp_path / "slow.py").write_text(f"import subprocess, time\n{child}print('up', flush=True)\ntime.sleep(600)\n")
    line = [sys.executable, "-m", "hvdtrain.audit", "--", "slow.py", "{out}"]
    process = subprocess.Popen(
        line, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), stderr=subprocess.PIPE, text=True
    )
    said = tmp_path / "audit/whole.txt"
    wait_for(lambda: said.exists() and said.read_text(), "the program does not start")
    process.send_signal(number)
    code = -number if number == signal.SIGKILL else 2
    assert process.wait(60) == code
    assert code < 0 or "interrupted: no verdict, and no process is left" in process.stderr.read()
    log = tmp_path / "audit/whole"
    wait_for(lambda: not list(members(log)), lambda: list(members(log)), 20 if code < 0 else 0)


def test_the_server_of_these_tests_listens_before_its_socket_can_be_found(tmp_path, monkeypatch):
    """Where it did so afterwards, a client was refused once, on a busy machine."""
    path, found = tmp_path / "socket", []

    class Listening(forked.socket.socket):
        def listen(self, *arguments):
            found.append(path.exists())
            super().listen(*arguments)

        def accept(self):
            found.append(path.exists())
            raise InterruptedError

    monkeypatch.setattr(forked.socket, "socket", Listening)
    monkeypatch.setattr(forked.signal, "signal", lambda *_: None)
    with pytest.raises(InterruptedError):
        forked.serve(str(path))
    assert found == [False, True]


@pytest.mark.slow
def test_two_ranks(tmp_path):
    done = audit(tmp_path, f"-np 2 --kills 4 -- {shlex.quote(PROGRAM)} {{out}} none")
    assert done.returncode == 0, done
    assert "All that was seen held, in 4 kills" in done.stdout


@pytest.mark.slow
@pytest.mark.leaves("vader_segment", "ompi.")  # Open MPI's, where all of a job are killed
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_hvdtrain_resumes(launcher, tmp_path):
    words = "-m hvdtrain.mnist --dataset digits --epochs 2 --checkpoint-steps 3 --no-progress --output-dir {out}"
    done = audit(tmp_path, f"-np 2 --launcher {launcher} -- {words}")
    assert done.returncode == 0, done


@pytest.mark.slow
@pytest.mark.timeout(2000)  # ten runs, one after the other
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_tool_kills_at_the_file_events_of_a_save(ranks, tmp_path):
    """ckpt-chaos knows files alone: it kills when a folder or file is made, renamed or removed."""
    pytest.importorskip("ckpt_chaos", reason="pip install ckpt-chaos==0.1.8")
    program = "-m hvdtrain.mnist --dataset digits --epochs 1 --checkpoint-steps 3 --no-progress --output-dir {out}"
    weights = "import json; print(json.load(open('{out}/summary.json'))['parameters_sha256'])"
    line = [sys.executable, "-m", "ckpt_chaos", "run", "--work", str(tmp_path / "work"), "--ranks", str(ranks)]
    line += ["--max-points", "8", "--timeout", "600", "--step-regex", r"resumed after step (\d+)"]
    line += ["--result-cmd", shlex.join([sys.executable, "-c", weights]), "--", sys.executable, *program.split()]
    env = environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1900)
    assert done.returncode == 0, done
    # Four of some thirty events, and a run without a kill. It tears no file of ours: it knows other ways to write one.
    assert "PASS: 5" in done.stdout, done
