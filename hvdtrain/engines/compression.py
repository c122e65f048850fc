"""What Horovod sends of gradients: in the order of their memory, divided, in the type of the network; and back.

Horovod's own compression and division have traps, which `together` names.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.engines.portable import as_row


class GradientCompressor:
    """A compressor for `hvd.DistributedOptimizer`."""

    def __init__(self, wire_dtype: torch.dtype | None, predivide: float = 1.0, factor_after: float = 1.0):
        self.wire_dtype = wire_dtype
        self.predivide = predivide
        self.factor_after = factor_after

    def together(self, gradients: Sequence[Tensor]) -> "tuple[list[Tensor], list[BucketPart]]":
        """Return the tensors to send, and for each what `decompress` takes.

        On a GPU, by a few kernels for many tensors: ResNet-50 has 161 gradients, and the host starts each kernel.
        """
        # Trap: Horovod takes contiguous tensors only, and gradients of weights in channels_last are not.
        sent = [in_memory_order(gradient) for gradient in gradients]
        if self.predivide != 1.0:
            # Traps: Horovod's fp16 sums before it divides: 40,000 on three ranks is infinity.
            # It ignores its own factor for grouped gradients.
            sent = list(torch._foreach_div(sent, self.predivide))
        sent = cast(sent, [self.wire_dtype or tensor.dtype for tensor in sent])
        bucket = Bucket(sent, gradients)
        return sent, [BucketPart(bucket, number) for number in range(len(sent))]

    def compress(self, gradient: Tensor) -> "tuple[Tensor, BucketPart]":
        """The same for one gradient. Horovod calls it where gradients are not grouped."""
        (sent,), (part,) = self.together([gradient])
        return sent, part

    def decompress(self, tensor: Tensor, part: "BucketPart") -> Tensor:
        """Return the reduced tensor, scaled, with dtype, shape and strides of the gradient. Its bucket is restored at the
        first call, when all of it has been reduced, in place of what was sent."""
        bucket = part.bucket
        if bucket.restored is None:
            bucket.restored = cast(bucket.sent, [gradient.dtype for gradient in bucket.gradients])
            if self.factor_after != 1.0:
                torch._foreach_mul_(bucket.restored, self.factor_after)
        gradient = bucket.gradients[part.number]
        return bucket.restored[part.number].as_strided(gradient.shape, gradient.stride())


class Bucket:
    """Gradients that are sent together."""

    def __init__(self, sent: list[Tensor], gradients: Sequence[Tensor]):
        self.sent, self.gradients = sent, gradients
        self.restored: list[Tensor] | None = None


class BucketPart(NamedTuple):
    """One gradient of a bucket."""

    bucket: Bucket
    number: int


def cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return each tensor in its dtype; itself where it has that."""
    pairs = zip(tensors, dtypes, strict=True)
    made = [t if t.dtype == dtype else torch.empty_like(t, dtype=dtype) for t, dtype in pairs]
    if changed := [(one, other) for one, other in zip(made, tensors, strict=True) if one is not other]:
        torch._foreach_copy_([one for one, _ in changed], [other for _, other in changed])
    return made


def send_buckets_together(kind: Any, hvd: Any, compressor: GradientCompressor) -> None:
    """Let `kind`, the class that `hvd.DistributedOptimizer` has made, compress each group of gradients at once."""

    def send(self: Any, group: Sequence[torch.nn.Parameter]) -> tuple[int, list[BucketPart]]:
        gradients: list[Any] = [parameter.grad for parameter in group]
        sent, parts = compressor.together(gradients)
        name = self._parameter_names.get(group[0])
        return hvd.grouped_allreduce_async_(sent, name=name, op=self.op, process_set=self.process_set), parts

    kind._grouped_allreduce_grad_async = send


# ---- what collectives carry

# Types that Horovod and Gloo both broadcast and gather. Trap: over NCCL, Horovod raises for bool and int16.
KNOWN = frozenset([torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])


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
    return tensor if tensor.dtype in known else as_row(tensor).view(torch.uint8)


@contextlib.contextmanager
def writable(tensor: Tensor, known: Collection[torch.dtype] = KNOWN) -> Iterator[Tensor]:
    """Context manager that yields what a collective may write in place of `tensor`: a view, or a copy to be copied back."""
    whole = in_memory_order(tensor.detach())
    sent = whole.resolve_conj().resolve_neg().contiguous()  # a slice of a larger tensor, or a lazy conjugate: a copy
    yield as_carried(sent, known)
    if sent is not whole:
        whole.copy_(sent)
