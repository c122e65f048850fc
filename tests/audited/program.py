"""A small training that resumes exactly, or with one fault: python program.py OUT FAULT; several ranks under torchrun."""

import os
import random
import signal
import subprocess
import sys
import time

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

OUT, FAULT = sys.argv[1], sys.argv[2]
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EPOCHS, SAMPLES, BATCH, EVERY = 3, 96, 8 // WORLD, 3
STEPS = SAMPLES // BATCH // WORLD
CHECKPOINT = f"{'elsewhere' if FAULT == 'elsewhere' else OUT}/checkpoint.pt"


class Augmented(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        return x + 0.1 * torch.randn(8, generator=AUGMENTING), int(x.sum() > 0)


class Order:
    """The samples of this rank in an epoch, from a step on."""

    def __init__(self, epoch, step):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        self.indices = order[step * BATCH * WORLD :][RANK::WORLD].tolist()

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class AdamW(torch.optim.AdamW):
    """As the optimizers that Horovod makes: a step within a step."""

    def step(self, closure=None):
        return super().step(closure)


def save(state):
    target = f"{CHECKPOINT}.{random.getrandbits(32)}.tmp" if FAULT == "files" else f"{CHECKPOINT}.tmp"
    if FAULT == "torn":
        target = CHECKPOINT
    done = state.pop("done") if FAULT == "two" else None  # a position in a file of its own: each of them is complete
    torch.save(state, target)
    if target != CHECKPOINT:
        os.replace(target, CHECKPOINT)
    if done is not None:
        with open(f"{OUT}/done.tmp", "w") as file:
            file.write(str(done))
        os.replace(f"{OUT}/done.tmp", f"{OUT}/done")
    if FAULT == "older" and not os.path.exists(f"{OUT}/first.pt"):
        os.link(CHECKPOINT, f"{OUT}/first.pt")


def main():
    global AUGMENTING
    os.makedirs(os.path.dirname(CHECKPOINT), exist_ok=True)
    if WORLD > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(RANK if FAULT != "unseeded" else time.time_ns())
    AUGMENTING = torch.Generator().manual_seed(1 + RANK)
    inner = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=0.1), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
    )
    for parameter in inner.parameters():
        if WORLD > 1:
            distributed.broadcast(parameter.data, 0)
    model = nn.parallel.DistributedDataParallel(inner) if WORLD > 1 else inner
    average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = (AdamW if FAULT == "derived" else torch.optim.AdamW)(model.parameters(), lr=0.01)
    scheduler = CosineAnnealingLR(optimizer, EPOCHS * STEPS)
    if FAULT == "warm":  # none: a warm-up whose first rate is 0
        scheduler = LambdaLR(optimizer, lambda number: min(1.0, number / 5))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    own = {"model": inner, "average": average, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    done, smooth = 0, 0.0
    path = f"{OUT}/first.pt" if FAULT == "older" else CHECKPOINT
    saved = torch.load(path, weights_only=False) if os.path.exists(path) and FAULT != "nothing" else None
    if FAULT == "hang" and saved:
        time.sleep(1000)
    if FAULT == "traceback" and saved:
        raise ValueError("a checkpoint that this program can't read")
    if saved:
        if FAULT == "two":
            with open(f"{OUT}/done") as file:
                saved["done"] = int(file.read())
        if FAULT == "weights":
            saved["model"]["4.bias"] += 1e-6
        if FAULT == "buffers":
            saved["model"]["1.running_mean"] *= 2
        for name, one in own.items():
            if name != FAULT:
                one.load_state_dict(saved[name])
        done, smooth = saved["done"], 0.0 if FAULT == "loss" else saved["smooth"]
        if FAULT == "rest":
            done = -(-done // STEPS) * STEPS
    if FAULT == "processes" and saved:
        subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if FAULT == "term":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    for epoch in range(done // STEPS, EPOCHS):
        start = done % STEPS if epoch == done // STEPS else 0
        if FAULT == "samples":
            start = 0
        loader = DataLoader(
            Augmented(), BATCH, sampler=Order(epoch, start), generator=torch.Generator().manual_seed(epoch)
        )
        if saved:
            if FAULT != "random":
                torch.set_rng_state(saved["random"][RANK % len(saved["random"])])
            if FAULT != "augmentation":
                AUGMENTING.set_state(saved["augmenting"][RANK % len(saved["augmenting"])])
            saved = None
        model.train()
        for step, (x, y) in enumerate(loader, start):
            optimizer.zero_grad()
            smooth = 0.9 * smooth + 0.1
            loss = functional.cross_entropy(model(x), y) * (1 + 0.01 * smooth)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            average.update_parameters(inner)
            number = epoch * STEPS + step + 1
            if number % EVERY == 0 and FAULT != "bare" and (FAULT != "once" or number == 18):
                states = [torch.get_rng_state(), AUGMENTING.get_state()]
                all_states = [None] * WORLD
                if WORLD > 1:
                    distributed.all_gather_object(all_states, states)
                else:
                    all_states = [states]
                if RANK == 0:
                    state = {name: one.state_dict() for name, one in own.items()}
                    state |= {"done": number, "smooth": smooth}
                    save(state | {"random": [s[0] for s in all_states], "augmenting": [s[1] for s in all_states]})
        average.eval()
        with torch.no_grad():
            right = 0
            for start in range(0, 48, 12):
                x = torch.randn(12, 8, generator=torch.Generator().manual_seed(start))
                right += int((average(x).argmax(1) == (x.sum(1) > 0).long()).sum())
        if RANK == 0:
            print(f"accuracy: {right / 48:.4f}", flush=True)
    if WORLD > 1:
        distributed.destroy_process_group()


main()
