"""Start real launchers from a test, with a hard time limit, and leave nothing behind."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hidden_gpus import HIDDEN
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PYTHON = shlex.quote(sys.executable)  # for command lines: the clone may lie under a path with a blank
GRACE_SECONDS = (
    60.0  # for what is ending: DataLoader workers that import the program themselves took 32 s on a busy machine
)
MARK = "HVDTRAIN_TEST_JOB"  # every process of a job carries it in its environment, wherever its launcher puts it

# Ours come first; --oversubscribe because a test machine may have fewer cores than a test has ranks.
LAUNCHERS = {
    "mpirun": os.environ.get("HVDTRAIN_TEST_MPIRUN", "mpirun --oversubscribe") + " -np {ranks}",
    "horovodrun": "horovodrun -np {ranks}",
    "gloo": "horovodrun --gloo -np {ranks}",
    "starter": f"{PYTHON} -m hvdtrain.starter --oversubscribe --local-ranks {{ranks}}",
}
TORCHRUN = "torchrun --standalone --nproc-per-node {ranks}"  # starts Python itself: no interpreter before -m


@dataclass
class Done:
    code: int
    stdout: str
    stderr: str
    seconds: float
    left_behind: int = 0  # processes that outlived the launcher by more than GRACE_SECONDS

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def environment(**extra: str) -> dict[str, str]:
    """Return the activated environment; as root, Open MPI wants to be told twice that it may."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "HOROVOD_", "SLURM_"))}
    base |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    base |= {"OMP_WAIT_POLICY": "passive"}  # threads that wait leave the cores to others: tests run side by side
    if os.geteuid() == 0:
        base |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return base | HIDDEN | extra


def new_job() -> str:
    """Return the name of a new job, which begins as that of the test's own: what it leaves behind is found by either."""
    return f"{os.environ.get(MARK, 'job')}.{uuid.uuid4().hex}"


@contextlib.contextmanager
def running(
    command: str | Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT, **streams
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a command line in a session of its own; yield it and its job's name. What is left is killed at the end.

    env: variables beside those of `environment`. streams: of `subprocess.Popen`; there is nothing to read.
    """
    job, own = new_job(), environment(**(env or {}))
    process = subprocess.Popen(
        shlex.split(command) if isinstance(command, str) else command, cwd=cwd, env=own | {MARK: job}, text=True,
        start_new_session=True, **{"stdin": subprocess.DEVNULL, **streams},
    )  # fmt: skip
    try:
        yield process, job
    finally:
        kill(job)
        process.wait()
        for stream in filter(None, (process.stdout, process.stderr)):
            stream.close()


def launch(command: str, *, timeout: float = 240, cwd: Path = ROOT, **extra: str) -> Done:
    """Run a command line to its end. Raises AssertionError where it is not over in `timeout` seconds."""
    began = time.monotonic()
    with running(command, env=extra, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as (process, job):
        try:
            stdout, stderr = process.communicate(timeout=timeout)
            seconds = time.monotonic() - began
        except subprocess.TimeoutExpired:
            kill(job)
            stdout, stderr = process.communicate()
            raise AssertionError(f"not over after {timeout:.0f} s: {command}\n{stdout}\n{stderr}") from None
        return Done(process.returncode, stdout, stderr, seconds, len(remaining(job)))


def members(job: str) -> list[int]:
    """Return the live processes of a job, found by their environment."""
    needle, found = f"{MARK}={job}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if needle in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def remaining(job: str, own: Collection[str] = ()) -> list[str]:
    """Return number and command of the processes of a job that its launcher left behind, but not of the programs `own`.

    Those that are about to end have GRACE_SECONDS for it: mpirun does not wait for the ssh that it has started.
    """
    until = time.monotonic() + GRACE_SECONDS
    while (left := _commands(job, own)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _commands(job: str, own: Collection[str]) -> list[str]:
    found = []
    for pid in members(job):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() not in own:
                command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
                found.append(f"{pid} {command}".strip())
    return found


def kill(job: str) -> None:
    for pid in members(job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def train(launcher: str, ranks: int, flags: str = "", **options) -> Done:
    """Run `hvdtrain.mnist` under a launcher; where `flags` names no data, one epoch of the embedded digits.

    Where it names no model, convnet: the tests count its steps. test_mnist.py has the default.
    """
    if "--model" not in flags:
        flags = f"--model convnet {flags}"
    if "--dataset" not in flags:
        flags = f"--dataset digits --epochs 1 {flags}"
    start = LAUNCHERS[launcher].format(ranks=ranks) if launcher != "alone" else ""
    return launch(f"{start} {PYTHON} -m hvdtrain.mnist --no-progress {flags}", **options)


def several(
    launcher: str, ranks: int, directory: Path, runs: Mapping[str, str], script: str = "hvdtrain.mnist", **options
) -> dict[str, Done]:
    """Run a script with each of `runs` (name -> [NAME=VALUE] flags), one after the other in one job: torch is imported once.

    Return what became of each: the exit code, the same on every rank; what the ranks said, one after the other.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "runs.json").write_text(json.dumps({name: shlex.split(flags) for name, flags in runs.items()}))
    start = LAUNCHERS[launcher].format(ranks=ranks) if launcher != "alone" else ""
    words = [sys.executable, str(ROOT / "tests" / "e2e" / "several_runs.py"), script, str(directory)]
    done = launch(f"{start} {shlex.join(words)}", **{"timeout": 300, **options})
    assert done.code == 0, done
    assert done.left_behind == 0, done
    found = {}
    for name in runs:
        code, out, err = (
            [(directory / f"{name}.{rank}.{what}").read_text() for rank in range(ranks)]
            for what in ("code", "out", "err")
        )
        assert len(set(code)) == 1, (name, code, err)
        found[name] = Done(int(code[0]), "".join(out), "".join(err), done.seconds)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def summary(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def events(directory: Path, name: str | None = None) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if name in (None, line["event"])]


def wait_for_training(directory: Path) -> None:
    record = directory / "metrics.jsonl"
    wait_for(lambda: record.exists() and events(directory, "train"), "training did not begin within two minutes", 120)
