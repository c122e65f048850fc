"""What ends a run in good order: stop signals, gradients that are not finite, replicas that differ, ranks that hang or die.

All ranks take each decision together, at the same step.
"""

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor, nn

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.training.records.metrics import Telemetry
from hvdtrain.training.resilience.watchdog import Watchdog
from hvdtrain.training.resume import Checkpoints, Position

Part = TypeVar("Part")  # whatever a script computes a loss from
STOPPED = 75  # exit code: EX_TEMPFAIL of sysexits.h; Slurm and Kubernetes can tell it from a failure
OVERFLOWS = 20  # steps in a row that the loss scaler may skip: from 65536 it can halve 16 times before it reaches 1


class Guard:
    """Use it as a context manager around training. Making one is a collective.

    flags: step_timeout, check_steps, max_skipped, amp, reduction.
    """

    def __init__(self, engine: Engine, flags: Namespace, telemetry: Telemetry):
        self.engine, self.telemetry = engine, telemetry
        self.check_steps = flags.check_steps
        self.scaled = flags.amp == "fp16"
        self.max_skipped = flags.max_skipped if flags.max_skipped is not None else OVERFLOWS * self.scaled
        # Adasum steps inside backward(): there the weights tell, one step later, and nothing can be skipped.
        self.adasum = flags.reduction == "adasum"
        self._buffers: list[Tensor] = []
        self._compared_at: int | None = None  # the step after which the weights were last compared
        self._watchdog = Watchdog(engine, flags.step_timeout, failed=self._record)
        if self._watchdog.off:
            telemetry.say(f"warning: hung ranks will not be noticed: the ranks cannot connect ({self._watchdog.off})")

    def _record(self, headline: str) -> None:
        self.telemetry.event("error", kind="watchdog", message=headline)

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.engine.barrier()  # until then, who does not come is still missed
        elif isinstance(error, Failure):
            self.telemetry.event("error", kind="failure", message=str(error))
        agreed = error is None or isinstance(error, Failure) or (isinstance(error, UserError) and error.everywhere)
        self._watchdog.close(None if agreed else f"{type(error).__name__}: {error}")

    def tick(self) -> None:
        """Tell the watchdog that this rank makes progress, outside of steps."""
        self._watchdog.tick()

    def begin_step(self, at: Position, model: nn.Module) -> None:
        """Call it before every step. Raises Failure on every rank where the replicas differ."""
        self._watchdog.step = at.step
        self._watchdog.tick()
        if at.step and self.check_steps and at.step % self.check_steps == 0:
            self.compare_replicas(at, model)
        if self.max_skipped:  # what forward changes of the model, in case its gradients are not finite
            self._buffers = [buffer.clone() for buffer in model.buffers()]

    def finite(
        self, at: Position, model: nn.Module, loss: Tensor, loss_of: Callable[[Part], Tensor], parts: Sequence[Part]
    ) -> bool:
        """Tell, on all ranks alike, whether the reduced gradients are finite; if not, the step must be left out.

        They are the same on all ranks, and one rank's NaN or infinity is in all of them. Raises Failure on every rank where
        too many steps in a row were left out. loss: of this rank's batches. loss_of: computes that of one of the step's
        `parts` again, on the bare model, to find the culprit.
        """
        tensors = [p.detach() if self.adasum else p.grad for p in model.parameters() if p.grad is not None]
        # Looked at in Python: isfinite and all, as kernels that nothing else calls, would be half of what this costs.
        sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors]).tolist()
        if all(map(math.isfinite, sums)):
            at.skipped = 0
            return True
        at.skipped += 1
        give_up = at.skipped > self.max_skipped or self.adasum
        if give_up or not self.scaled:  # a loss scaler overflows now and then: that is how it finds its scale
            message = f"step {at.step + 1}: gradients are not finite: {self._culprit(model, loss, loss_of, parts)}"
            message += f"; {at.skipped} step{'s'[: at.skipped > 1]} in a row, --max-skipped {self.max_skipped}"
            if give_up:
                raise Failure(message)
            self.telemetry.say(f"warning: {message}: left out")
            self.telemetry.event("error", kind="non-finite", step=at.step + 1, message=message)
        for buffer, before in zip(model.buffers(), self._buffers, strict=True):
            buffer.copy_(before)
        return False

    def _culprit(self, model: nn.Module, loss: Tensor, loss_of: Callable[[Part], Tensor], parts: Sequence[Part]) -> str:
        """Name rank, host and first layer. A collective."""
        here = first_non_finite(model, loss_of, parts)
        if here is None and not bool(loss.isfinite().all()):
            here = "a loss that is finite when computed again: check that host's memory"
        found = self.engine.all_gather_object(here, "guard.culprit")
        ranks = [f"rank {rank} on {self._watchdog.host(rank)}, {what}" for rank, what in enumerate(found) if what]
        return " and ".join(ranks) or "each rank's own are, their sum over ranks is not"

    def compare_replicas(self, at: Position, model: nn.Module) -> None:
        """Raise Failure on every rank where the parameters are not the same bits on all. A collective.

        Again after the same step, it does nothing: that a checkpoint is due and that steps are due both ask for it.
        """
        if self.engine.size == 1 or self._compared_at == at.step:
            return
        self._compared_at = at.step
        names = [name for name, _ in model.named_parameters()]
        sums = torch.stack([checksum(parameter) for parameter in model.parameters()]).cpu()
        rows = self.engine.all_gather(sums, "guard.replicas")
        kinds = Counter(tuple(row.tolist()) for row in rows)
        if len(kinds) == 1:
            return
        usual, votes = kinds.most_common(1)[0]
        unlike = [rank for rank, row in enumerate(rows) if tuple(row.tolist()) != usual]
        first = next(i for i in range(len(names)) if len(set(rows[:, i].tolist())) > 1)
        who = " and ".join(f"rank {rank} on {self._watchdog.host(rank)}" for rank in unlike)
        said = f"{who} has other weights than the rest"
        if votes * 2 <= self.engine.size:
            said = (
                f"the weights differ between ranks, and no majority says which are right ({who} differs from the rest)"
            )
        since = f"between steps {max(0, at.step - self.check_steps)} and {at.step}" if self.check_steps else "by now"
        raise Failure(
            f"{said}: first in {names[first]}, {since}: start again from a checkpoint; check that host's memory"
        )

    def stops(self, at: Position) -> bool:
        """Tell, on all ranks alike, whether to save and leave after this step. Call it after every step."""
        watchdog = self._watchdog
        if watchdog.off and watchdog.stop_at is None:
            if self.engine.sum(torch.tensor([float(watchdog.stop_reason is not None)]), "guard.stop").item():
                watchdog.stop_at = at.step
        elif self.engine.rank == 0 and watchdog.stop_reason and watchdog.stop_at is None:
            watchdog.announce_stop(at.step + (self.engine.size > 1))
        return watchdog.stop_at is not None and at.step >= watchdog.stop_at

    def leave(self, at: Position, checkpoints: Checkpoints) -> int:
        """Return the exit code once the checkpoint is on the disk. Raises Failure where it cannot be written."""
        unsaved = checkpoints.close(self.tick)
        saved = (
            f"saved after step {at.step}: start me again" if checkpoints.writes else "nothing saved: no --output-dir"
        )
        saved = unsaved or saved
        self.telemetry.event("stop", reason=self._watchdog.stop_reason, step=at.step, samples=at.samples)
        self.telemetry.say(f"stopped by {self._watchdog.stop_reason or 'another rank'}; {saved}")
        if unsaved:
            raise Failure(unsaved)
        return STOPPED


def checksum(parameter: Tensor) -> Tensor:
    """Return int64 []: the sum of the values' bits, each times its position from 1, modulo 2^64.

    One flipped bit always changes it, and so do two values exchanged. Computed where the parameter is.
    """
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    bits = parameter.detach().contiguous().reshape(-1).view(kind)
    return (bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()


def first_non_finite(model: nn.Module, loss_of: Callable[[Part], Tensor], parts: Sequence[Part]) -> str | None:
    """Return what this rank's own forward or backward pass first computes that is not finite; None if nothing is."""
    found: list[str] = []

    def look(name: str, module: nn.Module):
        def hook(_, inputs: tuple, output: object) -> None:
            for what, values in ((f"input of {name}", inputs), (f"output of {name}", (output,))):
                if not found and any(isinstance(v, Tensor) and not bool(v.isfinite().all()) for v in values):
                    found.append(f"{what} ({type(module).__name__})")

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    hooks = [module.register_forward_hook(look(name, module)) for name, module in leaves]
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    try:
        for part in parts:
            loss = loss_of(part)
            if found:
                break
            gradients = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
            for (name, _), gradient in reversed(list(zip(named, gradients, strict=True))):
                if not found and gradient is not None and not bool(gradient.isfinite().all()):
                    found.append(f"gradient of {name}")
    finally:
        for handle in hooks:
            handle.remove()
    return found[0] if found else None
