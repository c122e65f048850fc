"""hvdtrain: docs/convert.md, docs/training.md (schedulers), docs/restarts.md."""

import task
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from hvdtrain import training


def main():
    flags = training.parser("task", __doc__, epochs=task.EPOCHS, batch_size=task.BATCH).parse_args()
    with training.start(flags, metrics={"loss": "min"}) as run:
        net = task.Net()
        train = DataLoader(task.train_data, flags.batch_size, shuffle=True)
        test = DataLoader(task.test_data, 32)
        model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
        scheduler = CosineAnnealingLR(optimizer, task.EPOCHS * task.STEPS)
        run.register(scheduler=scheduler)  # resume
        for _ in run.epochs(flags.epochs):
            for step in run.steps(train):
                for batch in step.batches():
                    step.backward(model(**batch)["loss"])
                step.update()
                scheduler.step()
            with run.evaluating(test) as own_part:
                for batch in own_part:
                    run.record(loss=model(**batch)["loss"] * len(batch["x"]), count=len(batch["x"]))
    return run.exit_code  # resume


training.main(main)
