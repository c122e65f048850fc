"""Infinite streams of batches of constant size, for benchmarks: synthetic, one repeated batch, or read from files."""

from argparse import Namespace
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hvdtrain.data import idx
from hvdtrain.data.images import open_folder
from hvdtrain.data.loading import Plan
from hvdtrain.data.text import windows
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.models.convnet import MODELS

POOL_BATCHES = 4  # size of the pool of synthetic images, in batches
FOR_EVER = 1_000_000_000  # epochs
# Images float32 [b, channels, side, side] and labels int64 [b]; or tokens and next tokens, int64 [b, t]. On the device.
Batches = Iterator[tuple[Tensor, Tensor]]


def scaled(images: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return uint8 images as float32 in [0, 1]."""
    return images.to(torch.float32, memory_format=memory_format).div_(255)


def open_endless(flags: Namespace, engine: Engine, classes: int, shape: Sequence[int]) -> Batches:
    """Return an infinite stream of this rank's batches. A collective. shape: of an image, or (context,) for tokens.

    Raises UserError on every rank if there is no data for `--input real`, or not enough.
    """
    memory_format = torch.channels_last if flags.channels_last else torch.contiguous_format
    if reads_folders(flags):
        return folder_batches(flags, engine, memory_format)
    if len(shape) == 1:
        return token_batches(flags, engine, classes, shape[0])
    with engine.raising_together("input"):
        generator = torch.Generator().manual_seed(flags.seed + engine.rank)
        if flags.input == "real":
            dataset = idx.load(flags.dataset, flags.data_dir, say=print if engine.rank == 0 else None)
            images, labels = (part[engine.rank :: engine.size] for part in (dataset.train_images, dataset.train_labels))
        else:
            count = flags.batch_size * (1 if flags.input == "mock" else POOL_BATCHES)
            images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
            labels = torch.randint(0, classes, (count,), generator=generator)
        if len(images) < flags.batch_size:
            said = (
                f"{len(images)} samples per rank are less than one batch: use --batch-size {len(images)} or fewer ranks"
            )
            raise UserError(said)
        images, labels = images.to(engine.device), labels.to(engine.device)
    if flags.input == "mock":
        return same_batch(scaled(images, memory_format), labels)
    return gathered_batches(images, labels, flags.batch_size, memory_format, generator)


def reads_folders(flags: Namespace) -> bool:
    """Return whether the flags request images from folders."""
    return flags.input == "real" and flags.model not in MODELS


def same_batch(images: Tensor, labels: Tensor) -> Batches:
    """Yield the same batch forever."""
    while True:
        yield images, labels


def token_batches(flags: Namespace, engine: Engine, vocabulary: int, context: int) -> Batches:
    """Yield windows of random tokens, gathered as in lm.py; with --input mock, always the same ones."""
    generator = torch.Generator().manual_seed(flags.seed + engine.rank)
    pool = flags.batch_size * (1 if flags.input == "mock" else POOL_BATCHES)
    tokens = torch.randint(0, vocabulary, (pool * context + 1,), generator=generator)
    while True:
        for indices in torch.arange(pool).split(flags.batch_size):
            inputs, targets = windows(tokens, indices, context)
            yield inputs.to(engine.device), targets.to(engine.device)


def gathered_batches(
    images: Tensor, labels: Tensor, batch_size: int, memory_format: torch.memory_format, generator: torch.Generator
) -> Batches:
    """Yield full batches, gathered and scaled from uint8 images on the device, as in mnist.py."""
    whole = len(images) // batch_size * batch_size
    while True:
        for indices in torch.randperm(len(images), generator=generator)[:whole].to(images.device).split(batch_size):
            yield scaled(images.index_select(0, indices), memory_format), labels.index_select(0, indices)


def folder_batches(flags: Namespace, engine: Engine, memory_format: torch.memory_format) -> Batches:
    """Return full batches read from image folders, as in imagenet.py. A collective. Raises UserError on every rank."""
    source = open_folder(engine, flags.data_dir, side=flags.image_size, seed=flags.seed, workers=flags.workers)
    count = source.train_count
    plan = Plan(count, count, flags.seed, FOR_EVER, engine.rank, engine.size, flags.batch_size)
    if count < flags.batch_size * engine.size:
        said = f"{count} images are less than one batch per rank: use a smaller --batch-size, or fewer ranks"
        raise UserError(said, everywhere=True)

    def batches() -> Batches:
        missed = 0  # consecutive smaller batches: at the end of an epoch, or because of corrupt images
        for loaded in source.train(plan):
            missed = 0 if loaded.samples == flags.batch_size else missed + 1
            if missed > plan.steps_per_epoch():
                raise UserError(f"--data-dir {flags.data_dir}: no full batch of readable images in a whole epoch")
            if missed == 0:
                images = loaded.images.to(engine.device, non_blocking=True)
                yield scaled(images, memory_format), loaded.labels.to(engine.device, non_blocking=True)

    return batches()
