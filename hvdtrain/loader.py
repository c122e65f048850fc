"""A DataLoader in a loop of your own, which goes on at the right sample and with the same random numbers after a restart.

    loader = exact_loader(DataLoader(dataset, 32, shuffle=True), seed=1)

It iterates over this rank's batches of each epoch, and has `state_dict` and `load_state_dict`. Order, shares and seeds are
those of `run.steps`, by the same code (inputs/plan.py, samplers.py, fetching.py). They follow from the seed and from the
position alone. So the state is a few numbers, alike on all ranks, and it does not matter which of them saves it.

There are no collectives. Nothing is imported but torch. Rank and size are those of whatever has started the ranks.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import place_in_use
from hvdtrain.inputs.dataloaders import Jobs, fetched_by, plain_order, require_usable
from hvdtrain.inputs.fetching import Samples
from hvdtrain.inputs.loading import as_it_is, show_own_dataset
from hvdtrain.inputs.plan import Plan
from hvdtrain.inputs.samplers import DrawnBatches, digest_of_indices, drawn, has_own_sampler, numbered
from hvdtrain.inputs.sharding import mixed_seed, seed_generators

Ends = Literal["drop", "weight", "repeat"]
# What torch's DataLoader is given as it is. Not in_order: a batch that overtakes another is one that is not counted.
OPTIONS = ("num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")


@contextlib.contextmanager
def _value_errors() -> Iterator[None]:
    """Raise a UserError as a ValueError: the exit code is the program's."""
    try:
        yield
    except UserError as error:
        raise ValueError(str(error)) from None


class ExactLoader:
    """This rank's batches of `dataloader`, which is that of a program for one process. An iteration goes on where the one
    before was left, also within an epoch.

    ends: what becomes of the last samples of an epoch, if they do not fill a step of all ranks. "drop": left out. "weight":
    divided; a rank without any repeats the first, and the mean over ranks of `loss * loader.weight` is exact. "repeat":
    filled from the beginning of the epoch. Default: "drop" with drop_last=True, else "weight".
    rank, size: of the data-parallel group; by default, of torch.distributed, Horovod, accelerate or the launcher.
    batches_done: for a trainer that counts, and saves no state of the loader. Called when the first epoch begins, it returns
    how many batches this rank has done since the beginning of training.
    Raises ValueError for a DataLoader that can't be made exact.
    """

    @_value_errors()
    def __init__(
        self, dataloader: DataLoader[Any], *, seed: int = 0, ends: Ends | None = None,
        rank: int | None = None, size: int | None = None, batches_done: Callable[[], int] | None = None,
    ):  # fmt: skip
        _require_exact(dataloader, seed, ends, rank, size, batches_done)
        self._given, self._seed, self._batches_done = dataloader, seed, batches_done
        self._place = None if rank is None or size is None else (rank, size)
        self._ends: Ends = ends or ("drop" if dataloader.drop_last else "weight")
        self._draws = drawn(None, dataloader, seed) if has_own_sampler(dataloader) else None
        self.dataset: Any = dataloader.dataset
        self.drop_last = self._ends == "drop"  #: as of a DataLoader: loops look at it
        self.weight = 1.0  #: of the current batch
        self._global_batch: int | None = None  # samples of a step over all ranks, in the run that saved the state
        self._plans: dict[Any, Plan] = {}  # the current one; self._digest is that of its order
        self._turn = 0  # the number of the current iteration: an older one must not go on
        self._jobs = Jobs()
        self._persistent: DataLoader[Any] | None = None
        #: from 0; the next one as soon as a loop has come to the end of its iteration
        self.epoch: int
        self._taken: int  # samples of this epoch in the batches that the loop was given, over all ranks
        self._is_left: bool  # the loop was given batches, and has not come to the end of the epoch
        self._go_to(0, 0)

    def __getattr__(self, name: str) -> Any:
        """Return what a program asks of the DataLoader, such as its number of workers."""
        if name in (*OPTIONS, "collate_fn", "worker_init_fn"):
            return getattr(self._given, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    @property
    def batch_size(self) -> Any:
        return self._given.batch_size

    @property
    def sampler(self) -> "ExactLoader":
        """Lightning tells a loader's sampler in which epoch it is."""
        return self

    # ---- which samples

    @_value_errors()
    def _rank_and_size(self) -> tuple[int, int]:
        return self._place or place_in_use()  # now: trainers start ranks after a loader was made

    def _plan(self) -> Plan:
        """Return what this rank takes in this epoch, from its beginning. Raises ValueError."""
        rank, size = self._rank_and_size()
        count, whole = len(self.dataset), self.batch_size is None
        per_step = size if whole else self._global_batch or self.batch_size * size
        key = self.epoch, rank, size, per_step, count
        if key not in self._plans:
            order, batches = self._ended(per_step, count)
            self._plans = {key: Plan(
                len(order), len(order), self._seed, self.epoch + 1, rank, size, -(-per_step // size), global_batch=per_step,
                first_epoch=self.epoch, order=lambda *_: order, batches=(lambda *_: batches) if whole else None,
                batches_per_step=size,
            )}  # fmt: skip
        return self._plans[key]

    @_value_errors()
    def _ended(self, per_step: int, count: int) -> tuple[Tensor, DrawnBatches]:
        """Return the order of this epoch with its end as `ends` has it, int64 [n], and its parts: the batches of a
        batch_sampler, which stay whole. per_step: samples, or such batches, over all ranks."""
        whole, draws = self.batch_size is None, self._draws
        if draws:
            batches = draws.batches(self._seed, self.epoch)
        else:
            batches = DrawnBatches.one(plain_order(self._given, count, self._seed, self.epoch))
        self._digest = digest_of_indices(batches)
        parts = len(batches) if whole else len(batches.order)
        used = {"drop": parts - parts % per_step, "weight": parts, "repeat": parts + -parts % per_step}[self._ends]
        if not used:
            few = f"an epoch has {parts}, fewer than the {per_step} {'batches' if whole else 'samples'} of a step"
            raise UserError(f'{few}: use fewer ranks, or ends="weight"' if parts else "the DataLoader has no samples")
        # [used]: with "repeat", places beyond the last one begin again at the first.
        places = torch.arange(used) % parts
        batches = batches.at(places) if whole else DrawnBatches.one(batches.order[places])
        batches = numbered(batches, count) if draws or used > parts else batches
        return batches.order, batches

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, also in one that is resumed: trainers count from its beginning."""
        return self._plan().steps_per_epoch()

    # ---- iteration

    def __iter__(self) -> Iterator[Any]:
        # A generator, which begins with the first batch: Lightning calls iter() before a state is loaded.
        turn = self._turn = self._turn + 1
        if self._batches_done and turn == 1:
            epoch, of_epoch = divmod(self._batches_done(), len(self))
            self._go_to(epoch, of_epoch * (self._plan().global_batch or 1))
        if self._taken >= self._plan().total and not self._end_is_due:  # trainers that count never ask for more
            self._go_to(self.epoch + 1, 0)
        plan = dataclasses.replace(self._plan(), taken=self._taken)
        if self._is_left:
            done = f"{self._taken} of {plan.total} samples of the epoch"
            remedy = "to look at a batch, iterate over the DataLoader itself"
            warnings.warn(f"exact_loader goes on after {done}, where a loop was left: {remedy}", stacklevel=2)
        batches = self._opened(plan) if self._taken < plan.total else iter(())
        for step in plan.epoch(self.epoch):
            if turn != self._turn:
                raise RuntimeError("this iteration has ended: another of the loader has begun, or a state was loaded")
            with _value_errors():
                fetched = fetched_by(batches)
            planned = step.batches[0]
            # A collate_fn may leave samples out.
            self.weight = planned.weight * min(1.0, fetched.samples / max(1, planned.local_count))
            self._seed_by(plan)  # to ask for ranks again, in each batch, takes 0.1 ms
            self._taken, self._is_left = self._taken + step.count, True
            try:
                yield fetched.batch
            except GeneratorExit:  # with the last batch, as by zip(): the same loop would go on with the next epoch
                if turn == self._turn and self._taken >= plan.total:
                    self._go_to(self.epoch + 1, 0)
                raise
        self._go_to(self.epoch + 1, 0)
        if not self._batches_done:  # such a trainer comes here only in an epoch in which it has resumed
            self.seed_generators("end of epoch")

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
                worker_init_fn=functools.partial(show_own_dataset, given.worker_init_fn),
                generator=torch.Generator().manual_seed(seed), **{name: getattr(given, name) for name in OPTIONS},
            )  # fmt: skip
            self._persistent = loader if given.persistent_workers else None
        return iter(loader)

    def seed_generators(self, *what: str) -> None:
        """Seed the generators of torch, CUDA, Python and numpy by the position, as `run.steps` does for each step.

        So what is drawn in a step is the same after a restart, on each rank, without a generator's state. what: for random
        numbers of another kind, such as those of an evaluation.
        """
        self._seed_by(self._plan(), *what)

    def _seed_by(self, plan: Plan, *what: str) -> None:
        device = None
        if torch.cuda.is_available():  # before CUDA is initialized, torch keeps the seed for later
            device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
        seed_generators(mixed_seed(self._seed, self.epoch * plan.total + self._taken, plan.rank, *what), device)

    # ---- position

    def _go_to(self, epoch: int, taken: int, end_is_due: bool = False) -> None:
        self.epoch, self._taken = epoch, taken
        self._end_is_due = end_is_due  # the state was saved at the end of an epoch, which the loop has still to notice
        self._is_left = False

    def set_epoch(self, epoch: int) -> None:
        """Not needed. Tells that the loop is in the next epoch, if the position is the end of the last one."""
        if epoch > self.epoch and self._taken >= self._plan().total:
            self._go_to(self.epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, after the batches that the loop was given. Numbers and a word; the same on all ranks."""
        plan = self._plan()
        return {
            "epoch": self.epoch, "taken": self._taken, "ended": self._taken >= plan.total, "seed": self._seed,
            "samples": len(self.dataset), "batch_size": self.batch_size, "ends": self._ends,
            "global_batch": None if self.batch_size is None else plan.global_batch, "order": self._digest,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, also with another number of workers or ranks.

        A step of all ranks keeps its number of samples: with fewer ranks, their batches become larger. Raises ValueError for
        a state of other data, or of another seed, batch size or sampler.
        """
        own = {"samples": len(self.dataset), "seed": self._seed, "ends": self._ends}
        names = {"epoch", "taken", "ended", "batch_size", "global_batch", "order", *own}
        counts = ("epoch", "taken")
        if not isinstance(state, Mapping) or names - set(state) or any(type(state[one]) is not int for one in counts):
            raise ValueError("load_state_dict() got something else than what state_dict() of an exact_loader returned")
        for name, value in own.items():
            if state[name] != value:
                remedy = "use the same, or begin anew without the state"
                raise ValueError(f"the state is of {name}={state[name]!r}, the loader has {value!r}: {remedy}")
        step, (_, size) = state["global_batch"], self._rank_and_size()
        if state["batch_size"] != self.batch_size and (self.batch_size is None or self.batch_size * size != step):
            given = f"batch_size={self.batch_size} on {size} ranks"
            remedy = f"use batch_size={state['batch_size']}, which keeps {step} samples in a step of all ranks"
            raise ValueError(f"the state is of batch_size={state['batch_size']}, the loader has {given}: {remedy}")
        self._turn, self._global_batch = self._turn + 1, step
        self._go_to(state["epoch"], state["taken"], bool(state["ended"]))
        total = self._plan().total
        if self._digest != state["order"]:
            raise ValueError("the state is of another order of samples: use the same shuffle=, sampler and data set")
        self._taken = total if self._end_is_due else self._taken


def _require_exact(given: DataLoader[Any], seed: Any, ends: Any, rank: int | None, size: int | None, done: Any) -> None:
    """Raise UserError for what can't be made exact."""
    if not isinstance(given, DataLoader):
        raise UserError(f"exact_loader got a {type(given).__name__}: give it a DataLoader of torch")
    of_accelerate = type(given).__module__.partition(".")[0] == "accelerate"
    whole, streams = given.batch_size is None, isinstance(given.dataset, IterableDataset)
    misplaced = (rank is None) != (size is None) or not 0 <= (rank or 0) < (1 if size is None else size)
    for wrong, line in (
        (of_accelerate, "the DataLoader is accelerate's: give exact_loader yours, and leave it out of prepare()"),
        (streams, "the DataLoader has an IterableDataset, whose samples have no index: use a map-style one, or run.steps()"),
        (whole and given.batch_sampler is None, "the DataLoader has batch_size=None: give it one, or a batch_sampler"),
        (whole and done is not None, "batches_done= does not tell samples of a batch_sampler: use state_dict()"),
        (ends not in (None, "drop", "weight", "repeat"), f'ends={ends!r}: use "drop", "weight" or "repeat"'),
        (given.drop_last and ends not in (None, "drop"),
         f"ends={ends!r} of a DataLoader with drop_last=True: leave one of them out"),
        (not (hasattr(seed, "__index__") and abs(seed) < 2**62), f"seed={seed!r}: use a whole number of up to 62 bits"),
        (not (done is None or callable(done)), f"batches_done={done!r}: give it a function, such as lambda: number"),
        (misplaced, f"rank={rank}, size={size}: give both, with the rank from 0 to size - 1, or none of them"),
    ):  # fmt: skip
        if wrong:
            raise UserError(line)
    require_usable(given)


exact_loader = ExactLoader
