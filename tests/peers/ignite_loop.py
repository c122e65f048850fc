"""ignite: docs.pytorch.org/ignite/engine.html (Resuming the training), Checkpoint, DeterministicEngine, distributed."""

import glob
import os

import ignite.distributed as idist
import task
import torch
from ignite.engine import Engine, Events
from ignite.engine.deterministic import DeterministicEngine, keep_random_state
from ignite.handlers import Checkpoint, DiskSaver
from ignite.utils import manual_seed
from torch.utils.data import DataLoader


def main():
    if task.WORLD > 1:
        idist.initialize("gloo")
    net = task.Net()
    optimizer, scheduler = task.optimizer_of(net)
    model = idist.auto_model(net)
    train = idist.auto_dataloader(task.train_data, batch_size=task.BATCH * task.WORLD, shuffle=True)
    test = DataLoader(task.test_data, 32)

    def train_step(engine, batch):
        model.train()
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        scheduler.step()

    @torch.no_grad()
    def test_step(engine, batch):
        net.eval()
        net(**batch)

    trainer, evaluator = DeterministicEngine(train_step), Engine(test_step)
    if task.WORLD > 1:
        trainer.add_event_handler(Events.EPOCH_STARTED, lambda engine: train.sampler.set_epoch(engine.state.epoch - 1))
    objects = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "trainer": trainer}  # resume
    saver = DiskSaver(task.CHECKPOINTS, create_dir=True, require_empty=False)  # resume
    due = Events.ITERATION_COMPLETED(every=task.SAVE_EVERY)  # resume
    trainer.add_event_handler(due, Checkpoint(objects, saver, n_saved=3))  # resume
    trainer.add_event_handler(Events.EPOCH_COMPLETED, keep_random_state(lambda: evaluator.run(test)))
    saved = glob.glob(os.path.join(task.CHECKPOINTS, "*.pt"))  # resume
    if saved:  # resume
        newest = max(saved, key=os.path.getmtime)  # resume
        Checkpoint.load_objects(objects, torch.load(newest, weights_only=False))  # resume
    manual_seed(task.SEED)
    trainer.run(train, max_epochs=task.EPOCHS)


main()
