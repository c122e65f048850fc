"""ExactResume in Lightning itself: after a checkpoint, a training sees what the whole one saw after it."""

import importlib.util

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.loader import exact_loader

# Lightning takes two seconds to import: by the tests here, and not whenever tests are collected.
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="make setup installs lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning"),
]
SAMPLES, BATCH, EPOCHS = 11, 3, 3  # four steps in an epoch
AT = {"step3": 3, "step4": 5, "epoch0": 5, "step5": 6, "step8": 10, "epoch1": 10, "step11": 13}  # lines that were seen


def noting_module():
    """Return a module that notes the samples and a random number of each step, and a random number of each validation."""
    from lightning.pytorch import LightningModule

    class Noting(LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = torch.nn.Linear(1, 1), []

        def training_step(self, batch, number):
            parts = list(batch.values()) if isinstance(batch, dict) else [batch]
            self.seen.append([*(x.flatten().tolist() for (x,) in parts), torch.rand(1).item()])
            return self.net(parts[0][0]).pow(2).mean()

        def validation_step(self, batch, number):
            self.seen.append(["validation", torch.rand(1).item()])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    return Noting()


def batches(first=0):
    x = torch.arange(first, first + SAMPLES, dtype=torch.float32).view(-1, 1)
    return DataLoader(TensorDataset(x), BATCH, shuffle=True)


def one():
    return exact_loader(batches(), seed=1)


def two():
    return {"a": one(), "b": exact_loader(batches(100), seed=2), "plain": DataLoader([[0.0]] * 4)}


def fit(train, start=None, folder=None, with_callback=True):
    """Train, and return what was seen. folder: for a checkpoint after each step, and after each epoch."""
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from hvdtrain.integrations.lightning import ExactResume

    torch.manual_seed(2 if start else 1)  # what follows does not depend on it
    every = {"auto_insert_metric_name": False, "save_top_k": -1}
    # Else Lightning starts MPI to ask whether there are more ranks. Twice a worker of pytest has ended there without a word.
    alone = LightningEnvironment()
    callbacks = [ModelCheckpoint(folder, "step{step}", every_n_train_steps=1, **every),
                 ModelCheckpoint(folder, "epoch{epoch}", save_on_train_epoch_end=True, **every)]  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", max_epochs=EPOCHS, num_sanity_val_steps=0, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=folder is not None, plugins=[alone],
        callbacks=callbacks * (folder is not None) + [ExactResume()] * with_callback,
    )  # fmt: skip
    module = noting_module()
    trainer.fit(module, train, DataLoader([1.0]), ckpt_path=start)
    return module.seen


@pytest.fixture(scope="module", params=[one, two])
def whole(request, tmp_path_factory):
    """The loaders of a training, what it saw, and its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    return request.param, fit(request.param(), folder=folder), folder


@pytest.mark.parametrize("name", AT)
def test_a_training_goes_on_within_an_epoch_and_between_epochs(name, whole):
    loaders, seen, folder = whole
    assert fit(loaders(), folder / f"{name}.ckpt") == seen[AT[name] :]
    assert len({line[-1] for line in seen}) == len(seen) == 15  # nothing draws what something else drew


@pytest.mark.parametrize("name", ["step4", "epoch0", "step11"])
def test_without_the_callback_it_sees_something_else(name, whole):
    """Lightning loads the states of loaders within an epoch alone, and seeds no validation."""
    loaders, seen, folder = whole
    assert fit(loaders(), folder / f"{name}.ckpt", with_callback=False) != seen[AT[name] :]


def test_a_checkpoint_of_other_loaders(whole, tmp_path):
    """Of one without a state, nothing is restored, as when a training goes over to exact_loader."""
    loaders, _, folder = whole
    number = {one: 1, two: 2}[loaders]
    with pytest.raises(ValueError, match=f"has {number} states of exact_loader, the training has 0 of them"):
        fit(batches(), folder / "epoch0.ckpt")
    plain = batches()
    fit(plain, folder=tmp_path, with_callback=False)
    assert fit(one(), tmp_path / "epoch0.ckpt")[0][:-1] == fit(one())[0][:-1]
