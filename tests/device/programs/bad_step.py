"""Train a classifier with batch norm and dropout on 256 samples, one of which is NaN: its step must be left out."""

import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain import training

BAD = 100  # the index of that sample


def main() -> int:
    parser = training.parser("bad_step", __doc__, epochs=1, batch_size=16)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="adamw")
    parser.add_argument("--clip-norm", type=training.positive)
    flags = parser.parse()
    with training.start(flags) as run:
        generator = torch.Generator().manual_seed(1)
        samples = torch.randn(256, 4, generator=generator)
        labels = (samples.sum(1) > 0).long()
        samples[BAD] = float("nan")
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        if flags.optimizer == "sgd":
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        model, _ = run.prepare(net, optimizer)
        for _ in run.epochs(flags.epochs):
            for step in run.steps(samples, labels):
                for inputs, targets in step.batches():
                    step.backward(F.cross_entropy(model(inputs), targets))
                step.update(clip_norm=flags.clip_norm)
            with run.evaluating(64) as mine:
                inputs, targets = run.to_device(samples[mine], labels[mine])
                run.record(loss=F.cross_entropy(net(inputs), targets, reduction="sum"))
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
