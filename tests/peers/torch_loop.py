"""Plain torch: its recipe for a checkpoint to resume from, and its tutorial of DistributedDataParallel for two ranks.

docs.pytorch.org/tutorials/recipes/recipes/saving_and_loading_a_general_checkpoint.html, .../intermediate/ddp_tutorial.html
"""

import os

import task
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

PATH = os.path.join(task.CHECKPOINTS, "model.pt")  # resume


def main():
    os.makedirs(task.CHECKPOINTS, exist_ok=True)  # resume
    net = task.Net()
    optimizer, scheduler = task.optimizer_of(net)
    model, sampler = net, None
    if task.WORLD > 1:
        distributed.init_process_group("gloo")
        model, sampler = DistributedDataParallel(net), DistributedSampler(task.train_data, seed=task.SEED)
    train = DataLoader(task.train_data, task.BATCH, sampler=sampler, shuffle=sampler is None)
    test = DataLoader(task.test_data, 32)
    first_epoch = step = 0
    if os.path.exists(PATH):  # resume
        checkpoint = torch.load(PATH, weights_only=True)  # resume
        net.load_state_dict(checkpoint["model_state_dict"])  # resume
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])  # resume
        scheduler.load_state_dict(checkpoint["scheduler_state_dict"])  # resume
        first_epoch, step = checkpoint["epoch"], checkpoint["step"]  # resume
    for epoch in range(first_epoch, task.EPOCHS):
        if sampler:
            sampler.set_epoch(epoch)
        model.train()
        for batch in train:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % task.SAVE_EVERY == 0 and task.RANK == 0:  # resume
                state = {"epoch": epoch, "step": step}  # resume
                state["model_state_dict"] = net.state_dict()  # resume
                state["optimizer_state_dict"] = optimizer.state_dict()  # resume
                state["scheduler_state_dict"] = scheduler.state_dict()  # resume
                torch.save(state, PATH)  # resume
        model.eval()
        with torch.no_grad():
            for batch in test:
                net(**batch)


main()
