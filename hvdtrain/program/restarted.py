"""What a program has otherwise when it is started again, and the run is resumed: texts in another order, another setting of
a loss, copies of weights that are those of the checkpoint, and variables of a step before it.
"""

import argparse
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree
from torch.utils.data import DataLoader, Dataset

from hvdtrain.engines.errors import UserError
from hvdtrain.program.reached import DEEPEST, MOST_PARTS, Reached, attributes_of, is_plain, parts_of, what_is

tree_iter = getattr(_pytree, "tree_iter", _pytree.tree_leaves)  # torch 2.3 has none
# Flags are compared, in whatever order they stand.
UNORDERED = (FunctionType, type, ModuleType, argparse.Namespace, Tensor, torch.optim.Optimizer, LRScheduler)
FEW = 20  # parts of a collection that are followed
MOST_NAMES = 100_000  # of classes, words, files
SETTING = "a setting"  # in place of a hash of what a collection has


def orders_of(names: Mapping[str, Any], reached: Reached) -> dict[str, list[str]]:
    """Return, of each list of texts and of each dictionary that numbers them, a hash of what it has and one of its order. Of
    losses of torch, each of their settings. names: variables, which hold them. reached: has reached nothing yet."""
    found = dict[str, list[str]]()
    for path, value in (pair for name, one in names.items() for pair in collections_in(reached, name, one)):
        if isinstance(value, nn.modules.loss._Loss):
            settings = attributes_of(value).items()
            found |= {f"{path}.{setting}": [SETTING, repr(one)] for setting, one in settings if is_plain(one)}
            continue
        texts = isinstance(value, dict | list | tuple) and 1 < len(value) <= MOST_NAMES
        if not texts or any(type(one) is not str for one in value):
            continue
        if not isinstance(value, dict):
            has, order = sorted(value), list(value)
        elif all(type(number) is int for number in value.values()):
            has, order = [sorted(value), sorted(value.values())], sorted(value.items())
        else:
            continue
        found[path] = [hashlib.blake2b(repr(one).encode(), digest_size=8).hexdigest() for one in (has, order)]
    return found


def collections_in(reached: Reached, path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the collections and modules that a value is or holds, by path: objects, models and functions of the program, and
    a collate_fn. Those of a data set have a line of their own, but for what its objects of other modules hold."""
    kind, seen = what_is(value), reached.seen
    if kind.is_plain or id(value) in reached.apart | seen or depth > DEEPEST or len(seen) > MOST_PARTS:
        return
    seen.add(id(value))
    held: Iterable[tuple[str, Any]] = ()
    if kind.is_collection:
        yield path, value
        ordered = isinstance(value, dict | list | tuple) and len(value) <= FEW
        held = [(f"[{key!r}]", one) for key, one in parts_of(value)] if ordered else ()
    elif isinstance(value, DataLoader):
        held = [(".dataset", value.dataset), (".collate_fn", value.collate_fn)]
    elif isinstance(value, Dataset):
        pairs = attributes_of(value).items()
        held = [(f".{name}", one) for name, one in pairs if type(one).__module__ not in ("__main__", "builtins")]
    elif isinstance(value, nn.Module):
        yield path, value
        layers = [pair for pair in value.named_modules() if reached.is_own(type(pair[1]))]
        named = [(f".{at}.{name}", x) for at, one in layers for name, x in attributes_of(one).items()]
        held = [(inner.replace("..", "."), one) for inner, one in named]
    elif reached.is_own(value) or not isinstance(value, UNORDERED):
        held = reached.held_by(path, value, None)
    for inner, one in held:
        yield from collections_in(reached, f"{path}{inner}", one, depth + 1)


def differences_of(began: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> Iterator[tuple[list[str], str]]:
    """Yield what differs in two answers of `orders_of` for the same names: names, and the rest of a line."""
    other = [name for name, held in now.items() if held != began[name] and held[0] == began[name][0]]
    if mixed := [name for name in other if now[name][0] != SETTING]:
        # A set of texts has another order in each process.
        yield mixed, "has another order than when the run began: sort what comes from a set or a directory"
    for name in [name for name in other if name not in mixed][:1]:
        what = f"is {now[name][1]}, and was {began[name][1]} when the run began"
        yield [name], f"{what}: give the same, or another --output-dir"


def copies_of(restored: Sequence[Tensor], names: Mapping[str, Any], saved: set[int]) -> list[str]:
    """Return which of these variables are modules, lists or dictionaries whose tensors are copies of restored ones. saved:
    the identities of what is restored itself, also later."""
    alike: dict[object, list[Tensor]] = {}  # by shape and first values: layers of one shape are many and large
    for weight in restored:
        alike.setdefault(first_values(weight), []).append(weight)
    copies = list[str]()
    for name, value in names.items():
        held = list(value.parameters()) if isinstance(value, nn.Module) else [*islice(tree_iter(value), MOST_PARTS)]
        tensors = [one for one in held if isinstance(one, Tensor) and one.is_floating_point() and one.numel() > 1]
        if tensors and not any(id(one) in saved for one in (value, *held)):
            pairs = [(one, alike.get(first_values(one), ())) for one in tensors]
            copies += [name] if all(any(torch.equal(one, x) for x in others) for one, others in pairs) else []
    return copies


def first_values(tensor: Tensor) -> object:
    """Return the shape of a tensor and its first values."""
    return tensor.shape, *tensor.detach().reshape(-1)[:4].tolist()


def without_steps(error: UnboundLocalError, step: int, checkpoints: Iterable[Path]) -> UserError | None:
    """Return what an error means in a run that has taken no step since it was resumed after this one: the program uses a
    variable of the last step of an epoch. checkpoints: newest first."""
    if (unset := re.search(r"variable '(\w+)'", str(error))) is None:
        return None
    remedy = f"write `{unset[1]} = None` before the loop over run.epochs, and use it only where it is set"
    if earlier := next((path for path in checkpoints if f"{step:08}" not in path.name), None):
        remedy += f", or go on from an earlier checkpoint once: --resume {earlier}"
    return UserError(
        f"{unset[1]} is not set: the run was resumed after step {step}, the last one of an epoch: {remedy}"
    )
