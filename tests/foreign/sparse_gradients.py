"""A Horovod script as users have it: recommendations from embedding tables whose gradients are sparse.

horovodrun -np 2 python tests/foreign/sparse_gradients.py --steps 200
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

import horovod.torch as hvd


class Recommender(nn.Module):
    def __init__(self, users, items, width):
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=True)
        self.items = nn.EmbeddingBag(items, width, sparse=True, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, user, history):
        return self.mlp(torch.cat([self.users(user), self.items(history)], dim=1)).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(7)
    model = Recommender(args.users, args.items, args.width)
    taste = torch.randn(args.users)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size())
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    torch.manual_seed(hvd.rank())
    for step in range(1, args.steps + 1):
        user = torch.randint(args.users, (args.batch_size,))
        history = torch.randint(args.items, (args.batch_size, 10))
        clicked = (taste[user] + history.float().mean(1) / args.items > 0.5).float()
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(user, history), clicked)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            loss = hvd.allreduce(loss.detach(), name="loss")
            if hvd.rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
