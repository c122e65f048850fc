"""Batches without end, all of one size, for the benchmarks: made up, the same for ever, or read."""

from argparse import Namespace
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hvdtrain.convnet import MODELS
from hvdtrain.data import idx
from hvdtrain.engines.base import World
from hvdtrain.errors import UserError

POOL_BATCHES = 4  # synthetic input draws from so many batches' worth of images
Batches = Iterator[
    tuple[Tensor, Tensor]
]  # images float32 [b, channels, side, side] and labels int64 [b], on the device


def scaled(images: Tensor, memory_format: torch.memory_format) -> Tensor:
    return images.to(torch.float32, memory_format=memory_format).div_(255)


def open_endless(flags: Namespace, world: World, classes: int, shape: Sequence[int]) -> Batches:
    """Return the batches that this rank trains on, without end. Raises UserError where `--input real` has no data."""
    memory_format = torch.channels_last if flags.channels_last else torch.contiguous_format
    generator = torch.Generator().manual_seed(flags.seed + world.rank)
    if flags.input == "real" and flags.model in MODELS:
        dataset = idx.load(flags.dataset, flags.data_dir, say=print if world.rank == 0 else None)
        images, labels = (part[world.rank :: world.size] for part in (dataset.train_images, dataset.train_labels))
    elif flags.input == "real":
        return folder_batches(flags, world.device, memory_format, generator)
    else:
        count = flags.batch_size * (1 if flags.input == "mock" else POOL_BATCHES)
        images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, classes, (count,), generator=generator)
    if len(images) < flags.batch_size:
        raise UserError(
            f"{len(images)} samples per rank are not one batch: use --batch-size {len(images)} or fewer ranks"
        )
    images, labels = images.to(world.device), labels.to(world.device)
    if flags.input == "mock":
        return same_batch(scaled(images, memory_format), labels)
    return gathered_batches(images, labels, flags.batch_size, memory_format, generator)


def same_batch(images: Tensor, labels: Tensor) -> Batches:
    while True:
        yield images, labels


def gathered_batches(
    images: Tensor, labels: Tensor, batch_size: int, memory_format: torch.memory_format, generator: torch.Generator
) -> Batches:
    """Gather and scale batches from uint8 images in the device's memory, as mnist.py does; only whole batches."""
    whole = len(images) // batch_size * batch_size
    while True:
        for indices in torch.randperm(len(images), generator=generator)[:whole].to(images.device).split(batch_size):
            yield scaled(images[indices], memory_format), labels[indices]


def folder_batches(
    flags: Namespace, device: torch.device, memory_format: torch.memory_format, generator: torch.Generator
) -> Batches:
    """Decode, crop and flip the images below --data-dir/train, with torchvision's own ImageFolder and torch's DataLoader."""
    from torchvision import datasets
    from torchvision.transforms import v2

    if flags.data_dir is None:
        raise UserError("--input real needs --data-dir: the directory that has train/")
    if not (flags.data_dir / "train").is_dir():
        raise UserError(f"--data-dir {flags.data_dir} has no train/: name the directory that has")
    steps = [v2.PILToTensor(), v2.RandomResizedCrop(flags.image_size, antialias=True), v2.RandomHorizontalFlip()]
    try:
        dataset = datasets.ImageFolder(flags.data_dir / "train", v2.Compose(steps))
    except FileNotFoundError as error:
        raise UserError(f"--data-dir {flags.data_dir}: {str(error).splitlines()[0]}") from error
    if len(dataset) < flags.batch_size:
        raise UserError(
            f"--data-dir {flags.data_dir} has {len(dataset)} images: use --batch-size {len(dataset)} or less"
        )
    loader = torch.utils.data.DataLoader(
        dataset, flags.batch_size, shuffle=True, drop_last=True, num_workers=flags.workers, generator=generator,
        pin_memory=device.type == "cuda", persistent_workers=True,
        multiprocessing_context="forkserver",  # a process that speaks MPI must not fork
    )  # fmt: skip

    def batches() -> Batches:
        while True:
            for images, labels in loader:
                yield scaled(images.to(device, non_blocking=True), memory_format), labels.to(device, non_blocking=True)

    return batches()
