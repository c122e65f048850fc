"""Whether the gradients of a step are finite.

On a CPU, and in steps that are logged or saved, this is read at once. In others on an accelerator it stays there as a flag:
fused optimizers take it as `found_inf`, as from torch's GradScaler, and leave weights and state unchanged if it is set. The
host reads it in the next step, when the device has the next backward pass to do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hvdtrain.engines.accelerators import Delayed

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # with a kernel that takes `found_inf`


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


def fuse(optimizer: torch.optim.Optimizer, *, may_lack_gradients: bool) -> None:
    """Let an optimizer of torch use its fused kernel on an accelerator, unless the author has chosen another one.

    may_lack_gradients: some parameters may have no gradient; then not for SGD, whose kernel needs all momenta or none.
    """
    if not isinstance(optimizer, FUSED):
        return
    if may_lack_gradients and isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        open_to_choice = group.get("fused") is None and group.get("foreach") is None
        plain = not group.get("differentiable") and not group.get("capturable")
        if open_to_choice and plain and all(p.is_floating_point() and p.device.type != "cpu" for p in group["params"]):
            group["fused"] = True


def takes_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer.step` leaves all unchanged where its `found_inf` is set."""
    groups = optimizer.param_groups
    return isinstance(optimizer, FUSED) and all(
        group.get("fused") and all(p.device.type != "cpu" for p in group["params"]) for group in groups
    )
