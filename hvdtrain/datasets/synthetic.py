"""Random images, created once on the device, to measure training without the cost of loading."""

from collections.abc import Iterator

import torch

from hvdtrain.engines.base import Engine
from hvdtrain.inputs.loading import Loaded, Source
from hvdtrain.inputs.plan import Plan
from hvdtrain.inputs.sharding import shard


def open_synthetic(
    engine: Engine, side: int, batch_size: int, classes: int, train_count: int, test_count: int
) -> Source:
    """Return a source whose batches all consist of the same `batch_size` random images, different on each rank."""
    generator = torch.Generator().manual_seed(engine.rank)
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
