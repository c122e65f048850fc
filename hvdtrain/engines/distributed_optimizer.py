"""Makes `hvd.DistributedOptimizer`: fixed buckets, what is sent of gradients, and what Horovod would lose of the optimizer.

Comments that begin with "Trap" describe behavior observed with Horovod 0.28.1.
"""

import os
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hvdtrain.engines.base import WIRE_DTYPES, Reduction
from hvdtrain.engines.compression import GradientCompressor, send_buckets_together
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.library_settings import RELEASED_CAPACITY

LARGEST_BUCKET, SMALLEST_BUCKET = 25 * 2**20, 2**20  # bytes; the largest is the default of DDP's bucket_cap_mb
# Tensors. Each costs some microseconds after the last one is there, whatever its size: thousands would wait for the
# backward pass, and then hold up the step.
MOST_IN_BUCKET = 1000
OTHER_RESPONSES = 256  # in Horovod's cache: those of our own messages, and more than there are


class BucketParameters(tuple[nn.Parameter, ...]):
    """The parameters of a bucket. Horovod looks up a bucket for each gradient: by identity, not by all its tensors."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


def bucket_bytes(total: int) -> int:
    """Return the bucket size in bytes for `total` bytes of gradients: a sixteenth, between 1 and 25 MiB.

    The reduction of the last bucket cannot overlap with the backward pass, which has ended by then, so buckets should be
    small (docs/evidence/tuning.md). Below 1 MiB, the time of an all-reduce hardly depends on its size.
    """
    return min(LARGEST_BUCKET, max(SMALLEST_BUCKET, total // 16))


def buckets(parameters: Sequence[nn.Parameter], limit: int | None = None) -> list[list[nn.Parameter]]:
    """Split the trainable `parameters` into groups of at most `limit` bytes (or one parameter) and MOST_IN_BUCKET
    parameters, last layer first.

    The backward pass computes the last layer first, so its bucket is reduced while the earlier layers are still being
    computed. A model smaller than `limit` is one bucket. limit: default `bucket_bytes`; on GPUs the largest, because NCCL
    reduces small buckets slowly, and the links between GPUs are fast.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    sizes = [parameter.numel() * parameter.element_size() for parameter in trainable]
    if limit is None:
        on_gpus = any(parameter.device.type != "cpu" for parameter in trainable)
        limit = LARGEST_BUCKET if on_gpus else bucket_bytes(sum(sizes))
    groups: list[list[nn.Parameter]] = []
    filled = limit
    for parameter, size in zip(reversed(trainable), reversed(sizes), strict=True):
        if filled + size > limit or len(groups[-1]) == MOST_IN_BUCKET:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += size
    return groups


def use_buckets(optimizer: Any, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Have Horovod's `optimizer` reduce these groups, each as a whole. Raises UserError where Horovod would hang or crash.

    Gradients are then always summed in the same order, so runs are bitwise reproducible. Without groups, they are fused in
    the order in which they become ready: three runs on three ranks gave three results.
    """
    refuse_small_cache(sum(map(len, groups)), os.environ)
    optimizer._groups = groups
    optimizer._group_counts = {BucketParameters(group): 0 for group in groups}
    optimizer._p_to_group = {parameter: group for group in optimizer._group_counts for parameter in group}


def refuse_small_cache(tensors: int, environment: Mapping[str, str]) -> None:
    """Raise UserError if so many gradients do not fit into Horovod's cache of responses.

    Trap: once the cache is full, ranks forget different members of a group. They then hang, or crash with SIGSEGV (mended by
    launch/patches/30, which other builds of Horovod lack).
    """
    digits = re.match(r"\s*([0-9]+)", environment.get("HOROVOD_CACHE_CAPACITY", RELEASED_CAPACITY))
    capacity = int(digits[1]) if digits else 0  # as strtol reads it; 0: Horovod keeps no cache
    if 0 < capacity < (needed := tensors + OTHER_RESPONSES):
        raise UserError(
            f"HOROVOD_CACHE_CAPACITY is {capacity}, too small for {tensors} gradients: set it to {needed} or more, or to 0"
        )


def distributed_optimizer(
    hvd: ModuleType, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]], reduction: Reduction,
    size: int,
) -> torch.optim.Optimizer:  # fmt: skip
    """Return Horovod's optimizer for `optimizer`. Raises UserError on every rank.

    named: its parameters. size: the number of ranks.
    """
    op = {"average": hvd.Average, "sum": hvd.Sum}[reduction.reduction]
    wire_dtype, predivide, factor_after = WIRE_DTYPES[reduction.compression], 1.0, 1.0
    if reduction.compression != "none" or reduction.predivide != 1.0:
        op, predivide = hvd.Sum, reduction.predivide
        factor_after = predivide / size if reduction.reduction == "average" else predivide
    if complex_ := next((name for name, parameter in named if parameter.is_complex()), None):
        raise UserError(f"{complex_} is complex, which Horovod does not reduce: use --engine ddp", everywhere=True)
    compressor: Any = GradientCompressor(wire_dtype, predivide, factor_after)
    plain = wire_dtype is None and predivide == factor_after == 1.0
    if plain and all(parameter.is_contiguous() for _, parameter in named):
        compressor = hvd.Compression.none
    options: dict[str, Any] = dict(
        named_parameters=named,
        compression=compressor,
        op=op,
        # Horovod sums the micro-batches; the weights of `sharding.PlannedBatch` turn the sum into a mean.
        backward_passes_per_step=reduction.accumulate,
    )
    try:
        distributed: torch.optim.Optimizer = hvd.DistributedOptimizer(optimizer, **options)
    except TypeError as error:
        message = f"{type(optimizer).__name__} cannot be made from parameters alone, as Horovod does ({error})"
        raise UserError(f"{message}: give its arguments defaults, or use --engine ddp", everywhere=True) from error
    except Exception as error:  # whatever the author's class raises, such as one around another optimizer
        message = f"{type(optimizer).__name__} cannot be made from parameters alone, as Horovod does"
        raise UserError(f"{message}: use --engine ddp", everywhere=True) from error
    # Trap: it is another object of the class, made from `param_groups` alone: without the other arguments of the script,
    # hooks, and state that is not empty at the beginning.
    vars(distributed).update({name: value for name, value in vars(optimizer).items() if name != "param_groups"})
    kind: Any = type(distributed)

    def step(self: Any, *closure: Any) -> Any:
        """As Horovod's, which hands on `None` as the closure, and a step of the script's own may take none."""
        if self._should_synchronize:
            self.synchronize()
        self._synchronized = False
        return super(kind, self).step(*closure)

    # torch puts the hooks of an optimizer around the step of each class that is not marked as `hooked`. This step calls that
    # of the script's class, which has them.
    step.hooked = True  # type: ignore[attr-defined] # of a function
    kind.step = step
    if isinstance(compressor, GradientCompressor):
        send_buckets_together(kind, hvd, compressor)
    return distributed
