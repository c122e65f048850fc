"""Cross-validate a small network: one training for each of three folds."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

FOLDS = 3


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    flags = parser.parse_args()
    torch.manual_seed(1)
    x = torch.rand(1_200, 2, generator=torch.Generator().manual_seed(1)) * 6 - 3
    y = x.sum(1, keepdim=True).sin()
    losses = []
    for fold in range(FOLDS):
        held = torch.arange(len(x)) % FOLDS == fold
        train_x, train_y, test_x, test_y = x[~held], y[~held], x[held], y[held]
        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(flags.epochs):
            for indices in torch.randperm(len(train_x)).split(flags.batch_size):
                optimizer.zero_grad()
                loss = F.mse_loss(model(train_x[indices]), train_y[indices])
                loss.backward()
                optimizer.step()
            with torch.inference_mode():
                test_loss = F.mse_loss(model(test_x), test_y).item()
            print(f"epoch {epoch + 1}  loss {loss.item():.4f}  test loss {test_loss:.4f}")
        losses.append(test_loss)
    print(f"mean of {FOLDS} folds: {sum(losses) / FOLDS:.4f}")


if __name__ == "__main__":
    main()
