"""What a checkpoint consists of: parts, each with what it saves and how it restores that."""

from torch import Tensor

from hvdtrain.training.checkpoint import Facts


class Content:
    """The content of a checkpoint that is saved or restored. When it is restored, only rank 0 has `tensors`."""

    def __init__(self, facts: Facts, tensors: dict[str, Tensor] | None = None):
        self.facts = facts  # JSON
        self.tensors = {} if tensors is None else tensors
        self.live: dict[str, Tensor] = {}  # when saving: those that training goes on to change, to be copied


class Part:
    """A part of a checkpoint. Every rank calls each method at the same point."""

    def ready(self) -> None:
        """Called before a save, also of a run that writes no checkpoints. May raise Failure: nothing is saved."""

    def save(self, content: Content) -> None:
        """Add facts and tensors."""

    def restore(self, content: Content) -> None:
        """Take them from a checkpoint."""
