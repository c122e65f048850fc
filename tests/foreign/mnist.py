"""A Horovod script as users have it: nothing of hvdtrain in it, nothing tuned. Trains a ConvNet on MNIST, or on noise.

horovodrun -np 2 python tests/foreign/mnist.py --data-dir DIR     DIR has train-images-idx3-ubyte.gz and its labels
"""

import argparse
import gzip
import hashlib
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


def read(path, skip):
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())[skip:]), dtype=torch.uint8)


def dataset(data_dir, samples):
    if data_dir is None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (samples, 1, 28, 28), generator=generator)
        labels = torch.randint(0, 10, (samples,), generator=generator)
    else:
        images = read(data_dir / "train-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)[:samples]
        labels = read(data_dir / "train-labels-idx1-ubyte.gz", 8)[:samples].long()
    return TensorDataset((images.float() / 255 - 0.1307) / 0.3081, labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    data = dataset(args.data_dir, args.samples)
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    model.train()
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f}", flush=True)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    if hvd.rank() == 0:
        print(f"parameters {digest}")


if __name__ == "__main__":
    main()
