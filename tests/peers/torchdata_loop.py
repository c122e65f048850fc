"""Plain torch with torchdata's StatefulDataLoader: docs.pytorch.org/data/0.11/stateful_dataloader_tutorial.html

With --careful also what no recipe asks for: generators, and a checkpoint that replaces the old one at once.
"""

import os
import sys

import task
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

CAREFUL = "--careful" in sys.argv
PATH = os.path.join(task.CHECKPOINTS, "model.pt")  # resume


def main():
    os.makedirs(task.CHECKPOINTS, exist_ok=True)  # resume
    net = task.Net()
    optimizer, scheduler = task.optimizer_of(net)
    model, sampler = net, None
    if task.WORLD > 1:
        distributed.init_process_group("gloo")
        model, sampler = DistributedDataParallel(net), StatefulDistributedSampler(task.train_data, seed=task.SEED)
    train = StatefulDataLoader(task.train_data, task.BATCH, sampler=sampler, shuffle=sampler is None)
    test = DataLoader(task.test_data, 32)
    first_epoch = step = 0
    random_state = None  # careful
    if os.path.exists(PATH):  # resume
        checkpoint = torch.load(PATH, weights_only=False)  # resume
        net.load_state_dict(checkpoint["model"])  # resume
        optimizer.load_state_dict(checkpoint["optimizer"])  # resume
        scheduler.load_state_dict(checkpoint["scheduler"])  # resume
        train.load_state_dict(checkpoint["loaders"][task.RANK])  # resume
        first_epoch, step = checkpoint["epoch"], checkpoint["step"]  # resume
        random_state = checkpoint["random"][task.RANK] if CAREFUL else None  # careful
    for epoch in range(first_epoch, task.EPOCHS):
        if sampler:
            sampler.set_epoch(epoch)
        model.train()
        batches = iter(train)  # careful
        if random_state is not None:  # after iter(), which draws from the generator  # careful
            torch.set_rng_state(random_state)  # careful
            random_state = None  # careful
        for batch in batches:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % task.SAVE_EVERY == 0:  # resume
                loaders = gathered(train.state_dict())  # resume
                states = gathered(torch.get_rng_state())  # careful
                if task.RANK == 0:  # resume
                    state = {"epoch": epoch, "step": step, "loaders": loaders}  # resume
                    state |= {"model": net.state_dict(), "optimizer": optimizer.state_dict()}  # resume
                    state["scheduler"] = scheduler.state_dict()  # resume
                    if CAREFUL:
                        torch.save(state | {"random": states}, PATH + ".new")  # careful
                        os.replace(PATH + ".new", PATH)  # careful
                    else:
                        torch.save(state, PATH)  # resume
        model.eval()
        with torch.no_grad():
            for batch in test:
                net(**batch)


def gathered(own):  # resume
    states = [own] * task.WORLD  # resume
    if task.WORLD > 1:  # resume
        distributed.all_gather_object(states, own)  # resume
    return states  # resume


main()
