"""Cross-validate a small network: one training for each of three folds."""

import torch
import torch.nn.functional as F
from hvdtrain import training
from torch import nn

FOLDS = 3


def main():
    flags = training.parser("folds", __doc__, epochs=4, batch_size=32).parse_args()
    x = torch.rand(1_200, 2, generator=torch.Generator().manual_seed(1)) * 6 - 3
    y = x.sum(1, keepdim=True).sin()
    losses = []
    output_dir = flags.output_dir
    for fold in range(FOLDS):
        flags.output_dir = output_dir and output_dir / f"fold-{fold}"
        held = torch.arange(len(x)) % FOLDS == fold
        with training.start(flags) as run:
            train_x, train_y, test_x, test_y = run.to_device(x[~held], y[~held], x[held], y[held])
            model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
            model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
            for epoch in run.epochs(flags.epochs):
                for step in run.steps(train_x, train_y):
                    for inputs, targets in step.batches():
                        step.backward(F.mse_loss(model(inputs), targets))
                    step.update()
                with run.evaluating(len(test_x), prefix="test") as mine:
                    run.record(loss=F.mse_loss(model(test_x[mine]), test_y[mine], reduction="sum"))
        if run.exit_code:
            return run.exit_code
        losses.append(run.evaluation["loss"])
    run.say(f"mean of {FOLDS} folds: {sum(losses) / FOLDS:.4f}")
    return 0


if __name__ == "__main__":
    training.main(main)
