"""Horovod: rank 0 saves and loads, and broadcasts. Start it with mpirun or horovodrun.

github.com/horovod/horovod/blob/v0.28.1/examples/pytorch/pytorch_imagenet_resnet50.py
"""

import os

import horovod.torch as hvd
import task
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler

PATH = os.path.join(task.CHECKPOINTS, "model.pt")  # resume


def main():
    hvd.init()
    os.makedirs(task.CHECKPOINTS, exist_ok=True)  # resume
    net = task.Net()
    sampler = DistributedSampler(task.train_data, num_replicas=hvd.size(), rank=hvd.rank(), seed=task.SEED)
    train = DataLoader(task.train_data, task.BATCH, sampler=sampler)
    test = DataLoader(task.test_data, 32)
    optimizer, _ = task.optimizer_of(net)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    scheduler = CosineAnnealingLR(optimizer, task.EPOCHS * task.STEPS)
    position = {"epoch": 0, "step": 0, "scheduler": scheduler.state_dict()}
    if os.path.exists(PATH) and hvd.rank() == 0:  # resume
        checkpoint = torch.load(PATH, weights_only=True)  # resume
        net.load_state_dict(checkpoint["model"])  # resume
        optimizer.load_state_dict(checkpoint["optimizer"])  # resume
        position = checkpoint["position"]  # resume
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    position = hvd.broadcast_object(position, root_rank=0)  # resume
    scheduler.load_state_dict(position["scheduler"])  # resume
    step = position["step"]  # resume
    for epoch in range(position["epoch"], task.EPOCHS):
        sampler.set_epoch(epoch)
        net.train()
        for batch in train:
            optimizer.zero_grad()
            net(**batch)["loss"].backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % task.SAVE_EVERY == 0 and hvd.rank() == 0:  # resume
                position = {"epoch": epoch, "step": step, "scheduler": scheduler.state_dict()}  # resume
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "position": position}  # resume
                torch.save(state, PATH)  # resume
        net.eval()
        with torch.no_grad():
            for batch in test:
                net(**batch)


main()
