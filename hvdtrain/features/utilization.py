"""--mfu: the share of its peak at which a rank's device computes (model FLOPs utilization).

torch counts the floating-point operations of one step, the second one, in matrix products and convolutions, forward and
backward. That step is slower. The peak is the rate of a large matrix product in the type of --amp, measured first.
"""

import time

from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.engines.base import AMP_DTYPES
from hvdtrain.inputs.sharding import kept
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step
from hvdtrain.output.clock import matrix_product_rate


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
