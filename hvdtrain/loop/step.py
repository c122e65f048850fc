"""One training step: its micro-batches, their gradients and the update. Enforces the order that all ranks need."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.engines.accelerators import recorded
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.inputs import Batch, Input
from hvdtrain.inputs.sharding import PlannedStep, mixed_seed, seed_generators
from hvdtrain.loop.prepare import PARAMETER_ADDED, Prepared
from hvdtrain.loop.state import TrainState
from hvdtrain.output.metric_names import require_free
from hvdtrain.program.means import require_no_counts
from hvdtrain.program.mistakes import Outputs, backward_explained, instead_of_a_loss

if TYPE_CHECKING:
    from hvdtrain.loop.counts import Counts
    from hvdtrain.loop.feature import Features
    from hvdtrain.loop.gather import Rehearsals
    from hvdtrain.output.clock import Clock

UPDATE = "call step.update() after the loop over step.batches()"
EACH = "name the optimizer, step.backward(loss, optimizer), or update all of them at once"
LEFT = "the loop over step.batches() was left, as by `break`: let it end, and call run.end_epoch() or run.stop() to end more"
OF_NAN = "; also of a loss that is NaN: --max-skipped N leaves such steps out"
BACKWARD = "write `for batch in step.batches(): step.backward(loss)`"


def keep_in_order(prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
    """Refuse the author's calls of `optimizer` that would lose gradients, or apply those of this rank alone."""

    def zero_grad(set_to_none: bool = True) -> None:
        if optimizer in prepared.pending:
            remedy = "leave it out, gradients are cleared before each step"
            raise UserError(f"optimizer.zero_grad() would lose the gradients of this step: {remedy}")
        prepared.zero_grads[optimizer]()

    def add_param_group(*_: object) -> None:
        raise UserError(PARAMETER_ADDED)

    def before_step(*_: object) -> None:
        if not prepared.updating:
            remedy = "write step.update() after the loop over step.batches()"
            raise UserError(f"optimizer.step() applies gradients that are not those of all ranks: {remedy}")

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign,assignment] # of this object alone
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign] # of this object alone
    optimizer.register_step_pre_hook(before_step)


@dataclass
class Shared:
    """What all steps of a run share."""

    engine: Engine
    prepared: Prepared
    clock: "Clock"
    state: TrainState
    seed: int
    autocast: Callable[[], contextlib.AbstractContextManager[object]]  # the precision of --amp
    features: "Features"
    say: Callable[[str], object]
    step: "Step | None" = None  # the current one

    def __post_init__(self) -> None:
        # The ranks that this process computes, one after the other. They never change, and each step reads them.
        self.own = tuple(self.engine.own)
        self.rounds: Rehearsals | None = None  # of loops over micro-batches, if ranks take turns
        if self.engine.takes_turns:
            from hvdtrain.loop import gather

            self.rounds = gather.Rehearsals(self.engine)


class Tally(NamedTuple):
    """Of one rank, the sums of the loss and of recorded values over its samples, and their counts. Tensors stay on the
    device."""

    sums: dict[str, Tensor | float]
    counts: dict[str, Tensor | float]


class Step:
    """A step of training, by `for step in run.steps(...)`. Attributes: number (from 1, since the beginning of training),
    logged, last (of its epoch, or of all), count (samples of all ranks), local_count, gradient_norm (before clipping)."""

    def __init__(self, shared: Shared, planned: PlannedStep, source: Input, *, logged: bool, last: bool):
        self.number = shared.state.step + 1  # since the beginning of training, from 1
        self.logged = logged  # whether this step is recorded; `record` ignores its values otherwise
        self.last = last  # of its epoch, or of all
        self.ends_epoch = False  # whether the script has called `run.end_epoch`
        self.count = planned.count  # samples, over all ranks and micro-batches
        self.tallies: dict[int, Tally] = {}
        for rank in shared.own:
            self.tallies[rank] = Tally({}, {})
        self.local_count = 0  # samples of this rank
        self.gradient_norm: Tensor | None = None  # before clipping, if `update` clipped
        # Whether an update was skipped, because a gradient was not finite; None: that is not known yet.
        self.left_out: bool | None = False
        self.may_save = True  # whether all ranks have the same weights after it, so that it can be saved
        self.loaded: list[Batch] = []  # kept during the step, for another `batches()`
        self.micro_batch, self.micro_batches = 0, len(planned.batches)  # the current one, from 0; how many
        self.losses: list[Tensor] = []  # of each backward pass on this rank
        self.backwards: dict[torch.optim.Optimizer, int] = {}  # calls of `backward` in this loop
        self.missing: list[str] = []  # parameters that got no gradient on this rank
        self.items: Counts | None = None  # with `backward(count=...)`, or where a collate_fn may leave samples out
        self._planned = planned
        self._shared, self._input = shared, source
        self._samples = shared.state.samples  # of all steps before
        self._batch: Batch | None = None  # the current micro-batch
        self._left = False  # whether a loop over `batches` was left by `break`
        self._loops = 0  # calls of `batches`
        self._calls = 0  # calls of `backward` for this micro-batch
        self._passes = 0  # backward passes in this loop
        self._averaged: list[list[float]] = []  # in the first step, of the first loss of each: see `look_at`
        self._reduced: dict[torch.optim.Optimizer, bool] = {}  # not yet applied; False: they are not finite
        self._updated: set[torch.optim.Optimizer] = set()
        self._unscaled: set[torch.optim.Optimizer] = set()  # with --amp fp16: since the last update of the scaler
        self._uncounted: set[torch.optim.Optimizer] = set()  # those with a backward pass without `count`
        # After a backward pass, one gradient of each optimizer, and how often it was written.
        self._gradients: dict[torch.optim.Optimizer, tuple[Tensor, int]] = {}
        self._outputs: Outputs | None = None  # with several updates per step, and several micro-batches

    def __iter__(self) -> Iterator[Any]:
        raise UserError("a step is no batch: in `for step in run.steps(data):`, write `for x, y in step.batches():`")

    @property
    def lr(self) -> float:
        """The learning rate of the first optimizer; NaN if it has none. Setting it sets the rate of every optimizer."""
        return float(self._shared.prepared.optimizers[0].param_groups[0].get("lr", math.nan))

    @lr.setter
    def lr(self, rate: float) -> None:
        for optimizer in self._shared.prepared.optimizers:
            for group in optimizer.param_groups:
                if "lr" not in group:
                    raise UserError(f"step.lr: {type(optimizer).__name__} has no learning rate: leave it out")
                group["lr"] = rate

    # ---- micro-batches

    @property
    def current(self) -> Batch | None:
        """The current micro-batch; None outside of `batches`."""
        return self._batch

    @property
    def batch(self) -> Batch:
        """The current micro-batch: `data` (as it is yielded), `indices`, `count`."""
        if self._batch is None:
            raise UserError("step.batch outside of step.batches(): use it inside the loop")
        return self._batch

    @property
    def loss(self) -> float:
        """The loss of this step: the mean over the samples of all ranks, after `step.batches`. A collective."""
        tallies = self.tallies.values()
        if self._batch is not None or any("loss" not in tally.sums for tally in tallies):
            raise UserError(f"step {self.number}: step.loss before the end of step.batches(): use it after the loop")
        of_ranks = [[float(tally.sums["loss"]), float(tally.counts["loss"])] for tally in tallies]
        total, count = self._shared.engine.sums(of_ranks, "step.loss")
        return total / count if count else math.nan

    def _load(self, number: int, seed: int | None = None) -> Batch:
        """Return a micro-batch of this step, by its number. It is kept until the step ends. seed: as in `Input`."""
        if number == len(self.loaded):
            self._input.seed, activity = seed, self._shared.engine.activity
            with activity.during("reading data") if self._input.may_wait else contextlib.nullcontext():
                self.loaded.append(self._input.load(self._planned.batches[number]))
            self.local_count += self.loaded[number].count
        return self.loaded[number]

    def per_sample(self, number: Callable[[Any], Tensor | float]) -> float:
        """Return how many of something there are for each sample of this step, over all micro-batches and ranks: the
        denominator of a loss of its own, such as boxes per image. A collective; before `batches`.

        number: how many there are in a micro-batch. Raises UserError.
        """
        from hvdtrain.loop.counts import share_of_samples

        own, engine = self._shared.own, self._shared.prepared.engine
        return share_of_samples(engine, own, self._load, self.micro_batches // len(own), number)

    def batches(self) -> Iterator[Any]:
        """Yield this rank's micro-batches, as the DataLoader has collated them; of `run.steps(NUMBER)`, a Batch.

        After the loop, the gradients are those of the global batch. Autocast is enabled inside according to --amp. For
        another optimizer's update in the same step, call it again: it yields the same micro-batches.
        """
        if self._batch is not None:
            raise self._not_ended("step.batches() inside step.batches(): end the first loop before the next")
        shared, loop = self._shared, self._loops
        prepared, count = shared.prepared, self.micro_batches
        passes = count // len(shared.own)  # of each rank of this process: as many for all
        again, rounds, losses, tallies = True, shared.rounds, len(self.losses), self.tallies
        if rounds is not None:
            rounds.begin()
        if prepared.is_crowded:
            prepared.make_room()
        while again:
            self._begin_loop(loop, count)
            if rounds is not None:  # as before the round that was computed
                del self.losses[losses:]
                self.tallies = {rank: Tally(dict(one.sums), dict(one.counts)) for rank, one in tallies.items()}
            for number in range(count):
                turn, later = divmod(number, passes)
                seed = None if later else self._begin_turn(shared.own[turn], loop)
                batch = self._batch = self._load(number, seed)
                shared.clock.mark("loading")
                self.micro_batch, self._calls = number, 0
                local = prepared.engine.micro_batch(prepared.replicas, prepared.optimizers, number, count)
                with local, shared.autocast():
                    try:
                        yield batch if batch.data is None else batch.data
                    except GeneratorExit:  # of a loop that is left by `break`
                        self._left = True
                        raise
                self._batch = None
                if not self._calls:
                    raise UserError(f"step {self.number}: a micro-batch had no backward pass: {BACKWARD}{OF_NAN}")
                if number < count - 1:
                    shared.clock.mark("compute")
            if self._outputs is not None:
                self._outputs.end()
            again = rounds is not None and rounds.goes_on()
        if prepared.engine.takes_turns:
            self._begin_turn(None, loop)
        self._reduce()
        if prepared.scaler.is_enabled():  # here, for whatever is done with gradients before the update
            for one in self.backwards:
                prepared.scaler.unscale_(one)
                self._unscaled.add(one)
        for reduced in shared.features.reduced:
            reduced(self)

    def _not_ended(self, inside: str) -> UserError:
        """Return what is wrong in a loop over `batches`, or after it was left."""
        return UserError(f"step {self.number}: {LEFT + OF_NAN if self._left else inside}")

    def gathered(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks, which take turns: see `Rehearsals`."""
        rounds, planned = self._shared.rounds, self._planned.batches[self.micro_batch]
        assert rounds is not None
        return rounds.gather(rows, self.batch, planned.together, late=bool(self.backwards))

    def _begin_loop(self, loop: int, count: int) -> None:
        """Begin a loop (from 0) over `count` micro-batches."""
        engine, prepared = self._shared.engine, self._shared.prepared
        self._loops = loop + 1
        engine.activity.compute()
        if self.items is not None:
            self.items.begin()
        self._uncounted, self._passes, self.backwards = set(), 0, {}
        self._gradients = {}
        if count > 1 and len(prepared.optimizers) > 1:
            self._outputs = self._outputs or Outputs(prepared.replicas, self.number)
            self._outputs.begin(loop)

    def _begin_turn(self, rank: int | None, loop: int) -> int:
        """Go on as this rank, with its random numbers in this step, so that dropout is the same after a restart. Return
        their seed. None: the ranks of this process have had their turns, and what follows is the same on all."""
        shared = self._shared
        shared.engine.take_turn(rank)
        seed = mixed_seed(shared.seed, self._samples, "all" if rank is None else rank, *((loop,) if loop else ()))
        seed_generators(seed, shared.engine.device)
        return seed

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
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UserError(f"step.backward() got {instead_of_a_loss(loss)}")
        if self.number == 1:
            from hvdtrain.program.losses import look_at

            passes, say = self.micro_batches // len(self._shared.own), None if self._passes else self._shared.say
            own = look_at(loss, count is not None, batch.count, passes, self._shared.engine.size, say)
            self._averaged += [own] if not self._calls else []
        prepared = self._shared.prepared
        chosen = prepared.optimizers if optimizer is None else [prepared.own(optimizer)]
        loss = loss.reshape(()) if loss.ndim else loss
        # Detached: otherwise, the graph of each micro-batch would be kept until the end of the step.
        self.losses.append(value := loss.detach())
        self._begin_backward(chosen)
        if count is None:
            weight: Tensor | float = batch.weight
            self._uncounted.update(chosen)
        else:
            count = count if batch.count else 0.0  # a rank without samples repeats one, which does not count
            weight = self._counts().add(chosen, self._passes, count)
        self._passes += 1
        if self._passes > 1:
            self._require_gradients(chosen)
        self._differentiate(loss, weight, chosen)
        if (self.micro_batches > 1 or not prepared.reduces_at_once) and not prepared.engine.takes_turns:
            for one in chosen:
                if (first := next((p.grad for p in prepared.trained[one] if p.grad is not None), None)) is not None:
                    self._gradients[one] = first, first._version
        self._calls += 1
        if self._loops == 1 and self._calls == 1:  # with several losses, the first one is recorded as `loss`
            self._add("loss", value, batch.count if count is None else count)

    def _require_gradients(self, chosen: Sequence[torch.optim.Optimizer]) -> None:
        """Raise UserError if the program has cleared or changed the gradients of the micro-batches before."""
        for one in chosen:
            if one not in self._gradients:
                continue
            first, version = self._gradients[one]
            trained = self._shared.prepared.trained[one]
            # torch counts each write into a tensor: `_version` is another one after clipping or clearing.
            if first._version == version and any(p.grad is not None for p in trained):
                continue
            if not any(bool(p.grad.any()) for p in trained if p.grad is not None):
                remedy = "leave zero_grad() out, they are cleared before each step"
                raise UserError(f"step {self.number}: the gradients of the micro-batch before were cleared: {remedy}")
            raise UserError(
                f"step {self.number}: gradients were changed in the loop over step.batches(), before they are those of the "
                "global batch: do that after the loop, and clip them with step.update(clip_norm=...)"
            )

    def _begin_backward(self, chosen: Sequence[torch.optim.Optimizer]) -> None:
        """Count a backward pass of these optimizers. Raises UserError if they have gradients that are not applied yet."""
        prepared = self._shared.prepared
        for one in chosen:
            if one in self._reduced:
                remedy = EACH if self._updated else UPDATE
                raise UserError(f"step {self.number}: step.backward() before the last gradients were applied: {remedy}")
            if one not in self.backwards and one in self._updated:  # another update in the same step
                prepared.zero_grads[one]()
                if one in self._unscaled and not self._reduced:  # GradScaler unscales each once between its updates
                    prepared.scaler.update()
                    self._unscaled.clear()
            prepared.pending.add(one)
            self.backwards[one] = self.backwards.get(one, 0) + 1

    def _differentiate(self, loss: Tensor, weight: Tensor | float, chosen: Sequence[torch.optim.Optimizer]) -> None:
        """Run the backward pass of `weight` times `loss`, for the parameters of the `chosen` optimizers."""
        shared, prepared = self._shared, self._shared.prepared
        # backward() belongs outside of autocast: that of --amp, or the author's.
        with torch.autocast(shared.engine.device.type, enabled=False):
            scaled = prepared.scaler.scale(loss * weight if isinstance(weight, Tensor) or weight != 1.0 else loss)
            if shared.rounds is not None and shared.rounds.rehearses(scaled):
                return
            # With several optimizers, the hooks of the other optimizers' parameters must not run.
            inputs = None
            if len(chosen) < len(prepared.optimizers):
                inputs = [p for one in chosen for p in prepared.trained[one] if p.requires_grad]
            if prepared.engine.begin_backward is not None:
                prepared.engine.begin_backward(scaled, chosen)
            try:
                scaled.backward(inputs=inputs)
            except Exception as error:
                for one in prepared.optimizers:  # Horovod's own error for a sparse gradient does not name it
                    prepared.require_dense(one)
                if (mistake := backward_explained(error, self.number)) is None:
                    raise
                raise mistake from error
            shared.engine.activity.collective = None  # DDP reduces inside backward

    def _add(self, name: str, mean: Tensor, count: Tensor | float) -> None:
        """Add the mean over `count` samples to the sum `name`. The mean over none, NaN, adds nothing."""
        product = (mean.float() if mean.element_size() < 4 else mean) * count  # a sum of float16 ends at 65504
        if isinstance(count, Tensor):
            product = torch.where(count > 0, product, torch.zeros_like(product))
        elif not count:
            product = torch.zeros_like(product)
        sums, counts = self.tallies[self._shared.engine.rank]
        sums[name] = sums[name] + product if name in sums else product
        counts[name] = counts.get(name, 0.0) + count

    def _counts(self) -> "Counts":
        from hvdtrain.loop.counts import Counts

        self.items = self.items or Counts(self._shared.prepared, self.number, self.count)
        return self.items

    def _reduce(self) -> None:
        """Reduce the gradients over all ranks."""
        if self._gradients:
            self._require_gradients(list(self.backwards))
        shared, prepared = self._shared, self._shared.prepared
        shared.clock.mark("compute", at=prepared.engine.gradients_ready_at)
        if not self.backwards:
            raise UserError(f"step {self.number} has no gradients: {BACKWARD}")
        passes, first = len(self._planned.batches), not prepared.dense
        for optimizer, count in self.backwards.items():
            if count != passes:
                raise UserError(
                    f"step {self.number}: {count} backward passes in {passes} micro-batches for one optimizer: "
                    "add the losses up, one step.backward() in each micro-batch"
                )
            if optimizer not in prepared.dense:  # in its first step
                prepared.require_dense(optimizer)
                prepared.dense.add(optimizer)
            for parameter in prepared.trained[optimizer]:
                if parameter.grad is None and parameter.requires_grad:
                    self.missing = prepared.missing_gradients(optimizer)
                    break
            prepared.engine.synchronize(optimizer)
            self._reduced[optimizer] = True
        # Compared in the first step alone: a comparison is a message between all ranks.
        if first:
            from hvdtrain.loop.counts import compare_counts

            compare_counts(shared.engine, self.items, self._averaged, shared.say)
        if self.items is not None or self._input.may_leave_out:
            self._divide()
        shared.clock.mark("communication")

    def _divide(self) -> None:
        """Turn the gradients of means over the planned samples into those of means over what was counted. A collective."""
        if self.items is not None and self.items.given:
            if self._uncounted:
                remedy = "give it in all, or in none"
                raise UserError(f"step.backward(count=...) in one micro-batch and not in another: {remedy}")
            self.items.divide()
        elif self._input.may_leave_out:
            planned = sum(batch.local_count for batch in self._planned.batches)
            self._counts().make_up(sum(batch.count for batch in self.loaded), planned, list(self.backwards))

    def leave_out(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Skip the next update of these: their gradients are not finite, on all ranks that average them."""
        for optimizer in optimizers:
            self._reduced[optimizer] = False
            self.left_out = True

    # ---- the update

    def update(self, optimizer: torch.optim.Optimizer | None = None, *, clip_norm: float | None = None) -> None:
        """Apply the gradients on all ranks. If they are not finite, the update is skipped.

        optimizer: only this one (default: all that have gradients). clip_norm: maximum norm of its gradients. Raises
        UserError.
        """
        shared, prepared = self._shared, self._shared.prepared
        if clip_norm is not None and not isinstance(clip_norm, Tensor) and not float(clip_norm) > 0:
            raise UserError(f"step.update(clip_norm={clip_norm}): give it a number above 0, or leave it out")
        if self._batch is not None:
            raise self._not_ended("step.update() inside the loop over step.batches(): let it end first")
        chosen = list(self._reduced) if optimizer is None else [prepared.own(optimizer)]
        if not chosen or chosen[0] not in self._reduced:
            raise UserError(f"step.update() without gradients: {BACKWARD} before it, to the loop's end")
        for one in chosen:
            sound = self._reduced.pop(one)
            prepared.pending.discard(one)
            self._updated.add(one)
            if not sound and not prepared.scaler.is_enabled():
                continue
            prepared.updating = True
            with prepared.engine.stepping(one):
                if clip_norm is not None:
                    self.gradient_norm = torch.nn.utils.clip_grad_norm_(prepared.trained[one], clip_norm)
                prepared.scaler.step(one)  # skips the step after an overflow, the same on all ranks
            prepared.updating = False
        shared.engine.activity.update()

    def record(self, **values: Tensor | float) -> None:
        """Record training metrics of this micro-batch: one value per sample, or their mean. Each metric needs a unique name.

        `loss` is shown instead of the loss given to `backward`. Values are used only if `step.logged`.
        """
        batch = self._batch
        if batch is None:
            raise UserError("step.record() outside of step.batches(): call it beside step.backward()")
        require_free(values)
        if self.number == 1:
            require_no_counts(values, batch.count)
        for name, value in values.items() if self.logged else ():
            mean = recorded("step.record", name, value).float().mean()
            self._add("reported_loss" if name == "loss" else name, mean, batch.count)

    def require_complete(self) -> None:
        """Raise UserError if the script has omitted a part of the step. Called when it requests the next step."""
        if self._loops == 0:
            raise UserError(f"step {self.number} has no gradients: {BACKWARD}")
        if self._batch is not None:
            raise self._not_ended(LEFT)
        if self._reduced or not self._updated:
            remedy = EACH if self._reduced and self._updated else UPDATE
            raise UserError(f"step {self.number} has gradients that were not applied: {remedy}")
