"""Lightning Fabric: lightning.ai/docs/fabric/stable/guide/checkpoint/checkpoint.html (a dictionary)."""

import glob
import os

import lightning
import task
import torch
from torch.utils.data import DataLoader


def main():
    strategy = "ddp" if task.WORLD > 1 else "auto"
    fabric = lightning.Fabric(accelerator="cpu", devices=task.WORLD, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(task.SEED, workers=True)
    net = task.Net()
    optimizer, scheduler = task.optimizer_of(net)
    model, optimizer = fabric.setup(net, optimizer)
    train = fabric.setup_dataloaders(DataLoader(task.train_data, task.BATCH, shuffle=True))
    test = fabric.setup_dataloaders(DataLoader(task.test_data, 32))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "iteration": 0}  # resume
    saved = glob.glob(os.path.join(task.CHECKPOINTS, "*.ckpt"))  # resume
    if saved:  # resume
        fabric.load(max(saved, key=os.path.getmtime), state)  # resume
    for epoch in range(state["epoch"], task.EPOCHS):  # resume
        state["epoch"] = epoch  # resume
        model.train()
        for batch in train:
            optimizer.zero_grad()
            fabric.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            state["iteration"] += 1  # resume
            if state["iteration"] % task.SAVE_EVERY == 0:  # resume
                fabric.save(os.path.join(task.CHECKPOINTS, f"{state['iteration']}.ckpt"), state)  # resume
        model.eval()
        with torch.no_grad():
            for batch in test:
                model(**batch)


main()
