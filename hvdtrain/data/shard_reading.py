"""Reads batches of samples from tar shards by their numbers, at the positions given by the index.

The samples of a job are in as many files as a window has shards. A few threads read them, each the samples of one file in
file order. They read one job ahead, so that opening and reading overlap with decoding.
"""

import functools
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.data.corrupt import CorruptSample, why
from hvdtrain.data.loading import Loaded, Prepare, collate
from hvdtrain.data.shard_index import CRC, IMAGE_TYPES, LABEL, OFFSET, SIZE, key_at
from hvdtrain.engines.files import open_regular

READING_THREADS = 4  # per worker
OPEN_FILES = 128  # per worker: enough for several windows; the usual limit of a process is 1,024
LARGEST_FILE = 2**28  # bytes; a larger file is not an image


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
    held: deque[tuple[int, list[int]]] = deque()
    first = True
    for batch in batches:
        held.append(batch)
        if len(held) > max(1, workers):
            yield Job(*held.popleft(), held[-1][1], first)
            first = False
    while held:
        yield Job(*held.popleft(), [], first)
        first = False


class ShardBatches(Dataset[Loaded]):
    """A data set that maps a Job to the batch of its images. If `reports`, the first job reports the damaged shards."""

    def __init__(self, shards: Shards, prepare: Prepare, classes: int, *, reports: bool):
        self.shards, self.prepare, self.classes, self.reports = shards, prepare, classes, reports
        self._reader: Reader | None = None  # threads and open files, in the process that reads

    def __getitem__(self, job: Job) -> Loaded:
        self._reader = self._reader or Reader(self.shards)
        samples = []
        corrupt = list(self.shards.damaged) if job.first and self.reports else []
        for index, content in self._reader.read(job.indices, job.following):
            label = int(self.shards.table[index, LABEL])
            try:
                if isinstance(content, str):
                    raise ValueError(content)
                if not 0 <= label < self.classes:
                    said = (
                        f"class {label} of {self.classes}: see --classes"
                        if label >= 0
                        else "no class (.cls) next to it"
                    )
                    raise ValueError(said)
                samples.append((self.prepare(content, job.epoch, str(index)), label, index))
            except Exception as error:  # any exception of a decoder
                corrupt.append(CorruptSample(self._reader.name(index), why(error)))
        return collate(samples, corrupt, self.prepare.side)


class Reader:
    """Reads samples ahead of their use, in one process."""

    def __init__(self, shards: Shards):
        self.shards = shards
        self.ends = shards.sizes.cumsum(0)
        self.open = functools.lru_cache(OPEN_FILES)(lambda shard: OpenFile(shards.paths[shard]))  # raises OSError
        self.pool = ThreadPoolExecutor(READING_THREADS, "shards")
        self.ahead: tuple[list[int], dict[int, Future[dict[int, bytes | str]]]] = ([], {})

    def read(self, indices: list[int], following: list[int]) -> Iterator[tuple[int, bytes | str]]:
        """Yield each index with the content of its image file, or with an error message (str). `following` is read ahead."""
        asked, reading = self.ahead
        if asked != indices:
            reading = self.begin(indices)
        self.ahead = (following, self.begin(following))
        for index in indices:
            # pop, so that the memory is freed after decoding.
            yield index, reading[index].result().pop(index)

    def begin(self, indices: list[int]) -> dict[int, Future[dict[int, bytes | str]]]:
        """Start reading in the threads, one task per shard. Return the future for each index."""
        by_shard: dict[int, list[int]] = {}
        for index, shard in zip(indices, self.shard_of(indices), strict=True):
            by_shard.setdefault(shard, []).append(index)
        reading: dict[int, Future[dict[int, bytes | str]]] = {}
        for shard, mine in by_shard.items():
            future = self.pool.submit(self.read_shard, shard, sorted(set(mine)))
            reading |= dict.fromkeys(mine, future)
        return reading

    def shard_of(self, indices: list[int]) -> list[int]:
        """Return the number of the shard of each index."""
        return torch.searchsorted(self.ends, torch.tensor(indices, dtype=torch.int64), right=True).tolist()

    def read_shard(self, shard: int, indices: list[int]) -> dict[int, bytes | str]:
        """Return, by index, the content of the image file or an error message."""
        found: dict[int, bytes | str] = {}
        try:
            file = self.open(shard)
        except OSError as error:
            return dict.fromkeys(indices, why(error))
        for index, row in zip(indices, self.shards.table[indices].tolist(), strict=True):
            if row[SIZE] < 0:
                found[index] = f"no image in it ({', '.join(IMAGE_TYPES)})"
            elif row[SIZE] > LARGEST_FILE:
                found[index] = f"{row[SIZE]:,} bytes are not an image"
            else:
                try:
                    content = os.pread(file.fd, row[SIZE], row[OFFSET])
                except OSError as error:
                    found[index] = why(error)
                    continue
                same = len(content) == row[SIZE] and zlib.crc32(content) == row[CRC]
                found[index] = content if same else "has changed since it was indexed"
        return found

    def name(self, index: int) -> str:
        """Return the name of a sample for messages: its file and key."""
        (shard,) = self.shard_of([index])
        try:
            key = key_at(self.open(shard).fd, int(self.shards.table[index, OFFSET]))
        except OSError:
            key = None
        return (
            f"{self.shards.paths[shard]}: {key or f'sample {index - int(self.ends[shard] - self.shards.sizes[shard])}'}"
        )


class OpenFile:
    """A file that is closed when the last reference to it is dropped."""

    fd = -1

    def __init__(self, path: str):
        self.fd = open_regular(path)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
