"""Start the audited program, end it where it is to end, and read what its ranks have recorded."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from hvdtrain.launching.processes import marked

BOOT = Path(__file__).resolve().parent / "boot"
VARIABLE = "HVDTRAIN_AUDIT"
Step = dict[str, Any]  # a line of the recorder


class NotAudited(Exception):
    """The audit can't be run, or would say nothing. The message has the remedy."""


@dataclass
class Trace:
    """What one rank has done."""

    steps: list[Step] = field(default_factory=list)
    evaluations: list[Step] = field(default_factory=list)
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
    in_grace: bool = True  # it ended within the grace time after SIGTERM

    @property
    def steps(self) -> int:
        return max((len(trace.steps) for trace in self.ranks.values()), default=0)

    def last_line(self) -> str:
        lines = [line for line in self.said.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[-200:] if lines else "it said nothing"


@dataclass
class Program:
    command: Sequence[str]
    launcher: str
    folder: Path
    grace_seconds: float
    leaving_seconds: float = 15.0  # for DataLoader workers, which look every 5 s whether their rank is alive

    def words(self, ranks: int, out: Path) -> list[str]:
        """Return the command line."""
        words = [word.replace("{out}", str(out)) for word in self.command]
        if words[0] == "-m" or words[0].endswith(".py"):
            words = [sys.executable, *words]
        if self.launcher == "torchrun":
            words = words[1:] if words[0] == sys.executable else ["--no-python", *words]
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
        if self.launcher in ("mpirun", "horovodrun"):
            return [self.launcher, "-np", str(ranks), *words]
        return words

    def run(
        self, name: str, out: Path, ranks: int, seconds: float, kill: dict[str, Any] | None = None, whole: bool = False
    ) -> Run:
        """Run it to its end. kill: see `draw`. Raises NotAudited if it can't be started."""
        log = self.folder / name
        order = {"log": str(log), "out": str(out), "whole": whole, "kill": kill}
        environment = {**os.environ, VARIABLE: json.dumps(order)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BOOT), os.environ.get("PYTHONPATH")]))
        for setting, value in OPEN_MPI.items():
            environment.setdefault(setting, value)
        said = self.folder / f"{name}.txt"
        began = time.monotonic()
        # Not a file: the limit that tears a checkpoint would hold for it.
        try:
            process = subprocess.Popen(
                self.words(ranks, out), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise NotAudited(f"{self.words(ranks, out)[0]} can't be started: {error.strerror}") from None
        try:
            with said.open("wb") as file:
                assert process.stdout is not None
                copying = threading.Thread(target=copy, args=(process.stdout, file), daemon=True)
                copying.start()
                code, in_grace = self.wait(process, log, began + seconds, kill)
                left = leavers(log, self.leaving_seconds)
                kill_all(log)
                copying.join(5)
        finally:
            kill_all(log)
            process.wait()
        taken = time.monotonic() - began
        files = {str(path.relative_to(out)): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}
        return Run(code, taken, traces(log), said, left, files, in_grace)

    def wait(
        self, process: subprocess.Popen[bytes], log: Path, end: float, kill: dict[str, Any] | None
    ) -> tuple[int | None, bool]:
        """Wait for the launcher's end, and kill or ask when a rank says that it is at the place."""
        asked, grace_end = Path(f"{log}.asked"), None
        while (code := process.poll()) is None:
            if kill and grace_end is None and asked.exists():
                if kill["how"] == "all":
                    kill_all(log)
                else:
                    process.send_signal(signal.SIGTERM)
                    Path(f"{log}.sent").touch()
                grace_end = time.monotonic() + self.grace_seconds
            if grace_end is not None and time.monotonic() > grace_end:
                kill_all(log)
                return process.wait(), False
            if time.monotonic() > end:
                kill_all(log)
                process.wait()
                return None, True
            time.sleep(0.005)
        return code, True


# Several ranks on a machine with fewer cores, and as root in a container: what the options of mpirun would say, which
# differ between Open MPI 4, Open MPI 5 and MPICH.
OPEN_MPI = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
OPEN_MPI |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def copy(source: BinaryIO, target: BinaryIO) -> None:
    with contextlib.suppress(ValueError, OSError):  # closed, where a process that was left behind holds the pipe
        while data := source.read1(1 << 16):  # type: ignore[attr-defined]
            target.write(data)
            target.flush()


def members(log: Path) -> list[int]:
    """Return the processes of a run, wherever its launcher has put them: each has the audit's variable."""
    return marked(f'{VARIABLE}={{"log": {json.dumps(str(log))},'.encode())


def kill_all(log: Path) -> None:
    while pids := members(log):  # again: one may have forked meanwhile
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def leavers(log: Path, seconds: float) -> list[str]:
    """Return the commands of processes that are still there a while after their launcher's end."""
    end = time.monotonic() + seconds
    while (pids := members(log)) and time.monotonic() < end:
        time.sleep(0.05)
    commands = []
    for pid in pids:
        with contextlib.suppress(OSError):
            commands.append(
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
            )
    return commands


def traces(log: Path) -> dict[int, Trace]:
    """Return what each rank has recorded. Processes of one rank that followed each other count as one."""
    processes: dict[int, list[list[Step]]] = {}
    for path in log.parent.glob(f"{log.name}.*.*"):
        _, rank, pid = path.name.rsplit(".", 2)
        if not (rank.isdigit() and pid.isdigit()):
            continue
        lines = []
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut off by the kill
                lines.append(json.loads(text))
        processes.setdefault(int(rank), []).append(lines)
    ranks = {}
    for number, logs in sorted(processes.items()):
        trace = ranks[number] = Trace()
        ends = 0.0
        for lines in sorted(logs, key=lambda lines: min((line["time"] for line in lines if "time" in line), default=0)):
            steps = [line for line in lines if line["kind"] == "step"]
            if steps and steps[0]["time"] < ends:
                raise NotAudited(
                    f"several processes that train at the same time call themselves rank {number}: the audit reads a rank"
                    " from torch.distributed or from the launcher's variables, such as RANK"
                )
            ends = steps[-1]["time"] if steps else ends
            offset = len(trace.steps)
            trace.evaluations += [
                line | {"after": line["after"] + offset} for line in lines if line["kind"] == "evaluation"
            ]
            trace.unreadable += [line["error"] for line in lines if line["kind"] == "unreadable"]
            trace.steps += steps
    return ranks


def remove(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
