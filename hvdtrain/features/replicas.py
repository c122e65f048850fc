"""Compares the weights of all ranks, bit by bit."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from hvdtrain.checkpoint.sums import checksums
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure
from hvdtrain.engines.modules import named_parameters
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step

LATE = (
    "start again from a checkpoint; check that host's memory, and that the program changes weights on every rank alike, "
    "as by random numbers of torch.Generator().manual_seed(NUMBER)"
)
ALIKE_REMEDY = (
    "change weights on every rank alike: in forward, by load_state_dict(), and by random numbers in gradients or in the "
    "optimizer, from torch.Generator().manual_seed(NUMBER)"
)


def compare(
    engine: Engine, models: Sequence[nn.Module], name_of: Callable[[int], str], step: int, before: int,
    remedy: str = LATE, rates: Sequence[float] = (),
) -> None:  # fmt: skip
    """Raise Failure on every rank if the parameters are not bitwise equal on all ranks of `engine`. A collective.

    name_of: returns the name of a rank. before: the step of the last comparison. rates: learning rates of this rank.
    """
    named = named_parameters(models) if engine.size > 1 else []
    if not named:
        return
    names = [name for name, _ in named]
    sums = checksums([parameter for _, parameter in named]).cpu()
    rows = engine.all_gather_if_unlike(sums, "guard.replicas")
    kinds = Counter(tuple(row.tolist()) for row in rows)
    if len(kinds) == 1:
        return
    # A majority tells which ranks are wrong. Of two that differ, nobody can say which one is.
    usual, votes = kinds.most_common(1)[0]
    unlike = [rank for rank, row in zip(engine.ranks(), rows, strict=True) if tuple(row.tolist()) != usual]
    first = next(i for i in range(len(names)) if len(set(rows[:, i].tolist())) > 1)
    who = " and ".join(map(name_of, unlike))
    message = f"{who} has different weights than the other ranks"
    if votes * 2 <= len(rows):
        differ = f"{who} differs from the other ranks"
        message = f"the weights differ between ranks, and no majority says which are right ({differ})"
    message += (
        f": first in {names[first]}, between steps {before} and {step}: {remedy_of_rates(engine, rates) or remedy}"
    )
    raise Failure(message, everywhere=engine.of_all_ranks)


def remedy_of_rates(engine: Engine, rates: Sequence[float]) -> str:
    """Return what to do if ranks have other learning rates; empty if they do not. A collective."""
    first, *others = engine.all_gather_object(list(rates), "guard.rates")
    for rank, theirs in enumerate(others, start=1):
        for one, other in zip(first, theirs, strict=False):
            if one != other:
                cause = f"the learning rate is {one:g} on rank 0 and {other:g} on rank {rank}"
                return f"{cause}: give a scheduler the same values on every rank, as run.evaluation and step.loss have them"
    return ""


class Replicas(Feature):
    """Compares the weights after the first step of this process, every --check-steps, and before each save. name_of: returns
    the name of a rank."""

    def __init__(self, engine: Engine, check_steps: int, name_of: Callable[[int], str]):
        self._all, self.check_steps, self._name_of = engine, check_steps, name_of
        self.every = check_steps or sys.maxsize
        self._compared_at: tuple[int, int] | None = None  # step and number of ranks of the last comparison

    def prepare(self, run: Run) -> None:
        self._state, self._models, self._averaging = run.state, run.prepared().models, run.prepared().engine
        self._features, self._began, self._optimizers = run.features, run.state.step, run.prepared().optimizers

    def before_step(self, step: Step) -> None:
        if self._state.step:
            self.compare(self._averaging)

    def after_step(self, step: Step) -> None:
        # What a program changes on one rank alone differs after its first step.
        if self.check_steps and self._compared_at is None:
            self.compare(self._averaging)
        self._features.no_more_after_steps(self)

    def before_save(self) -> None:
        self.compare(self._all)  # waits for ranks that are in their step

    def compare(self, among: Engine) -> None:
        """Raise Failure on every rank if the weights differ among these. A collective. A second call after the same step
        does nothing: a checkpoint and --check-steps may both ask for it."""
        step, remedy = self._state.step, ALIKE_REMEDY if self._compared_at is None else LATE
        if self._compared_at != (step, among.size):
            before, _ = self._compared_at or (self._began, 0)
            self._compared_at = step, among.size
            rates = [float(group.get("lr", 0.0)) for one in self._optimizers for group in one.param_groups]
            compare(among, self._models, self._name_of, step, before, remedy, rates)
