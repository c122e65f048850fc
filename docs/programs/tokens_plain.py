"""Predict the next character of sentences of different lengths, with gradient clipping."""

import argparse
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    torch.manual_seed(1)
    lines = encode(SENTENCES)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(flags.epochs):
        for indices in torch.randperm(len(lines)).split(flags.batch_size):
            batch = lines[indices]
            optimizer.zero_grad()
            logits, targets = model(batch[:, :-1].clamp(min=0)), batch[:, 1:]
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
