"""Random images, created once on the device, to measure training without the cost of loading."""

from collections.abc import Iterator

import torch

from hvdtrain.data.loading import Loaded, Plan, Source
from hvdtrain.data.sharding import shard
from hvdtrain.engines.base import Engine


def open_synthetic(
    engine: Engine, side: int, batch_size: int, classes: int, train_count: int, test_count: int
) -> Source:
    """Return a source whose batches all consist of the same `batch_size` random images, different on each rank."""
    generator = torch.Generator().manual_seed(engine.rank)
    images = torch.randint(0, 256, (batch_size, 3, side, side), dtype=torch.uint8, generator=generator).to(
        engine.device
    )
    labels = torch.randint(0, classes, (batch_size,), generator=generator).to(engine.device)

    def some(count: int) -> Loaded:
        return Loaded(images[:count], labels[:count], count, [])

    def train(plan: Plan) -> Iterator[Loaded]:
        return (some(len(batch.indices)) for _, batch in plan)

    def test() -> Iterator[Loaded]:
        mine = len(range(test_count)[shard(test_count, engine.rank, engine.size)])
        return (some(min(batch_size, mine - start)) for start in range(0, mine, batch_size))

    reason = f"synthetic: {batch_size} random images per rank, repeated, {train_count:,} per epoch"
    return Source("synthetic", reason, classes, train_count, train, test)
