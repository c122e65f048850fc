"""Twins of what gives the samples: samplers, the options of a DataLoader, data sets."""

import inspect
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
    random_split,
)  # fmt: skip

from tests.twins import arguments
from tests.twins.twin import GLOBAL_BATCH, SAMPLES, SKIPPED, Twin, classes, numbered, part, squares

# ---- samplers


class EveryOther(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(0, len(self.data_source), 2))

    def __len__(self) -> int:
        return (len(self.data_source) + 1) // 2


class FirstTwice(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        order = [*range(20), *range(10)]
        return iter([order[i] for i in torch.randperm(30).tolist()])

    def __len__(self) -> int:
        return 30


class Without:
    """A sampler that is an iterable, and nothing else."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(25))


class Growing(Sampler[int]):
    """One more sample each time that it is drawn."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(range(24 + self.times))

    def __len__(self) -> int:
        return 25


WEIGHTS = torch.linspace(0.1, 1, SAMPLES)
# By class of torch: the constructors to try, of the data.
SAMPLERS: dict[str, dict[str, Any]] = {
    "SequentialSampler": {"": SequentialSampler, "over a range": lambda data: SequentialSampler(range(13))},
    "RandomSampler": {"": RandomSampler, "replacement=True": partial(RandomSampler, replacement=True),
        "num_samples=20": partial(RandomSampler, num_samples=20),
        "num_samples=40": partial(RandomSampler, num_samples=40),
        "generator": lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(3)),
        "over a range": lambda data: RandomSampler(range(13))},
    "SubsetRandomSampler": {"": lambda data: SubsetRandomSampler(range(5, 27))},
    "WeightedRandomSampler": {"": lambda data: WeightedRandomSampler(WEIGHTS, 25),
        "replacement=False": lambda data: WeightedRandomSampler(WEIGHTS, 25, replacement=False)},
    "DistributedSampler": {"": lambda data: DistributedSampler(data, 1, 0)},
    "BatchSampler": {},  # below, as a batch_sampler
}  # fmt: skip
LISTED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
OWN = {
    "a subclass of SequentialSampler": EveryOther, "a subclass of RandomSampler": FirstTwice, "a list": lambda data: LISTED,
    "an iterable without length": lambda data: Without(), "one that grows": lambda data: Growing(),
}  # fmt: skip
BY_SEED = "a shuffled order is hvdtrain's own, by --seed, as a line says"
OF_ONE_RANK = "with drop_last, an evaluation leaves out less than a batch of one rank, not of all, as a line says"
WHOLE = "a batch of a batch_sampler stays whole, on one rank"
UNEQUAL = [list(range(3)), list(range(3, 13)), list(range(13, 18)), [18], list(range(19, 31))]


def samplers() -> Iterator[Twin]:
    def sampled(make: Any, data: Any, batch: int) -> DataLoader[Any]:
        return DataLoader(data, batch, sampler=make(data))

    def batched(drop: bool, data: Any, batch: int) -> DataLoader[Any]:
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4 if drop else batch, drop))

    for name, _ in classes(torch.utils.data, Sampler):
        if name not in SAMPLERS:
            SKIPPED[f"sampler {name}"] = "unknown"
        for how, make in SAMPLERS.get(name, {}).items():
            draws = name == "WeightedRandomSampler" or how.startswith(("replacement", "num_samples"))
            told = dict(differs=BY_SEED, says="order by --seed") if how == "generator" else {}
            yield Twin(f"sampler {name} {how}".strip(), loader=partial(sampled, make), draws=draws, **told)
    for name, make in OWN.items():
        yield Twin(f"sampler {name}", loader=partial(sampled, make))
    for drop in (False, True):
        differs = WHOLE if drop else ""  # which, of as many samples, the whole batch of the plain loop is made of
        loader = partial(batched, drop)
        yield Twin(f"batch sampler BatchSampler, drop_last={drop}", loader=loader, differs=differs, differs_alone=False)
    listed = lambda data, batch: DataLoader(data, batch_sampler=UNEQUAL)  # noqa: E731
    yield Twin("batch sampler a list of unequal batches", loader=listed, differs=WHOLE, differs_alone=False)


# ---- options


def collate(samples: list[Any]) -> Any:
    return default_collate(samples)


def begin(worker: int) -> None:
    torch.set_num_threads(1)


def loader_options() -> Iterator[Twin]:
    def loaded(option: str, value: Any, data: Any, batch: int) -> DataLoader[Any]:
        own = {"collate_fn": collate, "worker_init_fn": begin, "generator": torch.Generator().manual_seed(3)}
        workers = {"num_workers": 1} if option in arguments.NEEDS_WORKERS else {}
        shuffle = {"shuffle": True} if option == "generator" else {}
        given = {"batch_size": batch, option: own[option] if value == "own" else value}
        return DataLoader(data, **given, **workers, **shuffle)

    for option in inspect.signature(DataLoader.__init__).parameters:
        if option in ("self", "dataset"):
            continue
        if option not in arguments.LOADER:
            SKIPPED[f"DataLoader {option}"] = "unknown"
        for value in arguments.LOADER.get(option, []):
            yield Twin(
                f"DataLoader {option}={value}", loader=partial(loaded, option, value), differs_alone=option != "drop_last",
                differs={"generator": BY_SEED, "drop_last": OF_ONE_RANK}.get(option, ""),
                says={"generator": "order by --seed", "drop_last": "leaves out"}.get(option, ""),
                brief=option in arguments.NEEDS_WORKERS,
            )  # fmt: skip


# ---- data sets

Pair = namedtuple("Pair", ["x", "y"])
FORMS = {  # what an item is of x and y, and x and y of a batch of such items
    "a dictionary": (lambda x, y, i: {"x": x, "y": y}, lambda batch: (batch["x"], batch["y"])),
    "a named tuple": (lambda x, y, i: Pair(x, y), lambda batch: batch),
    "a list": (lambda x, y, i: [x, y], lambda batch: batch),
    "nested": (lambda x, y, i: {"in": (x, {"y": y})}, lambda batch: (batch["in"][0], batch["in"][1]["y"])),
    "numpy arrays": (lambda x, y, i: (x.numpy(), y.numpy()), lambda batch: batch),
    "with a string": (lambda x, y, i: {"x": x, "y": y, "name": str(i)}, lambda batch: (batch["x"], batch["y"])),
    "numbers": (lambda x, y, i: (x, float(y)), lambda batch: (batch[0], batch[1].float().unsqueeze(1))),
    "one tensor": (lambda x, y, i: torch.cat([x, y]), lambda batch: (batch[:, :-1], batch[:, -1:])),
}


class Kept(Dataset[Any]):
    """Samples of another form."""

    def __init__(self, form: str):
        self.data, self.form = numbered(), form

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return FORMS[self.form][0](*self.data[i], i)


class Together(Dataset[Any]):
    """Is asked for a list of samples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("__getitems__ is to be called")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        data = numbered()
        return [data[i] for i in indices]


class Stream(IterableDataset[Any]):
    """This rank's and this worker's part of the samples: of each global batch, its share."""

    def __iter__(self) -> Iterator[Any]:
        data, (rank, size), worker = numbered(), part, get_worker_info()
        mine = [i for i in range(SAMPLES) if i % GLOBAL_BATCH * size // GLOBAL_BATCH == rank]
        yield from (data[i] for i in (mine[worker.id :: worker.num_workers] if worker else mine))


class Resumable(Stream):
    """Tells where it is, and goes on there."""

    at = first = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for self.at, sample in enumerate(super().__iter__(), start=1):
            if self.at > first:
                yield sample

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"]


class Numbers(IterableDataset[Any]):
    def __init__(self, first: int, last: int):
        self.first, self.last = first, last

    def __iter__(self) -> Iterator[Any]:
        data = numbered()
        return (data[i] for i in range(self.first, self.last) if i % part[1] == part[0])


KNOWN = {
    "TensorDataset": numbered,
    "Subset": lambda: Subset(numbered(), range(3, 29)),
    "ConcatDataset": lambda: ConcatDataset([Subset(numbered(), range(10)), Subset(numbered(), range(10, 31))]),
    "StackDataset": lambda: StackDataset(*(part for part in numbered().tensors)),
    "IterableDataset": Stream,
    "ChainDataset": lambda: ChainDataset([Numbers(0, 10), Numbers(10, 31)]),
}
OTHERS = {
    "random_split": lambda: random_split(numbered(), [25, 6], torch.Generator().manual_seed(1))[0],
    "IterableDataset with state_dict": Resumable,
    "with __getitems__": Together,
    "Subset of one with __getitems__": lambda: Subset(Together(), range(25)),
}


def datasets() -> Iterator[Twin]:
    def loss(form: str, model: nn.Module, *batch: Any) -> Tensor:
        return squares(model, *FORMS[form][1](batch if len(batch) > 1 else batch[0]))

    for name, _ in classes(torch.utils.data, Dataset):
        if name not in KNOWN:
            SKIPPED[f"dataset {name}"] = "unknown"
    for name in sorted(KNOWN):
        yield Twin(f"dataset {name}", data=KNOWN[name])
    for name, make in OTHERS.items():
        yield Twin(f"dataset {name}", data=make)
    for form in FORMS:
        yield Twin(f"dataset items: {form}", data=partial(Kept, form), loss=partial(loss, form))
