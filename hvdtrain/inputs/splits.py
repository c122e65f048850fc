"""Which samples the subsets in a data set have, as a number, by which ranks and runs compare them."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import ConcatDataset, StackDataset, Subset, SubsetRandomSampler

SPLIT = "draw it from a generator of its own, random_split(..., generator=torch.Generator().manual_seed(0))"


def split_of(*held: Any) -> int | None:
    """Return 63 bits of a hash of the indices of all subsets in data sets and samplers; None if there are none."""
    all_indices = [[int(index) for index in indices] for indices in indices_in(held)]
    if not all_indices:
        return None
    return int.from_bytes(hashlib.blake2b(json.dumps(all_indices).encode(), digest_size=8).digest()) >> 1


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
