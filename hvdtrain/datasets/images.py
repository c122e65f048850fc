"""Images in folders, `train/CLASS/*.jpg` and `val/CLASS/*.jpg`, as for torchvision's ImageFolder.

Only rank 0 lists the folders, and sends the list to the other ranks. Listing a million files on every rank at once would
overload a shared file system, and a single list cannot differ between ranks.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.datasets.corrupt import CorruptSample, why
from hvdtrain.datasets.decoding import Prepare
from hvdtrain.engines import files
from hvdtrain.engines.accelerators import Copies, to_device
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.inputs import Batch, Input, Kind
from hvdtrain.inputs.loading import Loaded, Source, collate, loader
from hvdtrain.inputs.plan import Plan
from hvdtrain.inputs.sharding import PlannedBatch, shard

TEST_BATCH = 64  # images of an evaluation's batch, on a CPU


class Listing(NamedTuple):
    """The files of one folder, as tensors, whose memory workers share. Python strings would be copied to each worker."""

    names: Tensor  # uint8: the concatenated paths relative to the folder, in UTF-8
    ends: Tensor  # int64 [n]: the end of each path in `names`
    labels: Tensor  # int64 [n]

    def name(self, index: int) -> str:
        """Return the path of file `index`, relative to the folder."""
        start = int(self.ends[index - 1]) if index else 0
        return bytes(self.names[start : int(self.ends[index])].numpy()).decode(errors="surrogateescape")


def open_folder(
    engine: Engine,
    data_dir: Path | None,
    *,
    side: int,
    seed: int,
    workers: int,
    reduced: bool = False,
    test_batch: int = TEST_BATCH,
) -> Source:
    """Return the training and test sets in `data_dir`. A collective. Raises UserError on every rank.

    reduced: see Prepare.
    """
    with engine.raising_together("folder"):
        count, train, test = 0, EMPTY, EMPTY
        if data_dir is None:
            message = "--dataset folder needs --data-dir: the directory that has train/ and val/"
            raise UserError(message, everywhere=True)
        for directory in (data_dir, data_dir / "train", data_dir / "val"):
            if not directory.is_dir():
                problem = "is not a directory" if directory.exists() else "does not exist"
                raise UserError(f"--data-dir: {directory} {problem}: name the directory that has train/ and val/")
        if engine.rank == 0:
            names, train = list_folder(data_dir / "train")
            test_names, test = list_folder(data_dir / "val")
            refuse_other_classes(names, test_names)
            count = len(names)
    classes = engine.broadcast_object(count, "classes")
    train = Listing(*(from_rank_zero(engine, part, f"train.{n}") for n, part in train._asdict().items()))
    test = Listing(*(from_rank_zero(engine, part, f"test.{n}") for n, part in test._asdict().items()))

    def train_batches(plan: Plan) -> Iterable[Loaded]:
        jobs = ((epoch, batch.indices.tolist()) for epoch, batch in plan)
        prepare = Prepare(side, seed, train=True, reduced=reduced)
        return loader(FolderBatches(data_dir / "train", train, prepare), workers, engine.device, jobs)

    def test_batches() -> Iterable[Loaded]:
        mine = torch.arange(len(test.labels))[shard(len(test.labels), engine.rank, engine.size)]
        jobs = [(0, some.tolist()) for some in mine.split(test_batch) if len(some)]
        prepare = Prepare(side, train=False, reduced=reduced)
        return loader(FolderBatches(data_dir / "val", test, prepare), workers, engine.device, jobs)

    counts = f"{len(train.labels):,} and {len(test.labels):,} images of {classes:,} classes"
    return Source("folder", f"{data_dir}: {counts}", classes, len(train.labels), train_batches, test_batches)


class FolderBatches(Dataset[Loaded]):
    """A data set that maps (epoch, indices) to the batch of those images."""

    def __init__(self, root: Path, listing: Listing, prepare: Prepare):
        self.root, self.listing, self.prepare = root, listing, prepare

    def __getitem__(self, job: tuple[int, list[int]]) -> Loaded:
        epoch, indices = job
        samples, corrupt = [], []
        for index in indices:
            name = self.listing.name(index)
            try:
                image = self.prepare(files.read_bytes(self.root / name), epoch, name)
                samples.append((image, int(self.listing.labels[index]), index))
            except Exception as error:  # any exception of a decoder
                corrupt.append(CorruptSample(str(self.root / name), why(error)))
        return collate(samples, corrupt, self.prepare.side)


EMPTY = Listing(torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


def list_folder(root: Path) -> tuple[list[str], Listing]:
    """Return the class names and the files, in ImageFolder's order. Raises UserError if a class has no images."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    try:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        paths = [files_of_class(f"{root}/{name}", IMG_EXTENSIONS) for name in classes]
    except OSError as error:
        raise UserError(f"--data-dir: {error.filename} cannot be read ({error.strerror})") from error
    if not classes:
        raise UserError(f"--data-dir: {root} has no directory for each class")
    if empty := [name for name, those in zip(classes, paths, strict=True) if not those]:
        supported = f"Supported extensions are: {', '.join(IMG_EXTENSIONS)}"
        raise UserError(f"--data-dir: Found no valid file for the classes {', '.join(empty)}. {supported}")
    names = [path[len(str(root)) + 1 :].encode(errors="surrogateescape") for those in paths for path in those]
    ends = torch.tensor([len(name) for name in names]).cumsum(0)
    labels = torch.tensor([label for label, those in enumerate(paths) for _ in those])
    return classes, Listing(torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8), ends, labels)


def files_of_class(directory: str, endings: tuple[str, ...]) -> list[str]:
    """Return the image files of one class, also those in directories below and behind links, in ImageFolder's order.

    Raises OSError, and UserError if a link leads to a directory above it: torchvision follows it for 40 levels, and two of
    them 2**40 times.
    """
    found = []
    above: dict[str, set[tuple[int, int]]] = {}  # path of a directory -> devices and inodes of those above it
    for path, names, in_it in os.walk(directory, followlinks=True):
        entry = Path(path).stat()
        place = entry.st_dev, entry.st_ino
        those = above.pop(path, set())
        if place in those:
            raise UserError(f"--data-dir: {path} leads to a directory above it: remove the link")
        above |= {f"{path}/{name}": those | {place} for name in names}
        found.append((path, [name for name in sorted(in_it) if name.lower().endswith(endings)]))
    return [f"{path}/{name}" for path, in_it in sorted(found) for name in in_it]


def refuse_other_classes(train: list[str], test: list[str]) -> None:
    """Raise UserError if the training and test sets have different classes."""
    for ours, theirs, where in ((train, test, "train"), (test, train, "val")):
        only = sorted(set(ours) - set(theirs))
        if only:
            more = f" and {len(only) - 1} more" if len(only) > 1 else ""
            raise UserError(
                f"--data-dir: train/ has {len(train)} classes, val/ has {len(test)}: {only[0]!r}{more} is only in {where}/"
            )


def from_rank_zero(engine: Engine, tensor: Tensor, name: str) -> Tensor:
    """Return rank 0's one-dimensional `tensor` on every rank. The other ranks pass a tensor of its dtype and any length."""
    length = engine.broadcast_object(len(tensor), f"{name}.length")
    if engine.rank != 0:
        tensor = torch.zeros(length, dtype=tensor.dtype)
    engine.broadcast_(tensor, name)
    return tensor


def open_synthetic(
    engine: Engine, side: int, batch_size: int, classes: int, train_count: int, test_count: int
) -> Source:
    """Return a source whose batches all consist of the same `batch_size` random images, different on each process.

    Where ranks take turns, all have the same, as these may not depend on the number of processes.
    """
    generator = torch.Generator().manual_seed(0 if engine.takes_turns else engine.rank)
    images = torch.randint(0, 256, (batch_size, 3, side, side), dtype=torch.uint8, generator=generator).to(
        engine.device
    )
    labels = torch.randint(0, classes, (batch_size,), generator=generator).to(engine.device)

    def some(count: int, indices: range = range(0)) -> Loaded:
        return Loaded(images[:count], labels[:count], count, [], list(indices))

    def train(plan: Plan) -> Iterator[Loaded]:
        return (some(len(batch.indices)) for _, batch in plan)

    def test() -> Iterator[Loaded]:
        mine = range(test_count)[shard(test_count, engine.rank, engine.size)]
        parts = (mine[start : start + batch_size] for start in range(0, len(mine), batch_size))
        return (some(len(part), part) for part in parts)

    reason = f"synthetic: {batch_size} random images per rank, repeated, {train_count:,} per epoch"
    return Source("synthetic", reason, classes, train_count, train, test)


class Images(Input):
    """hvdtrain's image folders and shards, which skip unreadable samples."""

    def __init__(self, engine: Engine, source: Source, seed: int, batch_size: int, output: Any):
        self._engine, self._source, self._output, self._copies = engine, source, output, Copies(engine.device)
        self.samples = source.train_count
        self.per_epoch = min(source.per_epoch or self.samples, self.samples)
        self._batches: Iterator[Loaded] | None = None

    def read(self, jobs: Iterable[tuple[int, PlannedBatch]]) -> None:
        if self._batches is None:  # all epochs: the images do not change, and are read across the end of an epoch
            self._batches = iter(self._source.train(self._plan))

    def load(self, planned: PlannedBatch) -> Batch:
        assert self._batches is not None
        loaded = next(self._batches)
        self._source.corrupt.note(loaded.corrupt)
        # Unreadable samples contribute nothing; the other samples keep their weight.
        count = min(planned.local_count, loaded.samples)
        weight = planned.weight * count / max(planned.local_count, 1)
        return Batch(self._copies.to_device((loaded.images, loaded.labels)), planned.indices, count, weight)

    def settle(self) -> dict[str, object]:
        self._source.corrupt.settle(self._engine, self._output)
        return self.summary()

    def summary(self) -> dict[str, object]:
        return {"corrupt": self._source.corrupt.total()}


def evaluated_images(engine: Engine, source: Source, seed: int) -> Iterator[Batch]:
    """Yield this rank's batches of the test set."""
    for loaded in source.test():
        source.corrupt.note(loaded.corrupt)
        if loaded.samples:
            data = to_device((loaded.images, loaded.labels), engine.device)
            yield Batch(data, torch.tensor(loaded.indices, dtype=torch.int64), loaded.samples)


IMAGES = Kind(lambda data: isinstance(data, Source), Images, evaluated_images)
