"""All twins: `catalogue()` yields each. `twin.SKIPPED` then says what of torch no twin could be made of."""

from collections.abc import Iterator

from tests.twins import data, models, states, updates
from tests.twins.twin import Twin

KINDS = (
    models.layers, models.losses, updates.optimizers, updates.schedulers, data.samplers, data.datasets,
    models.parametrizations, models.prunings, states.buffers, states.parameters, states.saved, states.averages,
    updates.precisions, updates.module_hooks, updates.optimizer_hooks, updates.tensor_hooks, models.checkpointing,
    models.compiling,
    data.loader_options,  # the slowest: they start processes
)  # fmt: skip


def catalogue() -> Iterator[Twin]:
    yield Twin("plain")
    for kind in KINDS:
        yield from kind()
