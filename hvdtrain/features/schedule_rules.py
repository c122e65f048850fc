"""Registered schedulers of torch must be made for the run's length, and be stepped as often as they are made for."""

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from hvdtrain.engines.errors import UserError
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.optim import is_scheduled, length_of
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step
from hvdtrain.output.metric_names import Metric
from hvdtrain.program.means import OF_MANY
from hvdtrain.program.own_counts import steps_of_one_process, sum_of_one_rank
from hvdtrain.program.uses import frame_of_program, warn_if

MOST_TRIED = 10_000  # steps
LOSS = re.compile(r"(^|_)(loss|losses|rmse)(_|$)")  # of which less is better
SYMMETRIC = (0.0, 0.5, 1.0, 50.0)  # the same with another sign, or as what is lacking to 1 or 100


class ScheduleRules(Feature):
    """Applies the rules in the first step, and tells which settings of a checkpoint that has. Raises UserError."""

    def prepare(self, run: Run) -> None:
        self._run, self._before = run, dict[str, int]()

    def before_step(self, step: Step) -> None:
        run, registered = self._run, self._run.checkpoints.registered
        epochs, steps = run.metrics_logger.epochs, run.metrics_logger.steps
        with run.raising_together("schedules"):
            require_registered(run.prepared().optimizers, registered)
        many = run.size * run.flags.accumulate  # as many micro-batches of one process are a step
        lines = require_length(registered, steps, epochs, {run.size, run.flags.accumulate, many}) if steps else []
        for line in lines:
            run.say(f"warning: {line}")
        if not lines and many > 1 and steps and epochs:
            warn_if(steps_of_one_process, frame_of_program(), *run.data.given[:1], steps // epochs, say=run.say)
        if run.size > 1:
            warn_if(sum_of_one_rank, frame_of_program(), *run.data.given[:1], say=run.say)
        self._before, self._steps = positions(registered), steps if steps != epochs else None

    def reduced(self, step: Step) -> None:
        self._run.checkpoints.objects.tell_settings()

    def before_save(self) -> None:
        run = self._run
        asked = run.checkpoints.registered, run.evaluation, run.metrics_logger.metrics
        warn_if(plateau_turned, *asked, say=run.output.say_once)

    def after_step(self, step: Step) -> None:
        if not step.left_out:
            require_stepped(self._run.checkpoints.registered, self._before, self._steps)
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
            if abs(factor(steps)) < 1e-6:
                continue
            for many in sorted(factors):  # an epoch may end in a smaller step
                for end in range(max(steps, many * max(0, steps - epochs)) + 1, many * steps + 1):
                    if abs(factor(end)) < 1e-9:
                        # As a cosine of epochs, which is 0 at their number, and again at odd multiples.
                        restarts = any(abs(factor(step)) < 1e-9 for step in range(1, min(end, MOST_TRIED)))
                        return None if restarts else end
    return None


def require_length(
    registered: Mapping[str, Any], steps: int, epochs: int | None, factors: Collection[int]
) -> list[str]:
    """Return warnings about registered schedulers whose length is neither the run's number of steps nor of epochs.

    Raises UserError for OneCycleLR. epochs: None if the length is given in steps. factors: see above.
    """
    warnings = []
    schedulers = [one for one in registered.values() if isinstance(one, lr_scheduler.LRScheduler)]
    lengths = [length_of(one) or getattr(one, "total_iters", steps + 1) for one in schedulers]
    one_after_another = len(lengths) > 1 and sum(lengths) in (steps, epochs)
    if one_after_another and len({id(one.optimizer) for one in schedulers}) == 1:
        return []
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


def plateau_turned(
    registered: Mapping[str, Any], evaluation: Mapping[str, float], metrics: Mapping[str, Metric]
) -> str:
    """Return a warning if a ReduceLROnPlateau was given a value of the last evaluation, and waits for worse ones; else an
    empty text. metrics: those with a direction; of others, their names tell it."""
    for name, scheduler in registered.items():
        if not isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) or scheduler.best in SYMMETRIC:
            continue
        given = [key for key, value in evaluation.items() if value == scheduler.best and key != "count"]
        if len(given) != 1:
            continue
        of_name = (
            "min" if LOSS.search(given[0].lower()) else "max" if OF_MANY.search(given[0].lower()) else scheduler.mode
        )
        better = metrics[given[0]].direction if given[0] in metrics else of_name
        if better != scheduler.mode:
            which = f"which is better if it is {'larger' if better == 'max' else 'smaller'}"
            message = f"{name}: ReduceLROnPlateau in mode {scheduler.mode!r} got {given[0]}, {which}"
            return f'{message}: write ReduceLROnPlateau(optimizer, mode="{better}")'
    return ""


def positions(registered: Mapping[str, Any]) -> dict[str, int]:
    """Return how often each scheduler was stepped."""
    schedulers = {name: what for name, what in registered.items() if isinstance(what, lr_scheduler.LRScheduler)}
    return {name: int(what.last_epoch) for name, what in schedulers.items()}


def require_stepped(registered: Mapping[str, Any], before: Mapping[str, int], steps: int | None) -> None:
    """Raise UserError after a step if a scheduler that is made for the run's steps was not stepped once in it, or one
    without a length several times, as in each micro-batch.

    before: their `positions` before the step. steps: of the run; None: it has as many epochs.
    """
    for name, position in before.items():
        what, length = registered[name], length_of(registered[name])
        times = int(what.last_epoch) - position
        if length is None and times > 1:
            message = f"{name}: {type(what).__name__} was stepped {times} times in a step"
            raise UserError(f"{message}: call {name}.step() once, after the loop over step.batches()")
        if steps is not None and length == steps and times != 1:
            message = f"{name}: {type(what).__name__} is made for the run's steps"
            remedy = f"call {name}.step() once, after step.update()"
            raise UserError(f"{message}, and was stepped {times} times in one of them: {remedy}")


def require_registered(optimizers: Sequence[torch.optim.Optimizer], registered: Mapping[str, Any]) -> None:
    """Raise UserError if a scheduler of one of `optimizers` is not registered: a resumed run would begin it again."""
    known = [what.optimizer for what in registered.values() if isinstance(what, lr_scheduler.LRScheduler)]
    if any(is_scheduled(optimizer) and not any(optimizer is one for one in known) for optimizer in optimizers):
        remedy = "after run.prepare, write run.register(scheduler=scheduler)"
        raise UserError(f"a learning rate scheduler is not registered, so a resumed run would begin it again: {remedy}")
