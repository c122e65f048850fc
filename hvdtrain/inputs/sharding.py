"""Which samples a rank takes in each step of each epoch: index arithmetic, in pure functions. And what seeds follow from it.

The order is that of `torch.utils.data.DistributedSampler`, without padding. In epoch e (from 0), it is a permutation of
all n samples from a generator seeded with `seed + e`. With s ranks and batch size B, rank r takes positions r, r + s, r +
2s, ... Over all ranks, step k takes positions k*B*s to (k+1)*B*s (A times as many with A accumulated passes). The order
therefore depends on the global batch, but not on the number of ranks.

No samples are added or dropped: the shards of the ranks are disjoint and cover the data set. If a step has fewer than B*s
samples, each rank's gradient is weighted, so that the mean over ranks is still the mean over samples.
"""

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The samples of one rank for one forward and backward pass."""

    indices: Tensor  #: int64 [b], 1 <= b <= batch_size
    #: factor for the mean loss of these samples, so that the sum over passes, averaged over ranks, is the step's mean loss
    weight: float
    local_count: int  #: number of samples that count: b, or 0 if there is no sample left for this rank
    together: int = 0  #: number of samples of all ranks in this pass
    first: int = 0  #: how many of them belong to lower ranks; 0 if there is no sample left for this rank


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The samples of one rank for one optimizer step: one batch, or several whose gradients are accumulated."""

    batches: list[PlannedBatch]
    count: int  #: samples over all batches and all ranks


def epoch_order(n: int, seed: int, epoch: int) -> Tensor:
    """Return the order of samples in `epoch` (from 0): a permutation of 0..n-1, int64 [n], the same on every rank."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))


def steps_per_epoch(n: int, size: int, batch_size: int, accumulate: int = 1) -> int:
    """Return the number of steps for `size` ranks to visit n samples once. The last step may be smaller."""
    return -(-n // (batch_size * size * accumulate))


def passes_per_step(global_batch: int, size: int, batch_size: int) -> int:
    """Return the number of passes per step, with at most `batch_size` samples on each of `size` ranks."""
    return -(-global_batch // (batch_size * size))


def shard(n: int, rank: int, size: int) -> slice:
    """Return the positions that `rank` takes of n, without padding. The slices of all ranks are disjoint and complete."""
    return slice(rank, n, size)


def mixed_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends only on `parts`, and not on the process or Python's hash seed."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of torch (CPU and `device`), Python and numpy."""
    # Not torch.manual_seed, which queries every accelerator backend: hundreds of microseconds, and this runs in every step.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(seed)
        for index, generator in enumerate(torch.cuda.default_generators):  # DataParallel computes on the others, too
            if index != (device.index or 0):
                generator.manual_seed((seed + 1 + index) % 2**64)
    random.seed(seed)
    if "numpy" in sys.modules:  # otherwise it is not used
        # numpy takes 32 bits.
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def global_state() -> str:
    """Return the states of the global generators of torch (CPU), Python and numpy."""
    numpy = sys.modules["numpy"].random.get_state()[1:3] if "numpy" in sys.modules else None
    return f"{torch.get_rng_state().tolist()} {random.getstate()} {numpy}"


@contextlib.contextmanager
def kept(device: torch.device | None = None, seed: int | None = None) -> Iterator[None]:
    """Context manager that restores the global generators after the block; of torch the CPU's, and those of `device`.

    seed: with which `seed_generators` was just called: again, it takes a tenth of the time of keeping their states.
    """
    if seed is not None:
        try:
            yield
        finally:
            seed_generators(seed)
        return
    state, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    on_devices = torch.cuda.default_generators if device is not None and device.type == "cuda" else ()
    states = [generator.get_state() for generator in on_devices]
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for generator, held in zip(on_devices, states, strict=True):
            generator.set_state(held)
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)


def steps(
    order: Tensor, rank: int, size: int, batch_size: int, accumulate: int = 1, global_batch: int | None = None
) -> Iterator[PlannedStep]:
    """Yield this rank's part of each step through `order` (int64 [n]). All ranks have the same number of steps and passes.

    A step takes `global_batch` samples (default: batch_size * size * accumulate) in as many passes as needed. A run that is
    resumed with a different number of ranks keeps its global batch, even if it is not divisible. To resume within an epoch,
    pass the remaining part of its order.

    If the last pass has no sample for a rank, the rank repeats the pass's first sample with weight 0. It takes part in every
    collective, and contributes nothing.
    """
    n = len(order)
    per_pass = batch_size * size
    per_step = global_batch or per_pass * accumulate
    for first in range(0, n, per_step):
        count = min(per_step, n - first)
        passes = []
        for start in range(first, first + count, per_pass):
            together = min(per_pass, first + count - start)  # what all ranks take in this pass
            local_count = max(0, -(-(together - rank) // size))
            # As `shard`. Batch norm would fail with an empty batch.
            indices = order[start + rank : start + together : size] if local_count else order[start : start + 1]
            before = rank * (together // size) + min(rank, together % size) if local_count else 0
            # The weight b_r * N / B: averaged over N ranks,
            # it leaves the mean over all B samples (docs/how-it-works.md, "The gradient").
            passes.append(PlannedBatch(indices, local_count * size / count, local_count, together, before))
        yield PlannedStep(passes, count)
