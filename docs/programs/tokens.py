"""Predict the next character of sentences of different lengths, with gradient clipping."""

from random import Random

import torch
import torch.nn.functional as F
from hvdtrain import training
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
    flags = training.parser("tokens", __doc__, epochs=3, batch_size=16).parse_args()
    with training.start(flags) as run:
        lines = encode(SENTENCES)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, optimizer = run.prepare(model, optimizer)
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(lines):
                for (batch,) in step.batches():
                    logits, targets = model(batch[:, :-1].clamp(min=0)), batch[:, 1:]
                    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
                    step.backward(loss, count=(targets >= 0).sum())
                step.update(clip_norm=1.0)
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
