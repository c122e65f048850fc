"""What a checkpoint consists of: parts, each with what it saves and how it restores that."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.checkpoint.contents import States


class Moment(NamedTuple):
    """Where in training a checkpoint is saved."""

    in_steps: bool = False  # after a step, not after all steps of an epoch
    epoch_ended: bool = False  # after the evaluation of a whole epoch


HERE, IN_STEPS = Moment(), Moment(in_steps=True)


class Content:
    """The content of a checkpoint that is saved or restored. When it is restored, only rank 0 has `tensors`.

    writes: whether this rank writes what is saved. heartbeat: tells the watchdog that this rank makes progress.
    """

    def __init__(
        self, facts: Facts, tensors: dict[str, Tensor] | None = None, *, moment: Moment = HERE, writes: bool = False,
        heartbeat: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self.facts, self.moment, self.writes, self.heartbeat = facts, moment, writes, heartbeat
        self.tensors = {} if tensors is None else tensors
        self.states: States | None = None  # what the objects have returned, before it was encoded
        self.live: dict[str, Tensor] = {}  # when saving: tensors that the next step changes, so `snapshot` copies them

    @property
    def held(self) -> dict[str, Tensor] | None:
        """The tensors on the rank that has them."""
        return self.tensors or None


class Part:
    """A part of a checkpoint. Every rank calls each method at the same point, so each may be a collective."""

    def ready(self) -> None:
        """Called before a save, also of a run that writes no checkpoints. May raise Failure: nothing is saved."""

    def save(self, content: Content) -> None:
        """Add facts and tensors."""

    def restore(self, content: Content) -> None:
        """Take them from a checkpoint."""
