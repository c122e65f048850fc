"""A sample of the twins by enumeration (tests/twins): small programs as torch has them, beside a plain loop."""

import functools

import pytest

from tests.twins import data, models, states, updates
from tests.twins.twin import outcome

# Cheap ones of each kind; `python -m tests.twins` has all. What other tests of this folder have, too, is slow.
SAMPLE = [
    (models.checkpointing, "checkpointing, use_reentrant=False, 2 x", "works"),
    (models.parametrizations, "parametrization nn.utils.parametrizations.weight_norm", "works"),
    (updates.module_hooks, "module hooks that change values", "works"),
    (data.loader_options, "DataLoader drop_last=True", "differs"),
    (models.losses, "loss CrossEntropyLoss, weight= and count=", "works"),
]
SLOW = [
    (models.layers, "layer BatchNorm1d", "differs"),
    (models.layers, "layer Conv2d", "works"),
    (states.parameters, "parameter torch.float64", "works"),
    (models.checkpointing, "checkpointing, use_reentrant=True, 1 x", "works"),
    (updates.optimizers, "optimizer Adagrad", "works"),
    (updates.precisions, "default dtype torch.bfloat16", "works"),
    (updates.schedulers, "scheduler CosineAnnealingLR, by epoch", "works"),
    (data.datasets, "dataset items: with a string", "works"),
    (states.averages, "AveragedModel ema, use_buffers=True, no buffers", "works"),
]
ALL = [*SAMPLE, *(pytest.param(*twin, marks=pytest.mark.slow) for twin in SLOW)]


@functools.cache
def made(kind):
    """Of this kind, the twins up to the last one of the sample."""
    names = {name for of, name, _ in (*SAMPLE, *SLOW) if of is kind}
    found = {}
    for twin in kind():
        if twin.name in names:
            found[twin.name] = twin
        if len(found) == len(names):
            break
    return found


@pytest.mark.parametrize(("kind", "name", "expected"), ALL, ids=[name for _, name, _ in (*SAMPLE, *SLOW)])
def test_a_program_trains_as_in_one_process(engine, kind, name, expected):
    verdict = outcome(engine, made(kind)[name])
    wanted = "works" if engine.size == 1 else expected  # alone, batch norm has the whole batch
    assert verdict.kind == wanted, verdict.detail
