"""What a run leaves behind and shows: metrics.jsonl, summary.json, the progress display, the clock of each phase.

Only rank 0 writes and speaks; on the other ranks every method is there and does nothing.
"""

import contextlib
import hashlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from hvdtrain import files
from hvdtrain.engines.base import World
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    import tqdm

PLAIN_LINE_SECONDS = 10.0  # without a terminal: at most one line of progress in so many seconds


class Clock:
    """Where this rank's time goes: each `mark` books the time since the one before on a phase. Seconds as the host sees
    them: on CUDA, work that was only queued is booked where the host waits for it."""

    PHASES = ("loading", "compute", "communication")

    def __init__(self) -> None:
        self._began = self._marked = time.perf_counter()
        self._open_window()

    def _open_window(self) -> None:
        self._window_began = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._samples = self._local_samples = 0

    def mark(self, phase: str, at: float | None = None) -> None:
        """Book the time up to `at` (`time.perf_counter`; default now) on `phase`."""
        at = time.perf_counter() if at is None else at
        self._seconds[phase] += at - self._marked
        self._marked = at

    def count(self, samples: int, local_samples: int) -> None:
        """Count a step's samples: over all ranks, and on this one."""
        self._samples += samples
        self._local_samples += local_samples

    def rates(self) -> dict[str, float]:
        """Return samples per second over all ranks and seconds per sample of this rank by phase, since the last call."""
        elapsed = time.perf_counter() - self._window_began
        rates = {"samples_per_second": self._samples / elapsed}
        for phase in self.PHASES:
            rates[f"{phase}_seconds"] = self._seconds[phase] / max(self._local_samples, 1)
        self._open_window()
        return rates

    def lap(self) -> float:
        """Return the seconds since this clock was made, or since the last lap."""
        began, self._began = self._began, time.perf_counter()
        return self._began - began


class Telemetry:
    """Owns a run's output. Raises UserError where `output_dir` cannot be written.

    continued: the run in `output_dir` goes on, and so does its metrics.jsonl; else that is kept under another name.
    """

    def __init__(self, world: World, output_dir: Path | None, *, progress: bool, continued: bool = False):
        self.speaks = world.rank == 0
        self._lock = threading.Lock()
        self.output_dir = output_dir if self.speaks else None
        self._file = None
        self._bar: tqdm.tqdm | None = None
        self._progress = progress and self.speaks
        self._last_line = time.monotonic()
        if self.output_dir is not None:
            self._file = self._open(self.output_dir, continued)

    @staticmethod
    def _open(directory: Path, continued: bool):
        path = directory / "metrics.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if continued and path.exists() and not path.is_symlink():
                _drop_half_a_line(path)
            elif os.path.lexists(path):  # an earlier run's, or a link: nothing is lost
                path.rename(_free_name(directory))
            (directory / "summary.json").unlink(missing_ok=True)
            return files.open_to_append(path)
        except OSError as error:
            message = f"--output-dir {directory} cannot be written ({error.strerror}): name another, or make room"
            raise UserError(message) from error

    def say(self, line: str) -> None:
        """Print a line on rank 0, above the progress bar where there is one."""
        if not self.speaks:
            return
        if self._bar is not None:
            self._bar.clear()
        print(line, flush=True)

    def event(self, name: str, **fields: object) -> None:
        """Append one JSON object to metrics.jsonl."""
        line = json.dumps({"event": name, "time": time.time(), **fields}, default=str) + "\n"
        with self._lock:  # checkpoints are written, and hung ranks noticed, in threads of their own
            self._write(line)

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:  # a full disk: what is lost is a line of the record, not the training
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
            print(f"warning: {self.output_dir}/metrics.jsonl ends here ({error.strerror})", file=sys.stderr, flush=True)

    def start(self, world: World, dataset: str, reason: str, config: dict[str, object]) -> None:
        """Say what is about to run and why: first the data, then the ranks and each automatic choice."""
        facts = {"rank": world.rank, "host": socket.gethostname(), "pid": os.getpid(), "device": str(world.device)}
        ranks = world.gather(facts, "ranks")
        hosts = len({rank["host"] for rank in ranks})
        self.say(f"data: {reason}")
        self.say(
            f"{world.size} rank{'s'[: world.size > 1]} on {hosts} host{'s'[: hosts > 1]}, {world.description}, "
            f"{world.device.type}, {torch.get_num_threads()} torch thread{'s'[: torch.get_num_threads() > 1]} per rank"
        )
        if world.notes:
            self.say(f"automatic: {'; '.join(world.notes)}")
        self.event(
            "start", world_size=world.size, engine=world.engine, dataset=dataset, reason=reason, config=config,
            versions=versions(), ranks=ranks, automatic=world.notes,
        )  # fmt: skip

    def progress(self, epoch: int, epochs: int, step: int, steps: int, text: str) -> None:
        """Show where training stands: one bar on a terminal, elsewhere a plain line now and then."""
        if not self._progress:
            return
        if not sys.stderr.isatty():
            if time.monotonic() - self._last_line >= PLAIN_LINE_SECONDS:
                self._last_line = time.monotonic()
                self.say(f"epoch {epoch}/{epochs}  step {step}/{steps}  {text}")
            return
        if self._bar is None:
            import tqdm

            self._bar = tqdm.tqdm(total=steps, unit="step", leave=False, dynamic_ncols=True)
        bar = self._bar
        bar.set_description(f"epoch {epoch}/{epochs}", refresh=False)
        bar.set_postfix_str(text, refresh=False)
        bar.update(step - bar.n)

    def end(self, summary: dict[str, object]) -> None:
        """Write summary.json (complete or absent) and the `end` event."""
        self.event("end", **summary)
        if self.output_dir is not None:
            try:
                with files.replacing(self.output_dir / "summary.json") as file:
                    file.write(json.dumps(summary, indent=2) + "\n")
            except OSError as error:
                said = f"warning: {self.output_dir}/summary.json not written ({error.strerror}): {json.dumps(summary)}"
                print(said, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "Telemetry":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _drop_half_a_line(path: Path) -> None:
    """Cut what a killed writer left after the last complete line."""
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _free_name(directory: Path) -> Path:
    number = 1
    while os.path.lexists(path := directory / f"metrics.{number}.jsonl"):
        number += 1
    return path


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("hvdtrain", "horovod"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def parameters_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of the parameters' bytes, in `state_dict` order (buffers left out)."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def seconds_since_process_start() -> float:
    """Return the age of this process in seconds, imports included (proc(5): field 22 of stat, in clock ticks)."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime_seconds = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_seconds - started_ticks / os.sysconf("SC_CLK_TCK")
