"""All ranks of a host from one process: what fits, what is imported before the fork, and how ranks begin and end.

The ranks here are small scripts that import nothing, under the real starter; tests/e2e has ranks that train.
"""

import contextlib
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.engines.cores import cpu_quota
from hvdtrain.engines.errors import UserError
from hvdtrain.launching import capacity, forker, preload, rank_exit, supervisor
from hvdtrain.launching.local_rendezvous import Meeting
from hvdtrain.starter import parse
from tests.e2e.launchers import MARK, PYTHON, environment, kill, launch, members, new_job
from tests.waiting import wait_for

STARTER = f"{PYTHON} {shlex.quote(str(Path(__file__).parent / 'local_ranks.py'))} --oversubscribe"
SLEEP = "import time; time.sleep(600)"


# ---- what fits


@pytest.mark.parametrize(
    ("devices", "variables", "gpus"),
    [
        ([], {}, 0),
        (["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"], {}, 2),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 1),  # two of which are not there
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 2),
        ([], {"CUDA_VISIBLE_DEVICES": "0,1"}, 0),
    ],
)
def test_gpus_are_counted_without_cuda(devices, variables, gpus, tmp_path):
    for name in devices:
        (tmp_path / name).touch()
    assert capacity.gpus_here(variables, tmp_path) == gpus


def test_ranks_that_do_not_fit_are_refused_with_what_to_type():
    capacity.refuse_too_many_for_cores(8, 8, "none")
    with pytest.raises(UserError, match=r"--local-ranks 9, but 8 cores here: use --local-ranks 8, or add --oversub"):
        capacity.refuse_too_many_for_cores(9, 8, "none")
    with pytest.raises(UserError, match=r"but 1 core here: give the task more \(srun --cpus-per-task=8\), use"):
        capacity.refuse_too_many_for_cores(8, 1, "Slurm")
    capacity.refuse_too_many_for_gpus(8, 0)  # they train on the CPU
    capacity.refuse_too_many_for_gpus(4, 4)
    with pytest.raises(UserError, match=r"--local-ranks 5, but 4 GPUs here: use --local-ranks 4, or add --oversub"):
        capacity.refuse_too_many_for_gpus(5, 4)


@pytest.mark.parametrize(
    "words", ["--local-ranks 0 x.py", "--local-ranks x x.py", "--oversubscribe x.py", "--import a x.py"]
)
def test_options_that_make_no_sense_are_refused(words):
    with pytest.raises(UserError, match="--local-ranks"):
        parse(words.split())


def test_more_ranks_than_cores_are_refused_by_the_command():
    cores = len(os.sched_getaffinity(0))
    done = launch(f"{PYTHON} -m hvdtrain.starter --local-ranks {cores + 1} -m hvdtrain.mnist", timeout=60)
    assert done.code == 2, done
    assert done.stderr.startswith(f"hvdtrain.starter: error: --local-ranks {cores + 1}, but "), done
    assert len(done.stderr.splitlines()) == 1, done


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
    assert preload.modules_of(source) == [
        "torch.nn", "torchvision", "torchvision.models", "torchvision.transforms", "hvdtrain", "hvdtrain.training",
    ]  # fmt: skip


def test_a_module_that_starts_a_thread_or_cannot_be_imported_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(preload, "FIRST", ())
    (tmp_path / "with_thread.py").write_text(
        "import threading\nover = threading.Event()\nthreading.Thread(target=over.wait, daemon=True).start()\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "harmless.py").write_text("loaded = True\n")
    preload.preload("", ["harmless"])
    assert sys.modules["harmless"].loaded
    with pytest.raises(UserError, match="--import broken cannot be imported: ZeroDivisionError"):
        preload.preload("", ["broken"])
    try:
        with pytest.raises(
            UserError, match="--import with_thread starts threads, which does not survive a fork: leave it out"
        ):
            preload.preload("", ["with_thread"])
    finally:
        sys.modules["with_thread"].over.set()


def test_forked_ranks_do_not_draw_the_same_numbers():
    numpy = pytest.importorskip("numpy")
    before = numpy.random.get_state()
    try:
        numpy.random.seed(1)
        first = numpy.random.random()
        numpy.random.seed(1)
        preload.fresh_generators()
        assert numpy.random.random() != first
    finally:
        numpy.random.set_state(before)


# ---- how ranks begin and end


def start(tmp_path: Path, script: str, ranks: int, options: str = "", *, timeout: float = 60, **extra):
    """Run `script` on so many ranks to the end of all, and of whatever they started."""
    (tmp_path / "script.py").write_text(script)
    done = launch(
        f"{STARTER} --local-ranks {ranks} {options} {tmp_path}/script.py", timeout=timeout, cwd=tmp_path, **extra
    )
    assert done.left_behind == 0, done
    return done


def test_each_rank_is_the_program_with_a_place_of_its_own(tmp_path):
    script = """
import os, sys
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "CONTROLLER", "GLOO_IFACE")
print(__name__, sys.argv[1:], sys.path[0] == os.getcwd(), os.environ["OMP_NUM_THREADS"], len(os.listdir("/proc/self/task")),
      *(os.environ["HOROVOD_" + name] for name in names))
"""
    done = start(tmp_path, script + "\n#", 3, "--start-timeout 1e9", OMP_NUM_THREADS="5")
    assert done.code == 0, done
    expected = [f"__main__ [] True 5 1 {rank} 3 {rank} 3 0 1 gloo lo" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == expected, done
    assert done.stderr == "", done


def test_each_rank_has_its_share_of_the_hosts_threads(tmp_path):
    cores = math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota()))
    for ranks in (1, 2):
        done = start(tmp_path, "import os; print(os.environ['OMP_NUM_THREADS'])", ranks)
        assert done.stdout.split() == [str(max(1, cores // ranks))] * ranks, done


@pytest.mark.parametrize(
    ("first", "code", "said"),
    [
        ("raise SystemExit(5)", 5, "rank 1 on HOST ended with exit code 5: ending the other ranks"),
        ("1 / 0", 1, "rank 1 on HOST ended with exit code 1: ending the other ranks"),
        (
            "import os; os.kill(os.getpid(), 9)",
            137,
            "rank 1 on HOST was killed by SIGKILL (out of memory?): ending the other ranks",
        ),
    ],
)
def test_the_first_rank_that_fails_ends_the_others_and_gives_the_code(tmp_path, first, code, said):
    script = f"import os\nif os.environ['HOROVOD_RANK'] == '1':\n    {first}\n{SLEEP}"
    done = start(tmp_path, script, 3)
    assert done.code == code, done
    assert f"hvdtrain.starter: error: {said.replace('HOST', socket.gethostname())}" in done.stderr, done
    if "1 / 0" in first:  # its own error, in its own words, and nothing of ours around it
        assert "ZeroDivisionError: division by zero" in done.stderr, done
        assert "forker.py" not in done.stderr, done
        assert "starter.py" not in done.stderr, done


def test_a_rank_ends_as_under_the_interpreter(tmp_path):
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
    done = start(tmp_path, script, 1)
    assert done.code == 0, done
    assert done.stdout == "no line endthread\nregistered\nfinalized\ntold\n", done
    assert (tmp_path / "left_open.0").read_text() == "written"
    assert (tmp_path / "left_open.beside").read_text() == "written"


def test_ranks_share_a_module_of_the_forker_and_run_its_exit_handlers_but_not_its_finalizers(tmp_path):
    (tmp_path / "shared.py").write_text("""
import atexit, os, weakref
class Owned: pass
owned, pid = Owned(), os.getpid()
weakref.finalize(owned, print, "finalized", flush=True)
atexit.register(print, "registered", flush=True)
""")
    script = "import os, shared; print(shared.pid == os.getppid(), flush=True)"
    done = start(tmp_path, script, 2, "--import shared", SETTINGS='{"import": true}', PYTHONPATH=str(tmp_path))
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == ["True", "True", "registered", "registered"], done


@pytest.mark.parametrize(
    ("end", "code", "said"), [(None, 0, ""), (3, 3, ""), (256, 0, ""), ("why", 1, "why\n"), (-1, 255, "")]
)
def test_every_way_to_exit_gives_pythons_code(end, code, said, capsys):
    assert (rank_exit.code_of(SystemExit(end)), capsys.readouterr().err) == (code, said)


def test_a_rank_that_does_not_hear_sigterm_is_killed(tmp_path):
    script = f"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["HOROVOD_RANK"] == "1":
    time.sleep(0.5)
    raise SystemExit(7)
{SLEEP}"""
    assert start(tmp_path, script, 2, SETTINGS='{"grace": 0.2}').code == 7


@pytest.mark.parametrize("code", [75, 3])
def test_ranks_that_decided_together_to_end_are_given_the_time_for_it(tmp_path, code):
    script = f"""
import os, time
if os.environ["HOROVOD_RANK"] == "0":
    time.sleep(1)
    open("saved", "w").close()
raise SystemExit({code})"""
    done = start(tmp_path, script, 3)
    assert done.code == code, done
    assert done.stderr == "", done
    assert (tmp_path / "saved").exists()


def test_what_a_program_without_a_module_says_is_one_line(tmp_path):
    done = launch(f"{STARTER} --local-ranks 3 -m no.such_module", timeout=60, cwd=tmp_path)
    assert done.code == 2, done
    assert done.stderr == (
        "hvdtrain.starter: error: -m no.such_module: no such module here; name a module that `python -m` finds, or a file\n"
    )


class Running:
    """A starter that runs until it is told otherwise."""

    def __init__(self, tmp_path: Path, script: str, ranks: int, options: str = "", **extra: str):
        (tmp_path / "script.py").write_text(script)
        self.job = new_job()
        words = shlex.split(f"{STARTER} --local-ranks {ranks} {options} {tmp_path}/script.py")
        self.process = subprocess.Popen(
            words, cwd=tmp_path, env=environment(**{MARK: self.job}, **extra), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def wait_for_lines(self, count: int) -> list[str]:
        return [self.process.stdout.readline() for _ in range(count)]

    def ends(self, timeout: float = 60) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill(self.job)
            raise AssertionError("not over") from None
        try:
            wait_for(lambda: not members(self.job), "what was started is left", 20)
        finally:
            kill(self.job)
        return self.process.returncode, out, err


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("whole_group", [False, True])
def test_signals_reach_each_rank_once(tmp_path, number, whole_group):
    run = Running(tmp_path, HEARS, 2)
    assert run.wait_for_lines(2) == ["ready\n"] * 2
    if whole_group:  # as a terminal does
        os.killpg(run.process.pid, number)
    else:
        run.process.send_signal(number)
    code, out, err = run.ends()
    assert (code, out, err) == (75, f"{number.name}\n" * 2, "")


def test_a_signal_reaches_a_rank_whose_pid_is_heard_of_later():
    """The program may be ready, and be sent a signal, before the starter has read the pids of all ranks."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    listener = forker.listen()
    imported, done = os.pipe()
    os.write(done, b".")
    # The forker, and two ranks.
    started = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(3)]
    ranks = started[1:]

    def fork() -> None:
        for rank in ranks:
            end = listener.accept()[0]
            end.sendall(b"%d\n" % rank.pid)
            if rank is ranks[0]:
                while not supervised._pids:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGUSR1)
            code = rank.wait(timeout=30)
            end.sendall(b"%d\n" % code)

    made = forker.Forker(started[0].pid, listener.getsockname(), imported)
    meeting = Meeting(0, 1, "127.0.0.1", 0, None, 30)
    supervised = supervisor.Supervisor(made, ["x.py"], 2, meeting)
    forks = threading.Thread(target=fork)
    forks.start()
    try:
        assert supervised.run() == 128 + signal.SIGUSR1
        forks.join(30)
        assert [rank.returncode for rank in ranks] == [-signal.SIGUSR1] * 2
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            with contextlib.suppress(OSError, ValueError, TypeError):
                signal.signal(number, handler)
        for each in started:
            each.kill()
        listener.close()
        os.close(imported)
        os.close(done)


def test_a_closed_terminal_asks_the_ranks_to_stop_unless_nohup_has_it_ignored(tmp_path):
    run = Running(tmp_path, HEARS, 2)
    run.wait_for_lines(2)
    run.process.send_signal(signal.SIGHUP)
    assert run.ends() == (75, "SIGTERM\n" * 2, "")
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited
    try:
        run = Running(tmp_path, HEARS, 2)
    finally:
        signal.signal(signal.SIGHUP, handler)
    run.wait_for_lines(2)
    run.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)  # SIGTERM would be heard first
    run.process.send_signal(signal.SIGUSR1)
    assert run.ends() == (75, "SIGUSR1\n" * 2, "")


def test_ranks_that_a_signal_ends_give_its_code(tmp_path):
    run = Running(tmp_path, f"print('ready', flush=True)\n{SLEEP}", 2)
    run.wait_for_lines(2)
    run.process.send_signal(signal.SIGTERM)
    assert run.ends() == (143, "", "")


def test_a_rank_that_has_failed_and_waits_for_the_others_at_its_end_ends_them(tmp_path):
    """As `hvd.shutdown` does, which Horovod has registered for the end of the interpreter."""
    script = f"""
import atexit, os, time
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
    script = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n" + script
    done = start(tmp_path, script, 2)
    assert done.code == 1, done
    assert f"rank 1 on {socket.gethostname()} ended with exit code 1: ending the other ranks" in done.stderr, done
    assert (tmp_path / "finished").exists(), done


def test_an_interrupt_that_the_program_does_not_handle_gives_its_code(tmp_path):
    run = Running(tmp_path, f"print('ready', flush=True)\n{SLEEP}", 2)
    run.wait_for_lines(2)
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.ends()
    assert (code, out) == (130, ""), err
    assert "KeyboardInterrupt" in err
    assert "hvdtrain.starter" not in err


def test_the_third_request_is_the_last(tmp_path):
    script = f"import signal; signal.signal(2, signal.SIG_IGN); print('ready', flush=True)\n{SLEEP}"
    run = Running(tmp_path, script, 2)
    run.wait_for_lines(2)
    for _ in range(3):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert run.ends()[0] == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_import_leaves_nothing(tmp_path, number):
    run = Running(tmp_path, SLEEP, 2, SETTINGS='{"import_seconds": 600}')
    wait_for(lambda: len(members(run.job)) >= 2, "nothing is imported")
    time.sleep(0.3)
    run.process.send_signal(number)
    code, out, err = run.ends()
    assert code == 128 + number, (out, err)
    assert out == err == ""


def test_a_signal_during_the_meeting_leaves_nothing(tmp_path):
    run = Running(tmp_path, SLEEP, 2, **host(0, 2, free_port()))
    assert "waiting for 1 of 2" in run.process.stderr.readline()
    run.process.send_signal(signal.SIGINT)
    assert run.ends()[0] == 130


def test_ranks_end_when_the_starter_is_killed(tmp_path):
    run = Running(tmp_path, f"print('ready', flush=True)\n{SLEEP}", 3)
    run.wait_for_lines(3)
    run.process.kill()
    assert run.ends()[0] == -9


def test_the_import_ends_when_the_starter_is_killed(tmp_path):
    run = Running(tmp_path, SLEEP, 3, SETTINGS='{"import_seconds": 600}')
    wait_for(lambda: len(members(run.job)) >= 2, "nothing is imported")
    time.sleep(0.3)
    run.process.kill()
    assert run.ends()[0] == -9


def test_an_import_that_hangs_is_ended(tmp_path):
    hangs = {"SETTINGS": '{"import_seconds": 600}'}
    for options, variables in (("--start-timeout 0.5", {}), ("", {"HVDTRAIN_START_TIMEOUT": "0.5"})):
        done = start(tmp_path, SLEEP, 2, options, **hangs, **variables)
        assert done.code == 1, done
        assert (
            "the program's modules were not imported within 0 s: look at the file system that Python is on"
            in done.stderr
        )


# ---- several hosts, here all on this one


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def host(number: int, size: int, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "RANK": str(number)}


def test_hosts_may_bring_different_numbers_of_ranks(tmp_path):
    script = "import os; print(*(os.environ[name] for name in ('HOROVOD_RANK', 'HOROVOD_SIZE', 'RANK', 'WORLD_SIZE')))"
    port, runs = free_port(), []
    for number, ranks in enumerate((2, 1, 3)):
        (tmp_path / str(number)).mkdir()
        runs.append(Running(tmp_path / str(number), script, ranks, **host(number, 3, port)))
    ends = [run.ends() for run in runs]
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    lines = [sorted(out.splitlines()) for _, out, _ in ends]
    assert lines == [[f"{rank} 6 {rank} 6" for rank in ranks] for ranks in ([0, 1], [2], [3, 4, 5])], ends


def test_a_host_that_still_imports_is_named(tmp_path):
    port = free_port()
    first = Running(tmp_path, "print('done')", 1, **host(0, 2, port))
    slow = Running(tmp_path, "print('done')", 1, SETTINGS='{"import_seconds": 1.5}', **host(1, 2, port))
    code, out, err = first.ends()
    assert (code, out) == (0, "done\n"), err
    assert f"still importing: {socket.gethostname()}" in err
    assert slow.ends() == (0, "done\n", "")


@pytest.mark.parametrize("breaks", [0, 1])
def test_an_import_that_fails_on_one_host_ends_the_others(tmp_path, breaks):
    port, runs = free_port(), []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        settings = json.dumps({"import_error": "no disk"} if number == breaks else {})
        runs.append(Running(tmp_path / str(number), SLEEP, 2, SETTINGS=settings, **host(number, 2, port)))
    ends = [run.ends() for run in runs]
    assert [code for code, _, _ in ends] == [1, 1], ends
    assert "ZeroDivisionError: no disk" in ends[breaks][2]
    if breaks == 1:  # the first host says it, too; the others need not
        assert f"error: {socket.gethostname()}: its import ended with code 1" in ends[0][2]


@pytest.mark.parametrize("breaks", [0, 1])
def test_a_rank_that_is_killed_on_one_host_ends_the_ranks_of_the_others(tmp_path, breaks):
    port, runs = free_port(), []
    script = f"import os\nif os.environ['HOROVOD_RANK'] == '{2 * breaks}': os.kill(os.getpid(), 11)\n{SLEEP}"
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        runs.append(Running(tmp_path / str(number), script, 2, **host(number, 2, port)))
    ends = [run.ends() for run in runs]
    assert [ends[breaks][0], ends[1 - breaks][0]] == [139, 1], ends
    if breaks == 1:
        assert "rank 2 was killed by SIGSEGV" in ends[0][2]


def test_a_host_that_does_not_come_is_named(tmp_path):
    run = Running(tmp_path, SLEEP, 2, "--wait 0.5", **host(0, 2, free_port()))
    code, _, err = run.ends()
    assert code == 2, err
    assert "rank 1 did not connect to 127.0.0.1:" in err
