"""A small regression that pauses where a test wants it: after step N, until the file go-N is there. It says so by at-N."""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain import training

X = torch.randn(320, 3, generator=torch.Generator().manual_seed(1))


def main() -> int:
    parser = training.parser("pausing", __doc__, epochs=3, batch_size=8)
    parser.add_argument("--width", type=training.positive_int, default=8)
    parser.add_argument("--pause", type=training.count, nargs="*", default=[])
    parser.add_argument("--signs", type=Path)
    parser.may_change_on_resume("pause", "signs")
    flags = parser.parse_args()
    with training.start(flags) as run:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(3, flags.width), nn.Tanh(), nn.Linear(flags.width, 1))
        model, _ = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
        for _ in run.epochs(flags.epochs):
            for step in run.steps(X, X.sum(1, keepdim=True).sin()):
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x), y))
                step.update()
                if step.number in flags.pause:
                    (flags.signs / f"at-{step.number}").touch()
                    while not (flags.signs / f"go-{step.number}").exists():
                        time.sleep(0.05)
                        run.heartbeat()
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
