"""Train a small convolutional network on MNIST, Fashion-MNIST or the embedded digits.

python -m hvdtrain.mnist                                  one process
horovodrun -np 2 python -m hvdtrain.mnist                 two ranks on this machine
horovodrun --gloo -np 2 python -m hvdtrain.mnist          the same without MPI
mpirun -np 4 python -m hvdtrain.mnist                     the same, started by MPI
launch/horovodrun.sh -H a:4,b:4 --interface eth0 python -m hvdtrain.mnist   two hosts (hvdtrain.unpack writes launch/)

--dataset mnist --data-dir DIR      the IDX files in DIR, compressed or not
--recipe classic --epochs 10        plain SGD at a constant learning rate, as tutorials do
--output-dir OUT                    metrics.jsonl, summary.json, checkpoints; the same command again resumes
--evaluate OUT                      do not train: the test set under the newest model there; --predict FILE.csv
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hvdtrain import training
from hvdtrain.cli import add_optimization
from hvdtrain.datasets import mnist_data
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.flags import Flags
from hvdtrain.loop import optim
from hvdtrain.models.convnet import MODELS

RECIPES: dict[str, dict[str, object]] = {
    # The fastest to 99 %: one-cycle Adam with label smoothing. FAST_EPOCHS has epochs by data set, FAST_RATES what depends
    # on the model; cosinenet's batch size is `shared_batch`.
    "fast": dict(
        model="cosinenet", epochs=None, lr_scaling="none", lr_schedule="onecycle", warmup_epochs=0.0,
        optimizer="adam", momentum=None, weight_decay=0.0, label_smoothing=0.05,
    ),
    # As in tutorials: plain SGD at a constant rate.
    "classic": dict(
        model="convnet", epochs=10, batch_size=100, lr=1e-4, lr_scaling="none", lr_schedule="constant", warmup_epochs=0.0,
        optimizer="sgd", momentum=0.0, weight_decay=0.0, label_smoothing=0.0,
    ),
}  # fmt: skip
FAST_RATES: dict[str, dict[str, object]] = {
    "cosinenet": dict(lr=0.03, momentum=0.85),
    "convnet": dict(batch_size=64, lr=0.01, momentum=0.9),
    "convnet-nonorm": dict(batch_size=64, lr=0.01, momentum=0.9),
}
FAST_EPOCHS = {"mnist": 1, "fashion-mnist": 1, "digits": 10}  # digits: a fortieth of the samples
EVALUATION_BATCH = 64  # as in training: fits into a core's cache and into memory that is already allocated


METRICS = {"accuracy": training.Metric("max", percent=True), "loss": training.Metric("min")}


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = training.parser("hvdtrain.mnist", __doc__, epochs=None, batch_size=None)
    add = parser.add_argument
    add("--dataset", choices=mnist_data.DATASET_NAMES, default="auto",
        help="what to train on (default: MNIST if present or downloadable, else digits)")  # fmt: skip
    add("--data-dir", type=Path, help="where the data files are, or are downloaded to")
    add("--train-samples", type=training.positive_int, help="train only on the first N samples")
    add("--recipe", choices=tuple(RECIPES), default="fast", help="a set of values for the flags not given")
    add("--model", choices=tuple(MODELS), help="the network (default: cosinenet; with --recipe classic convnet)")
    add_optimization(parser)
    parser.set_help(
        epochs="passes through the training set (default: 1; of the digits 10; --recipe classic 10)",
        batch_size="samples per rank (default: 256 shared by the ranks, 16 to 96 each; convnet 64; --recipe classic 100)",
        lr="peak learning rate, before scaling (default: 0.03; convnet 0.01; --recipe classic 0.0001)",
        momentum="sgd: momentum; adam, adamw: beta 1 (default: 0.85; convnet 0.9; --recipe classic 0)",
    )
    # On resume, the resulting data set and number of samples are compared instead of these flags.
    parser.may_change_on_resume("dataset", "data_dir", "train_samples")
    flags = parser.parse(argv, RECIPES)
    for name, value in FAST_RATES[flags.model].items():  # the other recipe sets all of them
        if getattr(flags, name) is None:
            setattr(flags, name, value)
    if flags.batch_size is None:
        flags.derive("batch_size", shared_batch(flags.virtual_ranks or announced().size))
    return flags


def shared_batch(ranks: int) -> int:
    """Return the samples per rank of a step of 256 samples over all ranks, but from 16 to 96 per rank: see
    docs/evidence/accuracy.md."""
    # More samples in a step are fewer steps: with 128 on each of 8 ranks, the digits reached 87 % instead of 96 %.
    return max(16, min(96, 256 // ranks))


def scaled_digits(images: Tensor) -> Tensor:
    """Return uint8 [b, 1, 28, 28] as float32 in [0, 1], in channels_last. The weights stay contiguous, and so do their
    gradients: Horovod refuses others."""
    # Layers compute in the images' memory format. On a CPU, channels_last is 1.5 times as fast as contiguous.
    return images.to(torch.float32, memory_format=torch.channels_last).div_(255)


def load_images(flags: Flags, run: training.Run) -> mnist_data.Dataset:
    """Return the data, the same on every rank. A collective."""
    with run.raising_together("download"):  # one rank of each host: what is missing is then there for the others
        dataset = (
            mnist_data.load_dataset(flags.dataset, flags.data_dir, say=run.say) if run.engine.local_rank == 0 else None
        )
    with run.raising_together("data"):
        dataset = dataset or mnist_data.load_dataset(flags.dataset, flags.data_dir, download=False)
        flags.epochs = flags.epochs or FAST_EPOCHS[dataset.name]
        count = min(flags.train_samples or len(dataset.train_images), len(dataset.train_images))
        if count < run.size:
            raise UserError(f"{count} samples but {run.size} ranks: use -np {count} or fewer")
    run.describe_data(dataset.name, dataset.reason, train_samples=count, test_samples=len(dataset.test_images))
    return dataset


def train_mnist(flags: Flags, run: training.Run, dataset: mnist_data.Dataset) -> None:
    """Train and evaluate for --epochs. A collective."""
    train_images, train_labels = run.to_device(
        dataset.train_images[: flags.train_samples], dataset.train_labels[: flags.train_samples]
    )
    test_images, test_labels = run.to_device(dataset.test_images, dataset.test_labels)
    initial = run.initial  # the run's first start: a resumed run keeps its rates, on any number of ranks
    peak_rate = optim.scaled_rate(flags.lr, flags.lr_scaling, initial.ranks, flags.reduction, initial.accumulate)

    torch.manual_seed(flags.seed)
    net = MODELS[flags.model]()
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    # The other models keep the bits that they have always had.
    own: dict[str, Any] = dict(fused=True, beta2=0.99) if flags.model == "cosinenet" else {}
    optimizer = optim.build_optimizer(flags.optimizer, trained, peak_rate, flags.momentum, flags.weight_decay, **own)
    model, _ = run.prepare(net, optimizer)

    for _ in run.epochs(flags.epochs, stop_at={"accuracy": flags.target_accuracy}):
        for step in run.steps(train_images, train_labels):
            rate = peak_rate * optim.schedule_factor(flags.lr_schedule, run.progress)
            step.lr = rate * optim.warmup_factor(run.epochs_done, flags.warmup_epochs, initial.ranks, flags.lr_scaling)
            for images, labels in step.batches():
                logits = model(scaled_digits(images))
                step.backward(F.cross_entropy(logits, labels, label_smoothing=flags.label_smoothing))
                if step.logged:  # the loss without smoothing, as in evaluations
                    step.record(loss=F.cross_entropy(logits, labels), accuracy=logits.argmax(1) == labels)
            step.update()

        with run.evaluating(len(test_images), prefix="test") as mine:
            batches = zip(*(part[mine].split(EVALUATION_BATCH) for part in (test_images, test_labels)), strict=True)
            for images, labels in batches:
                logits = net(scaled_digits(images))
                predicted = logits.argmax(1)
                run.record(loss=F.cross_entropy(logits, labels, reduction="none"), accuracy=predicted == labels)
                run.predict(label=labels, predicted=predicted, probability=logits.softmax(1))


def main() -> int:
    flags = parse()
    with training.start(flags, metrics=METRICS) as run:
        train_mnist(flags, run, load_images(flags, run))
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
