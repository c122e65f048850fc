"""Classify points of the plane by the product of their coordinates."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    points = torch.rand(12_000, 2, generator=torch.Generator().manual_seed(1)) - 0.5
    labels = (points.prod(1) > 0).long()
    data = TensorDataset(points[:10_000], labels[:10_000])
    sampler = DistributedSampler(data, seed=1)
    train = DataLoader(data, 64, sampler=sampler)
    mine = slice(10_000 + rank, None, size)
    test = DataLoader(TensorDataset(points[mine], labels[mine]), 500)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    net = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        right, loss = torch.zeros(()), loss.detach() / size
        with torch.no_grad():
            for x, y in test:
                right += (net(x).argmax(1) == y).sum()
        dist.all_reduce(right)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch + 1}/5  train loss {loss:.4f}  accuracy {right / 2_000:.4f} of 2,000", flush=True)
            torch.save(net.module.state_dict(), "xor.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
