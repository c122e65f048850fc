"""Evaluations: each rank's part of a test set, and means over the samples of all ranks."""

import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hvdtrain.engines.accelerators import read, recorded
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.inputs import Batch
from hvdtrain.inputs.sharding import mixed_seed, seed_generators
from hvdtrain.inputs.splits import SPLIT, split_of
from hvdtrain.loop.epochs import Epochs
from hvdtrain.loop.shared_buffers import SharedBuffers
from hvdtrain.output.metric_names import require_free


class CutShort(BaseException):
    """Raised to end an evaluation early on this rank after a stop request. `Evaluations.block` catches it."""


# What a mean may go through and still be one: not a product, such as the mean times the number of samples.
SAME_VALUE = frozenset({"detach", "clone", "cpu", "to", "float", "double", "item", "__float__", "numpy"})


class Means(TorchFunctionMode):
    """Notes which scalars are means over a batch: `run.record` would take them for sums, and 0.67 of 8 samples for 0.08.

    Up to the first `run.record`, because a program records the same in each batch. Not in a program that has used
    torch.compile, which would compile again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._means: dict[int, object] = {}  # by id; kept, so that no other object gets the same one
        self._depth: int | None = None  # of the stack of such modes, with this one; None: it is not there

    def __enter__(self) -> "Means":
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None or not dynamo.counters["frames"]:
            super().__enter__()  # type: ignore[no-untyped-call] # torch's own
            self._depth = torch._C._len_torch_function_stack()
        return self

    def __exit__(self, *error: object) -> None:
        if self._depth is not None:
            self._depth = None
            super().__exit__(*error)  # type: ignore[no-untyped-call] # torch's own

    def stop(self) -> None:
        """Watch no longer. Does nothing where the program has entered such a mode, too, and not left it."""
        if self._depth == torch._C._len_torch_function_stack():
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if isinstance(result, float) or (isinstance(result, Tensor) and not result.ndim):
            passed_on = name in SAME_VALUE and bool(args) and id(args[0]) in self._means
            if passed_on or name == "mean" or is_mean_loss(func, args, kwargs or {}):
                self._means[id(result)] = result
        return result

    def has(self, value: object) -> bool:
        """Return whether `value` is a mean."""
        return id(value) in self._means


def is_share(value: object, samples: int) -> bool:
    """Return whether a number, which another library may have made, is a share of the samples, such as an accuracy."""
    return isinstance(value, float) and 0 < value < 1 and abs(value * samples - round(value * samples)) < 1e-9


def is_mean_loss(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether this call of a loss in torch.nn.functional takes the mean."""
    if getattr(func, "__module__", "") != "torch.nn.functional":
        return False
    parameters = inspect.signature(func).parameters
    given = dict(zip(parameters, args, strict=False)) | named
    return "reduction" in parameters and given.get("reduction", parameters["reduction"].default) in (
        "mean",
        "batchmean",
    )


class Evaluation:
    """The state of one `Evaluating.evaluating` block.

    data: see there. batches: of it, on this rank; None: it is a number of samples. heartbeat: called for each
    batch. means: notices those that are given without their count.
    """

    def __init__(
        self, engine: Engine, data: Any, batches: Iterator[Batch] | None, heartbeat: Callable[[], None], means: Means
    ):  # fmt: skip
        self._engine, self._data, self._loaded, self._heartbeat = engine, data, batches, heartbeat
        self._means = means
        self.whole = batches is None  # the script has one part of a number of samples, not batches
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor | float] = {}  # by name, the sum of `count`, if that was given
        self._samples = 0  # of this rank, in the batches yielded so far
        self._in_batch = 0  # of these, in the current batch
        self._rows: dict[str, int] = {}  # by name, the number of values that were given one for each sample
        self._rows_in_sums: dict[str, int] = {}  # by name, the number of samples in batches of which a sum was given
        self._indices: Tensor | None = None  # of the current batch, if there is one

    def mine(self) -> Any:
        """Return this rank's part of the data: a slice, or an iterator over batches."""
        if self._loaded is None:
            return slice(self._engine.rank, self._data, self._engine.size)
        return self._batches(self._loaded)

    def _batches(self, loaded: Iterator[Batch]) -> Iterator[Any]:
        for batch in loaded:
            self._heartbeat()
            self._samples += batch.count
            self._in_batch = batch.count
            self._indices = batch.indices
            yield batch.data

    def rows(self) -> Tensor:
        """Return the indices of the samples of the current batch, int64 [b]; of a number of samples, all of this rank's."""
        if self._loaded is None:
            return torch.arange(self._data)[self.mine()]
        if self._indices is None:
            raise UserError("run.predict() before the first batch: call it in the loop over the batches")
        return self._indices

    def add(self, values: Mapping[str, Any], count: Tensor | float | None) -> None:
        """Add values: sums over samples, or one value per sample. count: the number of items in each of these sums."""
        self._heartbeat()
        for name, value in values.items():
            if name in self._sums and (count is not None) != (name in self._counts):
                raise UserError("run.record(count=...) in one batch and not in another: give it in all, or in none")
            given = recorded("run.record", name, value)
            samples = self._held() if self.whole else self._in_batch
            if (
                not given.ndim
                and samples > 1
                and (self._means.has(value) or (count is None and is_share(value, samples)))
            ):
                remedy = 'give a value for each sample (reduction="none"), or their sum; count= is how many a sum is of'
                raise UserError(f"run.record({name}=...) got a mean, and parts may have unequal numbers: {remedy}")
            if given.ndim and (given.ndim > 1 or len(given) != 1 or self._in_batch == 1):
                self._rows[name] = self._rows.get(name, 0) + len(given)
            else:
                self._rows_in_sums[name] = self._rows_in_sums.get(name, 0) + self._in_batch
            given = given.to(torch.float64)
            if given.ndim > 1 and given.numel() and count is None:  # of a sample's pixels, tokens or labels: their mean
                given = given.flatten(1).mean(1)
            total = given.sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            if count is not None:
                self._counts[name] = self._counts[name] + count if name in self._counts else count
        self._means.stop()

    def _counted(self, name: str) -> int:
        """Return by how many samples of this rank the sum of a metric is divided: as many as there are values of it, where a
        collate_fn makes several of a sample. Raises UserError."""
        samples = self._held()
        if name not in self._rows:
            return samples
        rows = self._rows[name] + self._rows_in_sums.get(name, 0)
        if rows % samples if samples else rows:
            remedy = "give a value for each sample, or their sum, or count=, the number of values"
            raise UserError(f"run.record({name}=...) got {rows} values for {samples} samples: {remedy}")
        return rows

    def _held(self) -> int:
        """Return how many samples this rank has; of a loader, so far."""
        return len(range(self._data)[self.mine()]) if self._loaded is None else self._samples

    def means(self) -> dict[str, float]:
        """Return the means over the samples of all ranks, and `count`, that of the first. A collective. Raises UserError on
        every rank."""
        names, counted = self._names()
        own = [self._sums.get(name, 0.0) for name in names] + [self._counts.get(name, 0.0) for name in counted]
        with self._engine.raising_together("evaluate.rows"):
            rows = [0 if name in counted else self._counted(name) for name in names]
        mine = torch.tensor([*read(own), *rows], dtype=torch.float64)
        sums = self._engine.sum(mine, "evaluate").tolist()
        counts = dict(zip(names, sums[-len(names) :], strict=True))
        counts |= dict(zip(counted, sums[len(names) : -len(names)], strict=True))
        totals = [counts[name] for name in names]
        if min(totals) <= 0:
            raise UserError("the test set has no readable samples: see --test-shards, --data-dir", everywhere=True)
        means = {name: value / total for name, value, total in zip(names, sums, totals, strict=False)}
        return means | {"count": totals[0]}

    def _names(self) -> tuple[list[str], list[str]]:
        """Return the names of all sums, and of those with a `count`: a rank without samples has recorded nothing. A
        collective. Raises UserError on every rank."""
        split = None if self.whole else split_of(getattr(self._data, "dataset", None))
        mine = [list(self._sums), list(self._counts), split, self._held()]
        everyone = self._engine.all_gather_object(mine, "evaluate.names")
        if any(theirs[2] != split for theirs in everyone):
            raise UserError(
                f"ranks disagree about which samples the subset of the test set has: {SPLIT}", everywhere=True
            )
        names, counted = (list(dict.fromkeys(n for theirs in everyone for n in theirs[part])) for part in (0, 1))
        if not names:
            raise UserError("run.evaluating() recorded nothing: write run.record(loss=...) in it", everywhere=True)
        for rank, (own, _, _, samples) in enumerate(everyone):
            missing = [name for name in names if name not in own and name not in counted]
            if samples and missing:
                remedy = "record it on every rank, or give the number of its values as count="
                raise UserError(
                    f"run.record({missing[0]}=...) was not called on rank {rank}: {remedy}", everywhere=True
                )
        return names, counted


class Evaluations:
    """The evaluations of a run. shares: whether ranks have buffers of their own, which are made the same before."""

    def __init__(self, run: "Evaluating", *, shares: bool = True):
        self._run, self._shares = run, shares
        prepared = run.prepared()
        self.buffers = SharedBuffers(run.engine, prepared.models)
        self.current: Evaluation | None = None  # inside `block`
        self.last: Evaluation | None = None

    def _share_buffers(self, averaged: Mapping[str, torch.nn.Module]) -> None:
        """Make the buffers the same on all ranks. A collective. averaged: registered modules."""
        run = self._run
        # With --sync-every, the weights and statistics of registered modules are averaged over ranks, too.
        modules = averaged if run.prepared().weights_of_all is None else {}
        self.buffers.share((run.state.epoch, run.state.step, run.in_steps), modules)
        if line := self.buffers.warning():
            run.say(line)

    @contextlib.contextmanager
    def block(self, data: Any, prefix: str) -> Iterator[Any]:
        """See `Evaluating.evaluating`."""
        run = self._run
        prepared = run.prepared("run.evaluating()")
        if self.current is not None:
            raise UserError("run.evaluating() inside of run.evaluating(): end the first block before the next")
        run.metrics_logger.evaluation(run.data.input)
        began = time.perf_counter()
        registered = run.checkpoints.registered
        averaged = {name: what for name, what in registered.items() if isinstance(what, torch.nn.Module)}
        prepared.require_same_parameters()
        if self._shares:
            self._share_buffers(averaged)
        whole = isinstance(data, int) and not isinstance(data, bool)
        batches = None if whole else run.data.evaluated(data)
        means = Means()
        self.current = self.last = evaluation = Evaluation(run.engine, data, batches, self._go_on, means)
        models = (*prepared.replicas, *averaged.values())
        modes = [(module, module.training) for model in models for module in model.modules()]
        for model in models:
            model.eval()
        seed_generators(mixed_seed(run.flags.seed, "evaluate", run.state.step, run.rank), run.device)
        try:
            during = run.engine.activity.during("evaluation")
            with run.shared_weights(), during, torch.no_grad(), run.autocast(), means:
                yield evaluation.mine()
        except CutShort:
            pass
        finally:
            self.current = None
            for module, training in modes:
                module.training = training
        # Stopped between steps: save, and do not record the partial evaluation, which is repeated after the resume. Within a
        # step, the position does not match the weights yet, so nothing is saved before the step has ended.
        if not run.in_steps and self.is_cut_short():
            self.buffers.restore_own()
            run.stop()
        run.note_evaluation()
        run.metrics_logger.evaluated(evaluation.means(), prefix)
        run.clock.leave_out(time.perf_counter() - began)

    def _go_on(self) -> None:
        """Called for each batch. After a stop request, ranks leave an evaluation at any batch, except inside a step."""
        self._run.engine.activity.heartbeat()
        if self._run.stopping.monitor.stop_reason and not self._run.in_steps:
            raise CutShort

    def is_cut_short(self) -> bool:
        """Return, on all ranks, whether any rank knows of a stop request: they learn of it at slightly different times. A
        collective."""
        mine = torch.tensor([float(self._run.stopping.monitor.stop_reason is not None)])
        return bool(self._run.engine.sum(mine, "evaluate.stop").item())


class Evaluating(Epochs):
    """The epochs of a training, with evaluations in them or after them."""

    evaluations: Evaluations  # from `prepare` on

    def evaluating(self, data: Any, *, prefix: str = "") -> contextlib.AbstractContextManager[Any]:
        """Context manager for an evaluation. Yields this rank's part of a test set. A collective.

        Inside, models, also registered ones, are in evaluation mode, without gradients; batch norm's running statistics are
        averaged over ranks. data: a number of samples (yields a slice); or a DataLoader or a `Source` (yields an iterator
        over batches). prefix: for the names in summary.json and in the output, such as "test".
        """
        self.prepared("run.evaluating()")
        return self.evaluations.block(data, prefix)

    def predict(self, **values: Tensor) -> None:
        """Give what the model says about each sample of this batch, inside `evaluating`: with --predict, it is written.

        values: a tensor for each name, with a row for each sample in the order of the batch. The file has them in the order
        of the data set.
        """
        if self._shared is None or self.evaluations.current is None:
            raise UserError("run.predict() outside of run.evaluating(): write `with run.evaluating(...):` around it")

    def record(self, *, count: Tensor | float | None = None, **values: Tensor | float) -> None:
        """Record values of an evaluation.

        Inside `evaluating`: sums over this rank's samples, or a row for each sample, whose mean is its value. They are
        summed over ranks and divided by the number of samples, or by the sum of their `count`, such as a number of tokens.
        After `evaluating`: values that are added to the evaluation unchanged. They must be the same on all ranks.
        """
        require_free(values)
        if not values:
            raise UserError("run.record() got nothing: write run.record(loss=...)")
        current = self.evaluations.current if self._shared is not None else None
        if current is not None:
            current.add(values, count)
            return
        given = {name: recorded("run.record", name, value) for name, value in values.items()}
        if not self.metrics_logger.unwritten or any(value.numel() != 1 for value in given.values()):
            raise UserError(
                "run.record() outside of run.evaluating(): write `with run.evaluating(...):` around it "
                "(training metrics go to step.record())"
            )
        self.metrics_logger.amend({name: float(value) for name, value in given.items()})

    # ---- what evaluations and features use

    def make_evaluations(self) -> Evaluations:
        """Return what carries out evaluations."""
        return Evaluations(self)

    def shared_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the weights are the same on all ranks."""
        weights_of_all = self.prepared().weights_of_all
        return weights_of_all() if weights_of_all is not None and self.in_steps else contextlib.nullcontext()

    def note_evaluation(self) -> None:
        """Take note of an evaluation that was not cut short."""
        if self._in_epoch:
            self.state.evaluated_epoch = self.state.epoch
