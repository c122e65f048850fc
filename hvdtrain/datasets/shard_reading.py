"""Reads batches of samples from tar shards by their numbers, at the positions given by the index.

The samples of a job are in as many files as a window has shards. A few threads read them, each the samples of one file in
file order. They read one job ahead, so that opening and reading overlap with decoding. Of large images, they read part of a
job at a time.
"""

import contextlib
import functools
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.datasets.corrupt import CorruptSample, why
from hvdtrain.datasets.decoding import Prepare
from hvdtrain.datasets.shard_index import IMAGE_TYPES, LABEL, OFFSET, SIZE, key_at
from hvdtrain.engines.files import open_regular
from hvdtrain.inputs.loading import Loaded, collate

READING_THREADS = 4  # per worker
OPEN_FILES = 128  # per worker: enough for several windows; the usual limit of a process is 1,024
HELD_BYTES = 2**26  # of files that are read but not decoded yet; twice that while the next ones are being read
LARGEST_FILE = 2**28  # bytes; a larger file is not an image

Contents = dict[int, bytes | Exception]  # by index: an image file, or why it cannot be read


class Shards(NamedTuple):
    """Tar files on this host and the index of their samples, which are numbered across all files."""

    paths: list[str]
    sizes: Tensor  # int64 [k]: number of samples in each file
    table: Tensor  # int64 [n, 4]: the concatenated indexes
    damaged: list[CorruptSample]  # shards that could not be read to the end


class Job(NamedTuple):
    """The samples of one batch."""

    epoch: int
    indices: list[int]
    following: list[int]  # indices of the next job that the same worker will probably get
    first: bool  # whether this is the rank's first job


def jobs(batches: Iterable[tuple[int, list[int]]], workers: int) -> Iterator[Job]:
    """Yield a job for each (epoch, indices) in `batches`. A DataLoader assigns jobs to its workers in turn."""
    now, later = itertools.tee(batches)
    following = itertools.chain(itertools.islice(later, max(1, workers), None), itertools.repeat((0, [])))
    for number, ((epoch, indices), (_, after)) in enumerate(zip(now, following, strict=False)):
        yield Job(epoch, indices, after, first=number == 0)


class ShardBatches(Dataset[Loaded]):
    """A data set that maps a Job to the batch of its images. If `reports`, the first job reports the damaged shards."""

    def __init__(self, shards: Shards, prepare: Prepare, classes: int, *, reports: bool):
        self.shards, self.prepare, self.classes, self.reports = shards, prepare, classes, reports
        self._reader: Reader | None = None  # threads and open files, in the process that reads

    def __getitem__(self, job: Job) -> Loaded:
        self._reader = self._reader or Reader(self.shards)
        samples = []
        corrupt = list(self.shards.damaged) if job.first and self.reports else []
        for index, image in self._reader.read(job.indices, job.following):
            try:
                if isinstance(image, Exception):
                    raise image
                label = self.label(index)
                samples.append((self.prepare(image, job.epoch, str(index)), label, index))
            except Exception as error:  # any exception of a decoder
                corrupt.append(CorruptSample(self._reader.name(index), why(error)))
        return collate(samples, corrupt, self.prepare.side)

    def label(self, index: int) -> int:
        """Return the class of a sample. Raises ValueError if there is no such class."""
        label = int(self.shards.table[index, LABEL])
        if label < 0:
            raise ValueError("no class (.cls) next to it")
        if label >= self.classes:
            raise ValueError(f"class {label} of {self.classes}: see --classes")
        return label


class Reader:
    """Reads samples ahead of their use, in one process."""

    def __init__(self, shards: Shards):
        self.shards = shards
        self.ends = shards.sizes.cumsum(0)
        self.open = functools.lru_cache(OPEN_FILES)(lambda shard: OpenFile(shards.paths[shard]))  # raises OSError
        self.pool = ThreadPoolExecutor(READING_THREADS, "shards")
        self.ahead: tuple[list[int], dict[int, Future[Contents]]] = ([], {})

    def read(self, indices: list[int], following: list[int]) -> Iterator[tuple[int, bytes | Exception]]:
        """Yield each index with the content of its image file, or why it cannot be read. `following` is read ahead."""
        parts = [*self.parts(indices), next(self.parts(following), [])]
        for part, after in itertools.pairwise(parts):
            asked, reading = self.ahead
            if asked != part:
                reading = self.begin(part)
            self.ahead = (after, self.begin(after))
            for index in part:
                # pop, so that the memory is freed after decoding.
                yield index, reading[index].result().pop(index)

    def parts(self, indices: list[int]) -> Iterator[list[int]]:
        """Split indices into parts whose files have at most HELD_BYTES; a larger file is a part of its own."""
        part: list[int] = []
        held = 0
        for index, size in zip(indices, self.shards.table[indices, SIZE].tolist(), strict=True):
            if part and held + size > HELD_BYTES:
                yield part
                part, held = [], 0
            part.append(index)
            held += size
        if part:
            yield part

    def begin(self, indices: list[int]) -> dict[int, Future[Contents]]:
        """Start reading in the threads, one task per shard. Return the future for each index."""
        reading: dict[int, Future[Contents]] = {}
        for shard, group in itertools.groupby(sorted(set(indices)), self.shard_of):
            mine = list(group)
            reading |= dict.fromkeys(mine, self.pool.submit(self.read_shard, shard, mine))
        return reading

    def shard_of(self, index: int) -> int:
        """Return the number of the shard of a sample."""
        return int(torch.searchsorted(self.ends, index, right=True))

    def read_shard(self, shard: int, indices: list[int]) -> Contents:
        """Return, by index, the content of the image file, or why it cannot be read."""
        try:
            file = self.open(shard)  # kept until the end: the cache may drop it meanwhile
        except OSError as error:
            return dict.fromkeys(indices, error)
        found: Contents = {}
        for index, row in zip(indices, self.shards.table[indices].tolist(), strict=True):
            try:
                found[index] = content(file, *row)
            except (OSError, ValueError) as error:
                found[index] = error
        return found

    def name(self, index: int) -> str:
        """Return the name of a sample for messages: its file and key."""
        shard, key = self.shard_of(index), None
        with contextlib.suppress(OSError):
            file = self.open(shard)
            key = key_at(file.fd, int(self.shards.table[index, OFFSET]))
        number = index - int(self.ends[shard] - self.shards.sizes[shard])
        return f"{self.shards.paths[shard]}: {key or f'sample {number}'}"


class OpenFile:
    """A file that is closed when the last reference to it is dropped."""

    fd = -1

    def __init__(self, path: str):
        self.fd = open_regular(path)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def content(file: OpenFile, offset: int, size: int, _: int, crc: int) -> bytes:
    """Return the content of an image file. Raises OSError, ValueError."""
    if size < 0:
        raise ValueError(f"no image in it ({', '.join(IMAGE_TYPES)})")
    if size > LARGEST_FILE:
        raise ValueError(f"{size:,} bytes are not an image")
    found = os.pread(file.fd, size, offset)
    if len(found) != size or zlib.crc32(found) != crc:
        raise ValueError("has changed since it was indexed")
    return found
