"""Train a classifier of noisy stripes, with random augmentation in `DataLoader` workers."""

import torch
import torch.nn.functional as F
from hvdtrain import training
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
    parser = training.parser("augment", __doc__, epochs=4, batch_size=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.may_change_on_resume("workers")
    flags = parser.parse_args()
    with training.start(flags, metrics={"accuracy": "max"}) as run:
        features = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.Conv2d(8, 8, 5), nn.ReLU())
        net = nn.Sequential(features, nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        train = DataLoader(
            Stripes(2_000, 1, augment=True), batch_size=flags.batch_size, shuffle=True, num_workers=flags.workers
        )
        test = DataLoader(Stripes(500, 2, augment=False), batch_size=100)
        net, optimizer = run.prepare(net, optimizer)
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(train):
                for images, labels in step.batches():
                    loss = F.cross_entropy(net(images), labels)
                    step.backward(loss)
                step.update()
            with run.evaluating(test) as mine:
                for images, labels in mine:
                    run.record(accuracy=net(images).argmax(1) == labels)
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
