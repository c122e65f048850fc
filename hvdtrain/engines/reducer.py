"""What DDP's reducers do in a step of the engine `ddp`: the models whose gradients they sum, and how."""

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engines.base import WIRE_DTYPES
from hvdtrain.engines.buckets import buckets
from hvdtrain.guards.activity import Activity


class GradientHook:
    """A DDP communication hook: reduces a bucket of gradients over all ranks once this rank has computed it.

    It divides the gradients in their own type first, then casts them to the network type.
    """

    def __init__(
        self, size: int, compression: str, predivide: float, reduction: str, activity: Activity, group: Any = None,
        of_all_ranks: bool = True,
    ):  # fmt: skip
        """group: of torch.distributed; None: the default one. of_all_ranks: see `Engine`."""
        self.activity, self.group, self.of_all_ranks = activity, group, of_all_ranks
        self.wire_dtype = WIRE_DTYPES[compression]
        self.predivide = predivide
        self.factor_after = predivide / size if reduction == "average" else predivide
        self.ready = 0.0  # when this rank's last gradient was computed (time.perf_counter)

    # DDP accepts no other annotation of `bucket` than torch.distributed.GradBucket, which a torch without it lacks.
    def reduce(self, state: object, bucket) -> torch.futures.Future[Tensor]:  # type: ignore[no-untyped-def]
        """Start the all-reduce of `bucket`. Return a future of the reduced buffer."""
        if bucket.is_last():
            self.wait()
        return self.begin(bucket.buffer())

    def wait(self) -> None:
        """Take in that this rank's part is done. The step resets `collective` after backward."""
        self.ready = time.perf_counter()
        self.activity.call("backward", self.of_all_ranks)

    def begin(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Start the all-reduce of these gradients. Return a future of them, reduced in place."""
        # Divided before the cast: of float16, DDP's own hook makes infinity of a gradient of 100,000.
        wire = buffer if self.predivide == 1.0 else buffer / self.predivide
        wire = wire if self.wire_dtype is None else wire.to(self.wire_dtype)
        future = torch.distributed.all_reduce(wire, group=self.group, async_op=True).get_future()

        def finish(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            return buffer.copy_(done.value()[0]).mul_(self.factor_after)

        return future.then(finish)


def give_gradients_the_weights_strides(model: nn.Module) -> None:
    """Give each gradient the strides of its weight where both describe the same memory layout.

    With one input channel and channels_last images, the gradient of a convolution weight [16, 1, 5, 5] has the strides
    (25, 1, 5, 1), the weight (25, 25, 5, 1): the same layout.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and 1 in parameter.shape and parameter.is_contiguous():
            shape, strides = parameter.shape, parameter.stride()

            def same_strides(gradient: Tensor, shape: torch.Size = shape, strides: tuple[int, ...] = strides) -> Tensor:
                return gradient.as_strided(shape, strides) if gradient.is_contiguous() else gradient

            # DDP compares strides as numbers, and would warn on each rank.
            parameter.register_hook(same_strides)


def settle_buckets(replica: nn.parallel.DistributedDataParallel) -> None:
    """Let DDP assign gradients to buckets now, not after the first step. A collective.

    In the first step of a process, DDP has one bucket; then it assigns gradients to others, in the order in which they were
    ready. Here the first backward pass has gradients of zero.
    """
    trained = [parameter for parameter in replica.module.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        replica.reducer.prepare_for_backward([])
        # The last ones are ready first, as in the backward pass of most models.
        nothing = [parameter.flatten()[:0].sum() for parameter in trained]
        torch.autograd.backward(nothing, [torch.ones_like(each) for each in nothing])
    # The sum over three or more ranks is rounded differently at each place of a bucket.
    # Else the first step after a restart differs.
    replica.reducer._rebuild_buckets()
    for parameter in trained:
        parameter.grad = None


class ReducedModel:
    """A model whose gradients DDP's reducer sums. The script calls the model itself, in any way: a method, a layer of it.

    DDP's own forward pass only tells its reducer that a backward pass will follow. Here, `begin` does.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any], hook: GradientHook):
        self._model, self._options, self.hook = model, options, hook
        self.may_lack_gradients: bool = options["find_unused_parameters"]
        self.parameters = list(model.parameters())
        self._is_frozen = False  # all of it
        give_gradients_the_weights_strides(model)
        self._wrap()

    def holds(self, model: nn.Module) -> bool:
        return self._model is model

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def overlaps(self, model: nn.Module) -> bool:
        """Return whether one of the two is a part of the other: each gradient would be reduced twice."""
        return model in self._model.modules() or self._model in model.modules()

    def _wrap(self) -> None:
        self._trained = [parameter.requires_grad for parameter in self.parameters]
        self._replica: nn.parallel.DistributedDataParallel | None = None
        if any(self._trained):  # DDP rejects others
            self._replica = nn.parallel.DistributedDataParallel(self._model, **self._options)
            self._replica.register_comm_hook(None, self.hook.reduce)
            if not self.may_lack_gradients:  # else DDP keeps its first buckets
                settle_buckets(self._replica)

    def follow_freezing(self) -> None:
        """Take in which parameters are trained by now. A collective if that has changed, as on all ranks."""
        now = [parameter.requires_grad for parameter in self.parameters]
        self._is_frozen = not any(now)
        if now != self._trained and not self._is_frozen:
            self._replica = None
            gc.collect()  # the old reducer's buckets
            self._wrap()

    def begin(self, loss: Tensor | None = None) -> None:
        """Expect a backward pass, which then reduces the gradients. loss: what it begins with, right before it."""
        if self._replica is not None and not self._is_frozen:
            self._replica.reducer.prepare_for_backward([loss] if self.may_lack_gradients and loss is not None else [])

    def reduce_nothing(self) -> None:
        """Take part in the reduction where no loss of this rank depends on the model: the other ranks wait for it."""
        if self._replica is not None and self.may_lack_gradients and not self._is_frozen:
            trained = self.trained()
            # DDP's reducer begins with the gradient of one parameter, here zero. The others stay unused on this rank.
            nothing = trained[-1].flatten()[:0].sum()
            self._replica.reducer.prepare_for_backward([nothing])
            nothing.backward()

    def leave(self) -> None:
        self._replica = None


def reduce_in_order(parameters: Sequence[nn.Parameter], hook: GradientHook, *, may_lack_gradients: bool) -> None:
    """Reduce gradients after a backward pass in the order of `parameters`, the same on all ranks. A collective."""
    hook.wait()
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    if not (may_lack_gradients or used.all()) or not len(used):
        return  # refused by `Step`, which finds it
    torch.distributed.all_reduce(used, op=torch.distributed.ReduceOp.MAX, group=hook.group)
    alike: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            alike.setdefault(parameter.dtype, []).append(parameter)
    for bucket in (bucket for of_dtype in alike.values() for bucket in buckets(of_dtype)):
        gradients: list[Any] = [parameter.grad for parameter in bucket]
        gradients = [torch.view_as_real(each) if each.is_complex() else each for each in gradients]
        total = hook.begin(torch.cat([gradient.reshape(-1) for gradient in gradients])).wait()
        for gradient, part in zip(gradients, total.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))
