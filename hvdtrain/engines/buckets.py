"""Fixed buckets of gradients: each is reduced as a whole, the same at every step, so that runs are reproducible.

Comments that begin with "Trap" describe behavior observed with Horovod 0.28.1.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

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
    """Return the bucket size in bytes for `total` bytes of gradients: a sixteenth, between 1 and 25 MiB. Source:
    docs/evidence/tuning.md."""
    # The last bucket cannot overlap with the backward pass.
    # Below 1 MiB, the time of an all-reduce hardly depends on its size.
    return min(LARGEST_BUCKET, max(SMALLEST_BUCKET, total // 16))


def buckets(parameters: Sequence[nn.Parameter], limit: int | None = None) -> list[list[nn.Parameter]]:
    """Split the trainable `parameters` into groups of at most `limit` bytes (or one parameter) and MOST_IN_BUCKET
    parameters, last layer first.

    A model smaller than `limit` is one bucket. limit: default `bucket_bytes`; on GPUs the largest.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    sizes = [parameter.numel() * parameter.element_size() for parameter in trainable]
    if limit is None:
        on_gpus = any(parameter.device.type != "cpu" for parameter in trainable)
        # NCCL reduces small buckets slowly, and the links between GPUs are fast.
        limit = LARGEST_BUCKET if on_gpus else bucket_bytes(sum(sizes))
    groups: list[list[nn.Parameter]] = []
    filled = 0
    # The backward pass computes the last layer first: its bucket is reduced while earlier layers are still computed.
    for parameter, size in zip(reversed(trainable), reversed(sizes), strict=True):
        if not groups or filled + size > limit or len(groups[-1]) == MOST_IN_BUCKET:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += size
    return groups


def use_buckets(optimizer: Any, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Have Horovod's `optimizer` reduce these groups, each as a whole. Raises UserError where Horovod would hang or crash.

    Gradients are then always summed in the same order, so runs are bitwise reproducible.
    """
    refuse_small_cache(sum(map(len, groups)), os.environ)
    # Without groups, gradients are fused as they become ready: three runs on three ranks gave three results.
    optimizer._groups = groups
    optimizer._group_counts = {BucketParameters(group): 0 for group in groups}
    optimizer._p_to_group = {parameter: group for group in optimizer._group_counts for parameter in group}


def refuse_small_cache(tensors: int, environment: Mapping[str, str]) -> None:
    """Raise UserError if so many gradients do not fit into Horovod's cache of responses, as without launch/patches/30."""
    # Trap: once the cache is full, ranks forget different members of a group, and then hang, or crash with SIGSEGV.
    digits = re.match(r"\s*([0-9]+)", environment.get("HOROVOD_CACHE_CAPACITY", RELEASED_CAPACITY))
    capacity = int(digits[1]) if digits else 0  # as strtol reads it; 0: Horovod keeps no cache
    if 0 < capacity < (needed := tensors + OTHER_RESPONSES):
        raise UserError(
            f"HOROVOD_CACHE_CAPACITY is {capacity}, too small for {tensors} gradients: set it to {needed} or more, or to 0"
        )
