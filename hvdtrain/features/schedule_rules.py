"""Registered schedulers of torch must be made for the run's length, and be stepped as often as they are made for."""

import contextlib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from hvdtrain.checkpoint.uses import codes_of_program, frame_of_program, is_quotient_or_product, lines_of
from hvdtrain.engines.errors import UserError
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.optim import is_scheduled, length_of
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step

MOST_TRIED = 10_000  # steps
DIVIDED = re.compile("^size$|world|accum|ranks|total_steps|print")  # in a line that knows of ranks, or shows


class ScheduleRules(Feature):
    """Applies the rules in the first step. Raises UserError."""

    def prepare(self, run: Run) -> None:
        self._run, self._before = run, dict[str, int]()

    def before_step(self, step: Step) -> None:
        run, registered = self._run, self._run.checkpoints.registered
        epochs, steps = run.metrics_logger.epochs, run.metrics_logger.steps
        with run.raising_together("schedules"):
            require_registered(run.prepared().optimizers, registered)
        many = run.size * run.flags.accumulate  # as many micro-batches of one process are a step
        lines = require_length(registered, steps, epochs, {run.size, run.flags.accumulate, many}) if steps else []
        if not lines and many > 1 and steps and epochs:
            lines = lengths_of_one_process(run.data.given[0], steps // epochs)
        for line in lines:
            run.say(f"warning: {line}")
        self._before = positions(registered, steps) if steps != epochs else {}

    def after_step(self, step: Step) -> None:
        if not step.left_out:
            require_stepped(self._run.checkpoints.registered, self._before)
        self._run.features.drop(self)


def length_of_lambdas(scheduler: object, steps: int, epochs: int, factors: Collection[int]) -> int | None:
    """Return after how many steps a LambdaLR reaches 0, if that is as many as one process would take; None: it does not.

    Its functions tell no length, but they fall to 0 at its end, as of cosines and lines. factors: how many steps of one
    process may be a step of this run.
    """
    if type(scheduler) is not lr_scheduler.LambdaLR or epochs * max(factors) > MOST_TRIED:
        return None
    with contextlib.suppress(Exception):  # any: the functions are the author's
        for factor in scheduler.lr_lambdas:
            if abs(factor(steps)) > 1e-6:
                for many in sorted(factors):  # an epoch may end in a smaller step
                    for end in range(max(steps, many * max(0, steps - epochs)) + 1, many * steps + 1):
                        if abs(factor(end)) < 1e-9:
                            return end
    return None


def lengths_of_one_process(loader: object, steps: int) -> list[str]:
    """Return a warning if the program computes with the length of the loader that it trains on, `step / len(loader)`: an
    epoch of this run has fewer steps. steps: in an epoch."""
    if not isinstance(loader, DataLoader) or len(loader) == steps:
        return []
    frame = frame_of_program()
    names = {name for held in (frame.f_globals, frame.f_locals) for name, value in held.items() if value is loader}
    for line in [line for code in codes_of_program(frame) for line in lines_of(code)]:
        words = [one.argval for one in line if isinstance(one.argval, str)]
        known = any(DIVIDED.search(word) for word in words)
        for one, following in itertools.pairwise(one for one in line if one.opname.startswith(("LOAD", "CALL"))):
            read = one.argval in names and following.opname.startswith("CALL") and "len" in words
            if read and not known and is_quotient_or_product(line):
                message = f"len({one.argval}) is {len(loader)}, the steps of one process, and an epoch has {steps}"
                return [f"{message}: compute with run.total_steps({one.argval}, 1), or with run.progress"]
    return []


def require_length(
    registered: Mapping[str, Any], steps: int, epochs: int | None, factors: Collection[int]
) -> list[str]:
    """Return warnings about registered schedulers whose length is neither the run's number of steps nor of epochs.

    Raises UserError for OneCycleLR. epochs: None if the length is given in steps. factors: see above.
    """
    warnings = []
    for name, scheduler in registered.items():
        length = length_of(scheduler) or length_of_lambdas(scheduler, steps, epochs or 1, factors)
        if length is None or length in (steps, epochs):
            continue
        run = f"{steps} steps" + (f" in {epochs} epochs" if epochs is not None else "") + " over all ranks"
        remedy = f"give it run.total_steps(data, {epochs})" if epochs is not None else f"give it {steps}"
        line = f"{name}: {type(scheduler).__name__} is made for {length} steps, and this run has {run}: {remedy}"
        # Its rate rises and falls over its whole length: with another one, it has no meaning.
        if isinstance(scheduler, lr_scheduler.OneCycleLR):
            raise UserError(line, everywhere=True)
        warnings.append(line)
    return warnings


def positions(registered: Mapping[str, Any], steps: int) -> dict[str, int]:
    """Return how often each scheduler was stepped of those that are made for `steps` steps."""
    return {name: int(what.last_epoch) for name, what in registered.items() if length_of(what) == steps}


def require_stepped(registered: Mapping[str, Any], before: Mapping[str, int]) -> None:
    """Raise UserError after a step if a scheduler that is made for the run's steps was not stepped once in it.

    before: its `positions` before the step.
    """
    for name, position in before.items():
        times = int(registered[name].last_epoch) - position
        if times != 1:
            message = f"{name}: {type(registered[name]).__name__} is made for the run's steps"
            remedy = f"call {name}.step() once, after step.update()"
            raise UserError(f"{message}, and was stepped {times} times in one of them: {remedy}")


def require_registered(optimizers: Sequence[torch.optim.Optimizer], registered: Mapping[str, Any]) -> None:
    """Raise UserError if a scheduler of one of `optimizers` is not registered: a resumed run would begin it again."""
    known = [what.optimizer for what in registered.values() if isinstance(what, lr_scheduler.LRScheduler)]
    if any(is_scheduled(optimizer) and not any(optimizer is one for one in known) for optimizer in optimizers):
        remedy = "after run.prepare, write run.register(scheduler=scheduler)"
        raise UserError(f"a learning rate scheduler is not registered, so a resumed run would begin it again: {remedy}")
