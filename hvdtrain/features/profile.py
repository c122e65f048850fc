"""--profile: records some steps of each rank with torch.profiler, one file per rank for Perfetto (ui.perfetto.dev).

--mfu: the share of its peak at which a rank's device computes (model FLOPs utilization). torch counts the floating-point
operations of one step, the second one, in matrix products and convolutions, forward and backward. That step is slower. The
peak is the rate of a large matrix product in the type of --amp, measured first.
"""

import os
import shutil
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.engines import atomic, files, lines
from hvdtrain.engines.base import AMP_DTYPES, Engine
from hvdtrain.inputs.sharding import kept
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step
from hvdtrain.output.clock import matrix_product_rate
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
    """Write the recording to `path`, or leave what is there. Raises OSError or RuntimeError."""
    with atomic.replacing_several(path) as place:
        profiler.export_chrome_trace(str(place))
        end = b""
        if place.exists():
            with place.open("rb") as file:
                file.seek(-min(END_BYTES, place.stat().st_size), os.SEEK_END)
                end = file.read()
        # Trap: without room, torch's library writes half a file, or none, and tells nobody but its own log.
        if LAST_KEY not in end:
            raise OSError(f"no room for {path}, with {shutil.disk_usage(path.parent).free:,} bytes free")


class Utilization(Feature):
    """Records an event at each logged step: the mean since the last one, on rank 0."""

    def prepare(self, run: Run) -> None:
        self._run, self._taken = run, 0  # steps of this process
        self._per_sample = 0.0  # operations, once they are counted
        self._counter: FlopCounterMode | None = None
        self._began: float | None = None  # the current window
        self._samples = 0  # in it, of this rank
        self._last = 0.0  # operations per second
        with kept():  # it draws random numbers
            self._peak = float(matrix_product_rate(run.device, AMP_DTYPES[run.flags.amp]))

    def before_step(self, step: Step) -> None:
        self._taken += 1
        if self._taken == 2:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()
        elif self._began is None:
            self._began = time.perf_counter()

    def after_step(self, step: Step) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._per_sample = self._counter.get_total_flops() / max(step.local_count, 1)
            self._counter, self._began, self._samples = None, None, 0
            return
        self._samples += step.local_count
        if step.logged and self._per_sample and self._began is not None:
            self._last = self._per_sample * self._samples / (time.perf_counter() - self._began)
            share = self._last / self._peak
            self._run.event("utilization", step=step.number, flops_per_second=self._last, peak_share=share)
        if step.logged:  # what follows, such as an evaluation, is no step
            self._began, self._samples = None, 0

    def close(self, *, failed: bool) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
        if self._last and not failed:
            of_peak = f"{self._last / self._peak:.0%} of a matrix product's"
            self._run.say(f"utilization: {self._last / 1e9:,.1f} GFLOP/s on rank 0, {of_peak}")
