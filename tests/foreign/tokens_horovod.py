"""tokens_plain.py of docs/programs with plain Horovod: mpirun -np 2 python tokens_horovod.py"""

import argparse
from random import Random

import torch
import torch.nn.functional as F
import horovod.torch as hvd
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

WORDS = ["the old dog", "a small bird", "the cat", "a child on a bicycle", "sees", "follows", "waits for", "runs to"]


def sentence(random: Random) -> str:
    """Return a sentence such as "the cat sees a small bird, follows the old dog"."""
    parts = [f"{random.choice(WORDS[4:])} {random.choice(WORDS[:4])}" for _ in range(random.randint(1, 3))]
    return f"{random.choice(WORDS[:4])} {', '.join(parts)}"[:LONGEST]


LONGEST = 80
SENTENCES = [sentence(Random(seed)) for seed in range(400)]
CHARACTERS = sorted({character for line in SENTENCES for character in line})


def encode(lines: list[str]) -> Tensor:
    """Return int64 [n, LONGEST + 1], padded with -1."""
    codes = [[CHARACTERS.index(character) for character in line[: LONGEST + 1]] for line in lines]
    return torch.tensor([line + [-1] * (LONGEST + 1 - len(line)) for line in codes])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), 48)
        self.recurrent = nn.GRU(48, 96, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(96, len(CHARACTERS)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    flags = parser.parse_args()
    hvd.init()
    torch.manual_seed(1)
    lines = encode(SENTENCES)
    sampler = DistributedSampler(lines, hvd.size(), hvd.rank())
    loader = DataLoader(lines, batch_size=flags.batch_size, sampler=sampler)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(flags.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            logits, targets = model(batch[:, :-1].clamp(min=0)), batch[:, 1:]
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
