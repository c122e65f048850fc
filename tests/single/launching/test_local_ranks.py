"""All ranks of a host from one process: what fits, what is imported before the fork, and how ranks begin and end.

The ranks here are small scripts that import nothing, under the real starter; tests/e2e has ranks that train.
"""

import contextlib
import errno
import json
import math
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch

from hvdtrain.engines import cores, gpu
from hvdtrain.engines.cores import cpu_quota
from hvdtrain.engines.errors import UserError
from hvdtrain.launching import forker, run_script
from hvdtrain.launching.forker import Forker
from hvdtrain.launching.meeting import Meeting
from hvdtrain.launching.supervisor import Supervisor
from hvdtrain.starter import parse
from tests.e2e.launchers import PYTHON, free_port, members, running
from tests.single.forked import ends_of
from tests.waiting import wait_for

STARTER = f"{PYTHON} {shlex.quote(str(Path(__file__).parent / 'without_imports.py'))} starter --oversubscribe"
SLEEP = "import time; time.sleep(600)"
READY = f"print('ready', flush=True)\n{SLEEP}"
HOST = socket.gethostname()


# ---- what fits


@pytest.mark.parametrize(
    ("devices", "visible", "gpus"),
    [
        ([], None, 0),
        (["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"], None, 2),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0", "nvidia1"], "", 0),
        (["nvidia0", "nvidia1"], "0,-1,1", 1),
        (["nvidia0"], "0,1,2", 1),  # two of which are not there
        (["nvidia0", "nvidia1"], "GPU-4a", 1),
        (["nvidia0", "nvidia1"], "NoDevFiles", 0),
        (["nvidia0"], "MIG-a,MIG-b", 2),
        ([], "0,1", 0),
    ],
)
def test_gpus_are_counted_without_cuda(devices, visible, gpus, tmp_path):
    for name in devices:
        (tmp_path / name).touch()
    assert gpu.gpus_here({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == gpus


def test_ranks_that_do_not_fit_are_refused_with_what_to_type():
    cores.refuse_too_many_for_cores(8, 8, "none")
    with pytest.raises(UserError, match=r"but 1 core here: give the task more \(srun --cpus-per-task=8\), use"):
        cores.refuse_too_many_for_cores(8, 1, "Slurm")
    gpu.refuse_too_many_for_gpus(8, 0)  # they train on the CPU
    gpu.refuse_too_many_for_gpus(4, 4)
    with pytest.raises(UserError, match=r"--local-ranks 5, but 4 GPUs here: use --local-ranks 4, or add --oversub"):
        gpu.refuse_too_many_for_gpus(5, 4)
    here = math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota()))
    words = [sys.executable, "-m", "hvdtrain.starter", "--local-ranks", str(here + 1), "-m", "hvdtrain.mnist"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    said = (
        f"--local-ranks {here + 1}, but {here} core{'s'[: here > 1]} here: use --local-ranks {here}, or add --oversub"
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done
    assert done.stderr.startswith(f"hvdtrain.starter: error: {said}"), done


# ---- what is imported before the fork


def test_a_programs_own_imports_are_found_and_only_safe_ones():
    source = """
import torch.nn as nn, mpi4py.MPI
from torchvision import models, transforms
from hvdtrain import training
from . import sibling
from other import torch
if True:
    import numpy
def later():
    import PIL
"""
    assert forker.modules_of(source) == [
        "torch.nn", "torchvision", "torchvision.models", "torchvision.transforms", "hvdtrain", "hvdtrain.training",
    ]  # fmt: skip


def test_a_module_that_starts_a_thread_or_cannot_be_imported_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(forker, "FIRST_IMPORTS", ())
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)  # of an earlier test
    (tmp_path / "with_thread.py").write_text(
        "import threading\nover = threading.Event()\nthreading.Thread(target=over.wait, daemon=True).start()\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "harmless.py").write_text("loaded = True\n")
    forker.preload("", ["harmless"])
    assert sys.modules["harmless"].loaded
    with pytest.raises(UserError, match="--import broken cannot be imported: ZeroDivisionError"):
        forker.preload("", ["broken"])
    said = "--import with_thread starts threads, which does not survive a fork: leave it out"
    try:
        with pytest.raises(UserError, match=said):
            forker.preload("", ["with_thread"])
    finally:
        sys.modules["with_thread"].over.set()


ASKS_CUDA = """
import os, sys, torch
from hvdtrain import training
from hvdtrain.engines import gpu
from hvdtrain.launching import forker
forker.FIRST_IMPORTS = ("torch",)
sys.path.append(FOLDER)

def asks(gpus, nvml):
    torch.cuda._device_count_nvml = lambda: nvml
    gpu.gpus_here = lambda environment: gpus
    forker.preload("import hvdtrain.training" if nvml < gpus else "", ["asks"])
    if (pid := os.fork()) == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    print("lost" if os.waitpid(pid, 0)[1] else "kept", "torch._dynamo" in sys.modules)
"""


@pytest.mark.skipif(not torch.version.cuda, reason="this torch is for CPUs")
def test_forked_ranks_have_cuda_whatever_was_asked_of_it(tmp_path):
    """As torch.utils.cpp_extension and torch.utils.benchmark do when they are imported."""
    (tmp_path / "asks.py").write_text("import torch\ntorch.cuda.is_available(), torch.cuda.device_count()\n")
    said = {
        "asks(1, 1)": "kept False",
        # Where NVML does not answer.
        "asks(1, -1)": "--import asks starts CUDA, which does not survive a fork: leave it out",
        "asks(0, -1)": "lost True",  # and not needed; what optimizers import asks nothing
    }
    ends = ends_of(ASKS_CUDA.replace("FOLDER", repr(str(tmp_path))), {one: one for one in said}, tmp_path)
    for one, end in ends.items():
        assert said[one] in end.out + end.err, end


# ---- how ranks begin and end


class Started:
    """A starter and its ranks."""

    def __init__(self, process: subprocess.Popen[str], job: str):
        self.process, self.job = process, job

    def lines(self, count: int) -> list[str]:
        return [self.process.stdout.readline() for _ in range(count)]

    def send(self, number: int) -> "Started":
        self.process.send_signal(number)
        return self

    def ends(self) -> tuple[int, str, str]:
        """Wait for the end of all its processes. Return exit code, output and errors."""
        out, err = self.process.communicate(timeout=60)
        wait_for(lambda: not members(self.job), "what was started is left", 20)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path):
    """Start ranks that run `script` in `folder`. settings: of without_imports.py."""
    with contextlib.ExitStack() as stack:

        def begin(script: str, ranks: int = 2, options: str = "", folder: str = ".", settings=(), **variables: str):
            directory = tmp_path / folder
            directory.mkdir(exist_ok=True)
            (directory / "script.py").write_text(script)
            words = f"{STARTER} --local-ranks {ranks} {options} script.py"
            env = {"SETTINGS": json.dumps(dict(settings))} | variables
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            return Started(*stack.enter_context(running(words, env=env, cwd=directory, **pipes)))

        yield begin


def test_each_rank_is_the_program_with_a_place_and_numbers_of_its_own(start, monkeypatch):
    script = """
import os, sys
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "CONTROLLER", "GLOO_IFACE")
print(__name__, sys.argv[1:], sys.path[0] == os.getcwd(), os.environ["OMP_NUM_THREADS"], len(os.listdir("/proc/self/task")),
      *(os.environ["HOROVOD_" + name] for name in names))
"""
    code, out, err = start(script, 3, "--start-timeout 1e9", OMP_NUM_THREADS="5").ends()
    expected = [f"__main__ [] True 5 1 {rank} 3 {rank} 3 0 1 gloo lo" for rank in range(3)]
    assert (code, sorted(out.splitlines()), err) == (0, expected, "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = "import os, numpy.random; print(os.environ['OMP_NUM_THREADS'], numpy.random.random())"
    code, out, err = start(script, 2, "--import numpy.random", settings={"import": True}).ends()
    assert (code, err) == (0, "")
    threads, drawn = zip(*(line.split() for line in out.splitlines()), strict=True)
    share = math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota())) // 2
    assert threads == (str(max(1, share)),) * 2
    assert len(set(drawn)) == 2


@pytest.mark.parametrize(
    ("first", "code", "said"),
    [
        ("raise SystemExit(5)", 5, "ended with exit code 5"),
        ("1 / 0", 1, "ended with exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL (out of memory?)"),
    ],
)
def test_the_first_rank_that_fails_ends_the_others_and_gives_the_code(start, tmp_path, first, code, said):
    ended, _, err = start(f"import os\nif os.environ['HOROVOD_RANK'] == '1':\n    {first}\n{SLEEP}", 3).ends()
    assert ended == code
    assert f"hvdtrain.starter: error: rank 1 on {HOST} {said}: ending the other ranks" in err
    if "1 / 0" in first:  # its own error, from its own first frame, and nothing of ours around it
        assert f'Traceback (most recent call last):\n  File "{tmp_path}/script.py", line 3, in <module>\n' in err
        assert "ZeroDivisionError: division by zero" in err
        assert "hvdtrain/" not in err


def test_a_rank_ends_as_under_the_interpreter(start, tmp_path):
    """With threads that it still has, with what it registered, with files that it did not close, with objects told."""
    script = """
import atexit, os, threading, time, weakref
import beside
class Told:
    def __del__(self):
        print("told", flush=True)
told = Told()
weakref.finalize(told, print, "finalized", flush=True)
left_open = open("left_open." + os.environ["HOROVOD_RANK"], "w")
left_open.write("written")
atexit.register(print, "registered", flush=True)
def later():
    time.sleep(0.3)
    print("thread", flush=True)
threading.Thread(target=later).start()
print("no line end", end="")
"""
    (tmp_path / "beside.py").write_text("left_open = open('left_open.beside', 'w'); left_open.write('written')")
    assert start(script, 1).ends() == (0, "no line endthread\nregistered\nfinalized\ntold\n", "")
    assert (tmp_path / "left_open.0").read_text() == "written"
    assert (tmp_path / "left_open.beside").read_text() == "written"
    lost = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('lost')"
    code, _, err = start(lost, 1, PYTHONUNBUFFERED="").ends()
    assert (code, "OSError: [Errno 28] No space left on device\n" in err) == (120, True), err
    code, out, _ = start("import os; print('said'); os.kill(os.getpid(), 9)", 1, PYTHONUNBUFFERED="1").ends()
    assert (code, out) == (137, "said\n")


def test_a_rank_reads_and_writes_as_the_environment_says(start):
    """It failed where it printed what the locale lacks."""
    run = start(
        "import sys; print(*(each.encoding for each in (sys.stdin, sys.stdout, sys.stderr)))", 1, LC_ALL="C",
        PYTHONIOENCODING="latin-1",
    )  # fmt: skip
    assert run.ends() == (0, f"{' '.join(['iso8859-1'] * 3)}\n", "")


def test_ranks_share_a_module_of_the_forker_and_run_its_exit_handlers_but_not_its_finalizers(start, tmp_path):
    (tmp_path / "shared.py").write_text("""
import atexit, os, weakref
class Owned: pass
owned, pid = Owned(), os.getpid()
weakref.finalize(owned, print, "finalized", flush=True)
atexit.register(print, "registered", flush=True)
""")
    script = "import os, shared; print(shared.pid == os.getppid(), flush=True)"
    variables = {"settings": {"import": True}, "PYTHONPATH": str(tmp_path)}
    code, out, err = start(script, 2, "--import shared", **variables).ends()
    assert (code, sorted(out.splitlines())) == (0, ["True", "True", "registered", "registered"]), err


@pytest.mark.parametrize(
    ("end", "code", "said"), [(None, 0, ""), (3, 3, ""), (256, 0, ""), ("why", 1, "why\n"), (-1, 255, "")]
)
def test_every_way_to_exit_gives_pythons_code(end, code, said, capsys):
    assert (run_script.code_of(SystemExit(end)), capsys.readouterr().err) == (code, said)


def test_a_rank_that_does_not_hear_sigterm_is_killed(start):
    script = f"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["HOROVOD_RANK"] == "1":
    time.sleep(0.5)
    raise SystemExit(7)
{SLEEP}"""
    assert start(script, settings={"grace": 0.2}).ends()[0] == 7


@pytest.mark.parametrize("code", [75, 3])
def test_ranks_that_decided_together_to_end_are_given_the_time_for_it(start, tmp_path, code):
    script = f"""
import os, time
if os.environ["HOROVOD_RANK"] == "0":
    time.sleep(1)
    open("saved", "w").close()
raise SystemExit({code})"""
    assert start(script, 3).ends() == (code, "", "")
    assert (tmp_path / "saved").exists()


def test_what_a_program_without_a_module_says_is_one_line(start):
    said = "-m no.such_module: no such module here; name a module that `python -m` finds, or a file"
    assert start("", 3, "-m no.such_module").ends() == (2, "", f"hvdtrain.starter: error: {said}\n")


def test_a_program_out_of_a_pipe_is_that_of_each_rank(start, tmp_path):
    """As of `hvdtrain.starter <(cat train.py)`: the ranks found it read to its end, and did nothing."""
    os.mkfifo(tmp_path / "pipe")
    run = start("", 2, "pipe")
    (tmp_path / "pipe").write_text("print('runs', flush=True)")
    assert run.ends() == (0, "runs\n" * 2, "")


def test_a_program_that_is_no_source_code_is_refused(start, tmp_path):
    (tmp_path / "train.pyc").write_bytes(b"\xa7\r\r\n\0\0")
    said = "train.pyc is no source code of Python: name a script (.py), or `-m MODULE`"
    assert start("", 2, "train.pyc").ends() == (2, "", f"hvdtrain.starter: error: {said}\n")


def test_a_syntax_error_is_shown_without_what_looks_for_the_program(start, tmp_path):
    code, out, err = start("x = (1", 3).ends()
    assert (code, out) == (1, "")
    shown = f"""  File "{tmp_path}/script.py", line 1\n    x = (1\n        ^\nSyntaxError: '(' was never closed\n"""
    assert err.endswith(shown)
    assert str(run_script.PACKAGE_DIRECTORY) not in err


HEARS = """
import os, signal, sys, time
heard = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: heard.append(signal.Signals(number).name))
print("ready", flush=True)
while not heard:
    time.sleep(0.01)
time.sleep(0.3)  # a second one would come now
print(*heard, flush=True)
raise SystemExit(75)
"""


@pytest.mark.parametrize(
    ("number", "whole_group", "heard"),
    [
        ("SIGINT", True, "SIGINT"),  # as a terminal does
        ("SIGINT", False, "SIGINT"),
        ("SIGTERM", True, "SIGTERM"),
        ("SIGUSR1", False, "SIGUSR1"),
        ("SIGHUP", False, "SIGTERM"),  # a closed terminal
    ],
)
def test_signals_reach_each_rank_once(start, number, whole_group, heard):
    run = start(HEARS)
    assert run.lines(2) == ["ready\n"] * 2
    (os.killpg if whole_group else os.kill)(run.process.pid, signal.Signals[number])
    assert run.ends() == (75, f"{heard}\n" * 2, "")


def test_a_signal_to_every_process_of_a_job_is_for_its_ranks(start):
    """As systemd and Slurm send it: the forker's end would be that of the ranks."""
    run = start(HEARS)
    assert run.lines(2) == ["ready\n"] * 2
    for pid in members(run.job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    code, out, err = run.ends()
    assert (code, set(out.split()), err) == (75, {"SIGTERM"}, "")


def test_ranks_write_to_a_terminal_that_stops_background_processes(tmp_path):
    """`stty tostop`: the ranks are process groups of their own, so the terminal counts them as in the background."""
    (tmp_path / "script.py").write_text("print('written', flush=True)")
    ours, its = pty.openpty()
    settings = termios.tcgetattr(its)
    settings[3] |= termios.TOSTOP
    termios.tcsetattr(its, termios.TCSANOW, settings)
    words = f"setsid --ctty --wait {STARTER} --local-ranks 2 script.py"
    with running(words, cwd=tmp_path, env={"SETTINGS": "{}"}, stdin=its, stdout=its, stderr=its) as (process, _):
        os.close(its)
        assert process.wait(60) == 0
    assert os.read(ours, 1000).split() == [b"written"] * 2
    os.close(ours)


def test_a_closed_terminal_is_ignored_under_nohup(start):
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited
    try:
        run = start(HEARS)
    finally:
        signal.signal(signal.SIGHUP, handler)
    run.lines(2)
    run.send(signal.SIGHUP)
    time.sleep(0.5)  # SIGTERM would be heard first
    assert run.send(signal.SIGUSR1).ends() == (75, "SIGUSR1\n" * 2, "")


@pytest.fixture
def told():
    """A supervisor of two ranks, each a process that sleeps, and what the forker tells it: `say` of a rank."""
    run = Supervisor(Forker(0, b"", 0), ["x.py"], 2, Meeting(0, 1, "127.0.0.1", 0, None, 1.0, "secret"))
    pairs = [socket.socketpair() for _ in range(2)]
    run._connections = [connection for connection, _ in pairs]
    run._meeting._came.set()
    ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]

    def say(local_rank: int, line: bytes) -> None:
        before = set(run._exited)
        pairs[local_rank][1].sendall(line + b"\n")
        run._hear_forker(local_rank)
        run._ranks_exited(set(run._exited) - before)
        run._ranks_fail()

    yield run, ranks, say
    for rank in ranks:
        rank.kill()
        rank.wait()
    run._signals.close()
    for connection in (each for pair in pairs for each in pair):
        connection.close()


def test_a_signal_reaches_a_rank_whose_pid_is_heard_of_later(told):
    """The program may be ready, and be sent a signal, before the starter has read the pids of all ranks."""
    run, ranks, say = told
    say(0, b"%d" % ranks[0].pid)
    run._hand_on(signal.SIGUSR1)
    say(1, b"%d" % ranks[1].pid)
    assert [rank.wait(20) for rank in ranks] == [-signal.SIGUSR1] * 2


BEGINS = """
import os, signal, socket, sys, time
from hvdtrain.launching import fork_client, forker
asked = fork_client.fork_request(["/dev/null"], os.environ, proxy=False)
for number in fork_client.HANDED_ON:
    signal.signal(number, signal.SIG_IGN)
begins, (asks, asked_for) = forker.leave_terminal, socket.socketpair()
forker.leave_terminal = lambda: (begins(), time.sleep(1))
fork_client.send(asks, asked)
rank = forker.fork(asked_for, [], None)
os.kill(rank.pid, int(sys.argv[1]))
sys.exit(-forker.exit_code(rank.pid))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_a_rank_that_has_only_been_forked(number):
    """The forker ignores what is for the ranks, and so does a rank as long as it has what it inherits."""
    assert subprocess.run([sys.executable, "-c", BEGINS, str(int(number))], timeout=60).returncode == number


@pytest.mark.parametrize(("end", "code"), [(b"-9", 137), (b"0", 1)])
def test_a_rank_that_fails_because_another_was_killed_is_not_the_one_that_counts(told, end, code):
    """It says so itself. How the other has ended is said by the forker, which may not get a core for a while."""
    run, ranks, say = told
    for local_rank, rank in enumerate(ranks):
        say(local_rank, b"%d" % rank.pid)
    ranks[1].kill()
    os.waitid(os.P_PID, ranks[1].pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    say(0, forker.FAILED + b" 1")
    assert run._code == 0
    say(1, end)
    assert run._code == code


def test_a_rank_that_has_failed_and_waits_for_the_others_at_its_end_ends_them(start, tmp_path):
    """As `hvd.shutdown` does, which Horovod has registered for the end of the interpreter."""
    script = f"""
import atexit, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
def finish():
    while not os.path.exists("released"):
        time.sleep(0.01)
    open("finished", "w").close()
if os.environ["HOROVOD_RANK"] == "1":
    atexit.register(finish)
    while not os.path.exists("ready"):  # rank 0 has its handler by now: SIGTERM without it would end it at once
        time.sleep(0.01)
    1 / 0
try:
    open("ready", "w").close()
    {SLEEP}
finally:
    open("released", "w").close()"""
    code, _, err = start(script).ends()
    assert code == 1
    assert f"rank 1 on {HOST} ended with exit code 1: ending the other ranks" in err
    assert (tmp_path / "finished").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
@pytest.mark.parametrize("imports", [False, True])
def test_a_signal_that_nobody_handles_leaves_nothing(start, number, code, imports):
    """Sent to the starter while its ranks run, or while it imports. It exits with the signal's code."""
    run = start(READY, settings={"import_seconds": 600 * imports})
    if imports:
        wait_for(lambda: len(members(run.job)) >= 2, "nothing is imported")
        time.sleep(0.3)
    else:
        run.lines(2)
    ended, out, err = run.send(number).ends()
    assert (ended, out) == (code, "")
    assert "hvdtrain.starter" not in err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT and not imports)


def test_a_signal_during_the_meeting_leaves_nothing(start):
    for number, code in (
        (signal.SIGINT, 130),
        (signal.SIGUSR1, 75),
    ):  # the latter asks to stop, and to be started again
        run = start(SLEEP, **host(0, 2, free_port()))
        assert "waiting for 1 of 2" in run.process.stderr.readline()
        assert run.send(number).ends()[0] == code
        with contextlib.ExitStack() as stack:  # a process per rank
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            words, env = f"{PYTHON} -m hvdtrain.starter none.py", host(1, 2, first.getsockname()[1])
            alone, _ = stack.enter_context(running(words, env=env, stderr=subprocess.PIPE))
            first.accept()
            alone.send_signal(number)
            assert alone.stderr.read() == f"hvdtrain: {number.name} before training: nothing to save\n"
            assert alone.wait() == code


def test_the_third_request_is_the_last(start):
    run = start(f"import signal; signal.signal(2, signal.SIG_IGN); {READY}")
    run.lines(2)
    for _ in range(3):
        run.send(signal.SIGINT)
        time.sleep(0.2)
    assert run.ends()[0] == 130


def test_a_killed_forker_ends_its_ranks_and_is_named(start):
    run = start(f"import os; print(os.getppid(), flush=True)\n{SLEEP}")
    os.kill(int(run.lines(2)[0]), signal.SIGKILL)
    said = "hvdtrain.starter: error: the process that forks ranks was killed by SIGKILL (out of memory?)\n"
    assert run.ends() == (137, "", said)


def test_an_import_that_hangs_is_ended(start, monkeypatch):
    code, _, err = start(SLEEP, 2, "--start-timeout 0.5", settings={"import_seconds": 600}).ends()
    assert code == 1
    assert "its modules were not imported within 0 s: look at the file system that Python is on" in err
    assert 'without_imports.py", line ' in err  # where
    monkeypatch.setenv("HVDTRAIN_START_TIMEOUT", "7")
    assert parse(["x.py"])[0].start_timeout == 7


# ---- several hosts, here all on this one


def host(number: int, size: int, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "RANK": str(number)}


def test_hosts_may_bring_different_numbers_of_ranks(start):
    script = "import os; print(*(os.environ[name] for name in ('HOROVOD_RANK', 'HOROVOD_SIZE', 'RANK', 'WORLD_SIZE')))"
    port = free_port()
    runs = [start(script, ranks, **host(number, 3, port)) for number, ranks in enumerate((2, 1, 3))]
    ends = [run.ends() for run in runs]
    lines = [(code, sorted(out.splitlines())) for code, out, _ in ends]
    assert lines == [(0, [f"{rank} 6 {rank} 6" for rank in ranks]) for ranks in ([0, 1], [2], [3, 4, 5])], ends


def test_a_host_that_still_imports_is_named(start, tmp_path):
    port = free_port()
    first = start("print('done')", 1, **host(0, 2, port))
    slow = start("print('done')", 1, settings={"import_until": str(tmp_path / "told")}, **host(1, 2, port))
    while f"still importing: {HOST}" not in (line := first.process.stderr.readline()):
        assert line  # it has not ended
    (tmp_path / "told").touch()
    assert first.ends()[:2] == (0, "done\n")
    assert slow.ends() == (0, "done\n", "")


@pytest.mark.parametrize("imports", [True, False])
@pytest.mark.parametrize("breaks", [0, 1])
def test_what_fails_on_one_host_ends_the_others(start, breaks, imports):
    """Its import, or one of its ranks."""
    port, script = free_port(), SLEEP
    if not imports:
        script = f"import os\nif os.environ['HOROVOD_RANK'] == '{2 * breaks}': os.kill(os.getpid(), 11)\n{SLEEP}"
    runs = []
    for number in range(2):
        settings = {"import_error": "no disk"} if imports and number == breaks else {}
        runs.append(start(script, folder=str(number), settings=settings, **host(number, 2, port)))
    ends = [run.ends() for run in runs]
    assert [ends[breaks][0], ends[1 - breaks][0]] == [1 if imports else 139, 1], ends
    assert not imports or "ZeroDivisionError: no disk" in ends[breaks][2]
    said = f"{HOST}: its import ended with code 1" if imports else f"rank {2 * breaks} was killed by SIGSEGV"
    which = "error: " if breaks == 1 else f"error: on {HOST}, host 1 of 2 (from 0): "
    # On a busy machine, one host may have begun to wait for the other.
    [line] = [
        line for line in ends[1 - breaks][2].splitlines() if not line.startswith("hvdtrain.starter: waiting for ")
    ]
    assert line.startswith(f"hvdtrain.starter: {which}"), ends
    assert said in line


@pytest.mark.parametrize("options", ["--bad", "--wait -1", "--interface nope"])
def test_what_is_wrong_on_one_host_is_said_there(options, start):
    code, _, err = start(SLEEP, 2, options, **host(1, 2, free_port())).ends()
    assert (code, len(err.splitlines())) == (2, 1), err
    assert options.split()[0] in err


def test_a_host_that_does_not_come_is_named(start):
    code, _, err = start(SLEEP, 2, "--wait 0.5", **host(0, 2, free_port())).ends()
    assert code == 2, err
    assert "rank 1 did not connect to 127.0.0.1:" in err


def test_a_user_without_another_process_is_told_so(monkeypatch):
    def none_left():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", none_left)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(UserError, match=r"no more processes and threads: end some, raise `ulimit -u`"):
        forker.start_forker(["program.py"], 1, [], False, 0)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
