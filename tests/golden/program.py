"""A small program for tests/golden: a network with batch norm and dropout on random data. --case: what it uses beside."""

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset

from hvdtrain import training

SAMPLES = 160
CASES = ("plain", "schedule", "stream", "nan")


class Stream(IterableDataset):
    """Numbered samples of this rank, without end. It continues where its state says."""

    def __init__(self, rank: int, size: int):
        self.next, self.size = rank, size

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.next)
            self.next += self.size
            x = torch.randn(8, generator=generator)
            yield x, x.sum(0, keepdim=True)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def main():
    parser = training.parser("golden", __doc__, epochs=2, batch_size=8)
    parser.add_argument("--case", choices=CASES, default="plain")
    flags = parser.parse()
    with training.start(flags, metrics={"error": "min"}) as run:
        x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
        y = x.sum(1, keepdim=True)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        model, optimizer = run.prepare(net, optimizer)
        data, length = (x, y), {"count": flags.epochs}
        if flags.case == "schedule":
            schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=run.total_steps(x, flags.epochs))
            slow = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
            run.register(schedule=schedule, slow=slow)
        elif flags.case == "stream":
            data, length = (DataLoader(Stream(run.rank, run.size), batch_size=flags.batch_size),), {"steps": 20}
        for _ in run.epochs(**length):
            for step in run.steps(*data):
                for inputs, targets in step.batches():
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    if flags.case == "nan" and run.state.step == 5:
                        loss = loss * float("nan")
                    step.backward(loss)
                step.update()
                if flags.case == "schedule":
                    schedule.step()
                    slow.update_parameters(net)
            with run.evaluating(SAMPLES) as mine:
                run.record(error=(model(x[mine]) - y[mine]).abs())
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
