"""--profile: records some steps of all ranks in one file for Perfetto (ui.perfetto.dev).

Each rank records with torch.profiler. This file records, gathers and writes the data; `traces` merges them.
"""

import contextlib
import gzip
import json
import os
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from hvdtrain.data import leftovers
from hvdtrain.engines import files
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.launching import processes
from hvdtrain.output.clock import Clock
from hvdtrain.output.run_output import RunOutput
from hvdtrain.output.traces import Event, merge

if TYPE_CHECKING:
    from torch.profiler import profile as TorchProfiler

WAIT_STEPS, WARMUP_STEPS = 3, 2  # steps for memory allocation, then for start-up of the profiler
ROUNDS = 20  # barriers to compare the clocks
SLICE_BYTES = 2**20  # part of a rank's record per collective; limits memory on ranks other than 0


@dataclass
class Recording:
    """This rank's records in addition to those of torch.profiler."""

    first_step: int
    rounds: list[tuple[int, int]]  # barriers: entry, exit; `time.time_ns`
    began_ns: int
    began_counter: float  # the same moment by `time.perf_counter`
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # `Clock.spans`

    def spans_us(self) -> list[tuple[str, float, float]]:
        """Return (phase, start, duration) in microseconds since the recording began."""
        cut = [(phase, max(start, self.began_counter), end) for phase, start, end in self.spans]
        return [(phase, (start - self.began_counter) * 1e6, max(0.0, end - start) * 1e6) for phase, start, end in cut]


class Profile:
    """Records a profile. Use it as a context manager around training. Without --profile, it does nothing.

    Flags used: profile, output_dir. heartbeat: tells the watchdog that this rank makes progress.
    """

    def __init__(
        self, engine: Engine, flags: Namespace, output: RunOutput, heartbeat: Callable[[], None] = lambda: None
    ):
        self.engine, self.output, self._heartbeat = engine, output, heartbeat
        self._wanted: int = flags.profile or 0  # steps
        self.active = flags.profile is not None  # whether there is anything left to record
        self._output_dir: Path = flags.output_dir
        self._scratch, self._directory = contextlib.ExitStack(), Path()  # temporary directory of the records
        self._profiler: TorchProfiler | None = None
        self._recording: Recording | None = None
        self._seen = self._recorded = 0  # steps

    def step(self, at_step: int, clock: Clock) -> None:
        """Call it after every step. at_step: steps since the beginning of training.

        A collective at the beginning and the end of the recording. Its own time is excluded from the clock.
        """
        if not self.active:
            return
        self._seen += 1
        entered = time.perf_counter()
        opens, ends = WAIT_STEPS + WARMUP_STEPS, WAIT_STEPS + WARMUP_STEPS + self._wanted
        if self._seen == WAIT_STEPS:
            self._start(self._wanted)
        elif self._profiler is not None:
            if self._seen == opens:
                self._recording = self._open(at_step + 1)
                clock.spans = self._recording.spans
            self._profiler.step()
            self._recorded = max(0, self._seen - opens)
            if self._seen == ends:
                self._finish()
                clock.spans = None
        if self._seen in (WAIT_STEPS, opens, ends):
            clock.leave_out(time.perf_counter() - entered)

    def _start(self, wanted: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages of Kineto on stderr
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.engine.device.type == "cuda")
        steps = schedule(wait=0, warmup=WARMUP_STEPS, active=wanted, repeat=1)
        self._profiler = profile(activities=activities, schedule=steps)
        self._profiler.start()
        self._heartbeat()

    def _open(self, first_step: int) -> Recording:
        rounds = []
        for _ in range(ROUNDS):
            entry = time.time_ns()
            self.engine.barrier()
            rounds.append((entry, time.time_ns()))
        return Recording(first_step, rounds, time.time_ns(), time.perf_counter())

    def _finish(self) -> None:
        """Gather the records of all ranks; rank 0 merges and writes them. A collective."""
        ended_ns, recording = time.time_ns(), self._recording
        assert recording is not None
        self._heartbeat()
        mine = {
            "host": socket.gethostname(), "kernel": processes.boot_id() or socket.gethostname(), "rounds": recording.rounds,
            "began_ns": recording.began_ns, "ended_ns": ended_ns, "spans": recording.spans_us(),
            "events": self._torch_events(recording.began_ns),
        }  # fmt: skip
        self._heartbeat()
        gathered = self._gather(gzip.compress(json.dumps(mine).encode(), compresslevel=1))
        if self.engine.rank == 0:
            pieces = [json.loads(gzip.decompress(piece)) for piece in gathered]
            self._write(merge(pieces, recording.first_step, self._recorded))
        self.active, self._profiler = False, None
        self._scratch.close()

    def _torch_events(self, began_ns: int) -> list[Event]:
        """Return this rank's events, `ts` in microseconds since `began_ns`."""
        assert self._profiler is not None
        path = self._directory / "torch.json"
        try:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(path))
            recorded = json.loads(path.read_text())
        except (OSError, RuntimeError, ValueError) as error:
            print(f"warning: rank {self.engine.rank} has no profile ({error})", flush=True)
            return []
        base_us = (recorded.get("baseTimeNanoseconds", 0) - began_ns) / 1000
        # Processes whose pid is a string ("Spans", "Traces") describe the recording itself.
        events = [event for event in recorded["traceEvents"] if isinstance(event.get("pid"), int)]
        return [event | {"ts": event["ts"] + base_us} for event in events if "ts" in event]

    def _gather(self, piece: bytes) -> list[bytes]:
        """Return every rank's piece on rank 0, empty pieces on other ranks. A collective."""
        lengths = self.engine.all_gather_object(len(piece), "profile.length")
        parts: list[list[bytes]] = [[] for _ in lengths]
        size = min(SLICE_BYTES, max(lengths))
        for start in range(0, max(lengths), size):
            part = piece[start : start + size].ljust(size, b"\0")
            rows = self.engine.all_gather(torch.frombuffer(bytearray(part), dtype=torch.uint8), "profile.piece")
            if self.engine.rank == 0:
                for rank, row in enumerate(rows):
                    parts[rank].append(row.numpy().tobytes())
            self._heartbeat()
        return [b"".join(part)[:length] for part, length in zip(parts, lengths, strict=True)]

    def _write(self, merged: Event) -> None:
        path, other = self._output_dir / "profile.json.gz", merged["otherData"]
        try:
            with files.replacing(path, "wb") as file:
                file.write(gzip.compress(json.dumps(merged, separators=(",", ":")).encode()))
        except OSError as error:
            self.output.say(f"warning: {path} not written ({error.strerror}): training continues")
            return
        first, within_us = other["first_step"], other["clocks_within_us"]
        clocks = f"clocks within {within_us / 1000:.2f} ms of each other" if within_us else "all on one clock"
        ranks = f"{self.engine.size} rank{'s'[: self.engine.size > 1]}"
        said = f"profile: steps {first} to {first + self._recorded - 1} of {ranks}, {clocks}: {path}"
        self.output.say(f"{said} (open it at ui.perfetto.dev)")
        self.output.event("profile", first_step=first, steps=self._recorded, file=path.name)

    def __enter__(self) -> "Profile":
        if not self.active:
            return self
        with self.engine.raising_together("profile"):
            try:
                scratch = self._scratch.enter_context(leftovers.scratch("profile"))
            except OSError as error:
                wanted = "set TMPDIR to a directory that can be written"
                raise UserError(f"--profile needs a temporary directory ({error.strerror}): {wanted}") from error
        self._directory = Path(scratch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.active and error is None:
            needed = f"--profile {self._wanted} begins after {WAIT_STEPS + WARMUP_STEPS} steps"
            if self._recorded:
                self.output.say(f"profile: only {self._recorded} of {self._wanted} steps: the run is over ({needed})")
                self._finish()
            else:
                self.output.say(f"profile: nothing recorded, the run is over after {self._seen} steps ({needed})")
        self._scratch.close()
