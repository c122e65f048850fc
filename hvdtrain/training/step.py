"""One training step: its micro-batches, their gradients and the update. Enforces the order that all ranks need."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hvdtrain.data.loading import mixed_seed
from hvdtrain.data.sharding import Step as Planned
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.training import optim
from hvdtrain.training.guard import Guard
from hvdtrain.training.inputs import Batch, Input, seed_generators
from hvdtrain.training.non_finite import Inspection
from hvdtrain.training.prepared import Prepared
from hvdtrain.training.records.clock import Clock
from hvdtrain.training.state import TrainState, require_free

UPDATE = "call step.update() after the loop over step.batches()"
BACKWARD = "write `for batch in step.batches(): step.backward(loss)`"


def autocasts(device_type: str) -> bool:
    """Return whether autocast is enabled for the type of device: "cpu" or "cuda"."""
    try:
        return torch.is_autocast_enabled(device_type)
    except TypeError:  # torch 2.3 has a function for each
        return torch.is_autocast_cpu_enabled() if device_type == "cpu" else torch.is_autocast_enabled()


def counted_or_zero(count: Tensor | float, batch: Batch) -> Tensor | float:
    """Return `count`, or 0 if this rank has no samples in `batch`."""
    return count if batch.count else 0.0


class Sums:
    """Sums of a step's loss and recorded values over this rank's samples. Tensors stay on the device: no synchronization."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor | float] = {}
        self.counts: dict[str, Tensor | float] = {}

    def add(self, name: str, mean: Tensor, count: Tensor | float) -> None:
        """Add the mean over `count` samples to the sum `name`."""
        self.values[name] = self.values.get(name, 0.0) + mean * count
        self.counts[name] = self.counts.get(name, 0.0) + count


class Shared(NamedTuple):
    """Objects shared by all steps of a run."""

    engine: Engine
    prepared: Prepared
    guard: Guard
    clock: Clock
    state: TrainState
    seed: int
    reduction: str
    autocast: Callable[[], contextlib.AbstractContextManager[object]]  # the precision of --amp


class Step:
    """One training step, yielded by `for step in run.steps(...)`."""

    def __init__(self, shared: Shared, planned: Planned, source: Input, *, logged: bool):
        self.logged = logged  # whether this step is recorded; `record` ignores its values otherwise
        self.count = planned.count  # samples, over all ranks and micro-batches
        self.sums = Sums()
        self.local_count = 0  # samples of this rank
        self.gradient_norm: Tensor | None = None  # before clipping, if `update` clipped
        self.left_out = False  # the step was skipped, because a gradient was not finite
        self._shared, self._planned, self._input = shared, planned, source
        self._loaded: list[Batch] = []  # kept during the step, for another `batches()` and for the inspection
        self._batch: Batch | None = None  # the current micro-batch
        self._loops = 0  # calls of `batches`
        self._calls = 0  # calls of `backward` for this micro-batch
        self._backwards: dict[torch.optim.Optimizer, int] = {}  # calls of `backward` in this loop
        self._reduced: dict[torch.optim.Optimizer, bool] = {}  # reduced, not yet applied: are the gradients finite?
        self._updated: set[torch.optim.Optimizer] = set()
        self._tokens: list[Tensor | float] | None = None  # `count` of each backward in this loop, if given
        self._inspection: Inspection | None = None

    @property
    def number(self) -> int:
        """This step's number since the beginning of training, from 1."""
        return self._shared.state.step + 1

    @property
    def lr(self) -> float:
        """The learning rate of the first optimizer. Setting it sets the rate of every optimizer."""
        return self._shared.prepared.optimizers[0].param_groups[0]["lr"]

    @lr.setter
    def lr(self, rate: float) -> None:
        for optimizer in self._shared.prepared.optimizers:
            optim.set_rate(optimizer, rate)

    # ---- micro-batches

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches. After the loop, the gradients are those of the global batch.

        Autocast is enabled inside according to --amp. If the gradients are not finite, the loop is run again to find the
        rank and the layer. For another optimizer's update in the same step, call it again: it yields the same
        micro-batches.
        """
        if self._batch is not None:
            raise UserError("step.batches() inside step.batches(): end the first loop before the next")
        loop = self._loops
        self._loops += 1
        self._shared.engine.activity.compute()
        self._tokens = None
        self._backwards = {}
        yield from self._loop(loop)
        self._reduce()
        broken = [optimizer for optimizer in self._backwards if not self._reduced[optimizer]]
        if not broken:
            return
        self.left_out = True
        guard, shared = self._shared.guard, self._shared
        prepared = shared.prepared
        if guard.explains(shared.state):
            finite = all(bool(torch.as_tensor(value).isfinite().all()) for value in self.sums.values.values())
            self._inspection = Inspection(prepared.models, finite)
            with self._inspection.hooks():
                yield from self._loop(loop)
            culprit, self._inspection = self._inspection.result(), None
            prepared.raise_where_gradients_are_missing()
            guard.report_skipped_step(shared.state, prepared.models, culprit)
        guard.restore_buffers(prepared.models)

    def _loop(self, loop: int) -> Iterator[Batch]:
        shared, count = self._shared, len(self._planned.batches)
        prepared = shared.prepared
        parts = (shared.seed, shared.state.samples, shared.engine.rank) + ((loop,) if loop else ())
        seed_generators(mixed_seed(*parts), shared.engine.device)  # so that dropout is the same after a restart
        for number in range(count):
            if number == len(self._loaded):
                with shared.engine.activity.during("reading data"):
                    self._loaded.append(self._input.load(self._planned.batches[number]))
            batch = self._batch = self._loaded[number]
            self._calls = 0
            with contextlib.ExitStack() as stack:
                if self._inspection is not None:
                    self._inspection.micro_batch(number, count)
                else:
                    shared.clock.mark("loading")
                    if loop == 0:
                        self.local_count += batch.count
                    stack.enter_context(
                        shared.engine.micro_batch(prepared.replicas, prepared.optimizers, number, count)
                    )
                stack.enter_context(shared.autocast())
                yield batch
            self._batch = None
            if self._inspection is None:
                if not self._calls:
                    raise UserError(f"step {self.number}: a micro-batch had no backward pass: {BACKWARD}")
                if number < count - 1:
                    shared.clock.mark("compute")

    def backward(
        self, loss: Tensor, optimizer: torch.optim.Optimizer | None = None, *, count: Tensor | float | None = None
    ) -> None:
        """Compute the gradients of this micro-batch.

        loss: a scalar, the mean over the samples of this micro-batch. optimizer: compute gradients only for its parameters
        (default: all). count: number of items in the mean, if these are not samples, such as tokens; may differ between
        ranks. Raises UserError.
        """
        batch = self._batch
        if batch is None:
            raise UserError(f"step.backward() outside of step.batches(): {BACKWARD}")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UserError(
                f"step.backward() got {what}, not a scalar: take the mean over this micro-batch, loss.mean()"
            )
        if not loss.requires_grad:
            raise UserError(
                "step.backward() got a loss without a gradient: compute it from the model, without detach()"
            )
        shared, prepared = self._shared, self._shared.prepared
        chosen = prepared.optimizers if optimizer is None else [prepared.own(optimizer)]
        loss = loss.reshape(())
        if self._inspection is not None:
            self._inspection.backward(loss, prepared.named(chosen))
            return
        for one in chosen:
            if one in self._reduced:
                raise UserError(f"step {self.number}: step.backward() before the last gradients were applied: {UPDATE}")
            if one not in self._backwards and one in self._updated:  # another update in the same step
                one.zero_grad()
            self._backwards[one] = self._backwards.get(one, 0) + 1
        weight: Tensor | float = batch.weight
        if count is not None:
            weight = self._token_weight(count)
        elif self._tokens:
            raise UserError(
                "step.backward(count=...) in one micro-batch and not in another: give it in all, or in none"
            )
        with contextlib.ExitStack() as stack:
            if autocasts(shared.engine.device.type):
                stack.enter_context(torch.autocast(shared.engine.device.type, enabled=False))
            scaled = prepared.scaler.scale(loss * weight)
            # With several optimizers, the hooks of the other optimizers' parameters must not run.
            inputs = None if len(chosen) == len(prepared.optimizers) else prepared.parameters(chosen)
            scaled.backward(inputs=inputs)
            shared.engine.activity.collective = None  # DDP reduces inside backward
        self._calls += 1
        if self._loops == 1 and self._calls == 1:  # with several losses, the first one is recorded as `loss`
            self.sums.add("loss", loss.detach(), batch.count if count is None else counted_or_zero(count, batch))

    def _token_weight(self, count: Tensor | float) -> Tensor | float:
        """Return the weight of a loss that is a mean over `count` items. `_reduce` divides by the total count later."""
        if self._tokens is None and sum(self._backwards.values()) > len(self._backwards):
            raise UserError(
                "step.backward(count=...) in one micro-batch and not in another: give it in all, or in none"
            )
        if self._shared.reduction == "adasum":
            raise UserError("step.backward(count=...) cannot go with --reduction adasum: use average")
        assert self._batch is not None
        counted = counted_or_zero(count, self._batch)
        self._tokens = [*(self._tokens or []), counted]
        return counted * self._shared.engine.size / self.count

    def _reduce(self) -> None:
        shared, prepared = self._shared, self._shared.prepared
        shared.clock.mark("compute", at=shared.engine.gradients_ready())
        if not self._backwards:
            raise UserError(f"step {self.number} has no gradients: {BACKWARD}")
        passes = len(self._planned.batches)
        for optimizer, count in self._backwards.items():
            if count != passes:
                raise UserError(
                    f"step {self.number}: {count} backward passes in {passes} micro-batches for one optimizer: "
                    "add the losses up, one step.backward() in each micro-batch"
                )
            prepared.note_missing_gradients(optimizer)
            shared.engine.synchronize(optimizer)
        if self._tokens is not None:
            tokens = sum(float(count) for count in self._tokens)
            total = float(shared.engine.sum(torch.tensor(tokens, dtype=torch.float64), "tokens"))
            if total <= 0:
                raise UserError(
                    f"step {self.number}: step.backward(count=...) was 0 on all ranks: leave such samples out"
                )
            for optimizer in self._backwards:
                gradients = [p.grad for p in prepared.parameters([optimizer]) if p.grad is not None]
                torch._foreach_mul_(gradients, self.count / total)
        shared.clock.mark("communication")
        for optimizer in self._backwards:
            self._reduced[optimizer] = shared.guard.finite(prepared.parameters([optimizer]))

    # ---- the update

    def update(self, optimizer: torch.optim.Optimizer | None = None, *, clip_norm: float | None = None) -> None:
        """Apply the gradients on all ranks. If they are not finite, the update is skipped.

        optimizer: only this one (default: all that have gradients). clip_norm: maximum norm of its gradients. Raises
        UserError.
        """
        shared, prepared = self._shared, self._shared.prepared
        if self._batch is not None:
            raise UserError(
                f"step {self.number}: step.update() inside the loop over step.batches(): call it after the loop"
            )
        chosen = list(self._reduced) if optimizer is None else [prepared.own(optimizer)]
        if not chosen or any(one not in self._reduced for one in chosen):
            raise UserError(f"step.update() without gradients: {BACKWARD} before it, to the loop's end")
        for one in chosen:
            finite = self._reduced.pop(one)
            self._updated.add(one)
            if not finite and not prepared.scaler.is_enabled():
                continue
            with shared.engine.stepping(one):
                if clip_norm is not None:
                    prepared.scaler.unscale_(one)
                    self.gradient_norm = torch.nn.utils.clip_grad_norm_(prepared.parameters([one]), clip_norm)
                prepared.scaler.step(one)  # unscales; skips the step after an overflow, the same on all ranks
        shared.engine.activity.update()

    def record(self, **values: Tensor | float) -> None:
        """Record training metrics of this micro-batch: one value per sample, or their mean. Each metric needs a unique name.

        `loss` is shown instead of the loss given to `backward`. Values are used only if `step.logged`.
        """
        batch = self._batch
        if batch is None:
            raise UserError("step.record() outside of step.batches(): call it beside step.backward()")
        require_free(values)
        if not self.logged or self._inspection is not None:
            return
        for name, value in values.items():
            mean = torch.as_tensor(value).detach().float().mean()
            self.sums.add("reported_loss" if name == "loss" else name, mean, batch.count)

    def require_complete(self) -> None:
        """Raise UserError if the script has omitted a part of the step. Called when it requests the next step."""
        if self._loops == 0:
            raise UserError(f"step {self.number} has no gradients: {BACKWARD}")
        if self._batch is not None:
            raise UserError(f"step {self.number}: the loop over step.batches() was left early: let it run to its end")
        if self._reduced or not self._updated:
            raise UserError(f"step {self.number} has gradients that were not applied: {UPDATE}")
