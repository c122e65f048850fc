"""The batches of a map-style data set, as torch's DataLoader would make them; and how many samples are in them."""

import builtins
import contextlib
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset, TensorDataset, default_collate, get_worker_info

from hvdtrain.engines.accelerators import tensors_in
from hvdtrain.engines.portable import is_array
from hvdtrain.inputs.packing import Travels
from hvdtrain.inputs.sameness import (
    Compared,
    compared_of,
    drifted,
    has_cache,
    leaves,
    makes_generators,
    own_state,
    rows_held,
)
from hvdtrain.inputs.sharding import global_state, kept, mixed_seed, seed_generators
from hvdtrain.program.uses import instructions_of

COMPARISON = -1  # in place of an epoch: what is compared between ranks of the samples with these indices
CACHE = "a cache of random samples (keep them there as they are before the augmentation)"
UNSEEDED = "a generator of random numbers that is made without a seed"


class Fetched(NamedTuple):
    """A collated batch."""

    batch: Any
    samples: int  # in it: fewer than were asked for if the collate_fn has left some out
    problem: str = ""  # why there is none, in place of an exception that has another meaning to whoever calls
    drifted: str = ""  # what has changed in the data set by reading it


# StopIteration would end a generator or a loop; in a worker, the others end it without a word.
SILENT = (StopIteration, KeyboardInterrupt, SystemExit)


def silent(error: BaseException, what: str) -> str:
    """Return the line for what `what` has raised, one of SILENT. In the rank, all but StopIteration are raised again."""
    if not isinstance(error, StopIteration) and get_worker_info() is None:
        raise error
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{what} raised {type(error).__name__} ({at.filename}:{at.lineno}): let it return the sample"


class Samples(Travels, Dataset[Any]):
    """Batches of a map-style data set: item (epoch, indices) is the collated batch of those samples.

    Before each sample, the generators of torch, Python and numpy are seeded from seed, epoch and index, and from how often
    a sampler has drawn it before (see `samplers.numbered`). A data set that answers lists of indices is seeded from the
    list.
    """

    def __init__(self, given: DataLoader[Any], seed: int, *, watched: bool = False):
        """watched: what the first batch of a process changes in the data set is told with it."""
        dataset: Any = given.dataset
        self.dataset, self.collate, self.seed = dataset, given.collate_fn, seed
        self.count: int = len(dataset)
        self.unwatched = watched  # as long as this process has not read a batch

    @cached_property
    def only_looks_up(self) -> bool:
        """Whether reading a sample draws no random numbers: the generators need no seed then, which takes 10 µs."""
        with contextlib.suppress(Exception):  # any: the data set is the author's
            return looks_up(self.dataset)
        return False

    @property
    def moves_generators(self) -> bool:
        """Whether reading a batch seeds the generators, or may draw from them."""
        return not self.only_looks_up or self.collate is not default_collate

    def __getitem__(self, job: tuple[int, list[int]]) -> Fetched:
        epoch, numbers = job
        if epoch == COMPARISON:
            return Fetched(self.compared(numbers), 0)
        before = self.own_state() if self.unwatched else None
        may_draw = before is not None and not self.only_looks_up
        cached = may_draw and has_cache(self.dataset) and self.draws(epoch, numbers[0])
        rows = self.rows(numbers) if before is not None else {}
        unseeded = may_draw and not takes_lists(self.dataset) and self.makes_generators()
        try:
            samples = self.samples(epoch, numbers)
            first = self.first_of(samples) if rows or unseeded else []
            batch = self.collate(samples)
        except SILENT as error:
            those = ", ".join(str(number % self.count) for number in numbers)
            return Fetched(None, 0, silent(error, f"the data set, or its collate_fn, of the samples {those},"))
        count = samples_in(batch, samples, len(numbers)) if may_leave_out(self.collate) else len(numbers)
        if before is None:
            return Fetched(batch, count)
        self.unwatched = False
        if cached and not self.draws(epoch, numbers[0]):
            return Fetched(batch, count, drifted=CACHE)
        changed = drifted(before, self.own_state())
        if not changed and first and (changed := drifted(rows, self.rows(numbers)) or (UNSEEDED if unseeded else "")):
            # Read again: a cache that is filled has the same sample then, and so has what draws seeded numbers.
            again = first
            with contextlib.suppress(Exception):  # any: some can be read once
                again = self.first_of(self.samples(epoch, numbers[:1]))
            changed = "" if again == first else changed
        return Fetched(batch, count, drifted=changed)

    def rows(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return what the data set holds for these samples, which reading them may change."""
        with contextlib.suppress(Exception):  # any: the data set is the author's, and may be indexed otherwise
            held = rows_held(self.dataset, [number % self.count for number in numbers])
            return {f"{name} of the data set": rows for name, rows in held.items()}
        return {}

    def makes_generators(self) -> bool:
        with contextlib.suppress(Exception):  # as above
            return makes_generators(self.dataset)
        return False

    def first_of(self, samples: Any) -> list[Any]:
        """Return the parts of the first sample; none if these are no list of samples."""
        return leaves(samples[0]) if isinstance(samples, (list, tuple)) and samples else []

    def draws(self, epoch: int, number: int) -> bool:
        """Return whether reading the sample with this number draws random numbers."""
        with kept():
            self.samples(epoch, [number])
            after = global_state()
            self._seed(epoch, [number], as_list=takes_lists(self.dataset))
            # Read and seeded again: if the states differ now, reading has drawn from the generators.
            return global_state() != after

    def own_state(self) -> dict[str, Any]:
        """Return what may change in the data set, and in a collate_fn that is an object, or a method of one."""
        collate = getattr(self.collate, "__self__", self.collate)
        held = {f"{name} of the data set": one for name, one in own_state(self.dataset).items()}
        return held | {f"{name} of collate_fn": one for name, one in own_state(collate).items()}

    def compared(self, numbers: Sequence[int]) -> Compared:
        """Return what is compared of the samples with these numbers."""
        return compared_of(numbers, lambda number: self.samples(0, [number])[0])

    def samples(self, epoch: int, numbers: Sequence[int]) -> Any:
        """Return the samples with these numbers: k * `count` + index, if a sampler has drawn an index k times before."""
        if self.only_looks_up:
            if self.moves_generators:  # what collates may draw
                self._seed(epoch, numbers[-1:], as_list=False)
            return [self.dataset[number % self.count] for number in numbers]
        if takes_lists(self.dataset):
            self._seed(epoch, numbers, as_list=True)
            return self.dataset.__getitems__([number % self.count for number in numbers])
        samples = []
        for number in numbers:
            self._seed(epoch, [number], as_list=False)
            samples.append(self.dataset[number % self.count])
        return samples

    def _seed(self, epoch: int, numbers: Sequence[int], *, as_list: bool) -> None:
        """Seed the generators for samples that are read as a list, or for a single one."""
        again, index = divmod(numbers[0], self.count)
        parts = ["list", *numbers] if as_list else [index, *([again] if again else [])]
        # So random augmentation depends neither on the worker nor on the rank that loads the sample.
        seed_generators(mixed_seed(self.seed, epoch, *parts))


UNCHANGING = {bool, int, float, str, torch.dtype, torch.Tensor}
# Methods of these, and functions of torch, that draw nothing, and whose results have no code of the program's.
DRAWS_NOTHING = re.compile(
    "as_tensor|astype|clone|contiguous|copy|div|double|flatten|float|float32|from_numpy|full|int|int64|item|long|mul|numpy|"
    "ones|permute|reshape|shape|size|squeeze|stack|tensor|to|transpose|uint8|unsqueeze|view|zeros"
)


def looks_up(dataset: Any) -> bool:
    """Return whether a data set is known only to take parts of numbers, tensors and arrays that it holds."""
    kind: Any = type(dataset)
    if kind in (Subset, TensorDataset):
        return kind is TensorDataset or looks_up(dataset.dataset)
    if kind in (list, tuple):
        return len(set(map(type, dataset))) == 1 and are_plain(dataset[0])
    if takes_lists(dataset) or kind.__getattribute__ is not object.__getattribute__:
        return False
    read, held = kind.__getitem__, vars(dataset)
    own, of_own = read.__code__.co_varnames[0], False  # the name of `self`; whether that was just loaded
    for one in instructions_of(read.__code__):
        name, is_attribute = one.argval, one.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if of_own:
            known = is_attribute and name in held and not hasattr(kind, name) and are_plain(held[name])
        elif is_attribute:
            known = DRAWS_NOTHING.fullmatch(name) is not None
        elif one.opname == "LOAD_GLOBAL":
            found = read.__globals__.get(name, getattr(builtins, name, None))
            known = any(found is safe for safe in (torch, len, int, float))
        else:
            known = not isinstance(name, CodeType) and not one.opname.startswith(("IMPORT", "LOAD_DEREF", "STORE_ATTR"))
        if not known:
            return False
        of_own = one.opname.startswith("LOAD_FAST") and own == (name[-1] if isinstance(name, tuple) else name)
    return True


def are_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, a tensor, an array of numbers, or a list or dictionary of these."""
    if type(value) in (list, tuple, dict):
        parts = list(value.values()) if type(value) is dict else value
        return set(map(type, parts)) <= UNCHANGING or (len(parts) < 100 and all(map(are_plain, parts)))
    return type(value) in UNCHANGING or (is_array(value) and value.dtype.kind in "biufc")


def takes_lists(dataset: Any) -> bool:
    """Return whether torch's DataLoader asks this data set for a list of indices, with `__getitems__`."""
    # torch's own classes only pass the list on. If nothing below takes lists, samples are the same one by one.
    if type(dataset) is Subset:
        return takes_lists(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(map(takes_lists, parts.values() if isinstance(parts, dict) else parts))
    return bool(getattr(dataset, "__getitems__", None))


def may_leave_out(collate: Callable[[Any], Any]) -> bool:
    """Return whether a batch may have fewer samples than were collated: torch's own function takes all."""
    return collate is not default_collate


def samples_in(batch: Any, samples: Any, asked: int) -> int:
    """Return how many of the `asked` samples are in `batch`, which the user's own collate_fn has made of `samples`.

    What a collate_fn does is not known. It has left samples out if some are None, and the batch does not have as many rows
    all the same; or if all parts of the batch agree on fewer rows.
    """
    if batch is None:
        return 0
    missing = sum(sample is None for sample in samples) if isinstance(samples, (list, tuple)) else 0
    lengths = {length for part in parts_of_batch(batch) if (length := rows_of(part, asked)) is not None}
    if missing:
        return asked if lengths == {asked} else asked - missing
    if len(lengths) != 1 or (isinstance(batch, list) and len(batch) == asked):
        return asked
    tensors = [part for part in parts_of_batch(batch) if isinstance(part, torch.Tensor)]
    # Recurrent layers take the batch second: the first length of such a tensor is that of the sequences.
    by_time = tensors and all(part.ndim > 1 and part.shape[1] == asked for part in tensors)  # [time, batch, ...]
    if by_time and not all(shapes_in(sample) & {tuple(part.shape[1:]) for part in tensors} for sample in samples):
        return asked
    return min(asked, *lengths)


def rows_in(batch: Any) -> int:
    """Return the number of samples in a batch that was collated elsewhere: the length of its first tensor, or list."""
    for tensor in tensors_in(batch):
        return len(tensor) if tensor.ndim else 1
    while isinstance(batch, Mapping) and batch:
        batch = next(iter(batch.values()))
    return len(batch) if isinstance(batch, (list, tuple)) else 1


def shapes_in(sample: Any) -> set[tuple[int, ...]]:
    """Return the shapes of the tensors and arrays of a sample."""
    if isinstance(sample, (list, tuple, Mapping)):
        return {shape for part in parts_of_batch(sample) for shape in shapes_in(part)}
    return {tuple(sample.shape)} if hasattr(sample, "shape") else set()


def parts_of_batch(batch: Any) -> list[Any]:
    """Return the parts of a batch, of which each may have a row for each sample."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, (list, tuple)) else [batch]


def rows_of(part: Any, asked: int) -> int | None:
    """Return the number of rows of a part of a batch; None if it has no rows, or is not understood."""
    if getattr(part, "shape", None):  # a tensor, or an array of numpy
        return len(part)
    if isinstance(part, (list, tuple, Mapping)):
        inner = parts_of_batch(part)
        if any(rows_of(one, asked) == asked for one in inner):  # further parts, of which one has a row for each sample
            return asked
        alike = isinstance(part, (list, tuple)) and len({type(one) for one in inner}) == 1
        return len(inner) if alike and not isinstance(inner[0], (list, tuple)) else None
    return None
