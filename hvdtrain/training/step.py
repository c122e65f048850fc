"""One training step: its micro-batches, their gradients and the update. Enforces the order that all ranks need."""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.data.sharding import PlannedStep, mixed_seed, seed_generators
from hvdtrain.engines.accelerators import to_device
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.output.clock import Clock
from hvdtrain.output.metric_names import require_free
from hvdtrain.training.guard import Guard
from hvdtrain.training.inputs import Batch, Input
from hvdtrain.training.non_finite import Inspection
from hvdtrain.training.prepared import ADDED, Prepared
from hvdtrain.training.reuse import Outputs
from hvdtrain.training.shared_buffers import Kept
from hvdtrain.training.state import TrainState
from hvdtrain.training.verdict import Verdict, not_finite

UPDATE = "call step.update() after the loop over step.batches()"
BACKWARD = "write `for batch in step.batches(): step.backward(loss)`"


def instead_of_a_loss(given: object) -> str:
    """Return what `given` is, and what to give instead, for a message."""
    how = "take the mean over this micro-batch, loss.mean()"
    if isinstance(given, Tensor):
        return f"a tensor of shape {tuple(given.shape)}, not a scalar: {how}"
    if given is None:
        return "None, not a loss: a Hugging Face model computes one if the batch has labels"
    if hasattr(given, "loss") or (isinstance(given, Mapping) and "loss" in given):
        how = "give it the loss in it"
    return f"a {type(given).__name__}, not a scalar: {how}"


def in_checkpoint(error: BaseException) -> bool:
    """Return whether `error` was raised in a backward pass within a backward pass, that of torch.utils.checkpoint."""
    return any("checkpoint" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def finite(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether the reduced gradients are finite. The result is the same on all ranks, because NaN and infinity
    propagate through the reduction."""
    tensors = [p.grad for p in parameters if p.grad is not None]
    if not tensors:
        return True
    # Checked in Python: the kernels of isfinite and all, which nothing else uses, would double the cost.
    real = [(torch.view_as_real(t) if t.is_complex() else t).sum(dtype=torch.float32) for t in tensors]
    sums = torch.stack(real).tolist()
    return all(map(math.isfinite, sums))


def keep_in_order(prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
    """Refuse the author's calls of `optimizer` that would lose gradients, or apply those of this rank alone."""

    def zero_grad(set_to_none: bool = True) -> None:
        if optimizer in prepared.pending:
            how = "leave it out, gradients are cleared before each step"
            raise UserError(f"optimizer.zero_grad() would lose the gradients of this step: {how}")
        prepared.zero_grads[optimizer]()

    def before_step(*_: object) -> None:
        if not prepared.updating:
            how = "write step.update() after the loop over step.batches()"
            raise UserError(f"optimizer.step() applies gradients that are not those of all ranks: {how}")

    def add_param_group(*_: object) -> None:
        raise UserError(ADDED)

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign,assignment] # of this object alone
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign] # of this object alone
    optimizer.register_step_pre_hook(before_step)


class Shared(NamedTuple):
    """Objects shared by all steps of a run."""

    engine: Engine
    prepared: Prepared
    guard: Guard
    clock: Clock
    state: TrainState
    seed: int
    autocast: Callable[[], contextlib.AbstractContextManager[object]]  # the precision of --amp


class Step:
    """One training step, yielded by `for step in run.steps(...)`."""

    def __init__(
        self, shared: Shared, planned: PlannedStep, source: Input, before: "Step | None", *, logged: bool, at_once: bool
    ):
        """before: the step before this one, if its `verdicts` are not read yet. logged: see the attribute. at_once: read in
        this step whether its gradients are finite, also on an accelerator."""
        self.number = shared.state.step + 1  # since the beginning of training, from 1
        self.logged = logged  # whether this step is recorded; `record` ignores its values otherwise
        self.count = planned.count  # samples, over all ranks and micro-batches
        # Sums of the loss and of recorded values over this rank's samples, and their counts. Tensors stay on the device.
        self.sums: dict[str, Tensor | float] = {}
        self.counts: dict[str, Tensor | float] = {}
        self.local_count = 0  # samples of this rank
        self.gradient_norm: Tensor | None = None  # before clipping, if `update` clipped
        self.left_out = False  # the step was skipped, because a gradient was not finite
        self._at_once = at_once
        self.verdicts: dict[int, Verdict] = {}  # by loop: on an accelerator, to be read in the next step
        self.before = before
        self._shared, self._planned, self._input = shared, planned, source
        self._samples = shared.state.samples  # of all steps before
        self._loaded: list[Batch] = []  # kept during the step, for another `batches()` and for the inspection
        self._batch: Batch | None = None  # the current micro-batch
        self._loops = 0  # calls of `batches`
        self._calls = 0  # calls of `backward` for this micro-batch
        self._backwards: dict[torch.optim.Optimizer, int] = {}  # calls of `backward` in this loop
        # Reduced, not yet applied: are the gradients finite? Or a flag on the accelerator, of `not_finite`.
        self._reduced: dict[torch.optim.Optimizer, bool | Tensor] = {}
        self._updated: set[torch.optim.Optimizer] = set()
        # Of each optimizer, `count` by the number of the backward pass in this loop.
        self._tokens: dict[torch.optim.Optimizer, dict[int, Tensor | float]] = {}
        self._uncounted: set[torch.optim.Optimizer] = set()  # those with a backward pass that had none
        self._passes = 0  # backward passes in this loop
        self._token_total: Tensor | None = None  # their sum over all ranks, where it is on an accelerator
        self._missing: list[str] = []  # parameters that got no gradient on this rank
        self._inspection: Inspection | None = None
        self._outputs: Outputs | None = None  # with several updates per step, and several micro-batches

    @property
    def lr(self) -> float:
        """The learning rate of the first optimizer. Setting it sets the rate of every optimizer."""
        return float(self._shared.prepared.optimizers[0].param_groups[0]["lr"])

    @lr.setter
    def lr(self, rate: float) -> None:
        for optimizer in self._shared.prepared.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    # ---- micro-batches

    @property
    def current(self) -> Batch | None:
        """The current micro-batch; None outside of `batches`."""
        return self._batch

    @property
    def inspected(self) -> bool:
        """Whether the micro-batches are computed again to find a tensor that is not finite."""
        return self._inspection is not None

    @property
    def batch(self) -> Batch:
        """The current micro-batch: `data` (as it is yielded), `indices`, `count`."""
        if self._batch is None:
            raise UserError("step.batch outside of step.batches(): use it inside the loop")
        return self._batch

    @property
    def loss(self) -> float:
        """The loss of this step: the mean over the samples of all ranks, after `step.batches`. A collective."""
        if "loss" not in self.sums or self._batch is not None:
            raise UserError(f"step {self.number}: step.loss before the end of step.batches(): use it after the loop")
        mine = torch.tensor([float(self.sums["loss"]), float(self.counts["loss"])], dtype=torch.float64)
        total, count = self._shared.engine.sum(mine, "step.loss").tolist()
        return total / count if count else math.nan

    def batches(self) -> Iterator[Any]:
        """Yield this rank's micro-batches, as the DataLoader has collated them; of `run.steps(NUMBER)`, a Batch.

        After the loop, the gradients are those of the global batch. Autocast is enabled inside according to --amp. If the
        gradients are not finite, the loop is run again to find the rank and the layer. For another optimizer's update in the
        same step, call it again: it yields the same micro-batches.
        """
        if self._batch is not None:
            raise UserError("step.batches() inside step.batches(): end the first loop before the next")
        shared, loop = self._shared, self._loops
        prepared, count = shared.prepared, len(self._planned.batches)
        self._loops += 1
        shared.engine.activity.compute()
        self._tokens, self._uncounted, self._passes = {}, set(), 0
        self._backwards = {}
        seed_generators(self._seed(loop), shared.engine.device)
        if count > 1 and len(prepared.optimizers) > 1:
            self._outputs = self._outputs or Outputs(prepared.replicas, self.number)
            self._outputs.begin(loop)
        for number, planned in enumerate(self._planned.batches):
            if number == len(self._loaded):
                with (
                    shared.engine.activity.during("reading data") if self._input.may_wait else contextlib.nullcontext()
                ):
                    self._loaded.append(self._input.load(planned))
                self.local_count += self._loaded[number].count
            batch = self._batch = self._loaded[number]
            shared.clock.mark("loading")
            self._calls = 0
            local = prepared.gradients.micro_batch(prepared.replicas, prepared.optimizers, number, count)
            with local, shared.autocast():
                yield batch if batch.data is None else batch.data
            self._batch = None
            if not self._calls:
                raise UserError(f"step {self.number}: a micro-batch had no backward pass: {BACKWARD}")
            if number < count - 1:
                shared.clock.mark("compute")
        if self._outputs is not None:
            self._outputs.end()
        sound = self._reduce(loop)
        if self.before is not None:
            yield from self._look_back(self.before, loop)
        if not sound:
            self.left_out = True
            if shared.guard.explains(shared.state):
                yield from self._inspect(self, loop)
            shared.guard.restore_buffers()

    def _look_back(self, before: "Step", loop: int) -> Iterator[Any]:
        """Read whether the gradients of this loop in the step before were finite. By now, the device has more to do."""
        verdict, activity = before.verdicts.pop(loop, None), self._shared.engine.activity
        if verdict is None:
            return
        activity.collective = "gradients"  # the device may still wait for the other ranks
        sound = verdict.finite()
        activity.collective = None
        if sound:
            return
        before.left_out = True
        if self._shared.guard.explains(self._shared.state):
            buffers = Kept(self._shared.prepared.models)
            yield from self._inspect(before, loop)
            buffers.restore()

    def _seed(self, loop: int) -> int:
        """Return the seed of this rank's random numbers in this step, so that dropout is the same after a restart."""
        parts = (self._shared.seed, self._samples, self._shared.engine.rank) + ((loop,) if loop else ())
        return mixed_seed(*parts)

    def _inspect(self, of: "Step", loop: int) -> Iterator[Any]:
        """Yield the micro-batches of a step again, to find the first tensor that is not finite, and report it. A collective.

        of: this step, or the one before. The weights are still those with which it computed, unless the step before has
        updated those of another optimizer.
        """
        shared, prepared = self._shared, self._shared.prepared
        if of._token_total is not None and float(of._token_total) <= 0:
            raise UserError(of._no_tokens())
        finite = all(bool(torch.as_tensor(value).isfinite().all()) for value in of.sums.values())
        same = of is self or len(prepared.optimizers) == 1
        self._inspection = Inspection(prepared.models, finite, same_weights=same)
        seed_generators(of._seed(loop), shared.engine.device)
        with self._inspection.hooks():
            for number, batch in enumerate(of._loaded):
                self._inspection.micro_batch(number, len(of._loaded))
                self._batch = batch
                with shared.autocast():
                    yield batch if batch.data is None else batch.data
                self._batch = None
        culprit, self._inspection = self._inspection.result(), None
        prepared.raise_where_gradients_are_missing(of._missing)
        shared.guard.report_skipped_step(shared.state, of.number, culprit)

    def backward(
        self, loss: Tensor, optimizer: torch.optim.Optimizer | None = None, *, count: Tensor | float | None = None
    ) -> None:
        """Compute the gradients of this micro-batch.

        loss: a scalar, the mean over the samples of this micro-batch; that it is a sum is not noticed. optimizer: compute
        gradients only for its parameters (default: all). count: number of items in the mean, or the sum of their weights, if
        these are not samples, such as tokens; may differ between ranks. Raises UserError.
        """
        batch = self._batch
        if batch is None:
            raise UserError(f"step.backward() outside of step.batches(): {BACKWARD}")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UserError(f"step.backward() got {instead_of_a_loss(loss)}")
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
                prepared.zero_grads[one]()
            prepared.pending.add(one)
            self._backwards[one] = self._backwards.get(one, 0) + 1
        weight: Tensor | float = batch.weight
        if count is not None:
            count = count if batch.count else 0.0  # of a repeated sample: none
            weight = count * shared.engine.size / self.count  # `_reduce` divides by the total count later
            for one in chosen:
                self._tokens.setdefault(one, {})[self._passes] = count
        else:
            self._uncounted.update(chosen)
        self._passes += 1
        with torch.autocast(shared.engine.device.type, enabled=False):  # that of --amp, or the author's own
            scaled = prepared.scaler.scale(loss * weight)
            # With several optimizers, the hooks of the other optimizers' parameters must not run.
            inputs = None
            if len(chosen) < len(prepared.optimizers):
                inputs = [p for one in chosen for p in prepared.trained[one] if p.requires_grad]
            prepared.gradients.begin_backward(scaled)
            try:
                scaled.backward(inputs=inputs)
            except Exception as error:
                if (told := self._explanation(error)) is None:
                    raise
                raise told from error
            shared.engine.activity.collective = None  # DDP reduces inside backward
        self._calls += 1
        if self._loops == 1 and self._calls == 1:  # with several losses, the first one is recorded as `loss`
            self._add("loss", loss.detach(), batch.count if count is None else count)

    def _explanation(self, error: Exception) -> UserError | None:
        """Return what to tell the author about an error of a backward pass; None: what it says itself."""
        for optimizer in self._shared.prepared.optimizers:  # Horovod's error is one about tensors
            self._shared.prepared.require_dense(optimizer)
        if "backward through the graph a second time" in str(error):
            how = "detach() what another backward pass has used, or compute it again in this loop"
            return UserError(f"step {self.number}: step.backward() got a part of an earlier loss: {how}")
        # Horovod's hook asserts, without words; DDP's reducer says this.
        if (isinstance(error, AssertionError) and not str(error)) or "mark a variable ready only once" in str(error):
            how = "leave loss.backward() out, step.backward(loss) calls it"
            if in_checkpoint(error):
                how = "a block that is checkpointed twice needs use_reentrant=False"
            return UserError(f"step {self.number}: a gradient was computed twice in a micro-batch: {how}")
        return None

    def _add(self, name: str, mean: Tensor, count: Tensor | float) -> None:
        """Add the mean over `count` samples to the sum `name`. The mean over none, NaN, adds nothing."""
        product = mean * count
        if isinstance(count, Tensor):
            product = torch.where(count > 0, product, torch.zeros_like(product))
        elif not count:
            product = torch.zeros_like(product)
        self.sums[name] = self.sums.get(name, 0.0) + product
        self.counts[name] = self.counts.get(name, 0.0) + count

    def _reduce(self, loop: int) -> bool:
        """Reduce the gradients over all ranks. Return whether they are finite, or True where that is read later."""
        shared, prepared = self._shared, self._shared.prepared
        shared.clock.mark("compute", at=prepared.gradients.gradients_ready_at)
        if not self._backwards:
            raise UserError(f"step {self.number} has no gradients: {BACKWARD}")
        passes = len(self._planned.batches)
        for optimizer, count in self._backwards.items():
            if count != passes:
                raise UserError(
                    f"step {self.number}: {count} backward passes in {passes} micro-batches for one optimizer: "
                    "add the losses up, one step.backward() in each micro-batch"
                )
            if optimizer not in prepared.dense:  # in its first step
                prepared.require_dense(optimizer)
                prepared.dense.add(optimizer)
            if [p for p in prepared.trained[optimizer] if p.grad is None and p.requires_grad]:
                self._missing = prepared.missing_gradients(optimizer)
            prepared.gradients.synchronize(optimizer)
        if self._tokens:
            if self._uncounted:
                how = "give it in all, or in none"
                raise UserError(f"step.backward(count=...) in one micro-batch and not in another: {how}")
            self._divide_by_tokens()
        elif self._input.may_leave_out:
            self._make_up_for_left_out()
        shared.clock.mark("communication")
        if not self._at_once and prepared.flagged.issuperset(self._backwards):
            self._keep_flags(loop)
            return True
        sound = True
        for optimizer in self._backwards:
            # On a GPU, `backward` and the reduction have only been enqueued.
            shared.engine.activity.collective = "gradients"
            self._reduced[optimizer] = found = finite(prepared.trained[optimizer])
            shared.engine.activity.collective = None
            sound = sound and found
        return sound

    def _keep_flags(self, loop: int) -> None:
        """Leave on the accelerator whether the gradients are finite: for the update, and for the next step to read."""
        prepared, guard = self._shared.prepared, self._shared.guard
        flags = {optimizer: not_finite(prepared.trained[optimizer]) for optimizer in self._backwards}
        self._reduced |= flags
        verdict = self.verdicts[loop] = Verdict(list(flags.values()))
        if guard.max_skipped:
            guard.restore_buffers(verdict.left_out)

    def _divide_by_tokens(self) -> None:
        """Turn the gradients of means over samples into those of a mean over items. Each loss has items of its own: so have
        the optimizers that got others in this loop."""
        alike: dict[
            tuple[int, ...], list[torch.optim.Optimizer]
        ] = {}  # by their backward passes, the same on all ranks
        for optimizer, counts in self._tokens.items():
            alike.setdefault(tuple(counts), []).append(optimizer)
        for optimizers in alike.values():
            self._multiply_gradients(self._per_token(list(self._tokens[optimizers[0]].values())), optimizers)

    def _per_token(self, counts: Sequence[Tensor | float]) -> Tensor | float:
        """Return the number of samples by that of items, over all ranks. counts: of this rank's backward passes."""
        shared = self._shared
        if (device := shared.engine.device).type != "cpu":  # the sum stays there, on every rank
            own = torch.zeros((), dtype=torch.float64, device=device)
            for count in counts:
                own += to_device(count, device)  # a tensor, or a number
            whole = self._tokens_of_all(own)
            self._token_total = whole if self._token_total is None else torch.minimum(whole, self._token_total)
            return (self.count / whole).float()  # infinite without tokens, which `_inspect` explains
        tokens = sum(float(count) for count in counts)
        total = float(self._tokens_of_all(torch.tensor(tokens, dtype=torch.float64)))
        if total <= 0:
            raise UserError(self._no_tokens())
        return self.count / total

    def _multiply_gradients(
        self, factor: Tensor | float, optimizers: Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        for optimizer in self._backwards if optimizers is None else optimizers:
            gradients = [p.grad for p in self._shared.prepared.trained[optimizer] if p.grad is not None]
            torch._foreach_mul_(gradients, factor)

    def _make_up_for_left_out(self) -> None:
        """Turn the gradients of means over the planned samples into those over the ones that the collate_fn has left in."""
        there, planned = sum(batch.count for batch in self._loaded), sum(p.local_count for p in self._planned.batches)
        device = self._shared.engine.device
        numbers = torch.tensor([there, planned], dtype=torch.float64).to(device, non_blocking=True)
        left, whole = self._shared.prepared.gradients.sum(numbers, "samples")
        if device.type != "cpu":  # the sums stay there
            self._token_total = left
            self._multiply_gradients((whole / left).float())  # infinite without samples, which `_inspect` explains
        elif left != whole:
            if not left and self._shared.prepared.gradients.of_all_ranks:
                raise UserError(self._no_tokens())
            self._multiply_gradients(float(whole) / float(left) if left else 1.0)

    def _tokens_of_all(self, own: Tensor) -> Tensor:
        """Return the number of tokens over all ranks, of which this rank has `own`. With --sync-every, as if each worker had
        as many; one that has none has gradients of zero, to be divided by 1."""
        size, worker = self._shared.engine.size, self._shared.prepared.gradients
        total = worker.sum(own, "tokens")
        if worker.size == size:
            return total
        return torch.where(total > 0, total * size / worker.size, torch.ones_like(total))

    def _no_tokens(self) -> str:
        if not self._tokens:
            return (
                f"step {self.number}: the collate_fn left no sample of all ranks: leave such samples out of the Dataset"
            )
        return f"step {self.number}: step.backward(count=...) was 0 on all ranks: leave such samples out"

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
        if not chosen or chosen[0] not in self._reduced:
            raise UserError(f"step.update() without gradients: {BACKWARD} before it, to the loop's end")
        for one in chosen:
            sound = self._reduced.pop(one)
            prepared.pending.discard(one)
            self._updated.add(one)
            if sound is False and not prepared.scaler.is_enabled():
                continue
            prepared.updating = True
            with prepared.gradients.stepping(one):
                if clip_norm is not None:
                    prepared.scaler.unscale_(one)
                    self.gradient_norm = torch.nn.utils.clip_grad_norm_(prepared.trained[one], clip_norm)
                if isinstance(sound, Tensor):
                    one.found_inf = sound  # type: ignore[attr-defined] # as GradScaler gives it to fused optimizers
                prepared.scaler.step(one)  # unscales; skips the step after an overflow, the same on all ranks
            prepared.updating = False
            if isinstance(sound, Tensor):
                vars(one).pop("found_inf", None)  # GradScaler removes it, too
            elif sound and one in prepared.unflagged:
                prepared.first_update(one)
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
            self._add("reported_loss" if name == "loss" else name, mean, batch.count)

    def require_complete(self) -> None:
        """Raise UserError if the script has omitted a part of the step. Called when it requests the next step."""
        if self._loops == 0:
            raise UserError(f"step {self.number} has no gradients: {BACKWARD}")
        if self._batch is not None:
            raise UserError(f"step {self.number}: the loop over step.batches() was left early: let it run to its end")
        if self._reduced or not self._updated:
            raise UserError(f"step {self.number} has gradients that were not applied: {UPDATE}")
