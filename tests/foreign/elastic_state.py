"""A Horovod script as users have it: elastic, with a state that is committed; it runs on a fixed number of ranks as well.

horovodrun -np 2 python tests/foreign/elastic_state.py
horovodrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh python tests/foreign/elastic_state.py
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batches-per-commit", type=int, default=20)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    x = torch.randn(args.samples, 64)
    y = (x @ torch.randn(64, 10)).argmax(1)
    dataset = TensorDataset(x, y)
    sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def on_state_reset():
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    @hvd.elastic.run
    def train(state):
        while state.epoch < args.epochs:
            for index, (data, target) in enumerate(loader):
                state.optimizer.zero_grad()
                loss = F.cross_entropy(state.model(data), target)
                loss.backward()
                state.optimizer.step()
                state.sampler.record_batch(index, args.batch_size)
                if index % args.batches_per_commit == 0:
                    state.commit()
            loss = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: loss {loss:.4f}", flush=True)
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    state.register_reset_callbacks([on_state_reset])
    train(state)


if __name__ == "__main__":
    main()
