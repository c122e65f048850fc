"""How the rows of hvdtrain.gpu_day start their commands: each with a time limit, its log, and nothing left behind."""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.analysis import nvidia_smi
from hvdtrain.analysis.launching import command, complaint, members, run_job
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.launching.processes import command_line

LEAST_SECONDS = 20.0  # a command that may take less is not started
LEAST_CONTEXT = 100  # MiB; a process with CUDA holds several times as much
SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL 2.30 and newer: several ranks on one GPU


class Failed(Exception):
    """A command did something else than it must, in one line."""


class NotRun(Exception):
    """A row cannot be run here, and why."""


class Done(NamedTuple):
    """A command that ended as it must. log: what it printed. left: processes that its launcher left behind."""

    directory: Path
    log: str
    seconds: float
    left: int

    def json(self, name: str) -> Any:
        """Return the content of a file that the command wrote. Raises Failed."""
        try:
            return json.loads((self.directory / name).read_text())
        except (OSError, ValueError) as error:
            raise Failed(f"{self.directory / name} cannot be read: {error}") from error


@dataclass
class Day:
    """Where, on what, and until when the rows run."""

    directory: Path
    device: str  # "cuda", or "cpu" for a rehearsal
    quick: bool  # as small as possible
    gpus: int
    until: float  # time.monotonic()
    nccl_tests: Path | None = None  # the program all_reduce_perf
    row: str = ""
    commands: list[str] = field(default_factory=list)

    def begin(self, row: str) -> None:
        """Begin a row, without what an earlier start left of it."""
        self.row, self.commands = row, []
        shutil.rmtree(self.directory / "runs" / row, ignore_errors=True)

    @property
    def counts(self) -> list[int]:
        """The numbers of ranks to try: all that one GPU shares, or those that have one each."""
        most = 2 if self.quick else 8 if self.gpus <= 1 else self.gpus
        return [count for count in (2, 4, 8) if count <= most]

    def ranks(
        self, name: str, count: int, module: str, *flags: object, variant: str = "horovod", **options: Any
    ) -> Done:
        """Run `count` ranks of a module, as `run` does. Several ranks share a GPU where there are too few."""
        if self.device == "cuda" and count > max(1, self.gpus):
            options[SHARED] = "1"
        words = [*map(str, flags), "--device", self.device]
        return self.run(name, command(variant, count, module, words), **options)

    def run(
        self,
        name: str,
        words: Sequence[str],
        *,
        seconds: float = 240.0,
        code: int | None = 0,
        meanwhile: Callable[[str], None] | None = None,
        **variables: str,
    ) -> Done:
        """Run a command line in this row's directory `name`, which must end with exit code `code`; None: with an error.

        Raises Failed, and NotRun if the day has no time left for it.
        """
        directory = self.directory / "runs" / self.row / name
        directory.mkdir(parents=True, exist_ok=True)
        shown = ["python" if word == sys.executable else word for word in words]
        self.commands.append(" ".join([f"{key}={value}" for key, value in variables.items()] + [shlex.join(shown)]))
        left = self.until - time.monotonic()
        if left < LEAST_SECONDS:
            raise NotRun("no time left: the same command goes on here")
        log = directory / "log"
        ended = run_job(words, min(seconds, left), log, meanwhile, **variables)
        if ended.code is None:
            if seconds > left:
                raise NotRun("no time left: the same command goes on here")
            raise Failed(f"not over after {seconds:.0f} s, killed; see {log}")
        if ended.code != code if code is not None else ended.code == 0:
            wanted = "" if code == 0 else f" instead of {'an error' if code is None else code}"
            raise Failed(f"exit code {ended.code}{wanted}: {complaint(log) or 'no line says why'}; see {log}")
        return Done(directory, log.read_text(errors="replace"), ended.seconds, ended.left)

    def probe(self, name: str, *words: str, **options: Any) -> Any:
        """Run a probe, and return what it wrote."""
        file = self.directory / "runs" / self.row / name / "probe.json"
        program = [sys.executable, "-m", "hvdtrain.analysis.gpu_day.probes", words[0], str(file), *words[1:]]
        return self.run(name, program, **options).json("probe.json")


def processes_of_rank(job: str, rank: int, module: str) -> list[int]:
    """Return the processes of a job that are this rank of `module`."""
    found = []
    for pid in members(job):
        try:
            lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = command_line(pid)
            environment = dict(os.fsdecode(line).split("=", 1) for line in lines if b"=" in line)
            if module in words and "python" in words[0] and announced(environment).rank == rank:
                found.append(pid)
        except (OSError, UserError):  # it has ended
            continue
    return found


class SignalRank:
    """For `meanwhile`: sends a signal to a rank, once, when `ready`."""

    def __init__(self, rank: int, number: signal.Signals, module: str, ready: Callable[[], bool]):
        self.rank, self.number, self.module, self.ready = rank, number, module, ready
        self.sent = False

    def __call__(self, job: str) -> None:
        if self.sent or not self.ready():
            return
        for pid in processes_of_rank(job, self.rank, self.module):
            os.kill(pid, self.number)
            self.sent = True


class OnGpus(NamedTuple):
    """What is on this host's GPUs. In a container nvidia-smi lists no processes, but the memory that is used."""

    processes: set[int]
    used: int  # MiB


def on_gpus() -> OnGpus | None:
    """Return what is on this host's GPUs; None if nvidia-smi cannot tell."""
    try:
        return OnGpus(nvidia_smi.processes(), sum(gpu.memory_used for gpu in nvidia_smi.gpus()))
    except OSError:
        return None


def left_on_gpus(before: OnGpus | None, after: OnGpus | None) -> tuple[bool, str]:
    """Return whether nothing was left, as far as nvidia-smi can tell, and the end of a sentence about it."""
    if before is None or after is None:
        return True, "; no nvidia-smi to ask"
    left, more = sorted(after.processes - before.processes), after.used - before.used
    if not left and more < LEAST_CONTEXT:
        return True, "; nvidia-smi: nothing left"
    return False, f"; nvidia-smi: {more} MiB more than before, processes {', '.join(map(str, left)) or 'not listed'}"
