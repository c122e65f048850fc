"""Learn from few labels and many unlabelled points: two loaders in one step."""

import torch
import torch.nn.functional as F
from hvdtrain import training
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def moons(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(count, generator=generator) * torch.pi
    labels = torch.randint(2, (count,), generator=generator)
    x, y = angle.cos() + labels, angle.sin() * (1 - 2 * labels) + 0.3 * labels
    return TensorDataset(torch.stack([x, y], 1) + 0.1 * torch.randn(count, 2, generator=generator), labels)


def consistency(net: nn.Module, points: torch.Tensor) -> torch.Tensor:
    confidence, guesses = net(points).detach().softmax(1).max(1)
    losses = F.cross_entropy(net(points + 0.1 * torch.randn_like(points)), guesses, reduction="none")
    return (losses * (confidence > 0.9)).mean()


def main():
    flags = training.parser("semi", __doc__, epochs=20, batch_size=16).parse_args()
    with training.start(flags) as run:
        labelled = DataLoader(moons(200, 1), batch_size=flags.batch_size, shuffle=True)
        unlabelled = DataLoader(moons(3_000, 2), batch_size=7 * flags.batch_size, shuffle=True)
        net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        net, optimizer = run.prepare(net, optimizer)
        for epoch in run.epochs(flags.epochs):
            for step in run.steps({"labelled": labelled, "unlabelled": unlabelled}):
                for batch in step.batches():
                    points, labels = batch["labelled"]
                    loss = F.cross_entropy(net(points), labels) + consistency(net, batch["unlabelled"][0])
                    step.backward(loss)
                step.update()
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
