"""Nested values as JSON and back, exactly: the same types and values, and what was one object is one again.

Not pickle: a checkpoint holds no code, and reading one runs none. What is not listed here is refused when it is saved.

None, bool, int, float, str    as JSON has them
list, dict with keys of str    as JSON has them
a tensor                       {TENSOR: where its bytes are, "shape": ..., "dtype": ...}
all others                     {KIND: name, "value": ..., "more": what else it takes to make it}
an object that was met before  {KIND: "same", "value": its number}: lists, mappings, sets, arrays and tensors are counted
"""

import base64
import bisect
import enum
import functools
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

TENSOR, KIND = MARKS = ("__tensor__", "__kind__")
Held = dict[str, Any]  # JSON: what stands for a tensor: its place, shape and dtype

SCALARS = frozenset([type(None), bool, float, str])
PLAIN_TYPES = SCALARS | {int}
SEQUENCES: Mapping[str, type] = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset, "deque": deque}
MAPPINGS: Mapping[str, type] = {
    "dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": defaultdict,
}  # fmt: skip
TYPE_NAMES = {kind: name for name, kind in (*SEQUENCES.items(), *MAPPINGS.items())}
FACTORIES: Mapping[str, type] = {one.__name__: one for one in (bool, int, float, str, list, dict, set, tuple, Counter)}
COUNTED = frozenset([list, set, deque, bytearray, *MAPPINGS.values()])  # and arrays and tensors: they can be changed
TENSOR_TYPES = {Tensor, nn.Parameter}  # not of derived classes, which may have more than their values
NUMBERS = "biufcmMSU"  # kinds of numpy's dtypes whose bytes are all of their value
LONGEST_INT = 2**2048  # Python's limit for reading digits is twice as long
DEEPEST = 100  # levels: each takes up to three of Python's 1,000 frames, also when it is read


class NotStored(TypeError):
    """A value that cannot be saved. The message says what it is and where, such as "Decimal at ['rates'][3]"."""

    def __init__(self, what: str):
        super().__init__(what)
        self.what, self.place = what, ""

    def __str__(self) -> str:
        return f"{self.what} at {self.place}" if self.place else self.what


def stand_in(tensor: Tensor, place: object) -> Held:
    """Return the JSON object that stands for a tensor. place: its bytes, or where they are, as JSON."""
    return {TENSOR: place, "shape": list(tensor.shape), "dtype": name_of_type(tensor.dtype)}


@functools.cache
def name_of_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_row(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as a row [n], of its own memory if they lie in it one after the other."""
    # Not reshape(-1): of a single value, that keeps any stride, with which torch views no bytes.
    return (whole := tensor.contiguous()).as_strided((whole.numel(),), (1,))


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as uint8 [n], on the CPU."""
    # A lazy conjugate or negative has its values' memory without the sign: as bytes, it would be another tensor.
    return as_row(tensor.detach().cpu().resolve_conj().resolve_neg()).view(torch.uint8)


def require_no_meta(tensor: Tensor) -> None:
    """Raise NotStored for a tensor without values."""
    if tensor.is_meta:
        raise NotStored("meta tensor")


def embedded(tensor: Tensor) -> str:
    """Return the tensor's bytes as text. Raises NotStored."""
    require_no_meta(tensor)
    return base64.b64encode(bytes_of(tensor).numpy().data).decode() if tensor.numel() else ""


def extracted(value: Held) -> Tensor:
    """Return the tensor that `embedded` has made text of."""
    # A bytearray, because a tensor may be written to, and bytes may not.
    dtype, data = getattr(torch, value["dtype"]), bytearray(base64.b64decode(value[TENSOR]))
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(value["shape"])


def to_json(value: Any, put: Callable[[Tensor], object] = embedded) -> Any:
    """Return `value` as JSON. Raises NotStored for what is not in the list above.

    put: called for each tensor, and for the bytes of others; returns its place, as JSON.
    """
    return _Encoder(put).encode(value)


def from_json(value: Any, get: Callable[[Held], Tensor] = extracted) -> Any:
    """Return what was given to `to_json`. get: called for each tensor, in the same order; returns it.

    Raises KeyError, TypeError, ValueError or IndexError for JSON that `to_json` has not made.
    """
    return _Decoder(get).decode(value)


def is_array(value: object) -> bool:
    """Return whether `value` is an array of numpy, and of no class derived from that, such as a masked one."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_scalar(value: object) -> bool:
    """Return whether `value` is a number or text of numpy, such as float64, which is a Python float, too."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def has_memory(value: Any) -> bool:
    """Return whether `value` is a tensor whose values lie in memory of its own, or of which it is a view."""
    plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta
    return plain and bool(value.numel())


def identity_of(value: Any) -> object:
    """Return the same for two names of one object that can be changed; None: it cannot be changed.

    `detach` and `data` make new objects for the memory of one tensor, so of a tensor, memory and shape count.
    """
    if type(value) in COUNTED:
        return id(value)
    if has_memory(value):
        return type(value), value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
    return id(value) if isinstance(value, Tensor) or is_array(value) else None


def is_long(number: int) -> bool:
    """Return whether JSON cannot have this number: Python does not read as many digits."""
    return not -LONGEST_INT < number < LONGEST_INT


def class_named(module: str, name: str) -> Any:
    """Return a class by the names of its module and in it. Nothing is imported, and no code runs. Raises ValueError."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        # Not getattr: a module's or a class's own `__getattr__` is code of the program, and would run.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if not isinstance(found, type):
        raise ValueError(f"there is no class {name} in {module} now")
    return found


def is_named_tuple(kind: type) -> bool:
    """Return whether a class is that of a namedtuple."""
    return issubclass(kind, tuple) and isinstance(kind.__dict__.get("_fields"), tuple)


class _Encoder:
    def __init__(self, put: Callable[[Tensor], object]):
        self._put, self._depth = put, 0
        self._numbers: dict[object, int] = {}  # by identity, in the order in which they are met
        self._spans: dict[object, list[tuple[int, int]]] = {}  # first and last byte of what lies in one memory

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        if kind is int:
            return {KIND: "int", "value": hex(value)} if is_long(value) else value
        if (known := identity_of(value)) is not None:
            if known in self._numbers:
                return {KIND: "same", "value": self._numbers[known]}
            self._numbers[known] = len(self._numbers)
        self._depth += 1
        try:
            return self._encode_other(value, kind)
        finally:
            self._depth -= 1

    def _encode_other(self, value: Any, kind: type) -> Any:
        if self._depth > DEEPEST:
            raise NotStored(f"{kind.__name__} in more than {DEEPEST} others")
        if kind is Tensor:
            return self._tensor(value, kind)
        if kind is list:
            return self._items(value)
        # A dictionary with one of our marks as a key would be read as something else: it goes as pairs, below.
        if kind is dict and {*map(type, value)} <= {str} and not any(mark in value for mark in MARKS):
            return dict(zip(value, self._items(value.values(), value), strict=True))
        if kind in TYPE_NAMES:
            more = self._more(value)
            # A set has no order that lasts: the same one must be the same JSON.
            in_order = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            items = self._pairs(value) if isinstance(value, dict) else self._items(in_order)
            return {KIND: TYPE_NAMES[kind], "value": items} | ({} if more is None else {"more": more})
        if isinstance(value, Tensor):
            return self._tensor(value, kind)
        if kind in (bytes, bytearray):
            return {KIND: kind.__name__, "value": self._bytes(value)}
        if is_array(value) or is_scalar(value):
            return self._array(value)
        if kind is complex:
            return {KIND: "complex", "value": [value.real, value.imag]}
        if isinstance(value, enum.Enum) and type(value).__members__.get(value.name) is value:
            return {KIND: "enum", "value": value.name, "more": self._class(kind)}
        if is_named_tuple(kind):
            return {KIND: "namedtuple", "value": self._items(value), "more": self._class(kind)}
        raise NotStored(kind.__name__)

    def _items(self, items: Iterable[Any], places: Iterable[object] | None = None) -> list[Any]:
        """Return the items of a collection. places: their keys; None: they are numbered."""
        if {*map(type, items)} <= PLAIN_TYPES and not any(type(one) is int and is_long(one) for one in items):
            return list(items)  # much faster for a long one
        encoded: list[Any] = []
        try:
            for item in items:
                encoded.append(self.encode(item))
        except NotStored as error:
            place = len(encoded) if places is None else [*places][len(encoded)]
            error.place = f"[{place!r}]{error.place}"
            raise
        return encoded

    def _pairs(self, value: dict[Any, Any]) -> list[Any]:
        keys = self._items(value.keys(), value)
        return [list(pair) for pair in zip(keys, self._items(value.values(), value), strict=True)]

    def _more(self, value: Any) -> Any:
        """Return what a collection has beside its items."""
        if isinstance(value, defaultdict) and value.default_factory is not None:
            name = getattr(value.default_factory, "__name__", type(value.default_factory).__name__)
            if FACTORIES.get(name) is not value.default_factory:
                raise NotStored(f"defaultdict with {name} for missing keys")
            return name
        if isinstance(value, deque):
            return value.maxlen
        if type(value) is OrderedDict:  # `_metadata` of a module's state_dict
            return self.encode(vars(value)) if vars(value) else None
        if type(value) is Counter and vars(value):
            raise NotStored("Counter with attributes")
        return None

    def _tensor(self, value: Tensor, kind: type) -> Any:
        if kind not in TENSOR_TYPES:
            raise NotStored(kind.__name__)
        if value.layout is not torch.strided or value.is_quantized:
            raise NotStored("sparse or quantized tensor")
        if has_memory(value):
            length = value.nbytes
            if not value.is_contiguous():
                ends = ((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
                length = (sum(ends) + 1) * value.element_size()
            self._require_apart((value.device, value.untyped_storage().data_ptr()), value.data_ptr(), length)
        held = stand_in(value, self._put(value.detach() if value.requires_grad else value))
        if kind is nn.Parameter:
            return {KIND: "parameter", "value": held, "more": value.requires_grad}
        return {KIND: "leaf", "value": held} if value.requires_grad and value.is_leaf else held

    def _array(self, value: Any) -> Any:
        if value.dtype.kind not in NUMBERS or not value.dtype.itemsize:
            raise NotStored(f"{type(value).__name__} of {value.dtype}")
        if is_array(value) and value.size:
            numpy, memory = sys.modules["numpy"], value
            while isinstance(memory.base, numpy.ndarray):
                memory = memory.base
            low, high = getattr(numpy.lib, "array_utils", numpy).byte_bounds(value)
            self._require_apart(("numpy", id(memory)), low, high - low)
        kind = "array" if is_array(value) else "scalar"
        return {KIND: kind, "value": self._bytes(value.tobytes()), "more": [value.dtype.str, list(value.shape)]}

    def _require_apart(self, memory: object, first: int, length: int) -> None:
        """Refuse one that shares only a part of its memory with another: it would be apart when it is read."""
        if (spans := self._spans.get(memory)) is None:
            self._spans[memory] = [(first, first + length)]
            return
        place = bisect.bisect(spans, (first, first))  # they are sorted: of many parts of one tensor, two are compared
        if any(first < end and begin < first + length for begin, end in spans[max(place - 1, 0) : place + 1]):
            raise NotStored("view of a part of another tensor or array (store a copy)")
        spans.insert(place, (first, first + length))

    def _bytes(self, value: bytes | bytearray) -> Held:
        content = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        return stand_in(content, self._put(content))

    def _class(self, kind: type) -> list[str]:
        try:
            found = class_named(kind.__module__, kind.__qualname__)
        except ValueError:
            found = None
        if found is not kind:
            raise NotStored(f"{kind.__name__}, whose class is not at the top of its module")
        return [kind.__module__, kind.__qualname__]


class _Decoder:
    def __init__(self, get: Callable[[Held], Tensor]):
        self._get = get
        self._met: list[Any] = []

    def decode(self, value: Any) -> Any:
        if type(value) is list:
            made: list[Any] = []
            self._met.append(made)  # before its items, as the encoder counts
            made.extend(self._items(value))
            return made
        if type(value) is not dict:
            return value
        if TENSOR in value:
            return self._meet(self._get(value))
        if KIND in value:
            return self._decode_other(value[KIND], value["value"], value.get("more"))
        mapping: dict[str, Any] = self._meet({})
        for key, item in value.items():
            mapping[key] = self.decode(item)
        return mapping

    def _meet(self, value: Any) -> Any:
        self._met.append(value)
        return value

    def _items(self, items: list[Any]) -> Iterable[Any]:
        return items if not {*map(type, items)} & {list, dict} else map(self.decode, items)

    def _decode_other(self, kind: str, value: Any, more: Any) -> Any:
        if kind == "same":
            return self._met[value]
        if kind in MAPPINGS:
            return self._mapping(MAPPINGS[kind], value, more)
        if kind in ("set", "deque"):
            collection: Any = self._meet(set() if kind == "set" else deque(maxlen=more))
            for item in self._items(value):
                collection.add(item) if kind == "set" else collection.append(item)
            return collection
        if kind in SEQUENCES:
            return SEQUENCES[kind](self._items(value))
        if kind == "parameter":
            return self._meet(nn.Parameter(self._get(value), requires_grad=more))
        if kind == "leaf":
            return self._meet(self._get(value).requires_grad_())
        if kind in ("bytes", "bytearray"):
            data = self._get(value).numpy().tobytes()
            return data if kind == "bytes" else self._meet(bytearray(data))
        if kind in ("array", "scalar"):
            import numpy

            array = numpy.frombuffer(self._get(value).numpy().tobytes(), dtype=more[0])
            # A copy, because an array over bytes is read-only.
            return self._meet(array.reshape(more[1]).copy()) if kind == "array" else array[0]
        if kind == "complex":
            return complex(*value)
        if kind == "int":
            return int(value, 16)
        return self._of_class(kind, value, class_named(*more))

    def _mapping(self, kind: type, pairs: list[Any], more: Any) -> Any:
        mapping: Any = self._meet(defaultdict(FACTORIES[more] if more else None) if kind is defaultdict else kind())
        # The encoder has counted what else there is first, then the keys, then the items.
        if more is not None and kind is OrderedDict:
            vars(mapping).update(self.decode(more))
        keys = [self.decode(key) for key, _ in pairs]
        for key, (_, item) in zip(keys, pairs, strict=True):
            mapping[key] = self.decode(item)
        return mapping

    def _of_class(self, kind: str, value: Any, of: type) -> Any:
        if kind == "enum" and issubclass(of, enum.Enum):
            return of.__members__[value]
        if kind == "namedtuple" and is_named_tuple(of):
            # The class's own `__new__` is code of the program. Reading a checkpoint runs none.
            return tuple.__new__(of, self._items(value))
        raise ValueError(f"{kind} {of.__name__}")


# ---- whether what is read is what was saved


def difference_of_values(saved: Any, read: Any) -> str | None:
    """Return where what was read differs from what was saved, in words; None: nowhere. Types, values, and which are one.

    It walks through the values, and does not compare their JSON: what that leaves out, both would lack.
    """
    return next(_differences(saved, read, "", {}, {}), None)


def _differences(
    saved: Any, read: Any, place: str, partner: dict[object, object], of_read: dict[object, object]
) -> Iterator[str]:
    """partner: identities of what was read, by those of what was saved. of_read: the reverse."""
    where = place or "it"
    if _type(saved) is not _type(read):
        yield f"{where} is a {type(saved).__name__} and comes back as a {type(read).__name__}"
        return
    if (known := identity_of(saved)) is not None:
        other = identity_of(read)
        if known in partner or other in of_read:
            if partner.get(known) != other or of_read.get(other) != known:
                yield f"{where} is one with another {type(saved).__name__} before or after, and not both"
            return
        partner[known], of_read[other] = other, known
    if isinstance(saved, dict):
        yield from _differences(tuple(saved), tuple(read), f"{place}.keys()", partner, of_read)
        if getattr(saved, "default_factory", None) is not getattr(read, "default_factory", None):
            yield f"{where} makes other values for missing keys when it comes back"
        for (key, item), other in zip(saved.items(), read.values(), strict=False):
            yield from _differences(item, other, f"{place}[{key!r}]", partner, of_read)
        yield from _differences(_attributes(saved), _attributes(read), f"{place}.__dict__", partner, of_read)
    elif isinstance(saved, (list, tuple, deque)):
        if len(saved) != len(read) or getattr(saved, "maxlen", None) != getattr(read, "maxlen", None):
            yield f"{where} has another length when it comes back"
        elif not {*map(type, saved)} <= PLAIN_TYPES or _told(list(saved)) != _told(list(read)):
            for number, (item, other) in enumerate(zip(saved, read, strict=True)):
                yield from _differences(item, other, f"{place}[{number}]", partner, of_read)
    elif isinstance(saved, Tensor):
        there, here = _kind(saved), _kind(read)
        if there != here:
            yield f"{where} is {there} and comes back as {here}"
        elif not torch.equal(bytes_of(saved), bytes_of(read)):
            yield f"{where} has other values when it comes back"
    elif is_array(saved) or is_scalar(saved):
        if (saved.dtype, saved.shape, saved.tobytes()) != (read.dtype, read.shape, read.tobytes()):
            yield f"{where} has other values when it comes back"
    elif _told(saved) != _told(read):
        yield f"{where} is {saved!r} and comes back as {read!r}"


def _type(value: Any) -> type:
    kind = type(value)
    return Tensor if kind in TENSOR_TYPES and kind is not nn.Parameter else kind


def _attributes(value: Any) -> Any:
    return vars(value) if type(value) is OrderedDict and vars(value) else None


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}{' with a gradient' if tensor.requires_grad and tensor.is_leaf else ''}"


def _told(value: Any) -> Any:
    """Return what tells values apart that `==` does not, such as 1 and True, 0.0 and -0.0, and makes one NaN another."""
    return sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else repr(value)


# ---- with the bytes of their tensors in one row


def flattened(value: Any) -> tuple[Any, Tensor]:
    """Return nested values as JSON, and the bytes of their tensors, one after the other, as int64 [n] on the CPU."""
    parts = list[Tensor]()
    packed = to_json(value, lambda tensor: parts.append(bytes_of(tensor)))
    rest = torch.zeros(-sum(map(len, parts)) % 8, dtype=torch.uint8)
    return packed, torch.cat([*parts, rest]).view(torch.int64)  # 8 bytes each: MPI counts up to 2^31


def unflattened(packed: Any, row: Tensor) -> Any:
    """Return what was given to `flattened`. row: may be longer."""
    content, end = row.view(torch.uint8), 0

    def get(held: Held) -> Tensor:
        nonlocal end
        dtype: torch.dtype = getattr(torch, held["dtype"])
        begin, end = end, end + math.prod(held["shape"]) * dtype.itemsize
        return content[begin:end].clone().view(dtype).reshape(held["shape"])

    return from_json(packed, get)
