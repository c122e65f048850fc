"""Notices ranks whose data sets differ: in what a random split has chosen, in the order of files, in the numbers of classes.

Each rank takes its part of one data set, so all must have the same. At the start, some samples are compared, read under the
same seed. What a rank itself does not read twice alike is left out. So are paths.
"""

import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
)

from hvdtrain.checkpoint.randomness import generator_state, is_generator
from hvdtrain.engines.accelerators import tensors_in
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.portable import bytes_of
from hvdtrain.engines.portable import difference_of_values as difference_of
from hvdtrain.program.uses import attributes_changed, codes_of, codes_of_program, frame_of_program

COMPARED = 8  # samples
SECONDS = 0.5  # after which no further sample is read
VALUES = 16  # of a tensor
EXACT = 64  # values: classes, lengths, tokens; larger tensors of integers are pictures
NEAR = 0.02  # of the largest value: decoders differ by 1 or 2 of 255, other pictures by more
FEW, NEAR_FEW = 4, 1e-4  # of so few values, such as a target
OF_MAIN = (
    "a worker imports the program, and does not see what main() has set: give it to the Dataset, or to worker_init_fn"
)
OF_INIT = (
    "if worker_init_fn has not set that, a worker does not see what main() has set: give it to the Dataset, or to that"
)
ALIKE = "sort the names of files and classes, and seed what is drawn before training.start()"
Leaf = list[Any]  # JSON: kind, and values of one part of a sample
Compared = list[list[Leaf] | None]  # JSON: of each sample, its parts; None: it could not be read


def compared_samples(order: torch.Tensor) -> list[int]:
    """Return the numbers of the samples to compare, of those in an epoch."""
    return [int(order[at * len(order) // COMPARED]) for at in range(min(COMPARED, len(order)))]


def compared_of(numbers: Sequence[int], read: Callable[[int], Any]) -> Compared:
    """Return what is compared of the samples with these numbers. read: returns a sample, always under the same seed."""
    began, compared = time.perf_counter(), Compared()
    for number in numbers:
        try:
            # What is not the same the second time is random,
            # because the data set has a generator of its own: it is not compared.
            twice = [leaves(read(number)), leaves(read(number))]
        except BaseException as error:  # such a sample is not compared; if training reads it, that raises the error
            if not isinstance(error, Exception) and get_worker_info() is None:  # such as Ctrl-C
                raise
            compared.append(None)
            continue
        compared.append([one if one == other else ["random"] for one, other in zip(*twice, strict=False)])
        if time.perf_counter() - began > SECONDS:
            break
    return compared


def require_same(engine: Engine, numbers: Sequence[int], compared: Compared) -> None:
    """Raise UserError on every rank if samples differ between ranks. A collective. compared: of the samples `numbers`."""
    if engine.size == 1:
        return
    first, *others = engine.all_gather_object(compared, "samples")
    for rank, theirs in enumerate(others, start=1):
        for number, one, other in zip(numbers, first, theirs, strict=False):
            if line := difference_of_samples(number, one or [], other or [], "on rank 0", f"on rank {rank}"):
                raise UserError(
                    f"ranks have different data: {line}: give all ranks all samples, {ALIKE}", everywhere=True
                )


def difference_of_samples(number: int, one: list[Leaf], other: list[Leaf], where: str, elsewhere: str) -> str | None:
    """Return in words how a sample differs between two places; None if it is the same."""
    for part, pair in enumerate(zip(one, other, strict=False), start=1):
        if not same_part(*pair):
            return f"part {part} of sample {number} is {samples_in_words(*pair, where, elsewhere)}"
    return None


def first_samples(dataset: Any) -> list[Any]:
    """Return as JSON how many samples a data set has, and of one of tensors its first one and its last one."""
    numbers = (0, -1) if type(dataset) is TensorDataset and len(dataset) else ()
    with contextlib.suppress(Exception):  # it may have no length
        if not isinstance(dataset, IterableDataset):  # each rank reads a stream of its own
            return [len(dataset), [leaves(dataset[number]) for number in numbers]]
    return [0, []]


def alike_samples(one: list[Any], other: list[Any]) -> bool:
    """Return whether two ranks have the same `first_samples`."""
    pairs = zip(one[1], other[1], strict=False)
    return one[0] == other[0] and not any(difference_of_samples(0, *pair, "", "") for pair in pairs)


def leaves(sample: Any) -> list[Leaf]:
    """Return the parts of a sample."""
    if isinstance(sample, Mapping):
        return [leaf for key in sorted(sample, key=str) for leaf in leaves(sample[key])]
    if isinstance(sample, (list, tuple)):
        return [leaf for part in sample for leaf in leaves(part)]
    return [leaf_of(sample)]


def leaf_of(value: Any) -> Leaf:
    """Return one part of a sample as JSON."""
    if isinstance(value, bytes):
        return ["text", hashlib.blake2b(value, digest_size=8).hexdigest()]
    if isinstance(value, str):
        return ["path"] if "/" in value else ["text", value[:200]]
    try:
        import numpy

        array = value.detach().cpu() if isinstance(value, torch.Tensor) else numpy.asarray(value)
        tensor = torch.as_tensor(array)
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor.resolve_conj()
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    except Exception:  # another object
        return ["other", type(value).__name__]
    flat = tensor.reshape(-1)
    count, last = min(VALUES, len(flat)), len(flat) - 1
    # Whole numbers: by torch.linspace in float32, the last of more than 2^24 values is beyond the end.
    chosen = flat[[at * last // max(count - 1, 1) for at in range(count)]]
    exact = not tensor.is_floating_point() and len(flat) <= EXACT
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ["exact" if exact else "near", chosen.double().tolist(), list(tensor.shape), dtype]


def same_part(one: Leaf, other: Leaf) -> bool:
    """Return whether a part of a sample is the same on two ranks, or is not compared."""
    if {one[0], other[0]} & {"random", "path", "other"}:
        return True
    if one[0] != other[0] or one[0] != "near":
        return one == other
    if one[2:] != other[2:]:  # shape, dtype
        return False
    pairs = list(zip(one[1], other[1], strict=True))
    largest = max((abs(value) for pair in pairs for value in pair if math.isfinite(value)), default=0.0)
    # Hosts may decode the same file a little differently: values are compared, not their bytes.
    limit = largest * (NEAR if len(pairs) > FEW else NEAR_FEW)
    return all(a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= limit for a, b in pairs)


def samples_in_words(one: Leaf, other: Leaf, where: str, elsewhere: str) -> str:
    """Return two parts of samples for a message, with their shapes and types if their first values are the same."""
    words = [values_in_words(leaf) for leaf in (one, other)]
    if words[0] == words[1]:
        words = [" ".join(map(str, leaf[2:])) for leaf in (one, other)]
    return f"{words[0]} {where}, and {words[1]} {elsewhere}"


def values_in_words(leaf: Leaf) -> str:
    """Return the first values of a part of a sample."""
    kind, *content = leaf
    if kind in ("exact", "near"):
        values = ", ".join(f"{value:.6g}" for value in content[0][:4])
        return f"{values}, ..." if len(content[0]) > 4 else values or "empty"
    return repr(content[0]) if content else kind


# ---- what changes in a data set when samples are read, and no checkpoint has

MOST_PARTS = 200  # objects of a data set: its transforms, and what they hold
MOST_NUMBERS = 1_000_000  # of a list
MAKING = {"default_rng", "RandomState", "Random", "SystemRandom", "SeedSequence", "PCG64", "urandom"}
DRIFTS = (
    "a resumed run reads other samples: let a sample follow from its index, and draw with torch's, numpy's or Python's "
)
DRIFTS += "global generators, which are seeded for each sample"


def own_state(dataset: object) -> dict[str, Any]:
    """Return the numbers, lists of numbers and generators that a data set and its transforms hold, by where they are."""
    held, known, parts = dict[str, Any](), set[int](), [("", dataset)]
    while parts and len(known) < MOST_PARTS:
        where, part = parts.pop(0)
        if id(part) in known or isinstance(part, (torch.Tensor, torch.nn.Module, ModuleType)):
            continue
        known.add(id(part))
        for name, value in list(getattr(part, "__dict__", {}).items()):
            if name.startswith("_") and type(part).__module__ not in ("__main__", "__mp_main__"):  # a library's own
                continue
            place = f"{where}{name}"
            if type(value) in (bool, int, float):
                held[place] = value
            elif is_generator(value):
                held[place] = generator_state(value)
            elif isinstance(value, (list, tuple)) and value:
                if type(value[0]) in (bool, int, float) and len(value) <= MOST_NUMBERS:
                    held[place] = tuple(value)
                elif len(value) <= MOST_PARTS:
                    parts += [(f"{place}.", one) for one in value]
            elif hasattr(value, "__dict__") and not isinstance(value, type):
                parts.append((f"{place}.", value))
    return held


def rows_held(dataset: Any, numbers: Sequence[int]) -> dict[str, list[bytes]]:
    """Return what the arrays, tensors and lists of them in a data set have for the samples with these numbers."""
    while isinstance(dataset, Subset):
        dataset, numbers = dataset.dataset, [int(dataset.indices[number]) for number in numbers]
    held = {}
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        with contextlib.suppress(Exception):  # of an array without a length, or of objects
            if (is_dense(value) or isinstance(value, list)) and len(value) == len(dataset):
                rows = [value[number] for number in numbers]
                if all(map(is_dense, rows)):
                    held[name] = [bytes_of(torch.as_tensor(row)).numpy().tobytes() for row in rows]
    return held


def has_cache(dataset: Any) -> bool:
    """Return whether a data set may keep what it has read: by `lru_cache`, or in a dictionary that is empty at first."""
    if isinstance(dataset, Subset):
        return has_cache(dataset.dataset)
    kind = type(dataset)
    functions = [*vars(kind).values(), *getattr(getattr(kind, "__getitem__", None), "__globals__", {}).values()]
    return any(hasattr(one, "cache_info") for one in functions) or any(
        type(one) is dict and not one for one in getattr(dataset, "__dict__", {}).values()
    )


def makes_generators(dataset: Any) -> bool:
    """Return whether the module of a data set may make generators of random numbers, perhaps without a seed."""
    kind = type(dataset.dataset if isinstance(dataset, Subset) else dataset)
    if kind.__module__.startswith("torch."):
        return False
    held = vars(sys.modules[kind.__module__]).values()
    own = [one for one in held if isinstance(one, FunctionType | type) and one.__module__ == kind.__module__]
    return any(MAKING & set(code.co_names) for one in (kind, *own) for code in codes_of(one))


def drifted(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the first part of `own_state` that has changed; empty if none has."""
    for name, held in before.items():
        now = after.get(name, held)
        quick = isinstance(held, (tuple, bool, int, float)) and (now is held or now == held)  # a tuple of numbers
        if not quick and difference_of(held, now):
            return name
    return ""


# ---- what a data set of files has in other order when the program starts again

MOST_ROWS = 1_000  # of a list, evenly spaced
MOST_KEYS = 100_000  # of a dictionary, which is sorted


def rows_of_dataset(dataset: object) -> dict[str, str]:
    """Return a hash of each list of numbers or names that a data set holds, and of each dictionary of them, such as the
    numbers of classes, by where it is; so of arrays and tensors, also of those that the program's transforms hold."""
    held, known, parts = dict[str, str](), set[int](), [("", dataset)]
    while parts and len(known) < MOST_PARTS:
        where, part = parts.pop(0)
        known.add(id(part))
        for name, value in list(getattr(part, "__dict__", {}).items()):
            place, rows = f"{where}{name}", value if isinstance(value, (list, tuple)) else [value]
            if isinstance(value, dict) and len(value) <= MOST_KEYS:
                rows = sorted(value.items(), key=repr)
            if len(rows) > MOST_ROWS:
                rows = [rows[at * len(rows) // MOST_ROWS] for at in range(MOST_ROWS)]
            parts += [
                (f"{place}.", one)
                for one in rows[:MOST_PARTS]
                if (isinstance(one, Dataset) or is_transform(name, one)) and id(one) not in known
            ]
            with contextlib.suppress(Exception):  # any: the data set is the author's
                if text := text_of_rows(value, rows, of_tensors=isinstance(part, TensorDataset) and name == "tensors"):
                    held[place] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return held


def text_of_rows(value: Any, rows: Sequence[Any], *, of_tensors: bool) -> str:
    """Return what is compared of an attribute of a data set; empty if nothing is. rows: of a collection, some of them."""
    if of_tensors:
        text = repr([leaf_of(one[at]) for one in rows for at in (0, len(one) // 2, -1) if len(one)])
        return text + "".join(map(hash_of_exact, rows))
    if is_dense(value):
        if exact := hash_of_exact(value):
            return exact
        kind, *content = leaf_of(value)  # another kind of processor may round differently
        numbers = kind in ("exact", "near")  # else an array of objects
        return repr([[f"{one:.6g}" for one in content[0]], content[1:]]) if numbers else kind
    if isinstance(value, (list, tuple, dict)) and rows and all(map(is_name, rows)):
        return json.dumps([len(value), names_of_rows(rows)])
    return ""


def set_by_methods(dataset: object, names: Iterable[str]) -> frozenset[str]:
    """Return those of these attributes, by path, that a method of a data set, or of a part of it, or the program sets, as
    set_epoch(epoch) does."""
    of_program = set[str]().union(*map(attributes_changed, codes_of_program(frame_of_program())))
    found = set[str]()
    for name in names:
        *path, attribute = name.split(".")
        owner: Any = dataset
        for part in path:
            owner = getattr(owner, part, None)
        methods = [one for base in type(owner).__mro__ for one in vars(base).values() if isinstance(one, FunctionType)]
        if any(attribute in attributes_changed(one.__code__) for one in methods) or attribute in of_program:
            found.add(name)
    return frozenset(found)


def hash_of_exact(value: Any) -> str:
    """Return a hash of all values in a tensor or an array of whole numbers, texts or dates, such as labels, of which few may
    be others; empty if it has other values, or too many."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_floating_point():
            return ""
        value = value.detach().cpu().numpy()
    if value.dtype.kind not in "biuUSMm" or value.size > MOST_NUMBERS:
        return ""
    return hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()


def is_transform(name: str, value: object) -> bool:
    """Return whether an attribute of this name is a transform of the program, or a library's list of them."""
    own = type(value).__module__ in ("__main__", "__mp_main__")
    return hasattr(value, "__dict__") and not isinstance(value, type) and (own or name.startswith("transform"))


def is_dense(value: Any) -> bool:
    """Return whether `value` is a dense tensor, or an array or a number of numpy."""
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return dense or hasattr(value, "__array_interface__")


def is_name(row: object) -> bool:
    """Return whether `row` is a number or text, or a tuple of these, as a path with its label."""
    return isinstance(row, (bool, int, float, str)) or (isinstance(row, tuple) and all(map(is_name, row)))


def names_of_rows(row: Any) -> Any:
    """Return the rows with the last part of each path."""
    if isinstance(row, (list, tuple)):
        return [names_of_rows(one) for one in row]
    # Of a path, the last part: a copy of the data may be elsewhere.
    return row.rpartition("/")[2] if isinstance(row, str) else row


SPLIT = "draw it from a generator of its own, random_split(..., generator=torch.Generator().manual_seed(0))"


def batch_hash(batch: Any) -> int:
    """Return 63 bits of a hash of a batch, not 0."""
    total = hashlib.blake2b(digest_size=8)
    tensors = list(tensors_in(batch))
    for tensor in tensors:
        total.update(repr((tensor.dtype, tensor.shape)).encode())
        total.update(bytes_of(tensor).numpy().data)
    if not tensors:
        total.update(repr(batch).encode())
    return (int.from_bytes(total.digest()) >> 1) | 1


def split_of(*held: Any) -> int | None:
    """Return 63 bits of a hash of the indices of all subsets in data sets and samplers; None if there are none."""
    total, found = hashlib.blake2b(digest_size=8), False
    for indices in indices_in(held):
        numbers, found = torch.as_tensor(indices, dtype=torch.int64), True
        total.update(f"{len(numbers)} ".encode())
        total.update(bytes_of(numbers).numpy().data)
    return int.from_bytes(total.digest()) >> 1 if found else None


def indices_in(held: Iterable[Any]) -> Iterator[Any]:
    """Yield the indices of the subsets that data sets of torch, and samplers, are made of."""
    for one in held:
        if isinstance(one, (Subset, SubsetRandomSampler)):
            yield one.indices
        if isinstance(one, Subset):
            yield from indices_in([one.dataset])
        elif isinstance(one, ConcatDataset):
            yield from indices_in(one.datasets)
        elif type(one) is StackDataset:
            yield from indices_in(list(one.datasets.values() if isinstance(one.datasets, dict) else one.datasets))
