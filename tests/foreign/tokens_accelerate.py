"""tokens_plain.py of docs/programs with accelerate: torchrun --standalone --nproc-per-node 2 tokens_accelerate.py"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

TEXT = (__doc__ + "".join(open(argparse.__file__).readlines()[:400])).replace(" " * 4, "\t")
SENTENCES = [line for line in TEXT.splitlines() if line.strip()]
CHARACTERS = sorted({character for line in SENTENCES for character in line})
LONGEST = 80


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
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    lines = encode(SENTENCES)
    loader = DataLoader(lines, batch_size=flags.batch_size, shuffle=True)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(flags.epochs):
        for batch in loader:
            optimizer.zero_grad()
            logits, targets = model(batch[:, :-1].clamp(min=0)), batch[:, 1:]
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        accelerator.print(f"epoch {epoch + 1}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
