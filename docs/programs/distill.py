"""Distil a frozen teacher into a small student, and average the student's weights."""

import torch
from hvdtrain import training
from torch import nn
from torch.nn.functional import kl_div, log_softmax
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 5))


def main():
    flags = training.parser("distill", __doc__, epochs=4, batch_size=32).parse_args()
    with training.start(flags, metrics={"agreement": "max"}) as run:
        x, test = run.to_device(torch.randn(2_000, 8), torch.randn(500, 8))
        teacher = network(64).eval().requires_grad_(False).to(run.device)
        net = network(16)
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        student, optimizer = run.prepare(net, optimizer)
        averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
        run.register(averaged=averaged)
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(x):
                for (batch,) in step.batches():
                    targets = log_softmax(teacher(batch), 1)
                    loss = kl_div(log_softmax(student(batch), 1), targets, reduction="batchmean", log_target=True)
                    step.backward(loss)
                step.update()
                averaged.update_parameters(net)
            with run.evaluating(len(test)) as mine:
                run.record(agreement=averaged(test[mine]).argmax(1) == teacher(test[mine]).argmax(1))
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
