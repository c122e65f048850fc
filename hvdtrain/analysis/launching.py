"""Start N ranks of a module on this host as a user would, with a hard time limit, and clean up after them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import without_launcher
from hvdtrain.launching.processes import marked

MARK = "HVDTRAIN_JOB"  # environment variable of every process of a job, however its launcher starts it
TERM_SECONDS = 10.0  # time for a launcher to end its ranks

# By name: the launcher, and flags that every script accepts.
VARIANTS = {
    "horovod": ("horovodrun", ["--engine", "horovod"]),
    "horovod-gloo": ("horovodrun --gloo", ["--engine", "horovod"]),
    "horovod-untuned": ("horovodrun", ["--engine", "horovod", "--tuning", "off"]),
    "ddp": ("torchrun --standalone", ["--engine", "ddp"]),
    "ddp-untuned": ("torchrun --standalone", ["--engine", "ddp", "--tuning", "off"]),
    "dataparallel": ("", ["--engine", "dataparallel"]),
    "serial": ("", ["--engine", "serial"]),
}


def command(variant: str, ranks: int, module: str, flags: Sequence[str]) -> list[str]:
    """Return the command line that starts `ranks` ranks of `module` as `variant`. Raises UserError without the launcher."""
    launcher, engine = VARIANTS[variant]
    python = [sys.executable, "-m", module, *engine, *flags]
    if not launcher:
        return python
    name, *options = launcher.split()
    if name == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", str(ranks)]
        return [*start, *python[1:]]
    return [program(name), *options, "-np", str(ranks), *python]


def program(name: str) -> str:
    """Return the path of `name`: next to this Python, or on PATH. Raises UserError if it is in neither."""
    here = Path(sys.executable).parent
    found = shutil.which(name, path=f"{here}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise UserError(f"{name} is neither next to {sys.executable} nor on PATH: run `make setup`, or load its module")
    return found


def run_job(arguments: Sequence[str], seconds: float, log: Path) -> int | None:
    """Run a command line with its output in `log`. Return its exit code; None: it took longer than `seconds`.

    Then, or if this process is interrupted, the job and all its processes are killed: no rank outlives the call.
    """
    job = uuid.uuid4().hex
    environment = os.environ | {MARK: job}
    if Path(arguments[0]).name not in ("horovodrun", "mpirun") and "torch.distributed.run" not in arguments:
        environment = without_launcher(environment)  # a single process must not see those of an enclosing batch job
    log.unlink(missing_ok=True)
    with os.fdopen(files.open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as output:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,  # else Ctrl-C would reach the launcher and all ranks at the same time
        )  # fmt: skip
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # These wait until the clean-up is done: they neither interrupt it nor get lost.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            try:
                end(process, job)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end(process: subprocess.Popen[bytes], job: str) -> None:
    """Ask the launcher to end its ranks, which it may not wait for; then kill what is left of the job."""
    process.terminate()  # nothing, if it has ended
    until = time.monotonic() + TERM_SECONDS
    while (left := marked(f"{MARK}={job}".encode())) and (now := time.monotonic()) < until + TERM_SECONDS:
        for pid in left if now > until else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()  # reaps it, so that no zombie is left
        time.sleep(0.05)
