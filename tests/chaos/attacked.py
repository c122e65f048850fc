"""`hvdtrain.mnist`, or the script that PROGRAM names, with one fault inside, at a chosen point of a chosen rank. It changes
nothing but what the fault does.

ATTACK='{"rank": 1, "point": "backward", "count": 7, "kind": "kill"}' mpirun -np 2 python tests/chaos/attacked.py ...

Under a wrapper that starts the job again, the next attempt carries out the fault in "then", if there is one.

The rank carries out the fault the `count`-th time (from 1) it comes to the point; with "saved", once a checkpoint is
complete, which another thread or rank writes. TAKEN names a directory where each rank logs the index of every sample that it
takes, step by step. STRUCK names the file to which the rank adds when (seconds since the epoch) its fault struck: a launcher
may lose what was printed just before.
"""

import contextlib
import json
import os
import runpy
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from hvdtrain import mnist, training
from hvdtrain.checkpoint import checkpoint, contents, saving, writer
from hvdtrain.engines import atomic, launchers
from hvdtrain.engines.base import Engine
from hvdtrain.engines.choice import engine_class
from hvdtrain.guards import connection
from hvdtrain.inputs.plan import Plan
from hvdtrain.launching import exit_codes, processes
from hvdtrain.loop.run import Run

ATTACK = json.loads(os.environ.get("ATTACK", "{}"))
STRUCK = Path(os.environ.get("STRUCK", os.devnull))
for _ in STRUCK.read_text().splitlines() if STRUCK.exists() else ():  # earlier attempts
    ATTACK = ATTACK.get("then", {})
TAKEN = os.environ.get("TAKEN")
PROGRAM = os.environ.get("PROGRAM")  # a script to attack in place of hvdtrain.mnist
ATTEMPT = os.environ.get("ATTEMPT", "0")  # higher in later jobs
RANK = launchers.announced().rank
SIGNALS = dict(kill=signal.SIGKILL, stop=signal.SIGSTOP, term=signal.SIGTERM, int=signal.SIGINT, usr1=signal.SIGUSR1,
               segv=signal.SIGSEGV)  # fmt: skip
SLOW_SECONDS = 8.0  # longer than the --step-timeout of attacked runs
STRANGERS, STRANGER_SECONDS = 30, 20.0
SAVED_SECONDS = 20.0
FULL_SECONDS = 0.2  # most of a run is still to come
reached = 0


def spin() -> None:
    while True:
        pass


def kill_launcher() -> None:
    named = [process for process in processes.launchers() if process.name != "process"]
    os.kill(named[0].pid, signal.SIGKILL)


def strangers(port: int) -> None:
    """In a thread: connect many times, and send a byte now and then, as a scanner of ports might."""
    until = time.monotonic() + STRANGER_SECONDS
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        open_ones = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(STRANGERS)]
        while time.monotonic() < until:
            for one in open_ones:
                with contextlib.suppress(OSError):
                    one.send(b"x")
            time.sleep(0.5)


def fill_disk() -> None:
    """Fill the file system of --output-dir (of which run.py made a small one), and free it after FULL_SECONDS."""
    directory = sys.argv[sys.argv.index("--output-dir") + 1]
    space = os.statvfs(directory)
    filler = os.open(directory, os.O_TMPFILE | os.O_WRONLY)  # the kernel also frees it if this process ends
    with contextlib.suppress(OSError):
        os.posix_fallocate(filler, 0, space.f_bavail * space.f_frsize)
    threading.Timer(FULL_SECONDS, os.close, [filler]).start()


def await_checkpoint() -> None:
    directory = Path(sys.argv[sys.argv.index("--output-dir") + 1]) / "checkpoints"
    until = time.monotonic() + SAVED_SECONDS
    while not checkpoint.checkpoints_in(directory) and time.monotonic() < until:
        time.sleep(0.01)


def come_to(point: str) -> bool:
    """Carry out the fault if this is its point, rank and count; tell whether a caller must carry it out itself."""
    global reached
    if ATTACK.get("point") != point or ATTACK["rank"] not in (RANK, "all"):
        return False
    reached += 1
    if reached != ATTACK["count"]:
        return False
    kind = ATTACK["kind"]
    if ATTACK.get("saved"):
        await_checkpoint()
    with STRUCK.open("a") as struck:
        struck.write(f"{time.time():.3f} {kind} of rank {RANK} at {point} {reached}\n")
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind == "raise":
        raise ZeroDivisionError("attack")
    elif kind == "spin":
        spin()
    elif kind == "sleep":  # deaf and dumb, holding Python's lock
        import ctypes

        ctypes.PyDLL(None).sleep(10_000)
    elif kind == "slow" and point != "snapshot":  # a checkpoint's copy makes progress: see `save`
        time.sleep(SLOW_SECONDS)
    elif kind == "launcher":
        kill_launcher()
    elif kind == "refill":
        fill_disk()
    elif kind == "full":
        raise OSError(28, "No space left on device")
    return True


def before(owner: object, name: str, point: str) -> None:
    """Come to `point` before each call of `owner.name`."""
    real = getattr(owner, name)

    def wrapped(*args, **kwargs):
        come_to(point)
        return real(*args, **kwargs)

    setattr(owner, name, wrapped)


before(training, "start", "start")
before(torch.Tensor, "backward", "backward")
before(training.Run, "evaluating", "evaluate")
before(Run, "_go_on", "evaluating")
before(saving.Checkpoints, "restore", "restore")
before(checkpoint, "checkpoint_digest", "digest")
before(atomic, "sync_directory", "directory")
before(writer, "prune", "prune")

real_fsync, real_replace, real_scaled, real_epoch = os.fsync, Path.replace, mnist.scaled_digits, Plan.epoch
real_save, real_snapshot = saving.Checkpoints.save, contents.snapshot


def save(self: saving.Checkpoints, *args, **named) -> None:
    struck = come_to("snapshot")
    contents.snapshot = slowly if struck and ATTACK["kind"] == "slow" else real_snapshot
    real_save(self, *args, **named)


def slowly(tensors: Mapping[str, torch.Tensor], heartbeat: Callable[[], None]) -> dict[str, torch.Tensor]:
    """Take SLOW_SECONDS for the copy of all tensors."""

    def wait() -> None:
        time.sleep(SLOW_SECONDS / len(tensors))
        heartbeat()

    return real_snapshot(tensors, wait)


def fsync(handle: int) -> None:
    come_to("fsync")
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode):  # directories are synchronized, too
        if ATTACK.get("point") == "half" and reached + 1 == ATTACK["count"] and found.st_size > 1000:
            os.ftruncate(handle, found.st_size // 2)  # as if only half had been written yet
        come_to("half")
    real_fsync(handle)


def replace(self: Path, target: Path) -> Path:
    if "step-" in str(target):
        come_to("rename")
    return real_replace(self, target)


def scaled(images: torch.Tensor) -> torch.Tensor:
    wrong = come_to("load")
    return real_scaled(images) * (float("nan") if wrong and ATTACK["kind"] == "nan" else 1.0)


def patch(engine: type[Engine]) -> None:
    before(engine, "broadcast_model", "broadcast")
    before(engine, "synchronize", "allreduce")
    real_stepping = engine.stepping

    @contextlib.contextmanager
    def stepping(self: Engine, optimizer: torch.optim.Optimizer):
        with real_stepping(self, optimizer):
            if come_to("update") and ATTACK["kind"] == "flip":
                weights = (
                    optimizer.param_groups[0]["params"][ATTACK.get("parameter", 0)].data.view(torch.int32).view(-1)
                )
                weights[3] ^= 1 << ATTACK.get("bit", 3)
            yield

    engine.stepping = stepping


def epoch(self: Plan, number: int):
    ahead = sys._getframe(1).f_code is Plan.__iter__.__code__  # for DataLoader workers: not taken yet
    return real_epoch(self, number) if ahead else logged(self, number)


def logged(self: Plan, number: int):
    """Log what each step takes, under its epoch and the number of samples still to come in it."""
    left = self.per_epoch - (self.taken if number == self.first_epoch else 0)
    for step in real_epoch(self, number):
        if PROGRAM:  # hvdtrain.mnist has a place of its own for it
            come_to("load")
        if TAKEN:
            taken = [index for batch in step.batches if batch.local_count for index in batch.indices.tolist()]
            with (Path(TAKEN) / f"{ATTEMPT}.{RANK}").open("a") as log:
                log.write(json.dumps([number, left, taken]) + "\n")
        left -= step.count
        yield step


real_listen = connection.listen_for_ranks


def listen(hosts: list[str]):
    listeners, where = real_listen(hosts)
    if come_to("listen"):
        for _, port in where.values():
            threading.Thread(target=strangers, args=(port,), daemon=True).start()
        time.sleep(0.5)  # they come first
    return listeners, where


connection.listen_for_ranks = listen
os.fsync, Path.replace, mnist.scaled_digits, Plan.epoch = fsync, replace, scaled, epoch
saving.Checkpoints.save = save
patch(engine_class("ddp" if "ddp" in sys.argv else "horovod"))
if __name__ == "__main__":  # a DataLoader worker imports this file, too
    come_to("import")
    if PROGRAM:
        sys.argv[0] = PROGRAM
        runpy.run_path(PROGRAM, run_name="__main__")
    else:
        sys.argv[0] = "hvdtrain/mnist.py"
        exit_codes.run_command(mnist.main)
