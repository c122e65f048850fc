"""Tensors in the form that collectives carry: contiguous, and as bytes if the library does not know their type."""

import contextlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

# Types that Horovod and Gloo both broadcast and gather. Trap: over NCCL, Horovod raises for bool and int16.
KNOWN = frozenset(
    [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
)  # fmt: skip


def carries_bf16() -> bool:
    """Return whether this build of Horovod takes bfloat16 tensors (launch/patches/25)."""
    from horovod.torch.mpi_ops import mpi_lib

    return hasattr(mpi_lib, "horovod_torch_allreduce_async_torch_BFloat16Tensor")


def by_horovod(dtype: torch.dtype) -> Collection[torch.dtype]:
    """Return the types that Horovod broadcasts and gathers, with `dtype` if it is one that only some builds do."""
    return KNOWN | {dtype} if dtype == torch.bfloat16 and carries_bf16() else KNOWN


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a contiguous view of a dense tensor, with its elements in the order of memory: channels_last, for instance."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride()[axis], -tensor.shape[axis])))


def as_carried(tensor: Tensor, known: Collection[torch.dtype] = KNOWN) -> Tensor:
    """Return a contiguous tensor as it is, if its type is one of `known`, else a view of its bytes: uint8 [n]."""
    return tensor if tensor.dtype in known else tensor.reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def written(tensor: Tensor, known: Collection[torch.dtype] = KNOWN) -> Iterator[Tensor]:
    """Context manager that yields what a collective may write in place of `tensor`: a view, or a copy to be copied back."""
    whole = in_memory_order(tensor.detach())
    sent = whole.resolve_conj().resolve_neg().contiguous()  # a slice of a larger tensor, or a lazy conjugate: a copy
    yield as_carried(sent, known)
    if sent is not whole:
        whole.copy_(sent)
