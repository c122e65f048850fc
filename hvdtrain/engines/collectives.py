"""The collectives over the ranks of a run: four that each engine has, and what is built of them. Every rank must call every
collective, in the same order."""

import contextlib
import hashlib
import json
import socket
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.modules import all_tensors, flatten, unflatten
from hvdtrain.engines.portable import TENSOR, Held, NotStored, from_json, to_json
from hvdtrain.guards.activity import collective

# With 16 bytes for the length and the name, a message has 1,024: most objects need no second one.
FIRST_BYTES = 1008
MANY = 64  # ranks: of more, what is alike on all is compared, and not sent by each


class Collectives(ABC):
    """The collectives of an engine."""

    rank: int
    size: int
    device: torch.device

    # ---- those of an engine, which decorates them with `activity.collective`

    @abstractmethod
    def all_reduce_(self, tensor: Tensor, op: str, name: str) -> None:
        """Reduce `tensor` over all ranks, in place on every rank.

        op: "sum", "average", "min", "max" or "product". Shape and dtype must be the same on all ranks; `name` identifies
        the call.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        """Return the `tensor` of every rank, stacked as [size, ...]. Shape and dtype must be the same on all ranks."""

    @abstractmethod
    def broadcast_(self, tensor: Tensor, name: str) -> None:
        """Copy rank 0's `tensor` to every rank, in place."""

    @abstractmethod
    def begin(self, kind: str, tensor: Tensor, lengths: Sequence[int], name: str) -> Callable[[], Tensor]:
        """Begin a collective on `tensor`, [n], and return what waits for its result, [m]: see `end`.

        kind: "sum": in place. "all": those of all ranks. "parts": give each rank its part of `tensor` (equal ones), and
        return what all have given to this one. lengths: of what each rank gives to this one. Collectives that have begun
        have different names.
        """

    # ---- built of them

    @collective
    def end(self, begun: Callable[[], Tensor], name: str) -> Tensor:
        """Return the result of what `begin` has begun."""
        return begun()

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """Return the sum of `tensor` over all ranks, on every rank."""
        result = tensor.clone()
        self.all_reduce_(result, "sum", name)
        return result

    def barrier(self) -> None:
        """Return once every rank has called this."""
        self.all_reduce_(torch.zeros(1), "sum", "barrier")

    def all_gather_object(self, value: object, name: str) -> list[Any]:
        """Return the `value` of every rank, in rank order. It must be JSON-serializable.

        One collective; two, if the JSON of a rank is longer than FIRST_BYTES. Of more than MANY ranks, one more before
        them, which is the only one if the values are alike.
        """
        # JSON, not pickle: whoever can send bytes to a rank could run code there.
        encoded = json.dumps(value).encode()
        if self.size > MANY and self.same_on_all(encoded, name):
            return [json.loads(encoded) for _ in range(self.size)]
        text = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        first = torch.zeros(16 + FIRST_BYTES, dtype=torch.uint8)  # two numbers, and what of the text has room
        first[:16] = torch.tensor([len(text), zlib.crc32(name.encode())]).view(torch.uint8)
        first[16 : 16 + len(text)] = text[:FIRST_BYTES]
        everyone = self.all_gather_first(first, name)
        lengths, names = everyone[:, :16].contiguous().view(torch.int64).T.tolist()
        # Gloo pairs calls by their order alone: ranks in different collectives would take each other's objects.
        if len(set(names)) > 1:
            self._refuse_different(name)
        texts = [theirs[16 : 16 + length].numpy().tobytes() for theirs, length in zip(everyone, lengths, strict=True)]
        if max(lengths) > FIRST_BYTES:
            rest = [max(0, length - FIRST_BYTES) for length in lengths]
            rows = self.all_gather_rows(text[FIRST_BYTES:], rest, f"{name}.rest")
            texts = [one + row.numpy().tobytes() for one, row in zip(texts, rows, strict=True)]
        return [json.loads(one) for one in texts]

    def same_on_all(self, content: bytes, name: str) -> bool:
        """Return whether all ranks call this with the same bytes and name. A collective that sends 64 bytes of each."""
        digest = torch.frombuffer(
            bytearray(hashlib.sha256(name.encode() + b"\n" + content).digest()), dtype=torch.int64
        )
        # One "max" tells both: the largest ~x is that of the smallest x.
        most, least = both = torch.stack([digest, ~digest])
        self.all_reduce_first_(both, "max", f"{name}.alike")
        return torch.equal(most, ~least)

    def all_gather_if_unlike(self, tensor: Tensor, name: str) -> Tensor:
        """Return what `all_gather` does. Of more than MANY ranks, tensors on the CPU that are alike are not sent."""
        if self.size > MANY and self.same_on_all(tensor.numpy().tobytes(), name):
            return tensor.expand(self.size, *tensor.shape)
        return self.all_gather(tensor, name)

    def all_reduce_first_(self, tensor: Tensor, op: str, name: str) -> None:
        """Reduce what ranks compare before they exchange an object, as `all_reduce_` does: always of the same shape."""
        self.all_reduce_(tensor, op, name)

    def all_gather_first(self, tensor: Tensor, name: str) -> Tensor:
        """Return what ranks begin to exchange an object with, as `all_gather` does: always of the same shape."""
        return self.all_gather(tensor, name)

    def sums(self, rows: Sequence[Sequence[float]], name: str) -> list[float]:
        """Return the sums of the rows of all ranks, few numbers each. As objects: a rank that is alone here is told."""
        everyone = self.all_gather_object(rows, name)
        return torch.tensor([row for theirs in everyone for row in theirs], dtype=torch.float64).sum(0).tolist()

    def _refuse_different(self, name: str) -> None:
        """Raise Failure on every rank: they exchange objects under different names. A collective."""
        from hvdtrain.guards.evidence import main_stack, where

        places = self.all_gather_object([name, socket.gethostname(), where(main_stack())], "different collectives")
        other = next(rank for rank, place in enumerate(places) if place[0] != places[0][0])
        two = ", ".join(
            f"rank {rank} on {places[rank][1]} in {places[rank][0]} at {places[rank][2]}" for rank in (0, other)
        )
        message = f"ranks wait in different collectives ({two}): all must call the same ones"
        raise Failure(message, everywhere=True)

    def all_gather_rows(self, rows: Tensor, lengths: Sequence[int], name: str) -> list[Tensor]:
        """Return the rows of each rank. lengths: number of rows of each rank, not all 0. The rest must be the same."""
        # An all-gather takes the same shape from each rank.
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
        everyone = self.all_gather(padded, name)
        return [theirs[:length] for theirs, length in zip(everyone, lengths, strict=True)]

    @contextlib.contextmanager
    def raising_together(self, name: str) -> Iterator[None]:
        """Context manager for a block that may fail on some ranks only. A collective.

        If any rank raises an exception, every rank raises it, so that no rank waits forever for one that has failed.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        ours = next((kind for kind in (UserError, Failure) if isinstance(failure, kind)), None)
        message = None if failure is None else str(failure) if ours else repr(failure)
        mine = None if failure is None else [message, ours and ours.__name__, socket.gethostname()]
        reports = self.all_gather_object(mine, f"agreement.{name}")
        failed = [(rank, *report) for rank, report in enumerate(reports) if report is not None]
        if not failed:
            return
        # An unexpected error keeps its own traceback on its rank. The others tell what it was.
        if failure is not None and ours is None:
            raise failure
        rank, message, kind, host = failed[0]
        where = "" if len(failed) == self.size else f"rank {rank} on {host}: "
        if kind is not None:
            raise (UserError if kind == UserError.__name__ else Failure)(
                f"{where}{message}", everywhere=True
            ) from failure
        raise RuntimeError(f"{where}{message}")

    def require_equal(self, what: str, value: object, remedy: str) -> None:
        """Raise UserError on every rank if `value` (JSON-serializable) differs between ranks. A collective."""
        values = self.all_gather_object(value, f"equal.{what}")
        for rank, other in enumerate(values):
            if other != values[0] and repr(other) != repr(values[0]):  # NaN is not equal to itself
                message = f"ranks disagree about {what}: rank 0 has {values[0]}, rank {rank} has {other}: {remedy}"
                raise UserError(message, everywhere=True)

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace floating-point tensors with their mean over ranks. One all-reduce."""
        if self.size > 1 and tensors:
            # As one tensor: statistics are many short tensors, and each all-reduce would cost a round of messages.
            unflatten(self.sum(flatten(tensors), "average_buffers") / self.size, tensors)

    # ---- nested values as JSON, and the bytes of their tensors (portable.flattened), which may differ between ranks

    def all_gather_packed(self, values: Sequence[Any], row: Tensor, name: str) -> tuple[list[Any], Tensor]:
        """Return the JSON values of all ranks as one list, and their rows, int64 [n] of any length, as one row."""
        everyone = self.all_gather_object([values, len(row)], name)
        lengths = [length for _, length in everyone]
        rows = self.all_gather_rows(row, lengths, f"{name}.bytes") if any(lengths) else [row]
        return [value for theirs, _ in everyone for value in theirs], torch.cat(rows)

    # ---- what rank 0 has, given to all ranks: models, the state of optimizers, values

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy rank 0's parameters and buffers to every rank, also those that a state_dict leaves out."""
        for name, tensor in all_tensors(model):
            self.broadcast_(tensor, name)

    def broadcast(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copy rank 0's parameters, buffers and optimizer state to every rank. Rank 0 is not changed."""
        self.broadcast_model(model)
        self.broadcast_optimizer_state(optimizer)

    def broadcast_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy rank 0's optimizer state and settings to every rank. If rank 0 has no state yet, neither has any rank."""
        try:
            local, sent = optimizer.state_dict(), list[Tensor]()
        except RuntimeError as error:  # of torch's ZeroRedundancyOptimizer
            message = f"the state of {type(optimizer).__name__} cannot be read ({error})"
            raise UserError(f"{message}: use one that keeps all of its state on every rank", everywhere=True) from error

        def put(tensor: Tensor) -> int:
            sent.append(tensor)
            return len(sent) - 1

        require_as_of_torch(optimizer, local)
        settings = [
            {name: value for name, value in group.items() if name != "params"} for group in local["param_groups"]
        ]
        # The structure comes first, so that ranks without state (only rank 0 reads the checkpoint) can receive the rest.
        # On the CPU: `step` of optimizers that are not fused. On a GPU, each would be read back in every step.
        try:
            plan = to_json([local["state"], settings], put) if self.rank == 0 else None
        except NotStored as error:
            remedy = "keep to numbers, text, tensors and collections of these"
            message = f"the settings of {type(optimizer).__name__} hold a {error}, which ranks cannot exchange"
            raise UserError(f"{message}: {remedy}") from error
        packed, on_cpu = self.broadcast_object(
            [plan, [tensor.device.type == "cpu" for tensor in sent]], "optimizer.plan"
        )
        devices = [torch.device("cpu") if here else self.device for here in on_cpu]
        state, settings = self.broadcast_tensors(packed, sent.__getitem__, "optimizer", devices.__getitem__)
        if self.rank != 0:
            groups = [mine | theirs for mine, theirs in zip(local["param_groups"], settings, strict=True)]
            load_exactly(optimizer, {"state": state, "param_groups": groups})

    def broadcast_tensors(
        self, packed: Any, find: Callable[[Any], Tensor], name: str,
        device_of: Callable[[Any], torch.device] = lambda place: torch.device("cpu"),
    ) -> Any:  # fmt: skip
        """Return on every rank the value that `portable.to_json` has made `told` of. A collective.

        find: on rank 0, returns the tensor at a place. device_of: returns where to receive it.
        """

        def get(held: Held) -> Tensor:
            place, dtype = held[TENSOR], getattr(torch, held["dtype"])
            tensor = torch.empty(held["shape"], dtype=dtype, device=device_of(place))
            if self.rank == 0:
                tensor.copy_(find(place))
            self.broadcast_(tensor, f"{name}.{place}")
            return tensor

        return from_json(packed, get)

    def broadcast_object(self, value: object, name: str) -> Any:
        """Return rank 0's `value` on every rank. It must be JSON-serializable; pickle is not used."""
        text = json.dumps(value).encode() if self.rank == 0 else b""
        length = torch.tensor([len(text)])
        self.broadcast_(length, name + ".length")
        content = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.broadcast_(content, name)
        return json.loads(content.numpy().tobytes())

    def broadcast_packed(self, value: Any, row: Tensor, name: str) -> tuple[Any, Tensor]:
        """Return rank 0's JSON value and its row, int64 [n], on every rank: see `all_gather_packed`."""
        value, length = self.broadcast_object([value, len(row)], name)
        row = row if self.rank == 0 else torch.zeros(length, dtype=torch.int64)
        if length:
            self.broadcast_(row, f"{name}.bytes")
        return value, row


# ---- the state of optimizers


def lay_state_as_weights(optimizer: torch.optim.Optimizer) -> None:
    """Give the state the memory format of the weights."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                # Fused kernels take no two memory formats at once, and what was loaded or received is contiguous.
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def require_as_of_torch(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Raise UserError for a state_dict of an optimizer that is not like those of torch, as of some that hold another one."""
    what, parts = f"the state_dict of {type(optimizer).__name__}", {"state", "param_groups"}
    if not isinstance(state, dict) or not state.keys() >= parts:
        remedy = "give run.prepare() each optimizer in it, or let its state_dict() have these"
        raise UserError(f"{what} has no 'state' and 'param_groups', as torch's: {remedy}")
    if more := [name for name in state if name not in parts]:
        remedy = "keep that in its state, state[parameter], or in param_groups"
        raise UserError(f"{what} has {more[0]!r} beside 'state' and 'param_groups', which is not restored: {remedy}")


def load_exactly(optimizer: torch.optim.Optimizer, held: dict[str, Any]) -> None:
    """Load a state_dict as it was, also where torch would convert it."""
    # torch makes text, arrays and namedtuples anew of their parts,
    # wrongly: they are left out here, and put back by `_as_held`.
    state = {number: _without_text(values) for number, values in held["state"].items()}
    before = list(optimizer.param_groups)
    optimizer.load_state_dict(held | {"state": state})
    # torch makes other dictionaries of settings. An optimizer in this one may have those of before, too.
    for number, (group, loaded) in enumerate(zip(before, optimizer.param_groups, strict=False)):
        if group is not loaded:
            group.clear()
            group.update(loaded)
            optimizer.param_groups[number] = group
    # torch has converted the rest to the type of the weights.
    # Of float16, integers or bool, the next step would differ, or fail.
    for number, values in optimizer.state_dict()["state"].items():
        if number in held["state"]:
            _as_held(held["state"][number], values)
    lay_state_as_weights(optimizer)


def _without_text(value: Any) -> Any:
    """Return nested values without what torch would make anew of its parts, wrongly: text, arrays, namedtuples."""
    if type(value) is dict:
        return {key: _without_text(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_text, value))
    return None if isinstance(value, Iterable) and not isinstance(value, Tensor) else value


def _as_held(held: Any, loaded: Any) -> Any:
    """Return `held` with the tensors of `loaded` that were not converted. Dictionaries and lists are changed in place."""
    if isinstance(held, Tensor) and isinstance(loaded, Tensor):
        return loaded if loaded.dtype == held.dtype else held.to(loaded.device)
    if isinstance(held, dict) and isinstance(loaded, dict):
        loaded.update({key: _as_held(value, loaded[key]) for key, value in held.items() if key in loaded})
    elif type(held) is list and type(loaded) is list:
        loaded[:] = map(_as_held, held, loaded)
    elif type(held) is tuple and type(loaded) is tuple:
        return tuple(map(_as_held, held, loaded))
    elif loaded is None:  # left out by `_without_text`
        return held
    return loaded
