"""A DataLoader in a loop of your own, which goes on at the right sample and with the same random numbers after a restart.

    loader = exact_loader(DataLoader(dataset, 32, shuffle=True), seed=1)

It iterates over this rank's batches of each epoch, and has `state_dict` and `load_state_dict`. Order, shares and seeds are
those of `run.steps`, by the same code (inputs/plan.py, samplers.py, fetching.py). They follow from the seed and from the
position alone. So the state is a few numbers, alike on all ranks, and it does not matter which of them saves it.

There are no collectives, and nothing is imported but torch. Rank and size are those of whatever has started the ranks.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.inputs.fetching import Samples
from hvdtrain.inputs.loaders import Jobs, fetched_by, own_randomness, require_usable
from hvdtrain.inputs.loading import as_it_is, show_own_dataset
from hvdtrain.inputs.plan import Plan
from hvdtrain.inputs.samplers import digest_of, drawn, has_own_sampler, numbered
from hvdtrain.inputs.sharding import epoch_order, mixed_seed, seed_generators

Ends = Literal["drop", "weight", "repeat"]
# What torch's DataLoader is given as it is. Not in_order: a batch that overtakes another is one that is not counted.
OPTIONS = ("num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")


def exact_loader(
    dataloader: DataLoader[Any],
    *,
    seed: int = 0,
    ends: Ends | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> "ExactLoader":
    """Return a loader of this rank's batches of `dataloader`, which is that of a program for one process.

    ends: what becomes of the last samples of an epoch, if they are fewer than a step of all ranks takes.
    "drop": left out, as with drop_last=True; with shuffle=True, these are others in each epoch.
    "weight": divided; a rank without any repeats the first. The mean over ranks of `loss * loader.weight` is exact.
    "repeat": filled with samples from the beginning of the epoch.
    Default: "drop" with drop_last=True, else "weight". All ranks have equally many batches in any case.

    rank, size: of the data-parallel group; by default, of torch.distributed, Horovod, accelerate or the launcher.
    Raises ValueError for a DataLoader that can't be made exact.
    """
    with _value_errors():
        return ExactLoader(dataloader, seed, ends, rank, size)


class EpochOrder(NamedTuple):
    """What all ranks take in an epoch."""

    samples: Tensor  # int64 [n]: their numbers, as of `numbered`
    batches: list[Tensor] | None  # of a batch_sampler, which stay whole: each int64 [b]
    per_step: int  # samples, or batches, over all ranks
    steps: int
    digest: int  # of what was drawn


class ExactLoader:
    """What `exact_loader` returns. An iteration goes on where the one before was left, also within an epoch."""

    def __init__(self, given: DataLoader[Any], seed: int, ends: Ends | None, rank: int | None, size: int | None):
        _require_exact(given, ends)
        self._given, self._seed, self._place = given, seed, (rank, size)
        self._ends: Ends = ends or ("drop" if given.drop_last else "weight")
        self._draws = drawn(None, given, seed) if has_own_sampler(given) else None
        self.dataset: Any = given.dataset
        self.batch_size = given.batch_size
        self.epoch = 0  #: from 0; the next one as soon as a loop has come to the end of its iteration
        self.weight = 1.0  #: of the current batch
        self._taken = 0  # samples of this epoch in the batches that the loop was given, over all ranks
        self._is_left = False  # the loop was given batches, and has not come to the end of the epoch
        self._end_is_due = False  # the state was saved at the end of an epoch, which the loop has still to notice
        self._global_batch: int | None = None  # samples of a step over all ranks, in the run that saved the state
        self._orders: dict[Any, EpochOrder] = {}  # the current one
        self._turn = 0  # the number of the current iteration: an older one must not go on
        self._jobs = Jobs()
        self._persistent: DataLoader[Any] | None = None

    @property
    def sampler(self) -> "ExactLoader":
        """Lightning tells a loader's sampler in which epoch it is."""
        return self

    # ---- which samples

    def _rank_and_size(self) -> tuple[int, int]:
        """Return them as they are now: Lightning and accelerate start ranks after a loader was made."""
        rank, size = self._place
        return _announced_place() if rank is None or size is None else (rank, size)

    def _order(self) -> EpochOrder:
        """Return what all ranks take in this epoch. Raises ValueError."""
        _, size = self._rank_and_size()
        count = len(self.dataset)
        per_step = size if self.batch_size is None else self._global_batch or self.batch_size * size
        key = self.epoch, per_step, count
        if key not in self._orders:
            with _value_errors():
                drawn_batches = self._draws.batches(self._seed, self.epoch) if self._draws else [self._plain(count)]
                self._orders = {key: self._ended(drawn_batches, per_step, count)}
        return self._orders[key]

    def _plain(self, count: int) -> Tensor:
        """Return the order of shuffle=True or False."""
        in_order = isinstance(self._given.sampler, SequentialSampler)
        return torch.arange(count) if in_order else epoch_order(count, self._seed, self.epoch)

    def _ended(self, batches: list[Tensor], per_step: int, count: int) -> EpochOrder:
        """Return the order of an epoch with its end as `ends` has it. batches: of an order of samples, the only one."""
        whole = self.batch_size is None
        parts = len(batches) if whole else sum(map(len, batches))
        used = {"drop": parts - parts % per_step, "weight": parts, "repeat": parts + -parts % per_step}[self._ends]
        if not used:
            few = f"an epoch has {parts}, fewer than the {per_step} {'batches' if whole else 'samples'} of a step"
            raise UserError(f'{few}: use fewer ranks, or ends="weight"')
        digest, places = digest_of(batches), torch.arange(used) % parts
        batches = [batches[at] for at in places.tolist()] if whole else [torch.cat(batches)[places]]
        if self._draws or used > parts:
            batches = numbered(batches, count)
        return EpochOrder(torch.cat(batches), batches if whole else None, per_step, -(-used // per_step), digest)

    def _plan(self, order: EpochOrder) -> Plan:
        """Return the plan of the rest of this epoch."""
        rank, size = self._rank_and_size()
        batches, total = order.batches, len(order.samples)
        return Plan(
            total, total, self._seed, self.epoch + 1, rank, size, -(-order.per_step // size),
            global_batch=order.per_step, first_epoch=self.epoch, taken=self._taken, order=lambda *_: order.samples,
            batches=None if batches is None else lambda *_: batches, batches_per_step=size,
        )  # fmt: skip

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, also in one that is resumed: trainers count from its beginning."""
        return self._order().steps

    # ---- iteration

    def __iter__(self) -> Iterator[Any]:
        self._turn += 1
        return self._iterate(self._turn)

    def _iterate(self, turn: int) -> Iterator[Any]:
        order = self._order()
        if self._taken >= len(order.samples) and not self._end_is_due:  # trainers that count never ask for more
            self._begin_next_epoch()
            order = self._order()
        if self._is_left:
            done = f"{self._taken} of {len(order.samples)} samples of the epoch"
            remedy = "to look at a batch, iterate over the DataLoader itself"
            warnings.warn(f"exact_loader goes on after {done}, where a loop was left: {remedy}", stacklevel=2)
        plan = self._plan(order)
        batches = self._opened(plan) if self._taken < len(order.samples) else iter(())
        for step in plan.epoch(self.epoch):
            planned = step.batches[0]
            if turn != self._turn:
                raise RuntimeError(
                    "this iteration has ended: another one of the loader has begun, or a state was loaded"
                )
            with _value_errors(), own_randomness(self._given.num_workers):
                fetched = fetched_by(batches)
            # A collate_fn may leave samples out.
            self.weight = planned.weight * min(1.0, fetched.samples / max(1, planned.local_count))
            self.seed_generators()
            self._taken, self._is_left = self._taken + step.count, True
            yield fetched.batch
        self._begin_next_epoch()
        self.seed_generators("end of epoch")

    def _begin_next_epoch(self) -> None:
        self.epoch, self._taken, self._is_left, self._end_is_due = self.epoch + 1, 0, False, False

    def _opened(self, plan: Plan) -> Iterator[Any]:
        """Return an iterator over the batches of a plan, by workers as the given DataLoader has them."""
        given = self._given
        self._jobs.begin((epoch, batch.indices.tolist()) for epoch, batch in plan)
        loader = self._persistent
        if loader is None:
            # Else torch draws from the program's generator, for each iteration.
            seed = mixed_seed(self._seed, "workers", plan.rank, self.epoch)
            loader = DataLoader(
                Samples(given, self._seed), batch_size=None, sampler=self._jobs, collate_fn=as_it_is,
                worker_init_fn=functools.partial(_begin_worker, given.worker_init_fn),
                generator=torch.Generator().manual_seed(seed), **{name: getattr(given, name) for name in OPTIONS},
            )  # fmt: skip
            self._persistent = loader if given.persistent_workers else None
        return iter(loader)

    def seed_generators(self, *what: str) -> None:
        """Seed the generators of torch, CUDA, Python and numpy by the position, as `run.steps` does for each step.

        So what is drawn in a step is the same after a restart, on each rank, without a generator's state. what: for random
        numbers of another kind, such as those of an evaluation.
        """
        samples = self.epoch * len(self._order().samples) + self._taken
        seed_generators(mixed_seed(self._seed, samples, self._rank_and_size()[0], *what), _device())

    # ---- position

    def set_epoch(self, epoch: int) -> None:
        """Not needed. Tells that the loop is in the next epoch, if the position is the end of the last one."""
        if epoch > self.epoch and self._taken >= len(self._order().samples):
            self._begin_next_epoch()

    def seek(self, batches: int) -> None:
        """Go on after so many batches of this rank since the beginning of training: for loops that count steps."""
        order = self._order()
        if order.batches is not None:
            raise ValueError("seek() does not know how many batches a batch_sampler draws: use load_state_dict()")
        self._turn, self._is_left, self._end_is_due = self._turn + 1, False, False
        self.epoch, taken = divmod(batches, order.steps)
        self._taken = taken * order.per_step

    def state_dict(self) -> dict[str, Any]:
        """Return the position: after the batches that the loop was given, whatever workers have read ahead. Numbers and a
        word; the same on all ranks."""
        order = self._order()
        return {
            "epoch": self.epoch, "taken": self._taken, "ended": self._taken >= len(order.samples), "seed": self._seed,
            "samples": len(self.dataset), "batch_size": self.batch_size, "ends": self._ends,
            "global_batch": None if self.batch_size is None else order.per_step, "order": order.digest,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, also with another number of workers or ranks.

        A step of all ranks keeps its number of samples: with fewer ranks, their batches become larger. Raises ValueError for
        a state of other data, or of another seed, batch size or sampler.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or set(own) - set(state):
            raise ValueError("load_state_dict() got something else than what state_dict() of an exact_loader returned")
        for name in ("samples", "seed", "ends"):
            if state[name] != own[name]:
                remedy = "use the same, or begin anew without the state"
                raise ValueError(f"the state is of {name}={state[name]!r}, the loader has {own[name]!r}: {remedy}")
        step, size = state["global_batch"], self._rank_and_size()[1]
        if state["batch_size"] != self.batch_size and (self.batch_size is None or self.batch_size * size != step):
            given = f"batch_size={self.batch_size} on {size} ranks"
            remedy = f"use batch_size={state['batch_size']}, which keeps {step} samples in a step of all ranks"
            raise ValueError(f"the state is of batch_size={state['batch_size']}, the loader has {given}: {remedy}")
        self._turn, self._is_left, self._end_is_due = self._turn + 1, False, bool(state["ended"])
        self.epoch, self._taken, self._global_batch = state["epoch"], state["taken"], step
        if (order := self._order()).digest != state["order"]:
            raise ValueError("the state is of another order of samples: use the same shuffle=, sampler and data set")
        if self._end_is_due:
            self._taken = len(order.samples)


def _require_exact(given: DataLoader[Any], ends: str | None) -> None:
    """Raise UserError for a DataLoader whose order or position can't be known."""
    if not isinstance(given, DataLoader):
        raise UserError(f"exact_loader got a {type(given).__name__}: give it a DataLoader of torch")
    if type(given).__module__.partition(".")[0] == "accelerate":
        raise UserError("the DataLoader is accelerate's: give exact_loader yours, and leave it out of prepare()")
    if isinstance(given.dataset, IterableDataset):
        remedy = "use a Dataset with __getitem__ and __len__, or run.steps(), which keeps the state of a stream"
        raise UserError(f"the DataLoader has an IterableDataset, whose samples have no index: {remedy}")
    if given.batch_size is None and given.batch_sampler is None:
        raise UserError("the DataLoader has batch_size=None: give it a batch_size, or a batch_sampler")
    if ends not in (None, "drop", "weight", "repeat"):
        raise UserError(f'ends={ends!r}: use "drop", "weight" or "repeat"')
    if given.drop_last and ends not in (None, "drop"):
        raise UserError(f"ends={ends!r} of a DataLoader with drop_last=True: leave one of them out")
    require_usable(given)


def _announced_place() -> tuple[int, int]:
    """Return rank and size, as the first of these that is in use has them; what is not imported is not in use."""
    distributed: Any = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    horovod: Any = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return horovod.rank(), horovod.size()
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is not None and (state := accelerate.PartialState._shared_state):
        return state["process_index"], state["num_processes"]
    with _value_errors():
        return announced()[1:]


def _device() -> torch.device | None:
    """Return the device of the program's other generator."""
    if not torch.cuda.is_available():
        return None
    # Before CUDA is initialized, torch keeps the seed for later.
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def _begin_worker(own: Any, worker: int) -> None:
    show_own_dataset()
    if own is not None:
        own(worker)


@contextlib.contextmanager
def _value_errors() -> Iterator[None]:
    """Raise a UserError as a ValueError: the exit code is the program's."""
    try:
        yield
    except UserError as error:
        raise ValueError(str(error)) from None
