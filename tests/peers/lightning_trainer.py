"""Lightning: lightning.ai/docs/pytorch/stable/common/checkpointing_basic (ckpt_path), .../checkpointing_intermediate."""

import lightning
import task
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = task.Net()

    def training_step(self, batch, number):
        return self.net(**batch)["loss"]

    def validation_step(self, batch, number):
        self.net(**batch)

    def configure_optimizers(self):
        optimizer, scheduler = task.optimizer_of(self.net)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    lightning.seed_everything(task.SEED, workers=True)
    train = DataLoader(task.train_data, task.BATCH, shuffle=True)
    test = DataLoader(task.test_data, 32)
    saving = ModelCheckpoint(  # resume
        task.CHECKPOINTS,
        every_n_train_steps=task.SAVE_EVERY,
        save_last=True,
        save_on_exception=True,  # resume
    )  # resume
    trainer = lightning.Trainer(
        max_epochs=task.EPOCHS,
        accelerator="cpu",
        devices=task.WORLD,
        strategy="ddp" if task.WORLD > 1 else "auto",
        callbacks=[saving],  # resume
        deterministic=True,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), train, test, ckpt_path="last")  # resume


main()
