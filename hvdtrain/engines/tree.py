"""Sums over the ranks of --virtual-ranks, with the same bits on any number of processes: of gradients, and of rows.

Gradients are added in one binary tree over the V ranks, whose shape does not depend on P: ranks 0 and 1, 2 and 3, then these
sums, and so on. A process adds complete subtrees of it as soon as it has both halves, so it holds one sum for each level at
most. Where P does not divide V, it is left with up to 2 log2(V) sums. Then each process gets the sums of all in one P-th
of the weights, adds these to the end of the tree, and all gather the results: on P = V, that is the traffic of a ring.
Other sums over ranks, of losses and counts, are of their V numbers, which all processes get and add in the same order.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hvdtrain.engines.base import Engine, Reduction
from hvdtrain.engines.buckets import bucket_bytes, buckets
from hvdtrain.engines.compression import in_memory_order

Node = tuple[int, int]  # of the tree: its level, 0 for a rank, and its place in it
# Numbers: each gradient begins at a multiple of it in what is exchanged, as kernels may add otherwise elsewhere.
ALIGNED = 128


def owned(process: int, processes: int, ranks: int) -> range:
    """Return the ranks of a process: consecutive ones, so that they fill subtrees."""
    return range(process * ranks // processes, (process + 1) * ranks // processes)


def owners(processes: int, ranks: int) -> list[range]:
    """Return the ranks of each process."""
    return [owned(process, processes, ranks) for process in range(processes)]


def added_into(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Return the sums, in place of `left`."""
    if left:
        torch._foreach_add_(left, right)
    return left


class Sums:
    """The sums of complete subtrees over consecutive ranks, which are added in order. first: the first one."""

    def __init__(self, first: int):
        self.nodes: list[tuple[Node, list[Tensor]]] = []
        self._next = first

    def add(self, tensors: list[Tensor]) -> None:
        """Add those of the next rank. They are changed."""
        self.nodes.append(((0, self._next), tensors))
        self._next += 1
        while len(self.nodes) > 1:
            (level, left), (other, right) = self.nodes[-2][0], self.nodes[-1][0]
            if level != other or left // 2 != right // 2:
                return
            (_, second), (_, first) = self.nodes.pop(), self.nodes.pop()
            self.nodes.append(((level + 1, left // 2), added_into(first, second)))


def nodes_of(ranks: Sequence[int]) -> list[Node]:
    """Return the nodes that `Sums` has after these ranks."""
    sums = Sums(ranks[0])
    for _ in ranks:
        sums.add([])
    return [node for node, _ in sums.nodes]


def root_of(nodes: Mapping[Node, list[Tensor]], ranks: int) -> list[Tensor]:
    """Return the root of the tree. nodes: those of all processes. A half that would be beyond the last rank is left out."""
    level_sums = dict(nodes)
    for level in range((ranks - 1).bit_length()):
        for place in sorted(place for at, place in level_sums if at == level and place % 2 == 0):
            left, right = level_sums.pop((level, place)), level_sums.pop((level, place + 1), None)
            level_sums[level + 1, place // 2] = left if right is None else added_into(left, right)
    (root,) = level_sums.values()
    return root


def exchange(
    engine: Engine, nodes: Mapping[Node, list[Tensor]], name: str, take: Callable[[Iterable[Tensor]], None]
) -> Iterator[None]:
    """Give the sums over all ranks to `take`. A collective, which yields where there is something to wait for.

    nodes: those of this process, with tensors of one type. name: of collectives that overlap with others.
    """
    processes, ranks, tensors = engine.processes, engine.size, next(iter(nodes.values()))
    if processes.size == 1:
        # Two stops, as with several processes: the caller begins other buckets at each.
        yield from (None, None)
        take(root_of(nodes, ranks))
        return
    room = [-(-tensor.numel() // ALIGNED) * ALIGNED for tensor in tensors]
    chunk = max(1, -(-sum(room) // (processes.size * ALIGNED))) * ALIGNED  # not 0, of parameters without numbers
    room.append(processes.size * chunk - sum(room))
    # What lies between the tensors is sent and added, and not used.
    rows = torch.empty(len(nodes), processes.size * chunk, dtype=tensors[0].dtype, device=tensors[0].device)
    for row, of_node in zip(rows, nodes.values(), strict=True):
        parts = [part[: tensor.numel()] for part, tensor in zip(row.split(room), of_node, strict=False)]
        torch._foreach_copy_(parts, [in_memory_order(tensor).reshape(-1) for tensor in of_node])
    each = [nodes_of(own) for own in owners(processes.size, ranks)]
    if [*map(len, each)] == [1, 1] and rows.dtype in (torch.float32, torch.float64):
        begun = processes.begin("sum", rows[0], (), name)  # a + b is b + a
        yield
    else:
        sent = rows.view(-1, processes.size, chunk).transpose(0, 1).reshape(-1)
        begun = processes.begin("parts", sent, [len(theirs) * chunk for theirs in each], name)
        yield
        got = processes.end(begun, "gradients").split(chunk)
        received = zip((node for theirs in each for node in theirs), got, strict=True)
        (total,) = root_of({node: [part] for node, part in received}, ranks)
        begun = processes.begin("all", total, (), f"{name} summed")
    yield
    sums = zip(processes.end(begun, "gradients").split(room), tensors, strict=False)
    take(part.as_strided(tensor.shape, tensor.stride(), part.storage_offset()) for part, tensor in sums)


# ---- gradients


class SummedBucket:
    """Gradients of one type that are added and exchanged together. name: of their exchange."""

    def __init__(self, engine: Engine, name: str, parameters: Sequence[nn.Parameter]):
        self._engine, self._name, self._parameters = engine, name, parameters
        self._exchange: Iterator[None] = iter(())

    def begin(self) -> None:
        """Begin a loop over micro-batches."""
        self._sums, self.left = Sums(self._engine.own[0]), set(self._parameters)

    def add(self, missing: float) -> list[nn.Parameter]:
        """Add those of this turn to those of this process's ranks before. Return the parameters that got none.

        missing: what is added of these.
        """
        gradients, without = [], []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.full_like(parameter, missing)
                without.append(parameter)
            # Buckets are added in the order of memory: gradients of all ranks need one layout.
            elif gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)
            gradients.append(gradient)
        self._sums.add(gradients)
        return without

    def clear(self) -> None:
        """Let the next turn begin without gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def start(self) -> None:
        """Begin to exchange the sums."""
        self._exchange = exchange(self._engine, dict(self._sums.nodes), self._name, self._take)
        next(self._exchange, None)

    def go_on(self) -> None:
        """Wait for the parts of this process, and begin to give their sums to all."""
        next(self._exchange, None)

    def end(self) -> None:
        """Wait for the sums over all ranks, which are then the gradients."""
        for _ in self._exchange:
            pass

    def _take(self, sums: Iterable[Tensor]) -> None:
        for parameter, total in zip(self._parameters, sums, strict=True):
            parameter.grad = total


def _call_if_alive(method: "weakref.WeakMethod[Callable[[Tensor], None]]", parameter: Tensor) -> None:
    """Call the method, where its object is still there."""
    if (alive := method()) is not None:
        alive(parameter)


class Gradients:
    """Those of an optimizer. In the last turn of a process, the exchange of a bucket begins as soon as it is complete.

    number: of the optimizer.
    """

    def __init__(self, engine: Engine, number: int, optimizer: torch.optim.Optimizer, how: Reduction):
        self._engine, self._number, self._optimizer, self._how = engine, number, optimizer, how
        self._bucket_of: dict[nn.Parameter, SummedBucket] = {}
        self._buckets: list[SummedBucket] = []
        self._hooked: set[nn.Parameter] = set()
        self.passes_last = False  # whether the current micro-batch is the last one of this process
        # Whether it is the only optimizer in this turn: of several, ranks may complete buckets in another order.
        self.is_alone = False

    def begin(self) -> None:
        """Begin a loop over micro-batches."""
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        if [*map(id, trained)] != [*map(id, self._bucket_of)]:
            self._divide(trained)
        for bucket in self._buckets:
            bucket.begin()
        self._started, self._turns = 0, 0
        self._without: Counter[nn.Parameter] = Counter()  # in how many turns a parameter got no gradient

    def _divide(self, trained: Sequence[nn.Parameter]) -> None:
        alike: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in trained:
            alike.setdefault(parameter.dtype, []).append(parameter)
            if parameter not in self._hooked:
                # Trap: what a hook refers to, here the model too, is never freed: the collector cannot see into a hook.
                parameter.register_post_accumulate_grad_hook(partial(_call_if_alive, weakref.WeakMethod(self._arrived)))
                self._hooked.add(parameter)
        # An exchange has two collectives, in place of one: half as many of them on CPUs. GPUs have the largest anyway.
        size = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        limit = 2 * bucket_bytes(size) if self._engine.device.type == "cpu" else None
        groups = [group for of_dtype in alike.values() for group in buckets(of_dtype, limit)]
        self._buckets = [
            SummedBucket(self._engine, f"gradients {self._number} {at}", of) for at, of in enumerate(groups)
        ]
        bucket_of = {p: bucket for bucket, of in zip(self._buckets, groups, strict=True) for p in of}
        self._bucket_of = {parameter: bucket_of[parameter] for parameter in trained}

    def _arrived(self, parameter: Tensor) -> None:
        """Take in that a parameter got its gradient in a backward pass."""
        bucket = self._bucket_of.get(parameter) if self.passes_last and self.is_alone else None  # type: ignore[call-overload]
        if bucket is None or parameter.grad.is_sparse:  # type: ignore[union-attr] # it has one
            return
        if parameter not in bucket.left:
            raise AssertionError  # as Horovod's hook does: it was computed twice
        bucket.left.remove(parameter)
        while self._started < len(self._buckets) and not self._buckets[self._started].left:
            self._start()

    def _start(self) -> None:
        bucket = self._buckets[self._started]
        self._without.update(bucket.add(0.0 if self._how.find_unused_parameters else math.nan))
        bucket.start()
        if self._started:
            self._buckets[self._started - 1].go_on()
        self._started += 1

    def end_turn(self, *, last: bool) -> None:
        """End the turn of a rank. last: of this process."""
        if any(p.grad is not None and p.grad.is_sparse for p in self._bucket_of):
            return  # refused by `Step`, which finds it
        self._turns += 1
        if last:
            while self._started < len(self._buckets):
                self._start()
            optional = self._how.find_unused_parameters
            for parameter in self._without:  # `Step` looks whether one is missing
                parameter.grad = torch.zeros_like(parameter) if optional else None
            return
        for bucket in self._buckets:
            self._without.update(bucket.add(0.0 if self._how.find_unused_parameters else math.nan))
            bucket.clear()

    def reduce(self) -> None:
        """Let the gradients be those of all ranks. A collective."""
        for bucket in self._buckets:
            bucket.end()
        if self._how.reduction == "average" and self._bucket_of:  # not all are frozen
            gradients = [parameter.grad for parameter in self._bucket_of if parameter.grad is not None]
            torch._foreach_div_(gradients, self._engine.size)
        if self._how.find_unused_parameters and self._bucket_of:
            unused = torch.tensor([self._without[p] == self._turns for p in self._bucket_of], dtype=torch.int32)
            self._engine.all_reduce_(unused, "min", "unused_parameters")
            for parameter, everywhere in zip(self._bucket_of, unused.tolist(), strict=True):
                if everywhere:  # as in a single process, the optimizer skips this parameter
                    parameter.grad = None
