"""--profile: records some steps of each rank with torch.profiler, one file per rank for Perfetto (ui.perfetto.dev)."""

import os
import shutil
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.engines import atomic, files, lines
from hvdtrain.engines.base import Engine
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step
from hvdtrain.output.run_output import RunOutput

if TYPE_CHECKING:
    from torch.profiler import profile as TorchProfiler

WAIT_STEPS, WARMUP_STEPS = 3, 2  # steps for memory allocation, then for start-up of the profiler
LAST_KEY, END_BYTES = b'"traceName"', 10_000  # of a whole file, and where it stands


class Profile(Feature):
    """Records a profile. The time to start and write the recording is excluded from the clock.

    Flags used: profile, output_dir. heartbeat: tells the watchdog that this rank makes progress.
    """

    def __init__(
        self, engine: Engine, flags: Namespace, output: RunOutput, heartbeat: Callable[[], None] = lambda: None
    ):
        self.engine, self.output, self._heartbeat = engine, output, heartbeat
        self._wanted: int = flags.profile  # steps
        self._output_dir: Path = flags.output_dir
        self._profiler: TorchProfiler | None = None
        self._seen = self._first = 0  # steps seen; number of the first recorded step

    def prepare(self, run: Run) -> None:
        self._clock, self._drop = run.clock, lambda: run.features.drop(self)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages of Kineto on stderr
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.engine.device.type == "cuda")
        steps = schedule(wait=WAIT_STEPS, warmup=WARMUP_STEPS, active=self._wanted, repeat=1)
        self._profiler = profile(activities=activities, schedule=steps, on_trace_ready=self._write)
        self._profiler.start()

    def after_step(self, step: Step) -> None:
        assert self._profiler is not None
        self._seen += 1
        entered = time.perf_counter()
        opens = WAIT_STEPS + WARMUP_STEPS
        if self._seen == opens:
            self._first = step.number + 1
        self._profiler.step()
        if self._seen in (WAIT_STEPS, opens, opens + self._wanted):
            self._clock.leave_out(time.perf_counter() - entered)
            self._heartbeat()
        if self._profiler is None:
            self._drop()

    def _write(self, profiler: Any) -> None:
        """Write this rank's file. torch.profiler calls it after the last step, or at an earlier end of the run."""
        self._profiler = None
        steps = min(self._seen - WAIT_STEPS - WARMUP_STEPS, self._wanted)
        if steps <= 0:
            return
        path = self._output_dir / "profile" / f"rank-{self.engine.rank}.json"
        try:
            files.make_directory(path.parent)
            write_trace(profiler, path)
        except (OSError, RuntimeError) as error:
            lines.warn(
                f"rank {self.engine.rank} has no profile ({getattr(error, 'strerror', None) or error}): training continues"
            )
            return
        message = f"profile: steps {self._first} to {self._first + steps - 1}, a file per rank: {path.parent}"
        self.output.say(f"{message} (open one at ui.perfetto.dev)")
        self.output.event("profile", first_step=self._first, steps=steps, directory=path.parent.name)

    def close(self, *, failed: bool) -> None:
        if self._profiler is None:
            return
        if failed:
            self._wanted = 0  # write nothing
        self._profiler.stop()
        if not failed:
            recorded = max(0, self._seen - WAIT_STEPS - WARMUP_STEPS)
            needed = f"--profile {self._wanted} begins after {WAIT_STEPS + WARMUP_STEPS} steps"
            self.output.say(f"profile: only {recorded} of {self._wanted} steps: the run is over ({needed})")


def write_trace(profiler: Any, path: Path) -> None:
    """Write the recording to `path`, or leave what is there. Raises OSError or RuntimeError.

    Trap: without room, torch's library writes half a file, or none, and tells nobody but its own log.
    """
    with atomic.replacing_several(path) as place:
        profiler.export_chrome_trace(str(place))
        end = b""
        if place.exists():
            with place.open("rb") as file:
                file.seek(-min(END_BYTES, place.stat().st_size), os.SEEK_END)
                end = file.read()
        if LAST_KEY not in end:
            raise OSError(f"no room for {path}, with {shutil.disk_usage(path.parent).free:,} bytes free")
