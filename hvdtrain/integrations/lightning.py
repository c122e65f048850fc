"""Lightning: a callback for loaders of `exact_loader`: `Trainer(callbacks=[ExactResume(), ModelCheckpoint(...)])`

Lightning saves the states of loaders, but loads them only where it resumes within an epoch. The callback does so between
epochs, too. And it seeds the random numbers of each validation by the position.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._pytree import tree_leaves

from hvdtrain.loader import ExactLoader


class ExactResume(Callback):  # type: ignore[misc] # Lightning is not looked into when types are checked
    """Lets a training by Lightning resume exactly, with loaders of `exact_loader`."""

    _states: Sequence[Mapping[str, Any]] | None = None  # of the checkpoint, until the loaders are there

    def on_save_checkpoint(self, trainer: Trainer, _: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["exact_loader"] = [loader.state_dict() for loader in self._loaders(trainer)]

    def on_load_checkpoint(self, trainer: Trainer, _: LightningModule, checkpoint: Mapping[str, Any]) -> None:
        self._states = checkpoint.get("exact_loader")

    def on_train_start(self, trainer: Trainer, _: LightningModule) -> None:
        states, self._states = self._states, None
        if states is not None and len(states) != (now := len(self._loaders(trainer))):
            raise ValueError(f"the checkpoint has {len(states)} states of exact_loader, the training has {now} of them")
        for loader, state in zip(self._loaders(trainer), states or (), strict=False):
            loader.load_state_dict(state)

    def on_validation_start(self, trainer: Trainer, _: LightningModule) -> None:
        for loader in self._loaders(trainer):
            loader.seed_generators("validation")

    def _loaders(self, trainer: Trainer) -> list[ExactLoader]:
        return [loader for loader in tree_leaves(trainer.train_dataloader) if isinstance(loader, ExactLoader)]
