"""--profile: records some steps of each rank with torch.profiler, one file per rank for Perfetto (ui.perfetto.dev)."""

import os
import shutil
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hvdtrain.engines import files, lines
from hvdtrain.engines.base import Engine
from hvdtrain.output.clock import Clock
from hvdtrain.output.run_output import RunOutput

if TYPE_CHECKING:
    from torch.profiler import profile as TorchProfiler

WAIT_STEPS, WARMUP_STEPS = 3, 2  # steps for memory allocation, then for start-up of the profiler
LAST_KEY, END_BYTES = b'"traceName"', 10_000  # of a whole file, and where it stands


class Profile:
    """Records a profile. Use it as a context manager around training. Without --profile, it does nothing.

    Flags used: profile, output_dir. heartbeat: tells the watchdog that this rank makes progress.
    """

    def __init__(
        self, engine: Engine, flags: Namespace, output: RunOutput, heartbeat: Callable[[], None] = lambda: None
    ):
        self.engine, self.output, self._heartbeat = engine, output, heartbeat
        self.active = flags.profile is not None  # whether there is anything left to record
        self._wanted: int = flags.profile or 0  # steps
        self._output_dir: Path = flags.output_dir
        self._profiler: TorchProfiler | None = None
        self._seen = self._first = 0  # steps seen; number of the first recorded step

    def __enter__(self) -> "Profile":
        if self.active:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages of Kineto on stderr
            from torch.profiler import ProfilerActivity, profile, schedule

            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.engine.device.type == "cuda")
            steps = schedule(wait=WAIT_STEPS, warmup=WARMUP_STEPS, active=self._wanted, repeat=1)
            self._profiler = profile(activities=activities, schedule=steps, on_trace_ready=self._write)
            self._profiler.start()
        return self

    def step(self, at_step: int, clock: Clock) -> None:
        """Call it after every step. at_step: steps since the beginning of training.

        The time to start and write the recording is excluded from the clock.
        """
        if self._profiler is None:
            return
        self._seen += 1
        entered = time.perf_counter()
        opens = WAIT_STEPS + WARMUP_STEPS
        if self._seen == opens:
            self._first = at_step + 1
        self._profiler.step()
        if self._seen in (WAIT_STEPS, opens, opens + self._wanted):
            clock.leave_out(time.perf_counter() - entered)
            self._heartbeat()

    def _write(self, profiler: Any) -> None:
        """Write this rank's file. torch.profiler calls it after the last step, or at an earlier end of the run."""
        self.active, self._profiler = False, None
        steps = min(self._seen - WAIT_STEPS - WARMUP_STEPS, self._wanted)
        if steps <= 0:
            return
        path = self._output_dir / "profile" / f"rank-{self.engine.rank}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(profiler, path)
        except (OSError, RuntimeError) as error:
            lines.warn(f"rank {self.engine.rank} has no profile ({error}): training continues")
            return
        said = f"profile: steps {self._first} to {self._first + steps - 1}, a file per rank: {path.parent}"
        self.output.say(f"{said} (open one at ui.perfetto.dev)")
        self.output.event("profile", first_step=self._first, steps=steps, directory=path.parent.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._profiler is None:
            return
        if error is not None:
            self._wanted = 0  # write nothing
        self._profiler.stop()
        if error is None:
            recorded = max(0, self._seen - WAIT_STEPS - WARMUP_STEPS)
            needed = f"--profile {self._wanted} begins after {WAIT_STEPS + WARMUP_STEPS} steps"
            self.output.say(f"profile: only {recorded} of {self._wanted} steps: the run is over ({needed})")


def write_trace(profiler: Any, path: Path) -> None:
    """Write the recording to `path`, or leave what is there. Raises OSError or RuntimeError.

    Trap: without room, torch's library writes half a file, or none, and tells nobody but its own log.
    """
    with files.replacing_several(path) as place:
        profiler.export_chrome_trace(str(place))
        end = b""
        if place.exists():
            with place.open("rb") as file:
                file.seek(-min(END_BYTES, place.stat().st_size), os.SEEK_END)
                end = file.read()
        if LAST_KEY not in end:
            raise OSError(f"no room for {path}, with {shutil.disk_usage(path.parent).free:,} bytes free")
