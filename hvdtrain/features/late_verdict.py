"""On accelerators: whether the gradients of a step are finite is read in the next step, without waiting for the device.

In steps that are logged or saved, it is read at once. In others it stays on the device as a flag: fused optimizers take it
as `found_inf`, as from torch's GradScaler, and leave weights and state unchanged if it is set. The host reads it when the
device has the next backward pass to do.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint.parts import Part
from hvdtrain.engines.accelerators import Delayed
from hvdtrain.features.non_finite import NOT_LOOKED, Kept, Skipping
from hvdtrain.loop.preparing import FUSED
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step


def not_finite(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a flag on the device, the same on all ranks: float32 [], 1 if a reduced gradient is not finite, else 0."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        sizes = list(torch._foreach_norm(gradients, 1))  # one kernel for many tensors
    else:
        parts = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in gradients]
        sizes = [part.float().abs().sum() for part in parts]  # a sum in a shorter type could overflow
    return torch.stack(sizes).isfinite().all().logical_not().float()


class Verdict:
    """Whether the gradients of one loop over micro-batches are finite: known to the device, on its way to the host."""

    def __init__(self, flags: Sequence[Tensor]):
        """flags: from `not_finite`, for each optimizer."""
        self.left_out = (flags[0] if len(flags) == 1 else torch.stack(list(flags)).amax()).bool()  # on the device
        self._delayed = Delayed(self.left_out)

    def finite(self) -> bool:
        """Return whether all are finite. Waits for the device if it is not there yet."""
        return not self._delayed.values()


def takes_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer.step` leaves all unchanged where its `found_inf` is set."""
    groups = optimizer.param_groups
    return isinstance(optimizer, FUSED) and all(
        group.get("fused") and all(p.device.type != "cpu" for p in group["params"]) for group in groups
    )


class LateVerdict(Skipping):
    """Does the same as `Skipping`, one step later where that is possible."""

    def prepare(self, run: Run) -> None:
        super().prepare(run)
        run.shared().check = self.check
        self._activity, self._saves_every = run.engine.activity, run.flags.checkpoint_steps
        self._verdicts: dict[int, Verdict] = {}  # by loop: of the current step
        self._before: Step | None = None  # the step before, if its verdicts are still to be read
        self._of_before: dict[int, Verdict] = {}
        self._to_explain: set[int] = set()  # its loops whose gradients are not finite
        # Optimizers that leave out an update by themselves. Not before the first one, which must be known to be sound: the
        # fused SGD would leave the momentum uninitialized that it allocates in it.
        self._flagged: set[torch.optim.Optimizer] = set()
        for optimizer in self.prepared.optimizers:
            if takes_flag(optimizer):
                optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined] # GradScaler reads the flag
                optimizer.register_step_post_hook(self._updated)

    def _updated(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Take the flag back. From now on, `optimizer`, which has made an update, is given flags."""
        if not self.prepared.scaler.is_enabled():  # else GradScaler takes its own back
            vars(optimizer).pop("found_inf", None)
        self._flagged.add(optimizer)
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined] # GradScaler gives it the flag

    def before_step(self, step: Step) -> None:
        if self.most:
            super().before_step(step)

    def check(self, step: Step, loop: int) -> Generator[Any, None, bool]:
        """Return whether the gradients are finite, or True where that is read later. See `Shared.check`."""
        saves = self._saves_every and step.number % self._saves_every == 0
        sound = True
        if step.logged or saves or not self._flagged.issuperset(step.backwards):
            sound = step.read()
        else:
            self._keep_flags(step, loop)
        if self._before is not None:
            yield from self._look_back(step, self._before, loop)
        return sound

    def _keep_flags(self, step: Step, loop: int) -> None:
        """Leave on the accelerator whether the gradients are finite: for the update, and for the next step to read."""
        flags = {optimizer: not_finite(self.prepared.trained[optimizer]) for optimizer in step.backwards}
        for optimizer, flag in flags.items():
            optimizer.found_inf = flag  # type: ignore[attr-defined] # as GradScaler gives it to fused optimizers
        self._verdicts[loop] = verdict = Verdict(list(flags.values()))
        step.left_out = step.left_out or None
        if self.most:
            self.buffers.restore(verdict.left_out)

    def _look_back(self, step: Step, before: Step, loop: int) -> Iterator[None]:
        """Read whether the gradients of the step before were finite. By now, the device has more to do."""
        self._read(before)
        if loop in self._to_explain and self.explains(self.state.skipped):
            buffers = Kept(self.prepared.models)
            yield from self.explain(step, before, loop, self.state.skipped)
            buffers.restore()

    def _read(self, before: Step) -> None:
        """Read the verdicts of the step before, once, and count it as skipped or not."""
        if not self._of_before:
            return
        self._activity.collective = "gradients"  # the device may still wait for the other ranks
        self._to_explain = {loop for loop, verdict in self._of_before.items() if not verdict.finite()}
        self._activity.collective = None
        self._of_before = {}
        if before.left_out is None:  # else it is counted
            before.left_out = bool(self._to_explain)
            self.state.skipped = self.state.skipped + 1 if before.left_out else 0

    def unsound(self, step: Step, loop: int) -> Iterator[None]:
        if self.most:
            yield from super().unsound(step, loop)
        elif self.explains(self.state.skipped + 1):
            yield from self.explain(step, step, loop, self.state.skipped + 1)

    def after_step(self, step: Step) -> None:
        self._before = step if self._verdicts else None  # and not its batches for longer
        self._of_before, self._verdicts, self._to_explain = self._verdicts, {}, set()

    def parts(self) -> Sequence[Part]:
        return [Settled(self)]

    def settle(self) -> None:
        """Count the last step as skipped or not, before a save. Without looking for the layer."""
        if self._before is not None:
            self._read(self._before)
            if self._to_explain and self.explains(self.state.skipped):
                self.report(self._before.number, NOT_LOOKED, self.state.skipped)
        self._before = None


class Settled(Part):
    """Learns of the last step before a save."""

    def __init__(self, verdicts: LateVerdict):
        self._verdicts = verdicts

    def ready(self) -> None:
        self._verdicts.settle()
