"""Train a classifier of noisy stripes, with random augmentation by DataLoader workers: ported to Hugging Face accelerate.

accelerate launch --cpu --num_processes 2 tests/ports/augment_accelerate.py

It does not promise an exact resume: a killed run starts anew, and other numbers of ranks or workers give other
weights. Where ranks do not divide the samples, some are trained on twice in an epoch.
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Stripes(Dataset):
    """Horizontal or vertical stripes, 12 x 12: shifted at random each time they are looked at."""

    def __init__(self, count: int, seed: int, augment: bool):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (count,), generator=generator)
        self.noise = torch.randn(count, 12, 12, generator=generator)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        stripes = torch.arange(12).remainder(4).lt(2).float().expand(12, 12)
        image = stripes.T if self.labels[index] else stripes
        if self.augment:
            image = image.roll(int(torch.randint(12, ())), dims=int(self.labels[index]) ^ 1)
        return (image + 1.5 * self.noise[index]).unsqueeze(0), self.labels[index]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    flags = parser.parse_args()
    accelerator = Accelerator()
    set_seed(1, device_specific=True)
    features = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.Conv2d(8, 8, 5), nn.ReLU())
    net = nn.Sequential(features, nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    train = DataLoader(
        Stripes(2_000, 1, augment=True), batch_size=flags.batch_size, shuffle=True, num_workers=flags.workers
    )
    test = DataLoader(Stripes(500, 2, augment=False), batch_size=100)
    net, optimizer, train, test = accelerator.prepare(net, optimizer, train, test)
    for epoch in range(flags.epochs):
        for images, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        net.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test:
                correct += int(accelerator.gather_for_metrics(net(images).argmax(1) == labels).sum())
        net.train()
        accelerator.print(f"epoch {epoch + 1}  accuracy {correct / len(test.dataset):.2%}")


if __name__ == "__main__":
    main()
