"""How a data set travels to DataLoader workers: as after a fork, they have it as it is then, without a copy for each.

Workers are not forked by the rank (`loading.start_workers_early`), so the data set is pickled. Three things are different
from multiprocessing's pickles:

- Arrays and small tensors travel in one block of memory, which the workers map, each with changes of its own. Large tensors
  are shared by torch, which copies them once.
- Functions and classes that the workers cannot import, because they stand in a function or a notebook, travel by value.
- An array that is mapped from a file is mapped from it again.
"""

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

LARGE = 2**20  # bytes: from here on, torch shares a tensor's memory
IN_BAND = 2**12  # bytes: up to here, memory is a part of the pickle
MOST_SHARED = 100  # tensors, each with a file descriptor
ALIGNMENT = 64  # bytes
STDIN = "<stdin>"  # __file__ of a program from standard input


class Packed:
    """A value that becomes itself again in a worker. It is read when the worker starts."""

    def __init__(self, value: Any):
        self.value = value
        self._block, self._lengths = -1, list[int]()  # for all workers: a file descriptor, and the parts in the file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Anew for each worker, as locks and queues in it demand. The same parts come each time.
        # What workers cannot import, as of a notebook or standard input, travels by value, if cloudpickle is installed.
        by_value = _by_value() if main_cannot_be_imported() else None
        try:
            content, parts = self._pickled(by_value or _Importable)
        except (pickle.PicklingError, AttributeError, TypeError):
            if by_value is not None or (by_value := _by_value()) is None:
                raise
            content, parts = self._pickled(by_value)
        if (lengths := [part.nbytes for part in parts]) != self._lengths:
            self._block, self._lengths = _written(parts), lengths
            weakref.finalize(self, os.close, self._block)
        return unpacked_sample, (content, lengths, reduction.DupFd(self._block) if lengths else None)

    def _pickled(self, kind: Any) -> tuple[bytes, list[memoryview]]:
        """Return the pickle, and the memory that is not in it: that of arrays comes from numpy, as out-of-band data."""
        file, parts, memories, shared = io.BytesIO(), list[memoryview](), dict[object, Memory](), set[int]()

        def is_in_band(buffer: pickle.PickleBuffer) -> bool:
            if (part := buffer.raw()).nbytes > IN_BAND:
                parts.append(part)
            return part.nbytes <= IN_BAND

        class Pickler(kind):  # type: ignore[misc] # one of two
            def reducer_override(self, what: Any) -> Any:
                reduced = _reduced(what, memories, shared)
                return super().reducer_override(what) if reduced is NotImplemented else reduced

        Pickler(file, is_in_band).dump(self.value)
        return file.getvalue(), parts


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


class Memory:
    """That of tensors, of which several may have parts."""

    def __init__(self, storage: torch.UntypedStorage):
        self.storage = storage

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.storage.nbytes():  # which torch.frombuffer refuses
            return torch.UntypedStorage, (0,)
        content: Any = torch.empty(0, dtype=torch.uint8).set_(self.storage).numpy()
        return _storage_of, (pickle.PickleBuffer(content),)


def _storage_of(content: Any) -> torch.UntypedStorage:
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


def _reduced(what: Any, memories: dict[object, Memory], shared: set[int]) -> Any:
    """Return what a worker makes `what` of again; NotImplemented for what is pickled as usual.

    memories, shared: of this pickle so far, by address: the memory of tensors, also by its size, as the beginning of an
    array may be one, too; and which of it torch sends.
    """
    if type(what) is Tensor or type(what) is nn.Parameter:
        unusual = what.is_quantized or what.is_conj() or what.is_neg()
        if what.device.type != "cpu" or what.layout is not torch.strided or unusual:
            return NotImplemented
        storage = what.untyped_storage()
        # torch sends a file descriptor for each shared memory, and 253 fit into one message.
        if storage.is_shared() or (storage.nbytes() >= LARGE and len(shared) < MOST_SHARED):
            storage.share_memory_()
            shared.add(storage.data_ptr())
            return NotImplemented
        memory = memories.setdefault((storage.data_ptr(), storage.nbytes()), Memory(storage))
        layout = what.storage_offset(), tuple(what.shape), what.stride()
        needs_grad = what.requires_grad and what.is_leaf
        return _tensor_of, (memory, what.dtype, layout, needs_grad, type(what) is nn.Parameter)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and type(what) is numpy.memmap and isinstance(what.base, mmap.mmap) and what.filename:
        mode = what.mode if what.mode in ("r", "c") else "r+"
        return numpy.memmap, (what.filename, what.dtype, mode, what.offset, what.shape)
    return NotImplemented


def _tensor_of(storage: Any, dtype: torch.dtype, layout: Any, needs_grad: bool, parameter: bool) -> Tensor:
    found = torch.empty(0, dtype=dtype).set_(storage, *layout)
    return nn.Parameter(found, needs_grad) if parameter else found.requires_grad_(needs_grad)


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _written(parts: list[memoryview]) -> int:
    """Return the descriptor of a new file without a name: in memory, and not in /dev/shm, which may be small."""
    if hasattr(os, "memfd_create"):
        block = os.memfd_create("hvdtrain-data-set")
    else:  # Python was built for a C library of before 2018
        with tempfile.TemporaryFile() as file:
            block = os.dup(file.fileno())
    os.ftruncate(block, sum(_padded(part.nbytes) for part in parts))
    begin = 0
    with mmap.mmap(block, 0) as memory:
        for part in parts:
            memory[begin : begin + part.nbytes] = part
            begin += _padded(part.nbytes)
    return block


def unpacked_sample(content: bytes, lengths: list[int], block: Any) -> Any:
    """Return the value of a `Packed`, in a worker."""
    parts, begin = [], 0
    if block is not None:
        with os.fdopen(block.detach(), "rb") as file:
            # Private, so that a worker may change its data set, as after a fork, and no other worker sees that.
            own = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        for length in lengths:
            parts.append(memoryview(own)[begin : begin + length])
            begin += _padded(length)
    return pickle.loads(content, buffers=parts)


class _Importable(reduction.ForkingPickler):  # knows multiprocessing's own objects
    def __init__(self, file: Any, is_in_band: Any):
        super().__init__(file, pickle.HIGHEST_PROTOCOL, True, is_in_band)

    def reducer_override(self, what: Any) -> Any:
        return NotImplemented


def _by_value() -> Any:
    """Return cloudpickle's pickler, which knows multiprocessing's objects, too; None if it is not installed."""
    try:
        import cloudpickle
    except ImportError:
        return None

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
        def __init__(self, file: Any, is_in_band: Any):
            super().__init__(file, pickle.HIGHEST_PROTOCOL, is_in_band)
            forking: Any = reduction.ForkingPickler(io.BytesIO())
            self.dispatch_table: Any = {**cloudpickle.Pickler.dispatch_table, **forking.dispatch_table}

    return ByValue


def main_cannot_be_imported() -> bool:
    """Return whether workers could not import the program: from standard input, `python -c`, or a notebook."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is None and getattr(main, "__file__", STDIN) == STDIN
