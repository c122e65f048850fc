"""Start N ranks of a module as a user would, with a hard time limit, and clean up after them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import without_launcher

MARK = "HVDTRAIN_JOB"  # environment variable of every process of a job, however its launcher starts it
INTERRUPTED = 130  # exit code as in shells: 128 + SIGINT
TERM_SECONDS = 10.0  # time for a launcher to end its ranks, on this host and others

# By name: the launcher, and flags that every script accepts.
VARIANTS = {
    "horovod": ("horovodrun", ["--engine", "horovod"]),
    "horovod-gloo": ("horovodrun --gloo", ["--engine", "horovod"]),
    "horovod-untuned": ("horovodrun", ["--engine", "horovod", "--tuning", "off"]),
    "ddp": ("torchrun", ["--engine", "ddp"]),
    "ddp-untuned": ("torchrun", ["--engine", "ddp", "--tuning", "off"]),
    "dataparallel": ("", ["--engine", "dataparallel"]),
    "serial": ("", ["--engine", "serial"]),
}


class Ended(NamedTuple):
    """How a job ended. code: exit code of the launcher; None if the job exceeded its time limit and was killed."""

    code: int | None
    seconds: float


def slots(hosts: str) -> dict[str, int]:
    """Return the slots of each host of "a:4,b:4". Raises UserError for other formats."""
    found: dict[str, int] = {}
    for host in hosts.split(","):
        name, _, number = host.rpartition(":")
        if not name or not re.fullmatch("[1-9][0-9]{0,5}", number):
            raise UserError(f"--hosts {hosts}: {host!r} is not NAME:SLOTS; write a:4,b:4")
        found[name] = found.get(name, 0) + int(number)
    return found


def command(
    variant: str, ranks: int, module: str, flags: Sequence[str], hosts: str | None = None, interface: str | None = None
) -> list[str]:
    """Return the command line that starts `ranks` ranks of `module` as `variant`, on `hosts` ("a:4,b:4") or on this host.

    interface: network interface that connects the hosts (default: the launcher searches for it). On several hosts, mpirun
    starts the ranks: torchrun would have to be started on each host, and horovodrun would call an mpirun that is not found
    on other hosts if ssh sets no PATH. Raises UserError if the launcher is not installed.
    """
    launcher, engine = VARIANTS[variant]
    python = [sys.executable, "-m", module]
    if launcher == "torchrun" and hosts is None:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [*start, "-m", module, *engine, *flags]
    if launcher in ("torchrun", "horovodrun") and hosts is not None:
        # Over ssh, a rank has none of this shell's environment; horovodrun --gloo passes it on by itself.
        carried = [
            part for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ for part in ("-x", name)
        ]
        if interface:
            carried += ["--mca", "btl_tcp_if_include", interface, "-x", f"GLOO_SOCKET_IFNAME={interface}"]
        return [program("mpirun"), "-np", str(ranks), "-H", str(hosts), *carried, *python, *engine, *flags]
    if launcher:
        name, *options = launcher.split()
        where = [] if hosts is None else ["-H", hosts]
        where += ["--network-interfaces", interface] if hosts and interface else []
        return [program(name), *options, "-np", str(ranks), *where, *python, *engine, *flags]
    return [*python, *engine, *flags]


def program(name: str) -> str:
    """Return the path of `name`: next to this Python, or on PATH. Raises UserError if it is in neither."""
    here = Path(sys.executable).parent
    found = shutil.which(name, path=f"{here}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise UserError(f"{name} is neither next to {sys.executable} nor on PATH: run `make setup`, or load its module")
    return found


def run_job(arguments: Sequence[str], seconds: float, log: Path) -> Ended:
    """Run a command line with its output in `log`, and return how it ended.

    After `seconds`, or if this process is interrupted, the job and all its processes are killed: no rank outlives the call.
    """
    job = uuid.uuid4().hex
    environment = os.environ | {MARK: job}
    if not is_launcher(arguments):  # a single process must not see the variables of an enclosing batch job
        environment = without_launcher(environment)
    began = time.monotonic()
    log.unlink(missing_ok=True)
    with os.fdopen(files.open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as output:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,  # else Ctrl-C would reach the launcher and all ranks at the same time
        )  # fmt: skip
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            taken = time.monotonic() - began
            # Ctrl-C and SIGTERM wait until the clean-up is done: they neither interrupt it nor get lost.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            try:
                end(process, job)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Ended(code, taken)


def complaint(log: Path) -> str:
    """Return the line of a job's log that says why it failed, or "". The script's own comes before the launcher's."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line]
    return lines[0].strip() if lines else ""


def is_launcher(arguments: Sequence[str]) -> bool:
    """Tell whether a command line starts a launcher."""
    return Path(arguments[0]).name in ("horovodrun", "mpirun") or "torch.distributed.run" in arguments


def interrupt(number: int, frame: object) -> None:
    """Signal handler: raise KeyboardInterrupt."""
    raise KeyboardInterrupt


def end(process: subprocess.Popen[bytes], job: str) -> None:
    """Ask the launcher to end its ranks, as only it can on other hosts; then kill what is left on this host."""
    patience = TERM_SECONDS  # mpirun does not wait for what it has started to end
    if process.poll() is None:
        patience = 0.0
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=TERM_SECONDS)
    began = time.monotonic()
    while (left := members(job)) and (waited := time.monotonic() - began) < patience + TERM_SECONDS:
        for pid in left if waited >= patience else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()  # reaps it, so that no zombie is left
        time.sleep(0.05)


def members(job: str) -> list[int]:
    """Return the process ids of `job` on this host, found by their environment."""
    needle, found = f"{MARK}={job}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if needle in path.read_bytes():
                found.append(int(path.parent.name))
    return found
