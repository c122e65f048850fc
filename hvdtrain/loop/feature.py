"""The interface of a feature: what a training may have beside its core.

A feature is one file in hvdtrain/features, and its lines in loop/start.py, which makes it if the flags ask for it. The
core calls these methods and imports no feature. Without the file and the line, all else works.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.checkpoint.own import Provider

if TYPE_CHECKING:  # the core hands these over; importing them would be a circle
    from hvdtrain.engines.base import Engine
    from hvdtrain.loop.run import Run
    from hvdtrain.loop.step import Step


class Feature(Provider):
    """What continues after a restart is what its `state` returns: see `Provider`. `load` is called after `prepare`.

    Each method does nothing, unless a feature overrides it. Every rank calls each of them at the same point.

    `run.engine` has all ranks. `run.prepared().engine` has those that average their gradients in a step: use it for what
    happens in `before_step` and `reduced`. In a save, use `run.engine`.
    """

    averaging: "Engine | None" = None  # what averages the gradients of a step, if it is not the run's
    every = 1  # steps between two calls of `before_step`, counted from the beginning of training

    def prepare(self, run: "Run") -> None:
        """Called at the end of `run.prepare`: models and optimizers are wrapped and restored."""

    def before_step(self, step: "Step") -> None:
        """Called before the script gets a step."""

    def reduced(self, step: "Step") -> None:
        """Called after each loop over `step.batches()`, before the script goes on to its update. Gradients are those of the
        mean over the global batch's samples (or of what `count` counts), the same on the ranks that average them."""

    def after_step(self, step: "Step") -> None:
        """Called after the script's part of a step. `run.state` counts it."""

    def after_steps(self) -> None:
        """Called after all steps of an epoch. Of a stream, no step knows that it is the last one."""

    def before_save(self) -> None:
        """Called before a checkpoint, also of a run that writes none. May be a collective, and raise: nothing is saved."""

    def close(self, *, failed: bool) -> None:
        """Called at the end of the block of `training.start`. failed: by an exception."""


class Features:
    """The features of a run. A method that a feature does not override is not called in steps."""

    def __init__(self, features: Sequence[Feature]):
        self.all = list(features)
        self.averaging = next((one.averaging for one in self.all if one.averaging is not None), None)
        self._choose()

    def _choose(self) -> None:
        self.before_step = [(method.__self__.every, method) for method in self._overriding("before_step")]
        self.reduced, self.after_step = self._overriding("reduced"), self._overriding("after_step")

    def _overriding(self, name: str) -> list[Any]:
        return [getattr(one, name) for one in self.all if getattr(type(one), name) is not getattr(Feature, name)]

    def no_more_after_steps(self, feature: Feature) -> None:
        """Do not call its `after_step` any more."""
        self.after_step = [method for method in self.after_step if method != feature.after_step]

    def drop(self, feature: Feature) -> None:
        """Do not call this one any more."""
        self.all.remove(feature)
        self._choose()
