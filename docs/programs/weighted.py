"""Classify clouds of which some are rare: a weighted sampler, and a one-cycle schedule."""

import torch
import torch.nn.functional as F
from hvdtrain import training
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

RARITY = torch.tensor([1.0, 0.2, 0.05])  # of each class


def clouds(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(RARITY, count, replacement=True, generator=generator)
    centers = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    return TensorDataset(centers[labels] + torch.randn(count, 2, generator=generator), labels)


def main():
    flags = training.parser("weighted", __doc__, epochs=4, batch_size=32).parse_args()
    with training.start(flags) as run:
        data = clouds(2_000, 1)
        sampler = WeightedRandomSampler(1 / RARITY[data.tensors[1]], len(data))
        train = DataLoader(data, batch_size=flags.batch_size, sampler=sampler)
        net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))
        net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        scheduler = OneCycleLR(optimizer, 0.2, total_steps=run.total_steps(train, flags.epochs))
        run.register(scheduler=scheduler)
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(train):
                for points, labels in step.batches():
                    loss = F.cross_entropy(net(points), labels)
                    step.backward(loss)
                step.update()
                scheduler.step()
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
