"""MosaicML Composer: docs.mosaicml.com/projects/composer/en/stable/notes/resumption.html (autoresume)."""

import task
from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist
from torch.utils.data import DataLoader


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.net = task.Net()

    def forward(self, batch):
        return self.net(**batch)

    def loss(self, outputs, batch):
        return outputs["loss"]

    def eval_forward(self, batch, outputs=None):
        return self.net(**batch)

    def get_metrics(self, is_train=False):
        return {}


def main():
    model = Model()
    optimizer, scheduler = task.optimizer_of(model)
    if task.WORLD > 1:
        dist.initialize_dist("cpu")
    sampler = dist.get_sampler(task.train_data, shuffle=True)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(task.train_data, task.BATCH, sampler=sampler),
        eval_dataloader=DataLoader(task.test_data, 32, sampler=dist.get_sampler(task.test_data)),
        optimizers=optimizer,
        schedulers=scheduler,
        step_schedulers_every_batch=True,
        max_duration=f"{task.EPOCHS}ep",
        eval_interval="1ep",
        save_folder=task.CHECKPOINTS,  # resume
        save_interval=f"{task.SAVE_EVERY}ba",  # resume
        autoresume=True,  # resume
        run_name="task",  # resume
        seed=task.SEED,
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()


main()
