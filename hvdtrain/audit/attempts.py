"""Start the audited program, end it where it is to end, and read what its ranks have recorded."""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

BOOT = Path(__file__).resolve().parent / "boot"
VARIABLE = "HVDTRAIN_AUDIT"
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# Several ranks on a machine with fewer cores, and as root in a container: what the options of mpirun would say, which
# differ between Open MPI 4, Open MPI 5 and MPICH.
OPEN_MPI = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
OPEN_MPI |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
Step = dict[str, Any]  # a line of the recorder: boot/sitecustomize.py


class NotAudited(Exception):
    """The audit can't be run, or would say nothing. The message has the remedy."""


@dataclass
class Trace:
    """What one rank has done. evaluations: digests of inputs and results of each call, by the number of steps before it."""

    steps: list[Step] = field(default_factory=list)
    evaluations: dict[int, list[list[str]]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)


@dataclass
class Run:
    """A run of the program that has ended. code: None if it had to be ended after its time."""

    code: int | None
    seconds: float
    ranks: dict[int, Trace]
    said: Path
    left: list[str]  # processes that outlived the launcher
    files: dict[str, int]  # sizes of what lies under {out}
    metrics: dict[str, str] | None  # the last of each place where they were found; None: they are not asked for
    in_grace: bool = True  # it ended within the grace time after SIGTERM

    @property
    def steps(self) -> int:
        return max((len(trace.steps) for trace in self.ranks.values()), default=0)

    @property
    def has_indices(self) -> bool:
        """Whether DataLoaders told which samples they are."""
        rows = (row for trace in self.ranks.values() for step in trace.steps for row in step["rows"])
        return any(index is not None for _, index in rows)

    def trace(self, rank: int) -> Trace:
        return self.ranks.get(rank, Trace())

    def last_line(self) -> str:
        lines = [line for line in self.said.read_text(errors="replace").splitlines() if re.search(r"\w", line)]
        return lines[-1].strip()[-200:] if lines else "it said nothing"


@dataclass
class Program:
    command: Sequence[str]
    launcher: str
    folder: Path
    grace_seconds: float
    metric_regex: str | None = None
    leaving_seconds: float = 15.0  # for DataLoader workers, which look every 5 s whether their rank is alive

    def words(self, ranks: int, out: Path) -> list[str]:
        """Return the command line."""
        words = [word.replace("{out}", str(out)) for word in self.command]
        if words[0] == "-m" or words[0].endswith(".py"):
            words = [sys.executable, *words]
        if self.launcher == "torchrun":
            words = words[1:] if words[0] == sys.executable else ["--no-python", *words]
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
        return words if self.launcher == "none" else [self.launcher, "-np", str(ranks), *words]

    def run(
        self, name: str, out: Path, ranks: int, seconds: float, kill: dict[str, Any] | None = None, read: object = None
    ) -> Run:
        """Run it to its end. kill: see `draw`; read: the recorder. Raises NotAudited if it can't be started."""
        log, lost, words = self.folder / name, self.folder / f"{name}.lost", self.words(ranks, out)
        order = {"log": str(log), "out": str(out), "whole": read, "kill": kill}
        environment = OPEN_MPI | os.environ | {VARIABLE: json.dumps(order)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BOOT), os.environ.get("PYTHONPATH")]))
        began, said = time.monotonic(), self.folder / f"{name}.txt"
        try:
            process = subprocess.Popen(
                words, bufsize=0, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_the_audit,
            )  # fmt: skip
        except OSError as error:
            raise NotAudited(f"{words[0]} can't be started: {error.strerror}") from None
        copying = threading.Thread(target=copy, args=(process.stdout, said, lost), daemon=True)
        copying.start()
        try:
            ended = self.ends(process, log, began + seconds, kill)
            left = outlasting(log, self.leaving_seconds) if ended else []
            hangs = not ended and time.monotonic() >= began + seconds
        finally:
            for pause in (0.05, 0.0):  # twice: a process that is just being started shows no environment for a moment
                outlasting(log, float("inf"), end_them=True)
                time.sleep(pause)
            code = process.wait()
            copying.join(5)
        if lost.exists():
            raise NotAudited(f"{self.folder} is full, and what a rank did is not known: choose another --output-dir")
        files = {str(path.relative_to(out)): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}
        texts = {"its output": said} | {name: out / name for name, size in files.items() if size < 1 << 24}
        found, in_grace = metrics(self.metric_regex, texts), ended or not kill or kill["how"] != "term"
        return Run(None if hangs else code, time.monotonic() - began, traces(log), said, left, files, found, in_grace)

    def ends(self, process: subprocess.Popen[bytes], log: Path, end: float, kill: dict[str, Any] | None) -> bool:
        """Wait for the launcher's end. False: it is to be killed. A rank is at the place, or a time is over."""
        while process.poll() is None and time.monotonic() < end:
            if kill and Path(f"{log}.asked").exists():
                if kill["how"] != "term":
                    return False
                process.send_signal(signal.SIGTERM)
                Path(f"{log}.sent").touch()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(self.grace_seconds, end - time.monotonic()))
                break
            time.sleep(0.005)
        return process.poll() is not None


def end_with_the_audit() -> None:
    """Have the kernel send SIGTERM to this process, a launcher or a program, when the audit ends, as by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def copy(said: IO[bytes], path: Path, lost: Path) -> None:
    """Copy what the program says to a file, to its end. lost: made if a part of it could not be written."""
    # The program does not write this file itself: the limit of sizes that tears a checkpoint would hold for it, too.
    with path.open("wb", buffering=0) as file:
        while part := said.read(1 << 16):
            written = 0
            # On a full disk, all that is said is still read: else the program waits for a reader.
            with contextlib.suppress(OSError):
                written = file.write(part)
            if written < len(part):
                lost.touch()


def members(log: Path) -> Iterator[tuple[int, str]]:
    """Yield number and command line of the processes of a run, wherever its launcher has put them."""
    # Wherever a launcher has put a rank, its environment has the audit's variable.
    mark = f'{VARIABLE}={{"log": {json.dumps(str(log))},'.encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and mark in (folder / "environ").read_bytes():
                yield int(folder.name), (folder / "cmdline").read_text(errors="replace").replace("\0", " ")[:120]


def outlasting(log: Path, seconds: float, end_them: bool = False) -> list[str]:
    """Return the commands of processes of a run that are still there after so long, or end them."""
    end = time.monotonic() + seconds
    while (processes := list(members(log))) and time.monotonic() < end:  # again: one may have forked meanwhile
        for number, _ in processes if end_them else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)
    return [command for _, command in processes]


def metrics(expression: str | None, places: dict[str, Path]) -> dict[str, str] | None:
    if expression is None:
        return None
    found = {name: re.findall(expression, path.read_text(errors="replace")) for name, path in places.items()}
    return {name: "".join(matches[-1]) for name, matches in found.items() if matches}


def traces(log: Path) -> dict[int, Trace]:
    """Return what each rank has recorded. Processes of one rank that followed each other count as one."""
    logs = []
    for path in log.parent.glob(f"{log.name}.[0-9]*.[0-9]*"):
        lines = [
            json.loads(text) for text in path.read_text().split("\n")[:-1]
        ]  # the last one may be cut off by the kill
        began = next((line["time"] for line in lines if line["kind"] == "step"), 0.0)
        logs.append((int(path.name.split(".")[-2]), began, path.name, lines))
    ranks: dict[int, Trace] = {}
    for number, began, _, lines in sorted(logs):
        trace = ranks.setdefault(number, Trace())
        if trace.steps and began and began < trace.steps[-1]["time"]:
            known = "the audit reads a rank from torch.distributed or from the launcher's variables, such as RANK"
            raise NotAudited(f"several processes that train at the same time call themselves rank {number}: {known}")
        for line in lines:
            if line["kind"] == "step":
                contents = array("I", bytes.fromhex(line.pop("contents", "")))
                line["rows"] = list(zip(contents, line.pop("indices", ()), strict=True))
                trace.steps.append(line)
            elif line["kind"] == "evaluation":
                trace.evaluations.setdefault(len(trace.steps), []).append(line["call"])
            else:
                trace.unreadable.append(line["error"])
    return ranks
