"""Attempts against the processes of a job: signals, workers, two jobs at once, names of hosts."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.launching import processes
from tests.chaos.attempts import Attempt, Job, wait_for
from tests.e2e.launchers import ROOT

PYTHON = sys.executable
COMMON = "--no-progress --step-timeout 5 --log-steps 1 --threads 1 --checkpoint-steps 20 --output-dir out"
MNIST = f"-m hvdtrain.mnist --dataset digits --model convnet --epochs 8 {COMMON}"
AUGMENT = f"{ROOT}/docs/programs/augment.py --epochs 6 --workers 1 {COMMON}"
STARTER = f"{PYTHON} -m hvdtrain.starter --oversubscribe --local-ranks"
HERE = f"{STARTER} 2 {MNIST}"  # its bits are those of two hosts: two ranks have one order of sums
WORKERS = f"TORCHINDUCTOR_CACHE_DIR=cache {STARTER} 2 {AUGMENT}"  # it would be left in TMPDIR
STEP = 20  # at which most attempts strike: a checkpoint is due
During = Callable[[Path, Job], None]
Processes = Callable[[Path, Job], list[int]]


def again(command: str) -> str:
    """Return a line of bash that repeats `command` after it has failed, and ends with the code of the first attempt."""
    return f"{command}; code=$?; {command} >again 2>&1 || {{ cat again; exit 99; }}; exit $code"


# ---- what strikes


def at_step(strike: During, step: int = STEP) -> During:
    """Return a function that calls `strike` when training has come to a step."""

    def during(here: Path, job: Job) -> None:
        wait_for(here / "out" / "metrics.jsonl", job, rf'"event": "train".*"step": {step}\b')
        strike(here, job)

    return during


def ranks(here: Path) -> list[int]:
    """Return the process of each rank of the newest start."""
    lines = [json.loads(line) for line in (here / "out" / "metrics.jsonl").read_text().splitlines()]
    return [rank["pid"] for line in lines if line["event"] == "start" for rank in line["ranks"]][-2:]


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def fork_server(rank: int) -> int:
    """Return the process that forks the DataLoader workers of a rank."""
    named = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children(rank)}
    return next(pid for pid, command in named.items() if "multiprocessing.forkserver" in command)


def rank(number: int) -> Processes:
    return lambda here, job: [ranks(here)[number]]


def worker(here: Path, job: Job) -> list[int]:
    return children(fork_server(ranks(here)[0]))


def everything(here: Path, job: Job) -> list[int]:
    return processes.descendants(job.pid)


def starter(here: Path, job: Job) -> list[int]:
    """Return the process that all ranks have in common."""
    return [pid for pid in [job.pid, *processes.descendants(job.pid)] if set(ranks(here)) <= set(children(pid))][:1]


def send(which: Processes, *numbers: signal.Signals, gap: float = 0.0) -> During:
    def strike(here: Path, job: Job) -> None:
        chosen = which(here, job)
        for place, number in enumerate(numbers):
            time.sleep(gap if place else 0.0)
            for pid in chosen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    return strike


def second_job(launcher: str, code: int) -> During:
    """Start the same training again, into the same output directory."""

    def strike(here: Path, job: Job) -> None:
        environment = Path(f"/proc/{job.pid}/environ").read_bytes().rstrip(b"\0").split(b"\0")
        own = dict(pair.split(b"=", 1) for pair in environment)
        done = subprocess.run(
            ["bash", "-c", launcher], cwd=here, env=own, capture_output=True, text=True, timeout=120
        )  # fmt: skip
        assert done.returncode == code, f"the second ended with {done.returncode}: {done.stderr[-300:]}"
        assert "Traceback" not in done.stderr, done.stderr

    return strike


# ---- what is attempted


def named(name: str, what: str, script: str, **options: Any) -> Attempt:
    """An attempt with another network or host name: `script` changes them, in namespaces of its own."""
    ranks = 1 if "code" in options else 2  # each rank says what is wrong with its host: one is enough
    inside = f"ip link set lo up; {script}; exec {STARTER} {ranks} {MNIST}"
    command = f"unshare -n -m -u bash -c {shlex.quote(inside)}"
    return Attempt(f"name-{name}", "names and addresses", what, command, needs=("root", "unshare", "ip"), **options)


def hosts(*lines: str) -> str:
    return f"printf '%s\\n' {shlex.join(lines)} >hosts; mount --bind hosts /etc/hosts"


def own_name(expression: str) -> str:
    """A host name that `hostname` would refuse."""
    return f"{PYTHON} -c {shlex.quote(f'import ctypes; n = {expression}; ctypes.CDLL(None).sethostname(n, len(n))')}"


UNKNOWN = "own name .* does not resolve, and Gloo needs it"
NAMES = [
    named("no-loopback", "the loopback interface is down", "ip addr flush dev lo; ip link set lo down",
          code=2, says="without an IPv4 address"),
    named("unknown", "the host name does not resolve", f"hostname nowhere.invalid; {hosts('127.0.0.1 localhost')}",
          code=2, says=UNKNOWN),
    named("debian", "the host name is 127.0.1.1, as on Debian",
          f"hostname deb; {hosts('127.0.0.1 localhost', '127.0.1.1 deb')}", bits_of=HERE),
    named("long", "a host name of 64 characters", own_name("b'h' * 64"), code=2, says=UNKNOWN),
]  # fmt: skip


STOPPED = [
    Attempt("stopped-all", "stopped", "every process is stopped, and continued after ten seconds", HERE,
            during=at_step(send(everything, signal.SIGSTOP, signal.SIGCONT, gap=10)), bits_of=HERE),
    Attempt("stopped-starter", "stopped", "the starter alone is stopped, and continued after ten seconds", HERE,
            during=at_step(send(starter, signal.SIGSTOP, signal.SIGCONT, gap=10)), bits_of=HERE),
]  # fmt: skip

SIGNALS = [
    *(Attempt(f"signal-all-{number.name}", "signals", f"{number.name} to every process, a hundred times", HERE,
              during=at_step(send(everything, *[number] * 100, gap=0.01)), bits_of=HERE)
      for number in (signal.SIGWINCH, signal.SIGCHLD, signal.SIGCONT, signal.SIGURG)),
    Attempt("signal-storm", "signals", "SIGTERM to rank 1, a hundred times", again(HERE), code=75, says="saved after step",
            during=at_step(send(rank(1), *[signal.SIGTERM] * 100, gap=0.01)), bits_of=HERE),
    *(Attempt(f"signal-rank-{number.name}", "signals", f"{number.name} to rank 1", again(HERE), code=128 + number,
              says=rf"rank 1 on \S+ was killed by {number.name}", during=at_step(send(rank(1), number)), bits_of=HERE)
      for number in (signal.SIGABRT, signal.SIGFPE, signal.SIGSYS, signal.SIGUSR2)),
]  # fmt: skip

INPUT_WORKERS = [
    Attempt("worker-killed", "DataLoader workers", "a DataLoader worker is killed", again(WORKERS), code=1,
            says="a DataLoader worker has ended", during=at_step(send(worker, signal.SIGKILL)), bits_of=WORKERS),
    Attempt("worker-paused", "DataLoader workers", "a DataLoader worker is stopped for three seconds", WORKERS,
            during=at_step(send(worker, signal.SIGSTOP, signal.SIGCONT, gap=3)), bits_of=WORKERS),
]  # fmt: skip

CONTAINER = "unshare --pid --fork --kill-child --mount-proc -u bash -c 'hostname other; exec \"$@\"' -"
LONG = HERE.replace("--epochs 8", "--epochs 40")  # the second job comes while it trains
TWO_JOBS = [
    Attempt("two-same", "two jobs, one directory", "the same command again while it trains", LONG,
            during=at_step(second_job(LONG, 2)), bits_of=LONG),
    Attempt("two-container", "two jobs, one directory", "the same from another host name and PID namespace", LONG,
            during=at_step(second_job(f"{CONTAINER} {LONG}", 2)), bits_of=LONG, needs=("root", "unshare")),
    Attempt("two-link", "two jobs, one directory", "the same through a symbolic link", LONG,
            during=at_step(second_job(f"ln -s out link; {LONG.replace('--output-dir out', '--output-dir link')}", 2)),
            bits_of=LONG),
]  # fmt: skip


DDP = f"torchrun --standalone --nproc-per-node 2 {MNIST} --engine ddp"
VARIABLES = [
    Attempt("variables-torchrun", "variables of launchers", "torchrun in a shell with variables of Horovod",
            f"HOROVOD_RANK=3 HOROVOD_SIZE=4 {DDP}", leaves="^torch"),
]  # fmt: skip

JOBS = [*NAMES, *STOPPED, *SIGNALS, *INPUT_WORKERS, *TWO_JOBS, *VARIABLES]
