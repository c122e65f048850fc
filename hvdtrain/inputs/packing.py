"""How a data set travels to DataLoader workers: as after a fork, they have it as it is then, without a copy for each.

Workers are not forked by the rank (`loading.start_workers_early`), so the data set is pickled. Three things are different
from multiprocessing's pickles:

- torch sends a file descriptor for each tensor, of which 253 fit. Here, arrays and small tensors travel in one block of
  memory, which the workers map, each with changes of its own. Large tensors are shared by torch, which copies them once.
- Functions and classes that the workers cannot import, because they stand in a function, a notebook or a program from
  standard input, travel by value (cloudpickle, if it is installed).
- An array that is mapped from a file is mapped from it again.
"""

import contextlib
import io
import mmap
import os
import pickle
import sys
import tempfile
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor, nn

LARGE = 2**20  # bytes: from here on, torch shares a tensor's memory; and an array is not a part of the pickle
MOST_SHARED = 100  # tensors, each with a file descriptor
ALIGNMENT = 64  # bytes
STDIN = "<stdin>"  # __file__ of a program from standard input
Block = tuple[int, int, int]  # number of the block of memory, first byte, bytes


class Packed:
    """A value that becomes itself again in a worker. It is read when the worker starts."""

    def __init__(self, value: Any):
        self.value = value
        self._placed: dict[int, tuple[Block, Any]] = {}  # of id or address: where it was put, and what keeps it alive
        self._blocks: list[int] = []  # file descriptors

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        kind = _by_value() if main_cannot_be_imported() else None
        try:
            content, shared = self._pickled(kind or _PICKLER)
        except (pickle.PicklingError, AttributeError, TypeError):
            if kind is not None or (kind := _by_value()) is None:
                raise
            content, shared = self._pickled(kind)
        return unpacked, (content, shared, [reduction.DupFd(block) for block in self._blocks])

    def _pickled(self, kind: Any) -> tuple[bytes, list[Tensor]]:
        file, shared, new = io.BytesIO(), list[Tensor](), _Content(self._placed, len(self._blocks))

        class Pickler(kind):  # type: ignore[misc] # one of two
            def persistent_id(self, what: Any) -> Any:
                return _described(what, new, shared)

        Pickler(file, pickle.HIGHEST_PROTOCOL).dump(self.value)
        self._placed |= new.placed
        if new.parts:
            self._blocks.append(block := new.written())
            weakref.finalize(self, os.close, block)
        return file.getvalue(), shared


class Travels:
    """Base class of data sets that are sent to workers with what they hold, and not changed afterwards."""

    dataset: Any  # the script's
    _packed: Packed | None = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._packed is None:  # one for all workers
            self._packed = Packed(dict(vars(self)))
        return remade, (type(self), self._packed)


def remade(kind: Any, attributes: dict[str, Any]) -> Any:
    """Return an object of `kind`, in a worker."""
    made = kind.__new__(kind)
    vars(made).update(attributes)
    return made


class _Content:
    """What is put into a new block of memory."""

    def __init__(self, placed: dict[int, tuple[Block, Any]], number: int):
        self._known, self._number = placed, number
        self.placed: dict[int, tuple[Block, Any]] = {}
        self.parts: list[tuple[int, memoryview]] = []  # first byte, content
        self._length = 0

    def place(self, key: int, held: Any, content: Callable[[], memoryview]) -> Block:
        """Return where something is, or will be. held: is kept, so that nothing else gets the same key."""
        if key in self._known:
            return self._known[key][0]
        if key not in self.placed:
            part = content()
            self.parts.append((self._length, part))
            self.placed[key] = (self._number, self._length, part.nbytes), held
            self._length += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        return self.placed[key][0]

    def written(self) -> int:
        """Return the descriptor of a block of memory with the parts."""
        block = _without_name()
        os.ftruncate(block, self._length)
        with mmap.mmap(block, self._length) as memory:
            for first, part in self.parts:
                memory[first : first + part.nbytes] = part
        return block


def _without_name() -> int:
    """Return the descriptor of a new file without a name: in memory, and not in /dev/shm, which may be small."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hvdtrain-data-set")
    with tempfile.TemporaryFile() as file:  # Python was built for a C library of before 2018
        return os.dup(file.fileno())


def _described(what: Any, new: _Content, shared: list[Tensor]) -> Any:
    """Return what a worker makes `what` of again; None for what is pickled as usual."""
    if type(what) is Tensor or type(what) is nn.Parameter:
        return _described_tensor(what, new, shared)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(what, numpy.ndarray) or what.dtype.hasobject:
        return None
    if type(what) is numpy.memmap and isinstance(what.base, mmap.mmap) and what.filename is not None:
        mode = what.mode if what.mode in ("r", "c") else "r+"
        return "file", id(what), (what.filename, what.dtype, mode, what.offset, what.shape)
    if type(what) is numpy.ndarray and what.nbytes >= LARGE and what.flags.c_contiguous:
        block = new.place(id(what), what, lambda: what.reshape(-1).view(numpy.uint8).data)
        return "array", id(what), (block, what.dtype, what.shape)
    return None


def _described_tensor(what: Tensor, new: _Content, shared: list[Tensor]) -> Any:
    unusual = what.is_quantized or what.is_conj() or what.is_neg()
    if what.device.type != "cpu" or what.layout is not torch.strided or unusual:
        return None
    storage = what.untyped_storage()
    size = storage.nbytes()
    if storage.is_shared() or (size >= LARGE and len(shared) < MOST_SHARED):
        place: Any = next((at for at, one in enumerate(shared) if one.data_ptr() == storage.data_ptr()), None)
        if place is None:
            place = len(shared)
            shared.append(torch.empty(0, dtype=torch.uint8).set_(storage))
    elif size:
        whole = lambda: torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data  # noqa: E731
        place = new.place(storage.data_ptr(), storage, whole)
    else:
        place = None
    layout = what.storage_offset(), tuple(what.shape), what.stride()
    needs_grad = what.requires_grad and what.is_leaf
    return "tensor", id(what), (place, what.dtype, layout, needs_grad, type(what) is nn.Parameter)


def unpacked(content: bytes, shared: list[Tensor], blocks: list[Any]) -> Any:
    """Return the value of a `Packed`, in a worker."""
    made: dict[int, Any] = {}
    memories, wholes = [], dict[Block, Any]()
    for block in blocks:
        with contextlib.closing(os.fdopen(block.detach(), "rb")) as file:
            memories.append(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))

    def bytes_of(place: Block) -> Any:
        number, first, size = place
        if place not in wholes:
            wholes[place] = memoryview(memories[number])[first : first + size]
        return wholes[place]

    def tensor(place: Any, dtype: torch.dtype, layout: Any, needs_grad: bool, parameter: bool) -> Tensor:
        if place is None:
            whole = torch.empty(0, dtype=torch.uint8)
        else:
            whole = shared[place] if isinstance(place, int) else torch.frombuffer(bytes_of(place), dtype=torch.uint8)
        found = torch.empty(0, dtype=dtype).set_(whole.untyped_storage(), *layout)
        return nn.Parameter(found, needs_grad) if parameter else found.requires_grad_(needs_grad)

    def array(place: Block, dtype: Any, shape: Any) -> Any:
        import numpy

        return numpy.frombuffer(bytes_of(place), dtype=dtype).reshape(shape)

    def mapped(name: Any, dtype: Any, mode: Any, offset: int, shape: Any) -> Any:
        import numpy

        return numpy.memmap(name, dtype, mode, offset, shape)

    kinds: dict[str, Callable[..., Any]] = {"tensor": tensor, "array": array, "file": mapped}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, what: Any) -> Any:
            kind, number, arguments = what
            if number not in made:
                made[number] = kinds[kind](*arguments)
            return made[number]

    return Unpickler(io.BytesIO(content)).load()


_PICKLER = reduction.ForkingPickler  # knows multiprocessing's own objects


def _by_value() -> Any:
    """Return cloudpickle's pickler, which knows multiprocessing's objects, too; None if it is not installed."""
    try:
        import cloudpickle
    except ImportError:
        return None

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
        def __init__(self, file: Any, protocol: int):
            super().__init__(file, protocol)
            forking: Any = reduction.ForkingPickler(io.BytesIO())
            self.dispatch_table: Any = {**cloudpickle.Pickler.dispatch_table, **forking.dispatch_table}

    return ByValue


def main_cannot_be_imported() -> bool:
    """Return whether workers could not import the program: from standard input, `python -c`, or a notebook."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is None and getattr(main, "__file__", STDIN) == STDIN
