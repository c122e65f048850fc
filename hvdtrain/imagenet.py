"""Train a torchvision classifier on images: ResNet-50 on ImageNet, or any model on any folder.

python -m hvdtrain.imagenet --data-dir DIR                          one process; DIR has train/CLASS/*.jpg and val/
mpirun -np 8 python -m hvdtrain.imagenet --data-dir DIR             eight ranks, one GPU each
torchrun --nproc-per-node 8 -m hvdtrain.imagenet --data-dir DIR

--dataset shards --data-dir DIR     tar files, DIR/train/*.tar and DIR/val/*.tar (hvdtrain.datasets.make_shards makes them)
--dataset synthetic                 random images, made once on the device
--model resnet18 --image-size 64    any torchvision classifier, any size
--amp bf16 --compile                mixed precision, torch.compile
--recipe goyal                      the schedule of arXiv:1706.02677
--output-dir OUT                    metrics.jsonl, summary.json, checkpoints; the same command again resumes
--evaluate OUT                      do not train: the test set under the newest model there; --predict FILE.csv
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from hvdtrain import training
from hvdtrain.cli import add_optimization
from hvdtrain.datasets.images import Images, open_folders
from hvdtrain.datasets.tar_shards import open_shards
from hvdtrain.engines.choice import cores_of_rank
from hvdtrain.engines.errors import UserError
from hvdtrain.flags import Flags
from hvdtrain.inputs.loading import default_workers, start_workers_early, workers_that_fit
from hvdtrain.loop import optim
from hvdtrain.models.classifiers import build_model, require_torchvision
from hvdtrain.models.compiling import compiled

# Without --lr: 0.1 for every 256 images of the global batch (arXiv:1706.02677, section 2.1).
RECIPES: dict[str, dict[str, object]] = {
    # As in most current ResNet-50 results: cosine schedule, label smoothing.
    "cosine": dict(
        epochs=90, batch_size=64, lr_scaling="linear", lr_schedule="cosine", warmup_epochs=5.0,
        optimizer="sgd", momentum=0.9, weight_decay=5e-5, label_smoothing=0.1,
    ),
    # As in arXiv:1706.02677: a tenth after 30, 60 and 80 epochs.
    "goyal": dict(
        epochs=90, batch_size=32, lr_scaling="linear", lr_schedule="step", warmup_epochs=5.0,
        optimizer="sgd", momentum=0.9, weight_decay=1e-4, label_smoothing=0.0,
    ),
}  # fmt: skip
MEMORY_FORMATS = {"channels_last": "channels_last", "contiguous": "contiguous_format"}
ACCURACY = training.Metric("max", percent=True)
METRICS = {"accuracy": ACCURACY, "accuracy_top5": ACCURACY, "loss": training.Metric("min")}
# Depthwise convolutions, as in mobilenet and efficientnet, are slower in bf16 on a CPU (docs/evidence/accuracy.md).
FASTER_IN_BF16 = ("resnet", "vit")
TEST_BATCH = 64  # images of an evaluation's batch, on a CPU
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, from 0 to 1: red, green, blue


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = training.parser("hvdtrain.imagenet", __doc__, epochs=None, batch_size=None)
    add = parser.add_argument
    kinds = ("folder", "shards", "synthetic")
    add("--dataset", choices=kinds, default="folder", help="form of the images (default: folder)")
    add("--data-dir", type=Path, help="directory with train/ and val/, of folders or of shards")
    add("--train-shards", help="a path or a glob of tar files, instead of --data-dir")
    add("--test-shards", help="the same for the test set")
    add("--train-samples", type=training.positive_int, help="samples per epoch (default: all)")
    classes = "number of classes, for shards and synthetic (default: that of the shards, or 1000)"
    add("--classes", type=training.positive_int, help=classes)
    add("--image-size", type=training.positive_int, default=224, help="pixels (default: 224)")
    reduced = "decode large JPEG images at 1/2, 1/4 or 1/8 of their size: faster, slightly different pixels"
    add("--reduced-decode", action="store_true", help=reduced)
    add("--workers", type=training.count, help="DataLoader workers per rank (default: derived from this rank's cores)")
    most = "stop if more samples than this cannot be read: a share if below 1, else a number (default: 0.001)"
    add("--max-corrupt", type=training.non_negative, default=0.001, help=most)
    add("--recipe", choices=tuple(RECIPES), default="cosine", help="a set of values for the flags not given")
    add("--model", default="resnet50", help="any torchvision classifier (default: resnet50)")
    formats = tuple(MEMORY_FORMATS)
    add("--memory-format", choices=formats, default="channels_last", help="of the images and of computing")
    add("--compile", action="store_true", help="torch.compile the model")
    add_optimization(parser)
    parser.set_help(
        lr="peak learning rate, before scaling (default: 0.1 times --batch-size over 256)",
        amp="compute in this type where safe (default: auto, bf16 where possible; on CPUs for resnet and vit only)",
    )
    # For the first five, see describe_data.
    parser.may_change_on_resume("dataset", "data_dir", "train_shards", "test_shards", "train_samples")
    parser.may_change_on_resume("compile", "max_corrupt", "memory_format", "workers")
    flags = parser.parse(argv, RECIPES)
    if flags.model.startswith(FASTER_IN_BF16):
        flags.bf16_on_cpus()
    known = (flags.recipe, flags.model) == ("cosine", "resnet50") and flags.image_size <= 224  # to fit
    if known and flags.evaluate is None and parser.parse(argv).batch_size is None:
        flags.on_large_gpus(batch_size=256)  # at 64, the host is the limit (docs/evidence/gpus.md)
    return flags


def scaled_images(images: Tensor, pixels: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return uint8 [b, 3, side, side], from any device, as float32 with mean 0 and deviation 1 on the device of `pixels`."""
    images = images.to(pixels.device, non_blocking=True).to(torch.float32, memory_format=memory_format)
    return images.sub_(pixels[0]).div_(pixels[1])


def random_batch(flags: Flags, run: training.Run, classes: int) -> tuple[Tensor, Tensor]:
    """Return a batch of random images, made once on the device: other ones on each rank, but the same on all where ranks
    take turns."""
    # Where ranks take turns, any number of processes must make the same images.
    generator = torch.Generator().manual_seed(0 if run.engine.takes_turns else run.rank)
    shape = (flags.batch_size, 3, flags.image_size, flags.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    moved: tuple[Tensor, Tensor] = run.to_device(
        images, torch.randint(0, classes, (flags.batch_size,), generator=generator)
    )
    return moved


class ImageData(NamedTuple):
    """What is trained and evaluated on."""

    train: Any  # DataLoaders; of synthetic images, numbers
    test: Any
    classes: int
    unreadable: "Unreadable"
    synthetic: tuple[Tensor, Tensor] | None = None  # images and labels, of which each batch has the first ones

    def batch(self, batch: Any) -> tuple[Tensor, ...]:
        """Return images and labels of a batch of a step."""
        if self.synthetic is not None:
            return tuple(part[: len(batch.indices)] for part in self.synthetic)
        self.unreadable.count(batch[1])
        return tuple(batch)

    def test_batches(self, mine: Any) -> Iterable[tuple[Tensor, ...]]:
        """Return those of an evaluation. mine: this rank's part of it."""
        if self.synthetic is None:
            return map(self.batch, mine)
        left = torch.arange(self.test)[mine].split(len(self.synthetic[1]))
        return (tuple(part[: len(indices)] for part in self.synthetic) for indices in left if len(indices))


class Unreadable:
    """Counts images that cannot be read in an epoch and its evaluation, over all ranks, and ends the run if they are too
    many. limit: how many there may be; below 1, the share of `samples`. lost: how many are known to be missing."""

    def __init__(self, run: training.Run, limit: float, samples: int, lost: int = 0):
        self._run, self._limit, self._lost = run, int(limit * samples) if limit < 1 else int(limit), lost
        self._here: Tensor | int = 0  # in this epoch, on this rank

    def count(self, labels: Tensor) -> None:
        """Count those of a batch."""
        self._here = self._here + (labels < 0).sum()

    def settle(self, *, ended: bool = False) -> None:
        """Add up what the ranks have counted. A collective. ended: with the evaluation. Raises UserError on every rank."""
        here = torch.tensor([int(self._here)])
        total = self._lost + int(self._run.engine.processes.sum(here, "unreadable"))
        if total > self._limit:
            remedy = f"--max-corrupt allows {self._limit:,}: fix the data, or raise it"
            raise UserError(f"{total:,} samples cannot be read: {remedy}", everywhere=True)
        if ended:
            self._here = 0
            self._run.summary(corrupt=total)


def open_data(flags: Flags, run: training.Run) -> ImageData:
    """Return the data, the same on every rank. A collective."""
    # On a GPU, evaluations have batches of the training's size. A CPU gains nothing from larger ones.
    test_batch = TEST_BATCH if run.device.type == "cpu" else max(TEST_BATCH, flags.batch_size)
    automatic = default_workers(cores_of_rank(run.engine), run.device)
    with run.raising_together("torchvision"):
        require_torchvision()
        if flags.dataset == "synthetic":
            flags.workers = automatic if flags.workers is None else flags.workers
        else:  # those of the training stay during an evaluation
            batch_bytes = (flags.batch_size + test_batch) * 3 * flags.image_size**2
            flags.workers, fewer = workers_that_fit(flags.workers, automatic, batch_bytes, run.engine.local_size)
            run.engine.notes += [fewer] if fewer else []
    if flags.dataset == "synthetic":
        count, classes = flags.train_samples or 100 * flags.batch_size * run.size, flags.classes or 1000
        reason = f"synthetic: {flags.batch_size} random images per rank, repeated, {count:,} per epoch"
        run.describe_data("synthetic", reason, train_samples=count, classes=classes)
        made = random_batch(flags, run, classes)
        return ImageData(count, -(-count // 10), classes, Unreadable(run, 0, 0), made)
    train: Images
    test: Images
    facts, lost = dict[str, object](), 0
    if flags.dataset == "folder":
        train, test, classes = open_folders(run.engine, flags.data_dir, flags.image_size, reduced=flags.reduced_decode)
        reason = f"{flags.data_dir}: {len(train):,} and {len(test):,} images of {classes:,} classes"
    else:
        patterns, asked = (flags.train_shards, flags.test_shards), flags.classes
        train, test, classes, facts, damaged = open_shards(
            run.engine, flags.data_dir, patterns, flags.image_size, classes=asked, reduced=flags.reduced_decode
        )
        lost = sum(samples for _, samples in damaged)
        for what, _ in damaged:
            run.say(f"skipped: {what}")
        what = f"{len(train.paths)} and {len(test.paths)} shards, such as {train.paths[0]}"
        reason = f"{what}: {len(train):,} images an epoch, {classes:,} classes"
    samples = min(flags.train_samples or len(train), len(train))
    run.describe_data(flags.dataset, reason, train_samples=samples, classes=classes, **facts)
    drawn = RandomSampler(train, num_samples=samples) if samples < len(train) else None
    options: dict[str, Any] = dict(num_workers=flags.workers, persistent_workers=flags.workers > 0)
    return ImageData(
        DataLoader(train, flags.batch_size, shuffle=drawn is None, sampler=drawn, **options),
        DataLoader(test, test_batch, num_workers=flags.workers),
        classes,
        Unreadable(run, flags.max_corrupt, len(train), lost),
    )


def train_imagenet(flags: Flags, run: training.Run, data: ImageData) -> None:
    """Train and evaluate for --epochs. A collective."""
    memory_format = getattr(torch, MEMORY_FORMATS[flags.memory_format])
    pixels = torch.tensor([MEAN, DEVIATION], device=run.device).view(2, 3, 1, 1) * 255
    initial = run.initial  # the run's first start: a resumed run keeps its rates, on any number of ranks
    base_rate = flags.lr or 0.1 * initial.batch_size / 256
    peak_rate = optim.scaled_rate(base_rate, flags.lr_scaling, initial.ranks, flags.reduction, initial.accumulate)

    torch.manual_seed(flags.seed)
    net = build_model(flags.model, data.classes, flags.image_size)
    if run.device.type != "cpu":
        # Else each convolution lays its weights out anew. On CPUs: the same speed.
        net = net.to(memory_format=memory_format)
    optimizer = optim.build_optimizer(
        flags.optimizer, optim.decay_groups(net), peak_rate, flags.momentum, flags.weight_decay
    )
    model, _ = run.prepare(net, optimizer)
    if flags.compile:
        with run.raising_together("compile"):
            model = compiled(model, run.device)

    for _ in run.epochs(flags.epochs, stop_at={"accuracy": flags.target_accuracy}):
        for step in run.steps(data.train):
            rate = peak_rate * optim.schedule_factor(flags.lr_schedule, run.progress)
            step.lr = rate * optim.warmup_factor(run.epochs_done, flags.warmup_epochs, initial.ranks, flags.lr_scaling)
            for batch in step.batches():
                images, labels = data.batch(batch)
                if len(labels) == 1 < flags.batch_size:
                    # The last batch may have one image, which gives batch norm no variance. Repeated, it has the same mean.
                    images, labels = images.repeat(2, 1, 1, 1), labels.repeat(2)
                logits = model(scaled_images(images, pixels, memory_format))
                # Not the mean, which would be over those that can be read: each of them has the weight of any other.
                losses = F.cross_entropy(logits, labels, label_smoothing=flags.label_smoothing, reduction="sum")
                step.backward(losses / len(labels))
                if step.logged:  # the loss without smoothing, as in evaluations
                    loss = F.cross_entropy(logits, labels, reduction="sum") / len(labels)
                    step.record(loss=loss, accuracy=logits.argmax(1) == labels)
            if step.logged and data.synthetic is None:
                data.unreadable.settle()
            step.update()

        with run.evaluating(data.test, prefix="test") as mine:
            for images, labels in data.test_batches(mine):
                logits = net(scaled_images(images, pixels, memory_format)).float()
                probability, predicted = logits.softmax(1).topk(min(5, logits.shape[1]))
                hits = predicted == labels[:, None]
                loss = F.cross_entropy(logits, labels, reduction="none")
                readable = (labels >= 0).sum()
                run.record(loss=loss, accuracy=hits[:, 0], accuracy_top5=hits.any(1), count=readable)
                run.predict(label=labels, predicted=predicted, probability=probability)
        if data.synthetic is None:
            data.unreadable.settle(ended=True)


def main() -> int:
    flags = parse()
    if flags.dataset != "synthetic" and flags.workers != 0:
        start_workers_early()
    with training.start(flags, metrics=METRICS) as run:
        train_imagenet(flags, run, open_data(flags, run))
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
