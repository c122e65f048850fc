"""Count the vowels of lines of text, in batches of lines with similar lengths."""

import argparse
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from hvdtrain import training
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

LINES = [line.strip() for line in open(argparse.__file__).readlines() if line.strip()][:1_500]


class Buckets(Sampler[list[int]]):
    """Batches of at most `characters` characters, padding included, in random order."""

    def __init__(self, lengths: list[int], characters: int):
        self.lengths, self.characters = lengths, characters
        self.count = len(list(self.batches(sorted(range(len(lengths)), key=lengths.__getitem__))))

    def __len__(self) -> int:
        return self.count

    def batches(self, order: list[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in order:
            if batch and (len(batch) + 1) * self.lengths[index] > self.characters:
                yield batch
                batch = []
            batch.append(index)
        yield batch

    def __iter__(self) -> Iterator[list[int]]:
        noisy = [length + 4 * random.random() for length in self.lengths]
        batches = list(self.batches(sorted(range(len(noisy)), key=noisy.__getitem__)))
        random.shuffle(batches)
        return iter(batches)


def collate(lines: list[str]) -> tuple[Tensor, Tensor]:
    codes = pad_sequence([torch.tensor([min(ord(c), 127) for c in line]) for line in lines], batch_first=True)
    return codes, torch.tensor([[float(sum(c in "aeiou" for c in line))] for line in lines])


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Embedding(128, 16, padding_idx=0)
        self.head = nn.Linear(16, 1)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.values(codes).tanh().sum(1))


def main():
    flags = training.parser("buckets", __doc__, epochs=3).parse_args()
    with training.start(flags) as run:
        sampler = Buckets([len(line) for line in LINES], characters=600)
        train = DataLoader(LINES, batch_sampler=sampler, collate_fn=collate)
        model = Counter()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        model, optimizer = run.prepare(model, optimizer)
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(train):
                for codes, counts in step.batches():
                    loss = F.mse_loss(model(codes), counts)
                    step.backward(loss)
                step.update()
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
