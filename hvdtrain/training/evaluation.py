"""One evaluation: this rank's part of a test set, and means over the samples of all ranks."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hvdtrain.data.loading import Source
from hvdtrain.data.sharding import shard
from hvdtrain.engines.accelerators import read, to_device
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.training.inputs import Batch, evaluation_batches, is_stream


class CutShort(BaseException):
    """Raised to end an evaluation early on this rank after a stop request. `Run.evaluating` catches it."""


class Evaluation:
    """The state of one `Run.evaluating` block.

    data: see `Run.evaluating`. heartbeat: called for each batch. Raises UserError for unsupported data.
    """

    def __init__(self, engine: Engine, data: Any, seed: int, heartbeat: Callable[[], None]):
        if isinstance(data, bool) or not (isinstance(data, (int, DataLoader, Source)) or is_stream(data)):
            kind = type(data).__name__
            raise UserError(f"run.evaluating() got a {kind}: give it a number of samples, or a DataLoader")
        self._engine, self._data, self._seed, self._heartbeat = engine, data, seed, heartbeat
        self._sums: dict[str, Tensor] = {}
        self._counts: Tensor | float | None = None  # sum of `count`, if given
        self._samples = 0  # of this rank, in the batches yielded so far
        self._indices: Tensor | None = None  # of the current batch, if there is one

    def mine(self) -> Any:
        """Return this rank's part of the data: a slice, or an iterator over batches."""
        if isinstance(self._data, int):
            return shard(self._data, self._engine.rank, self._engine.size)
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        for batch in self._loaded():
            self._heartbeat()
            self._samples += batch.count
            self._indices = batch.indices
            yield batch.data

    def _loaded(self) -> Iterator[Batch]:
        if not isinstance(self._data, Source):
            yield from evaluation_batches(self._engine, self._data, self._seed)
            return
        for loaded in self._data.test():
            self._data.corrupt.note(loaded.corrupt)
            if loaded.samples:
                data = to_device((loaded.images, loaded.labels), self._engine.device)
                yield Batch(data, torch.tensor(loaded.indices, dtype=torch.int64), loaded.samples)

    def rows(self) -> Tensor:
        """Return the indices of the samples of the current batch, int64 [b]; of a number of samples, all of this rank's."""
        if isinstance(self._data, int):
            return torch.arange(self._data)[self.mine()]
        if self._indices is None:
            raise UserError("run.predict() before the first batch: call it in the loop over the batches")
        return self._indices

    def add(self, values: Mapping[str, Tensor | float], count: Tensor | float | None) -> None:
        """Add values: sums over samples, or one value per sample."""
        self._heartbeat()
        for name, value in values.items():
            total = torch.as_tensor(value).detach().to(torch.float64).sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        if count is not None:
            self._counts = count if self._counts is None else self._counts + count

    def means(self) -> dict[str, float]:
        """Return the means over the samples of all ranks, and `count`. A collective. Raises UserError on every rank."""
        # A rank without samples has recorded nothing, so collect the names from all ranks.
        mine = [list(self._sums), self._counts is not None]
        everyone = self._engine.all_gather_object(mine, "evaluate.names")
        names = list(dict.fromkeys(name for theirs, _ in everyone for name in theirs))
        if not names:
            raise UserError("run.evaluating() recorded nothing: write run.record(loss=...) in it", everywhere=True)
        counted = any(with_count for _, with_count in everyone)
        mine_count = (0.0 if self._counts is None else self._counts) if counted else float(self._samples)
        *values, count = read([*(self._sums.get(name, 0.0) for name in names), mine_count])
        *sums, total = self._engine.sum(torch.tensor([*values, count], dtype=torch.float64), "evaluate").tolist()
        if isinstance(self._data, int) and not counted:
            total = float(self._data)
        if total <= 0:
            raise UserError("the test set has no readable samples: see --test-shards, --data-dir", everywhere=True)
        return {name: value / total for name, value in zip(names, sums, strict=True)} | {"count": total}
