"""What image folders and shards share: decoding, seeded augmentation, input workers, and corrupt samples.

Images travel as uint8 [b, 3, side, side] and are scaled on the device: a quarter of float's bytes between the processes.
"""

import atexit
import contextlib
import functools
import hashlib
import io
import math
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hvdtrain.data import leftovers
from hvdtrain.data.corrupt import CorruptSample, CorruptSamples
from hvdtrain.data.sharding import Batch, Step, epoch_order, steps, steps_per_epoch

PREFETCH = 2  # batches that each worker keeps ready
LARGEST_IMAGE = 2**26  # pixels in memory; of larger JPEG images a half, a quarter or an eighth of each side is decoded
LARGEST_RATIO = math.log(4 / 3)  # of width to height, its logarithm; the smallest is its negative
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Loaded(NamedTuple):
    """One batch of one rank, without its corrupt samples."""

    images: Tensor  # uint8 [b, 3, side, side]; where every sample is corrupt, one black image
    labels: Tensor  # int64 [b]
    samples: int  # how many of them count: b, or 0
    corrupt: list[CorruptSample]


@dataclass(frozen=True)
class Plan:
    """Which samples one rank takes, at which step of which epoch (sharding.py), as something that workers can be given."""

    total: int  # samples in the training set
    per_epoch: int  # of them an epoch takes
    seed: int
    epochs: int
    rank: int
    size: int
    batch_size: int
    accumulate: int = 1
    global_batch: int | None = None  # samples a step over all ranks, where it is not the product of the three above
    first_epoch: int = 0  # where a resumed run goes on,
    taken: int = 0  # and how many samples of that epoch it has behind it
    shuffle: bool = True  # False: in the order of the data set
    device: str | torch.device = "cpu"  # of the indices
    order: Callable[[int, int], Tensor] | None = None  # of seed and epoch: int64 [total]; None: `epoch_order`

    def epoch(self, epoch: int) -> Iterator[Step]:
        if not self.shuffle:
            order = torch.arange(self.total)
        else:
            order = self.order(self.seed, epoch) if self.order else epoch_order(self.total, self.seed, epoch)
        order = order[: self.per_epoch].to(self.device)
        rest = order[self.taken :] if epoch == self.first_epoch else order
        return steps(rest, self.rank, self.size, self.batch_size, self.accumulate, self.global_batch)

    def steps_per_epoch(self) -> int:
        if self.global_batch is not None:
            return -(-self.per_epoch // self.global_batch)
        return steps_per_epoch(self.per_epoch, self.size, self.batch_size, self.accumulate)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield (epoch, batch) for the whole of training: loading goes on across the end of an epoch."""
        for epoch in range(self.first_epoch, self.epochs):
            for step in self.epoch(epoch):
                for batch in step.batches:
                    yield epoch, batch


@dataclass(frozen=True)
class Source:
    """A training set and a test set. Each iteration of a loader starts afresh; `train` goes through a whole Plan."""

    name: str
    reason: str  # one line: which data this is, and why
    classes: int
    train_count: int
    train: Callable[[Plan], Iterable[Loaded]]
    test: Callable[[], Iterable[Loaded]]  # this rank's part of the test set; over all ranks, each sample once
    per_epoch: int | None = None  # samples that an epoch takes; None: all
    corrupt: CorruptSamples = field(default_factory=lambda: CorruptSamples(0, 0))  # met so far; by default, none may be
    order: Callable[[int, int], Tensor] | None = None  # as in Plan; `train` follows it, whatever the Plan has
    facts: Mapping[str, object] = field(default_factory=dict)  # what else identifies the training samples, in JSON


IMAGES = ("hvdtrain.data.loading", "torchvision.transforms.v2", "PIL.JpegImagePlugin", "simplejpeg")


def start_workers_early(preload: Sequence[str] = IMAGES) -> None:
    """Start the process that input workers will be forked from, with the modules of `preload` imported. Call it before the
    engine starts, where that is known to be needed by then.

    A rank must not fork once MPI or NCCL run in it: the child inherits locks that are never released and, with InfiniBand,
    the parent's registered pages become copy-on-write, so that its own sends read old memory. Started before, and by exec,
    this server has none of it; and having imported torch once, it forks a worker in hundredths of a second.
    """
    leftovers.sweep()
    leftovers.claim()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))  # what is not installed is left out
    # Ignored signals stay ignored across exec and fork: launchers and Ctrl-C send them to every process of a job, and when
    # to stop is the rank's decision. When the rank is gone, its workers end themselves, and so the server.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED_SIGNALS}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    atexit.register(_end_workers)


def _end_workers() -> None:
    """Kill the workers that are left where a rank fails: multiprocessing would send the signal they ignore, and wait."""
    for worker in multiprocessing.active_children():
        worker.kill()


def default_workers(cores: int, device: torch.device) -> int:
    """Return the input workers for a rank with `cores` cores: with a GPU all but one, on a CPU a quarter of them."""
    return max(1, cores - 1 if device.type == "cuda" else cores // 4)


def loader(
    dataset: Dataset,
    workers: int,
    device: torch.device,
    jobs: Iterable | None = None,
    *,
    timeout: float = 0,
    prefetch_factor: int | None = PREFETCH,
    worker_init: Callable[[int], None] | None = None,
) -> DataLoader:
    """Return a DataLoader whose items are whole batches: `dataset[job]`, or what an iterable dataset yields.

    timeout (seconds; 0: none), prefetch_factor, worker_init: as DataLoader's own, where there are workers.
    """
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=jobs,
        num_workers=workers,
        timeout=timeout if workers else 0,
        prefetch_factor=prefetch_factor if workers else None,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # else each pass over the data moves the global one, which dropout draws from
        multiprocessing_context="forkserver" if workers else None,
        # The server may have been started while mpirun had this rank bound to one core.
        worker_init_fn=functools.partial(_begin_worker, os.sched_getaffinity(0), worker_init) if workers else None,
    )


def _begin_worker(cores: set[int], worker_init: Callable[[int], None] | None, worker: int) -> None:
    # torch looks whether the parent lives, but that is the server, which in turn lives as long as its workers.
    threading.Thread(target=_end_with_rank, daemon=True).start()
    os.sched_setaffinity(0, cores)
    for number in IGNORED_SIGNALS:  # torch gives SIGTERM a handler of its own
        signal.signal(number, signal.SIG_IGN)
    if worker_init is not None:
        worker_init(worker)


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        leftovers.sweep_after(rank.pid or 0)
        os._exit(1)


def mixed_seed(*parts: object) -> int:
    """Return 63 bits that depend on all `parts` and on nothing else: not on the process, nor on Python's hash seed."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


class Prepare:
    """From an image file's bytes to uint8 [3, side, side].

    Training: a random part of 8 to 100 % of the area, mirrored half the time, by a generator seeded with seed, epoch and
    name: the same image comes out, whichever worker of whichever rank makes it. Test: the middle seven eighths.
    """

    def __init__(self, side: int, seed: int = 0, *, train: bool):
        self.side, self.seed, self.train = side, seed, train

    def __call__(self, content: bytes, epoch: int, name: str) -> Tensor:
        """Raises what decoders raise where `content` is no image."""
        image = decode(content)
        if not self.train:
            return middle(image, self.side)
        return random_part(image, self.side, random.Random(mixed_seed(self.seed, epoch, name)))


def random_part(image: Tensor, side: int, draw: random.Random) -> Tensor:
    """Return what torchvision's RandomResizedCrop and RandomHorizontalFlip would, with a generator of its own.

    torchvision draws from torch's global generator, which in the rank's own process is dropout's.
    """
    from torchvision.transforms.v2 import functional

    # A copy, so that the pixels are neighbours again: resizing a view takes longer than the copy and resizing that.
    part = functional.crop(image, *random_box(image.shape[1], image.shape[2], draw)).clone()
    resized = functional.resize(part, [side, side], antialias=True)
    return functional.horizontal_flip(resized) if draw.random() < 0.5 else resized


def random_box(height: int, width: int, draw: random.Random) -> tuple[int, int, int, int]:
    """Return top, left, height and width of 8 to 100 % of an image's area, between 3:4 and 4:3 (Szegedy et al. 2014)."""
    for _ in range(10):
        area = height * width * draw.uniform(0.08, 1.0)
        ratio = math.exp(draw.uniform(-LARGEST_RATIO, LARGEST_RATIO))
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            return draw.randint(0, height - h), draw.randint(0, width - w), h, w
    # Long and narrow: as much of its middle as the ratio allows.
    h, w = min(height, max(1, round(width * 4 / 3))), min(width, max(1, round(height * 4 / 3)))
    return (height - h) // 2, (width - w) // 2, h, w


def middle(image: Tensor, side: int) -> Tensor:
    from torchvision.transforms.v2 import functional

    resized = functional.resize(image, [side * 8 // 7], antialias=True)  # for 224, to 256
    return functional.center_crop(resized, [side, side])


def decode(content: bytes) -> Tensor:
    """Return uint8 [3, height, width], RGB."""
    # Both use libjpeg-turbo, and the pixels are the same; Pillow copies them twice more. Not torchvision.io, which is
    # deprecated in torchvision 0.29, to be removed.
    simplejpeg = fast_decoder()
    if simplejpeg is not None:
        with contextlib.suppress(ValueError):  # what it will not decode, Pillow may, or says why not
            height, width, *_ = simplejpeg.decode_jpeg_header(content)
            if height * width <= LARGEST_IMAGE:
                return torch.from_numpy(simplejpeg.decode_jpeg(content)).permute(2, 0, 1)
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    with Image.open(io.BytesIO(content)) as image:
        width, height = image.size
        if width * height > LARGEST_IMAGE:  # libjpeg can halve it up to three times; parts of it are made smaller still
            fitting = (s for s in (2, 4) if math.ceil(width / s) * math.ceil(height / s) <= LARGEST_IMAGE)
            scale = next(fitting, 8)
            image.draft("RGB", (width // scale, height // scale))
        if image.width * image.height > LARGEST_IMAGE:
            megapixels = image.width * image.height / 1e6
            raise ValueError(
                f"{megapixels:.0f} megapixels in {image.format}: at most {LARGEST_IMAGE / 1e6:.0f}: make it smaller"
            )
        return pil_to_tensor(image.convert("RGB"))


@functools.cache
def fast_decoder() -> ModuleType | None:
    """Return simplejpeg where it is installed; a missing one is looked for once, not for each image."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def collate(samples: list[tuple[Tensor, int]], corrupt: list[CorruptSample], side: int) -> Loaded:
    """Batch what is left; where nothing is, one black image that does not count (batch norm has no answer to none)."""
    if not samples:
        return Loaded(torch.zeros(1, 3, side, side, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), 0, corrupt)
    images, labels = zip(*samples, strict=True)
    return Loaded(torch.stack(images), torch.tensor(labels), len(samples), corrupt)
