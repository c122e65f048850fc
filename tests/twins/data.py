"""Twins of what gives the samples: samplers, the options of a DataLoader, data sets."""

import inspect
from collections import namedtuple
from collections.abc import Iterator
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
    TensorDataset,
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
# By class of torch: the constructors to try, and whether the samples are drawn at random.
SAMPLERS: dict[str, dict[str, Any]] = {
    "SequentialSampler": {
        "": lambda data: SequentialSampler(data),
        "over a range": lambda data: SequentialSampler(range(13)),
    },
    "RandomSampler": {
        "": lambda data: RandomSampler(data),
        "replacement=True": lambda data: RandomSampler(data, replacement=True),
        "num_samples=20": lambda data: RandomSampler(data, num_samples=20),
        "num_samples=40": lambda data: RandomSampler(data, num_samples=40),
        "generator": lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(3)),
        "over a range": lambda data: RandomSampler(range(13)),
    },
    "SubsetRandomSampler": {"": lambda data: SubsetRandomSampler(range(5, 27))},
    "WeightedRandomSampler": {
        "": lambda data: WeightedRandomSampler(WEIGHTS, 25),
        "replacement=False": lambda data: WeightedRandomSampler(WEIGHTS, 25, replacement=False),
    },
    "DistributedSampler": {"": lambda data: DistributedSampler(data, 1, 0)},
    "BatchSampler": {},  # below, as a batch_sampler
}
LISTED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
OWN = {
    "a subclass of SequentialSampler": EveryOther, "a subclass of RandomSampler": FirstTwice, "a list": lambda data: LISTED,
    "an iterable without length": lambda data: Without(), "one that grows": lambda data: Growing(),
}  # fmt: skip
BY_SEED = "a shuffled order is hvdtrain's own, by --seed, as a line says"
OF_ONE_RANK = "with drop_last, an evaluation leaves out less than a batch of one rank, not of all, as a line says"
WHOLE = "a batch of a batch_sampler stays whole, on one rank"


def samplers() -> Iterator[Twin]:
    for name, _ in classes(torch.utils.data, Sampler):
        if name not in SAMPLERS:
            SKIPPED[f"sampler {name}"] = "unknown"
        for how, make in SAMPLERS.get(name, {}).items():
            yield Twin(
                f"sampler {name} {how}".strip(),
                loader=lambda data, batch, make=make: DataLoader(data, batch, sampler=make(data)),
                draws=name == "WeightedRandomSampler" or how.startswith(("replacement", "num_samples")),
                differs=BY_SEED if how == "generator" else "",
                says="order by --seed" if how == "generator" else "",
            )
    for name, make in OWN.items():
        loader = lambda data, batch, make=make: DataLoader(data, batch, sampler=make(data))  # noqa: E731
        yield Twin(f"sampler {name}", loader=loader)
    for drop in (False, True):
        loader = lambda data, batch, drop=drop: DataLoader(  # noqa: E731
            data, batch_sampler=BatchSampler(SequentialSampler(data), 4 if drop else batch, drop)
        )
        differs = WHOLE if drop else ""  # which, of as many samples, the whole batch of the plain loop is made of
        yield Twin(f"batch sampler BatchSampler, drop_last={drop}", loader=loader, differs=differs, differs_alone=False)
    unequal = [list(range(3)), list(range(3, 13)), list(range(13, 18)), [18], list(range(19, 31))]
    listed = lambda data, batch: DataLoader(data, batch_sampler=unequal)  # noqa: E731
    yield Twin("batch sampler a list of unequal batches", loader=listed, differs=WHOLE, differs_alone=False)


# ---- options


def collate(samples: list[Any]) -> Any:
    return default_collate(samples)


def begin(worker: int) -> None:
    torch.set_num_threads(1)


def loader_options() -> Iterator[Twin]:
    for option in inspect.signature(DataLoader.__init__).parameters:
        if option in ("self", "dataset"):
            continue
        if option not in arguments.LOADER:
            SKIPPED[f"DataLoader {option}"] = "unknown"
            continue
        for value in arguments.LOADER[option]:

            def loader(data: Dataset[Any], batch: int, option: str = option, value: Any = value) -> DataLoader[Any]:
                own = {"collate_fn": collate, "worker_init_fn": begin, "generator": torch.Generator().manual_seed(3)}
                given = {option: own[option] if value == "own" else value}
                if option in arguments.NEEDS_WORKERS:
                    given["num_workers"] = 1
                if option == "generator":
                    given["shuffle"] = True
                return DataLoader(data, **({"batch_size": batch} | given))

            yield Twin(
                f"DataLoader {option}={value}",
                loader=loader,
                differs={"generator": BY_SEED, "drop_last": OF_ONE_RANK}.get(option, ""),
                differs_alone=option != "drop_last",
                says={"generator": "order by --seed", "drop_last": "leaves out"}.get(option, ""),
                brief=option in arguments.NEEDS_WORKERS,
            )


# ---- data sets

Pair = namedtuple("Pair", ["x", "y"])


class Kept(Dataset[Any]):
    """Samples of another form. form: of what an item is."""

    def __init__(self, form: str):
        self.data, self.form = numbered(), form

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        x, y = self.data[i]
        return {
            "a dictionary": {"x": x, "y": y}, "a named tuple": Pair(x, y), "a list": [x, y], "nested": {"in": (x, {"y": y})},
            "numpy arrays": (x.numpy(), y.numpy()), "with a string": {"x": x, "y": y, "name": str(i)},
            "numbers": (x, float(y)), "one tensor": torch.cat([x, y]),
        }[self.form]  # fmt: skip


def read(form: str, batch: Any) -> tuple[Tensor, Tensor]:
    if form == "nested":
        return batch["in"][0], batch["in"][1]["y"]
    if form == "one tensor":
        return batch[:, :-1], batch[:, -1:]
    if form == "numbers":
        return batch[0], batch[1].float().unsqueeze(1)
    if isinstance(batch, dict):
        return batch["x"], batch["y"]
    return batch[0], batch[1]


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


def datasets() -> Iterator[Twin]:
    known = {
        "TensorDataset": numbered,
        "Subset": lambda: Subset(numbered(), range(3, 29)),
        "ConcatDataset": lambda: ConcatDataset([Subset(numbered(), range(10)), Subset(numbered(), range(10, 31))]),
        "StackDataset": lambda: StackDataset(*(part for part in numbered().tensors)),
        "IterableDataset": Stream,
        "ChainDataset": lambda: ChainDataset([Numbers(0, 10), Numbers(10, 31)]),
    }
    for name, _ in classes(torch.utils.data, Dataset):
        if name in known:
            yield Twin(f"dataset {name}", data=known[name])
        else:
            SKIPPED[f"dataset {name}"] = "unknown"
    yield Twin(
        "dataset random_split", data=lambda: random_split(numbered(), [25, 6], torch.Generator().manual_seed(1))[0]
    )
    yield Twin("dataset IterableDataset with state_dict", data=Resumable)
    yield Twin("dataset with __getitems__", data=Together)
    yield Twin("dataset Subset of one with __getitems__", data=lambda: Subset(Together(), range(25)))
    for form in (
        "a dictionary",
        "a named tuple",
        "a list",
        "nested",
        "numpy arrays",
        "with a string",
        "numbers",
        "one tensor",
    ):

        def loss(model: nn.Module, *batch: Any, form: str = form) -> Tensor:
            return squares(model, *read(form, batch if len(batch) > 1 else batch[0]))

        yield Twin(f"dataset items: {form}", data=lambda form=form: Kept(form), loss=loss)


__all__ = ["TensorDataset", "datasets", "loader_options", "samplers"]
