"""Shards from a URL or a command, read sequentially with the webdataset library.

Each worker of each rank is a reader. Readers take whole shards; if there are fewer shards than readers, several readers
share a shard and each takes every n-th sample. For training, a reader has an endless stream: random orders of all shards,
one after the other. Every rank therefore has as many batches as needed, and in the long run all samples are used equally
often (drawing shards with replacement would omit a third of them in each epoch). For testing, every sample is used once.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from hvdtrain.data.corrupt import CorruptSample, why
from hvdtrain.data.images import TEST_BATCH
from hvdtrain.data.loading import Loaded, Plan, Prepare, collate
from hvdtrain.data.shard_index import IMAGE_TYPES
from hvdtrain.data.sharding import mixed_seed

SHUFFLE_SAMPLES = 1000  # maximum size of each reader's shuffle buffer: about 100 MB of ImageNet's files
FRUITLESS_SHARDS = 10  # after so many consecutive shards without samples, an incomplete batch is returned


class Sample(NamedTuple):
    """An encoded image and its label."""

    name: str
    content: bytes  # of the image file
    label: int


class StreamBatches(IterableDataset[Loaded]):
    """The batches of one reader: its training batches of `plan`; without a plan, its part of a test set."""

    def __init__(
        self, urls: list[str], prepare: Prepare, classes: int, seed: int, rank: int, size: int, plan: Plan | None
    ):
        self.urls, self.prepare, self.classes, self.seed = urls, prepare, classes, seed
        self.rank, self.size, self.plan = rank, size, plan
        self.corrupt: list[CorruptSample] = []  # since the last batch

    def __iter__(self) -> Iterator[Loaded]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        reader, readers = number * self.size + self.rank, workers * self.size
        # Split shards into parts (every n-th sample), so that there is at least one part per reader.
        parts = -(-readers // len(self.urls))
        units = [(url, part, parts) for part in range(parts) for url in self.urls]
        if self.plan is None:
            samples = itertools.chain.from_iterable(self.read(*unit) for unit in units[reader::readers])
            while (batch := self.fill(samples, TEST_BATCH, 0)).samples or batch.corrupt:
                yield batch
            return
        from webdataset.filters import shuffle

        stream = self.endless(units, reader, readers)
        draw = random.Random(mixed_seed(self.seed, "draw", reader))
        held = min(SHUFFLE_SAMPLES, max(1, self.plan.per_epoch // readers))
        samples = shuffle(held, initial=min(held, 100), rng=draw)(stream)
        # After a resume, skip as many samples as were taken in this epoch's order of shards. This is only approximate: a
        # stream is shuffled, and extends across the ends of epochs.
        for _ in itertools.islice(samples, self.plan.taken // readers):
            pass
        for index, (epoch, planned) in enumerate(self.plan):
            if index % workers == number:  # a DataLoader reads from its workers in turn
                yield self.fill(samples, len(planned.indices), epoch)

    def endless(self, units: list[tuple[str, int, int]], reader: int, readers: int) -> Iterator[Sample | None]:
        """Yield this reader's samples, in consecutive random orders of `units`; None after many shards without samples."""
        fruitless = 0
        first_epoch = self.plan.first_epoch if self.plan is not None else 0
        for position in itertools.count(reader + readers * -(-first_epoch * len(units) // readers), readers):
            turn, place = divmod(position, len(units))
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, "shards", turn))
            order = torch.randperm(len(units), generator=generator)
            fruitless += 1
            for sample in self.read(*units[order[place]]):
                fruitless = 0
                yield sample
            if fruitless >= FRUITLESS_SHARDS:
                yield None

    def fill(self, samples: Iterator[Sample | None], count: int, epoch: int) -> Loaded:
        """Return a batch of `count` samples, or fewer if there are no more."""
        good = []
        for sample in samples:
            if sample is None:  # return, so that the rank can report the corrupt shards
                break
            try:
                good.append((self.prepare(sample.content, epoch, sample.name), sample.label))
            except Exception as error:  # any exception of a decoder
                self.corrupt.append(CorruptSample(sample.name, why(error)))
            if len(good) == count:
                break
        corrupt, self.corrupt = self.corrupt, []
        return collate(good, corrupt, self.prepare.side)

    def read(self, url: str, part: int, parts: int) -> Iterator[Sample]:
        """Yield every `parts`-th sample of a shard, beginning with number `part`. Corrupt samples are noted."""
        from webdataset.gopen import Pipe, gopen, set_options
        from webdataset.tariterators import group_by_keys, tar_file_expander

        failures: list[Exception] = []

        def on_error(error: Exception) -> bool:
            failures.append(error)
            return True  # continue

        stream = None
        try:
            stream = gopen(url)
            # Otherwise it raises when the command fails, and drops the command's previous output.
            set_options(stream, ignore_errors=True)
            files = tar_file_expander([{"url": url, "stream": stream}], handler=on_error)
            for number, sample in enumerate(group_by_keys(files, handler=on_error)):
                if number % parts == part and (taken := self.take(sample)) is not None:
                    yield taken
            while stream.read(2**20):  # read to the end, so that the command is not ended by SIGPIPE
                pass
            if isinstance(stream, Pipe) and (code := stream.proc.wait()) not in stream.ignore_status:
                failures.append(OSError(f"its command ended with exit code {code}"))
        except Exception as error:
            failures.append(error)
        finally:
            if stream is not None:
                stream.close()
        if failures:
            self.corrupt.append(CorruptSample(url, why(failures[0])))

    def take(self, sample: dict[str, Any]) -> Sample | None:
        """Return the sample; None if it has no image or no valid class, which is noted."""
        name = f"{sample['__url__']}: {sample['__key__']}"
        image = next((sample[kind] for kind in IMAGE_TYPES if kind in sample), None)
        try:
            label = int(sample["cls"])
        except (KeyError, ValueError):
            label = -1
        if image is not None and 0 <= label < self.classes:
            return Sample(name, image, label)
        reason = f"class {label} of {self.classes}: see --classes" if label >= 0 else "no class (.cls) next to it"
        self.corrupt.append(
            CorruptSample(name, reason if image is not None else f"no image in it ({', '.join(IMAGE_TYPES)})")
        )
        return None
