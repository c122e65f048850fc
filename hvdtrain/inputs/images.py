"""hvdtrain's own image folders and shards as data of `run.steps` and `run.evaluating`: a `Source` (inputs/loading.py)."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hvdtrain.engines.accelerators import Copies, to_device
from hvdtrain.engines.base import Engine
from hvdtrain.inputs.inputs import Batch, Input, Kind
from hvdtrain.inputs.loading import Loaded, Source
from hvdtrain.inputs.sharding import PlannedBatch


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


def evaluated(engine: Engine, source: Source, seed: int) -> Iterator[Batch]:
    """Yield this rank's batches of the test set."""
    for loaded in source.test():
        source.corrupt.note(loaded.corrupt)
        if loaded.samples:
            data = to_device((loaded.images, loaded.labels), engine.device)
            yield Batch(data, torch.tensor(loaded.indices, dtype=torch.int64), loaded.samples)


IMAGES = Kind(lambda data: isinstance(data, Source), Images, evaluated)
