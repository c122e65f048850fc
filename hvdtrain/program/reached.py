"""What the names of a program reach, by path, such as `trainer.stop.best`: numbers, tensors, arrays and collections, with
what shows whether they change. Followed are objects of the program's own classes, and what functions and generators hold.
"""

import argparse
import array
import contextlib
import datetime
import enum
import functools
import gc
import itertools
import operator
import os
import queue
import sys
import threading
import zlib
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from numbers import Number
from types import FunctionType, GeneratorType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from hvdtrain.checkpoint.randomness import generator_state, is_generator
from hvdtrain.checkpoint.sums import digest_of_values
from hvdtrain.program.marks import mark_of

SIMPLE = (Number, str, bytes, datetime.date, datetime.timedelta, type(None), enum.Enum)
BUFFERS = (bytearray, array.array, memoryview)
HAVE_KEYS = (dict, UserDict, ChainMap, MappingProxyType, WeakKeyDictionary, WeakValueDictionary, type(os.environ))
COLLECTIONS = (list, tuple, set, frozenset, deque, UserList, *HAVE_KEYS)
MOST_TYPES = 10_000  # of which is kept what they are: the answers of `isinstance` take longest, as many are abstract
UNFOLLOWED = {int, float, bool, str, bytes, type(None)}  # most parts of collections
PLAIN_HOLDERS = (SimpleNamespace, argparse.Namespace, threading.local)
# Of torch and torchvision.
PARTS_OF_DATA = ("dataset", "datasets", "tensors", "transform", "transforms", "target_transform")
MOST_PARTS, MOST_OBJECTS, DEEPEST = 1_000, 20_000, 6
MOST_BYTES = 2**20  # of an array: the first ones, which a shuffle changes, too
OF_ANY_MODULE = frozenset(vars(nn.Module()))
RESULT = "<the result of a forward pass>"  # the mark of a tensor
HOOK = "hook"  # in the path of a function that is hooked in
HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip


class Reading(NamedTuple):
    """What is reached. owner: whose attribute or variable it is: of an object, a class, a function; None: of the program."""

    mark: object
    owner: object = None


class GeneratorMark(str):
    """A hash of the state of a generator of random numbers."""


class Kind(NamedTuple):
    """What values of a type are. is_plain: they cannot be changed and hold nothing else."""

    is_plain: bool
    is_collection: bool
    has_keys: bool


@functools.lru_cache(MOST_TYPES)
def what_type_is(which: type) -> Kind:
    numpy = sys.modules.get("numpy")
    plain = issubclass(which, SIMPLE) or (numpy is not None and issubclass(which, numpy.generic))
    return Kind(plain, issubclass(which, COLLECTIONS), issubclass(which, HAVE_KEYS))


def what_is(value: object) -> Kind:
    """Return what a value is, as `isinstance` says: a proxy has the class of what is behind it."""
    return what_type_is(value.__class__)  # type: ignore[arg-type] # a type is hashable


def is_plain(value: object) -> bool:
    """Return whether `value` cannot be changed and holds nothing else: a number, also one of numpy, a text, None."""
    return what_is(value).is_plain


def has_values(value: object) -> bool:
    """Return whether `value` is an array of numpy, also one in a file, or another buffer."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, BUFFERS) or (numpy is not None and isinstance(value, numpy.ndarray))


def attributes_of(what: object) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots; of a module, without what each has."""
    slots = [name for kind in type(what).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(what, name)]
    held = {name: getattr(what, name) for name in slots if not name.startswith("__")} | getattr(what, "__dict__", {})
    return {name: one for name, one in held.items() if not (isinstance(what, nn.Module) and name in OF_ANY_MODULE)}


def keeps_in_defaults(function: object) -> bool:
    """Return whether a function has a default that it may fill: `def call(self, seen={})`."""
    held = isinstance(function, FunctionType) and (
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    )
    return any(what_is(one).is_collection and not isinstance(one, tuple) for one in held or ())


def parts_of(collection: Any) -> Iterator[tuple[object, Any]]:
    """Yield the first parts of a collection, with their keys or numbers."""
    pairs = collection.items() if what_is(collection).has_keys else enumerate(collection)
    return itertools.islice(iter(pairs), MOST_PARTS)


def of_weights_and_hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a program has given to the parameters of a model as attributes, and the functions that it hooked in."""
    for path, parameter in model.named_parameters():
        given = {name: one for name, one in vars(parameter).items() if not name.startswith("_")}
        yield from ((f".{path}.{name}", one) for name, one in given.items())
    for path, one in itertools.chain(model.named_modules(), model.named_parameters()):
        hooks = [kept for name in HOOKS if (kept := getattr(one, name, None))]
        for function in itertools.chain.from_iterable(kept.values() for kept in hooks):
            yield ".".join(("", *filter(None, (path, HOOK)))), function


def read_so_far(iterator: Any, depth: int = 0) -> object:
    """Return what changes when an iterator of Python is read: how much is left in it, or in what it reads."""
    # Iterators of Python tell by a length hint how much is left, without being read.
    left = -1 if isinstance(iterator, tuple) else operator.length_hint(iterator, -1)
    if left >= 0:
        return left
    # Others, such as zip and map, hold what they read. Only the garbage collector knows that.
    inside = gc.get_referents(iterator) if depth < DEEPEST else ()
    return [read_so_far(one, depth + 1) for one in inside if isinstance(one, Iterator | list | tuple)]


class Reached:
    """Collects what names reach. is_own: whether a class or function is the program's. apart: the identities of what is
    saved, and of weights."""

    def __init__(self, is_own: Callable[[Any], bool], apart: set[int]):
        self.leaves = dict[str, Reading]()
        self.is_own, self.apart, self.seen = is_own, apart, set[int]()
        self._of_classes = dict[type, dict[str, Any]]()  # what their objects have in common

    def add(self, path: str, value: Any, owner: object = None, depth: int = 0) -> None:
        """Add what this path reaches."""
        kind = what_is(value)
        if kind.is_plain:
            self.leaves[path] = Reading(self._mark(value), owner)
            return
        if isinstance(value, torch.optim.Optimizer | LRScheduler):  # prepared, registered, or refused
            return
        if isinstance(value, IterableDataset) and hasattr(value, "load_state_dict"):  # a position in it is saved
            return
        if id(value) in self.apart or depth > DEEPEST or len(self.leaves) + len(self.seen) > MOST_OBJECTS:
            return
        if isinstance(value, Tensor):
            if value.grad_fn is None:
                self.leaves[path] = Reading(mark_of([value]), owner)
            return
        inside = kind.is_collection or has_values(value)
        if inside:
            self.leaves[path] = Reading(self._mark(value), owner)
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        for inner, one in self._followed_in(value) if inside else self.held_by(path, value, owner):
            self.add(f"{path}{inner}", one, owner if inside else value, depth + 1)

    def _is_followed(self, value: Any) -> bool:
        return isinstance(value, PLAIN_HOLDERS) or self.is_own(type(value))

    def _of_class(self, kind: type) -> dict[str, Any]:
        """Return the numbers and texts of a class, and its methods that may keep something in a default."""
        if kind not in self._of_classes:  # there may be thousands of its objects
            bases = [base for base in reversed(kind.__mro__) if self.is_own(base)]
            pairs = [pair for base in bases for pair in vars(base).items()]
            plain = {name: one for name, one in pairs if is_plain(one) and not name.startswith("__")}
            self._of_classes[kind] = plain | {name: one for name, one in pairs if keeps_in_defaults(one)}
        return self._of_classes[kind]

    def _followed_in(self, collection: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
        """Yield the objects of the program in a collection, and in those within it."""
        for key, one in parts_of(collection) if what_is(collection).is_collection and depth < DEEPEST else ():
            if what_is(one).is_collection:
                yield from ((f"[{key!r}]{inner}", other) for inner, other in self._followed_in(one, depth + 1))
            elif type(one) not in UNFOLLOWED and self._is_followed(one):
                yield f"[{key!r}]", one

    def held_by(self, path: str, value: Any, owner: object) -> Iterator[tuple[str, Any]]:
        """Yield what an object holds that is no collection, by the rest of its path."""
        held: dict[str, Any] = {}
        if isinstance(value, nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
            if any(id(one) in self.apart or one.grad_fn is not None for one in tensors):
                yield from of_weights_and_hooks(value)  # of a model, or what is around one
                return
            if tensors:
                self.leaves[path] = Reading(mark_of(tensors), owner)
            for inner, module in value.named_modules():
                own = self.is_own(type(module))
                for name, one in attributes_of(module).items():
                    if own or (isinstance(one, Tensor | list) and not name.startswith("_")):  # such as of torchmetrics
                        self.add(".".join(filter(None, (path, inner, name))), one, module, DEEPEST)
        elif isinstance(value, FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # it is empty
                    held[name] = cell.cell_contents
            defaults, names = value.__defaults__ or (), value.__code__.co_varnames[: value.__code__.co_argcount]
            held |= (
                vars(value)
                | (value.__kwdefaults__ or {})
                | dict(zip(reversed(names), reversed(defaults), strict=False))
            )
        elif isinstance(value, type):
            held = {name: one for name, one in vars(value).items() if not name.startswith("__") and not callable(one)}
        elif isinstance(value, MethodType):
            yield "", value.__self__
        elif isinstance(value, partial):
            held = dict(func=value.func, args=value.args, keywords=value.keywords)
        elif isinstance(value, GeneratorType):
            held = {} if value.gi_frame is None else value.gi_frame.f_locals
            # Of a new one, no variable is set.
            self.leaves[path] = Reading(value.gi_frame and value.gi_frame.f_lasti, owner)
        elif isinstance(value, DataLoader):
            held = dict(dataset=value.dataset, sampler=value.sampler)
            held["batch_sampler"] = getattr(value.batch_sampler, "sampler", None)
        elif isinstance(value, Sampler):  # which the resumed run begins anew, but for what the program has given it
            held = {name: one for name, one in attributes_of(value).items() if isinstance(one, Tensor)}
        elif isinstance(value, itertools.count):
            self.leaves[path] = Reading(repr(value), owner)
        elif isinstance(value, ContextVar):
            yield "", value.get(None)
        elif isinstance(value, queue.SimpleQueue):  # what is in it cannot be read
            self.leaves[path] = Reading(value.qsize(), owner)
        elif isinstance(value, queue.Queue):
            yield "", value.queue
        elif is_generator(value):
            self.leaves[path] = Reading(GeneratorMark(digest_of_values(generator_state(value))), owner)
        elif self._is_followed(value):
            held = self._of_class(type(value)) | attributes_of(value)
        elif isinstance(value, Dataset):
            held = {name: one for name, one in attributes_of(value).items() if name in PARTS_OF_DATA}
        elif (read := getattr(value, "_num_yielded", None)) is not None:  # an iterator of a DataLoader
            self.leaves[path] = Reading(read, owner)
        elif self._has_state(value):
            held = attributes_of(value)  # state_dict may be a collective of all ranks
        elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            self.leaves[path] = Reading(read_so_far(value), owner)
        for name, one in held.items():
            if not isinstance(one, FunctionType | type) or self.is_own(one):
                yield f".{name}", one

    def _has_state(self, value: Any) -> bool:
        """Return whether this is an object of a library with a state, such as a metric. Of streams, that is saved."""
        named = type(value).__module__.partition(".")[0]
        return named != "hvdtrain" and not hasattr(value, "__iter__") and callable(getattr(value, "state_dict", None))

    def _mark(self, value: Any, depth: int = 0) -> object:
        """Return what shows whether an array or a collection changes: numbers, and the identity of others."""
        kind = what_is(value)
        if kind.is_plain:
            long = isinstance(value, str | bytes) and len(value) > MOST_PARTS
            return (len(value), hash(value)) if long else value
        if kind.is_collection and depth < DEEPEST:
            return len(value), *(self._mark(one, depth + 1) for _, one in parts_of(value))
        if id(value) not in self.apart and isinstance(value, Tensor):
            # A result of the model is one of this step: no later step can differentiate through it.
            return (value.data_ptr(), value._version) if value.grad_fn is None else RESULT
        if isinstance(value, BUFFERS):
            return len(value), zlib.crc32(memoryview(value).cast("B")[:MOST_BYTES])
        if has_values(value) and not value.dtype.hasobject:
            first = value.flat[: max(1, MOST_BYTES // max(1, value.itemsize))]
            return value.shape, str(value.dtype), zlib.crc32(first.tobytes())
        return id(value)
