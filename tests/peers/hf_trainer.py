"""transformers.Trainer: huggingface.co/docs/transformers/trainer, and get_last_checkpoint of its examples run_*.py."""

import os

import task
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


def main():
    net = task.Net()
    args = TrainingArguments(
        task.CHECKPOINTS,
        num_train_epochs=task.EPOCHS,
        per_device_train_batch_size=task.BATCH,
        per_device_eval_batch_size=32,
        save_steps=task.SAVE_EVERY,  # resume
        enable_jit_checkpoint=True,  # resume
        eval_strategy="epoch",
        seed=task.SEED,
        data_seed=task.SEED,
        prediction_loss_only=True,
        remove_unused_columns=False,
        use_cpu=True,
        ddp_backend="gloo" if task.WORLD > 1 else None,
        report_to="none",
        disable_tqdm=True,
    )
    optimizers = task.optimizer_of(net)
    trainer = Trainer(net, args, train_dataset=task.train_data, eval_dataset=task.test_data, optimizers=optimizers)
    last = get_last_checkpoint(task.CHECKPOINTS) if os.path.isdir(task.CHECKPOINTS) else None  # resume
    trainer.train(resume_from_checkpoint=last)  # resume


main()
