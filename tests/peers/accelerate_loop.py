"""accelerate: save_state, load_state, and skip_first_batches; with --stateful its use_stateful_dataloader instead.

huggingface.co/docs/accelerate/usage_guides/checkpoint and its examples/by_feature/checkpointing.py
"""

import os
import sys

import task
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

STATEFUL = "--stateful" in sys.argv


def main():
    config = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=STATEFUL)
    accelerator = Accelerator(cpu=True, dataloader_config=config, step_scheduler_with_optimizer=False)
    set_seed(task.SEED)
    net = task.Net()
    optimizer, scheduler = task.optimizer_of(net)
    train = DataLoader(task.train_data, task.BATCH, shuffle=True)
    test = DataLoader(task.test_data, 32)
    model, optimizer, train, test, scheduler = accelerator.prepare(net, optimizer, train, test, scheduler)
    first_epoch = overall_step = resume_step = 0
    saved = [f.path for f in os.scandir(task.CHECKPOINTS)] if os.path.isdir(task.CHECKPOINTS) else []  # resume
    if saved:  # resume
        newest = max(saved, key=os.path.getctime)  # resume
        accelerator.load_state(newest)  # resume
        overall_step = int(os.path.basename(newest).removeprefix("step_"))  # resume
        first_epoch, resume_step = divmod(overall_step, len(train))  # resume
    for epoch in range(first_epoch, task.EPOCHS):
        model.train()
        train.set_epoch(epoch)
        active = train
        if epoch == first_epoch and resume_step and not STATEFUL:  # resume
            active = accelerator.skip_first_batches(train, resume_step)  # resume
        for batch in active:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if overall_step % task.SAVE_EVERY == 0:  # resume
                accelerator.save_state(os.path.join(task.CHECKPOINTS, f"step_{overall_step}"))  # resume
        model.eval()
        for batch in test:
            accelerator.gather_for_metrics(model(**batch)["loss"].detach())
    accelerator.end_training()


main()
