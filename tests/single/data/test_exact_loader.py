"""exact_loader: a loop that is killed, on other ranks or with other workers, reads what the whole loop would have read."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hvdtrain.inputs.sharding import epoch_order
from hvdtrain.loader import exact_loader
from tests.single.training import small
from tests.single.training.test_samplers import BATCHES, PLAIN, N

EPOCHS = 2


class Augmented(Dataset):
    def __init__(self, count=N):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return float(index), torch.rand(()).item() + random.random() + np.random.rand()


class Batched(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def together(samples):
    return samples


def made(kind="shuffled", count=N, batch=4, data=Augmented, **options):
    options.setdefault("collate_fn", together)
    if kind in BATCHES:
        return DataLoader(data(), batch_sampler=BATCHES[kind](), **options)
    if kind in PLAIN:
        return DataLoader(data(), batch, sampler=PLAIN[kind](), **options)
    return DataLoader(data(count), batch, shuffle=kind == "shuffled", **options)


def loaders(size, given, state=None, **options):
    """Return the loader of each rank; with the state that one of them has saved, through a file of JSON."""
    ranks = [exact_loader(given(), seed=3, rank=rank, size=size, **options) for rank in range(size)]
    for loader in ranks if state is not None else []:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def read(ranks, epochs=EPOCHS, until=None):
    """Return, for each step, each rank's (samples, weight, a random number); after `until` steps, the loop is killed."""
    steps = []
    for _ in range(ranks[0].epoch, epochs):
        for batches in zip(*ranks, strict=True):
            weights = [loader.weight for loader in ranks]
            steps.append(list(zip(batches, weights, [torch.rand(()).item()] * len(ranks), strict=True)))
            if len(steps) == until:
                return steps
    return steps


def counted(steps):
    """Return the samples of each step that count."""
    return [sorted(sample for batch, weight, _ in step if weight for sample in batch) for step in steps]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_killed_and_on_other_ranks_each_sample_is_read_once_as_in_the_whole_loop(data):
    kind = data.draw(st.sampled_from(["shuffled", "in order", *PLAIN, *BATCHES]))
    count = data.draw(st.integers(1, 50)) if kind in ("shuffled", "in order") else N
    batch, size, then = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    fits = size * batch <= min(count, 20) and kind not in BATCHES  # "drop" leaves a step
    ends = data.draw(st.sampled_from(["weight", "repeat"] + ["drop"] * fits))
    workless = lambda: made(kind, count, batch)  # noqa: E731
    whole = read(loaders(size, workless, ends=ends))
    ranks = loaders(size, workless, ends=ends)
    assert len(whole) == EPOCHS * len(ranks[0])
    killed = data.draw(st.integers(1, len(whole)))
    begun = read(ranks, until=killed)
    state = ranks[data.draw(st.integers(0, size - 1))].state_dict()
    rest = read(loaders(then, workless, state, ends=ends))
    if kind in BATCHES:  # batches stay whole, and a step takes as many as there are ranks
        if ends == "weight":
            assert Counter(chain(*counted(begun + rest))) == Counter(chain(*counted(whole)))
    else:
        assert counted(begun) + counted(rest) == counted(whole)
    if then == size:
        assert begun + rest == whole
    if kind in ("shuffled", "in order"):
        used = Counter(int(index) for index, _ in chain(*counted(whole)))
        plan = epoch_order(count, 3, 0).tolist() if kind == "shuffled" else range(count)
        assert {int(index) for index, _ in counted(whole)[0]} == set(plan[: batch * size])
        often = {used[index] for index in range(count)}
        assert {"weight": often == {EPOCHS}, "repeat": min(often) >= EPOCHS, "drop": max(often) <= EPOCHS}[ends]
    for step in whole + rest:
        total = sum(len(batch) for batch, weight, _ in step if weight)
        exact = sum(index for batch, weight, _ in step if weight for index, _ in batch) / total
        means = [weight * sum(index for index, _ in batch) / len(batch) for batch, weight, _ in step]
        assert sum(means) / len(step) == pytest.approx(exact)


def test_a_loop_draws_what_run_steps_draws(tmp_path):
    from hvdtrain import training

    def drawn(batch):
        return [*batch[0].tolist(), *batch[1].tolist(), torch.rand(()).item(), random.random(), np.random.rand()]

    flags = small.flags_for("--seed", "5", "--output-dir", str(tmp_path), epochs=EPOCHS, batch_size=4)
    ours = []
    with training.start(flags) as run:
        model, _ = run.prepare(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))

        def loss_of(step, index, content):
            ours.append(drawn((index, content)))
            return model(index.float().unsqueeze(1)).mean()

        small.fit(run, [made(count=21, collate_fn=None)], loss_of)
    theirs = [
        drawn(batch) for loader in [exact_loader(made(count=21, collate_fn=None), seed=5)] * EPOCHS for batch in loader
    ]
    assert ours == theirs


def own_data(worker):
    assert isinstance(get_worker_info().dataset, Augmented)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, {}), (1, {"persistent_workers": True, "prefetch_factor": 5}), (2, {"worker_init_fn": own_data}),
        (1, {"multiprocessing_context": "forkserver", "worker_init_fn": own_data}),
    ],
)  # fmt: skip
def test_workers_read_ahead_and_the_state_does_not(workers, options, worker_server):
    whole = read(loaders(1, made))
    ranks = loaders(1, lambda: made(num_workers=workers, **options))
    assert read(ranks, until=13) == whole[:13]
    assert ranks[0].state_dict()["taken"] == 3 * 4
    assert read(loaders(1, made, ranks[0].state_dict())) == whole[13:]
    ranks[0].load_state_dict(ranks[0].state_dict())
    assert read(ranks) == whole[13:]  # by the same workers, if they are persistent


def test_lists_of_indices_and_the_programs_own_generators():
    whole = read(loaders(1, lambda: made(data=Batched)))
    ranks = loaders(1, lambda: made(data=Batched))
    begun = read(ranks, until=4)
    torch.manual_seed(0)  # whatever the program does between steps
    assert begun + read(loaders(1, lambda: made(data=Batched), ranks[0].state_dict())) == whole
    torch.manual_seed(0)
    before = torch.get_rng_state()
    iter(ranks[0]), len(ranks[0]), ranks[0].state_dict(), exact_loader(made("weights"))
    assert torch.equal(torch.get_rng_state(), before)


# ---- where an epoch ends


def indices(loader):
    return [int(index) for batch in loader for index, _ in batch]


def at_the_end(loader):
    """Read an epoch as a trainer that counts does: it does not ask for a batch after the last."""
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    return batches  # which the loop still has


def test_a_loop_that_was_killed_at_the_end_of_an_epoch_has_still_to_end_it():
    loader = exact_loader(made("in order"))
    batches = at_the_end(loader)
    assert loader.epoch == 0
    resumed = loaders(1, lambda: made("in order"), loader.state_dict() | {"seed": 3})[0]
    assert indices(resumed) == []  # the loop's code after an epoch runs: an evaluation, a scheduler
    assert resumed.epoch == 1
    assert indices(resumed) == list(range(N))
    batches.close()
    assert indices(loader) == list(range(N))  # which was not killed
    assert loader.epoch == 2


@pytest.mark.parametrize("left", ["by zip", "by break"])
def test_a_loop_that_never_asks_for_more_than_the_last_batch_is_in_the_next_epoch(left):
    """Of two loaders in zip(), the second one is not asked. Its state was that of a loop that has still to end."""

    def epochs(ranks, count):
        for _ in range(count):
            for number, batches in enumerate(zip(*ranks, strict=False) if left == "by zip" else ranks[1], 1):
                yield batches
                if left == "by break" and number == len(ranks[1]):
                    break

    whole = list(epochs(loaders(2, made), 3))
    ranks = loaders(2, made)
    begun = list(epochs(ranks, 1))
    resumed = [loaders(2, made, loader.state_dict())[rank] for rank, loader in enumerate(ranks)]
    assert begun + list(epochs(resumed, 2)) == whole


def test_a_trainer_that_counts_tells_its_epoch():
    state = (loader := loaders(1, made)[0]).state_dict()
    held = at_the_end(loader)  # as such a trainer holds it when it saves
    for told in ("set_epoch", "sampler.set_epoch"):
        resumed = loaders(1, made, loader.state_dict())[0]
        batches = iter(resumed)
        (resumed if told == "set_epoch" else resumed.sampler).set_epoch(1)
        assert len(list(batches)) == len(resumed)
    held.close()
    resumed.load_state_dict(state)
    for told in (0, 5, 1):  # by a program that does not know where it is
        resumed.set_epoch(told)
        assert resumed.epoch == 0
    next(iter(resumed))
    resumed.set_epoch(1)
    assert resumed.state_dict()["taken"] == 4


@pytest.mark.parametrize("done", [0, 3, 10, 17])
def test_a_trainer_that_counts_tells_how_many_batches_are_done(done):
    whole = read(loaders(2, lambda: made(batch=2)))
    ranks = loaders(2, lambda: made(batch=2), batches_done=lambda: asked.append(done) or done)
    asked = []
    assert [len(loader) for loader in ranks] == [10, 10]
    assert asked == []  # it does not know when it makes the loader
    assert read(ranks, EPOCHS - done // 10) == whole[done:]
    assert asked == [done] * 2


def test_a_trainer_that_counts_finds_the_generators_as_without_a_restart():
    """In an epoch in which it has resumed, the Trainer of transformers asks for more than there are; else it does not."""
    at_the_end(exact_loader(made(), seed=3))
    expected = torch.rand(()).item()
    list(loaders(1, made, batches_done=lambda: 7)[0])
    assert torch.rand(()).item() == expected


def test_a_state_may_be_loaded_after_iter():
    """Lightning calls iter() before its callbacks know the checkpoint."""
    whole = read(loaders(1, made))
    read(ranks := loaders(1, made), until=4)
    batches = iter(resumed := loaders(1, made)[0])
    resumed.load_state_dict(ranks[0].state_dict())
    assert [next(batches) for _ in range(3)] == [batch for ((batch, *_),) in whole[4:7]]


def test_a_state_tells_the_samples_of_a_step_before_the_loader_asks_for_more_than_there_are():
    """One sample, left out on two ranks; a state of one rank has a step of it."""
    read(ranks := loaders(1, lambda: made(count=1, batch=1), ends="drop"), until=1)
    assert len(read(loaders(2, lambda: made(count=1, batch=1), ranks[0].state_dict(), ends="drop"))) == 1


def test_a_loop_that_is_left_goes_on_and_says_so():
    loader = exact_loader(made("in order"))
    next(iter(loader))
    with pytest.warns(UserWarning, match="goes on after 4 of 40 samples of the epoch, where a loop was left"):
        assert indices(loader) == list(range(4, N))
    first = iter(loader)
    next(first)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="a state was loaded"):
        next(first)


def test_a_sample_that_the_collate_fn_leaves_out_has_no_weight():
    odd = lambda samples: torch.tensor([index for index, _ in samples if index % 2] or [1.0])  # noqa: E731
    ranks = loaders(2, lambda: made("in order", 8, 2, collate_fn=odd))
    batches = [loader.weight for batch in zip(*ranks, strict=True) for loader in ranks]
    assert batches == [0.5, 0.5] * 2 or set(batches) <= {0.0, 0.5, 1.0}


# ---- what can't be made exact


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Endless(Augmented):
    def __iter__(self):
        while True:
            yield 0


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: [1, 2], {}, "exact_loader got a list: give it a DataLoader of torch"),
        (lambda: DataLoader(Stream()), {}, "whose samples have no index: use a map-style one, or run.steps()"),
        (lambda: DataLoader(Augmented(), None), {}, "the DataLoader has batch_size=None: give it one, or a batch_sampler"),
        (lambda: made("buckets"), {"batches_done": int}, "does not tell samples of a batch_sampler"),
        (made, {"seed": None}, "seed=None: use a whole number"), (made, {"seed": 1.0}, "seed=1.0: use a whole"),
        (made, {"seed": 2**64}, f"seed={2**64}: use a whole number of up to 62 bits"),
        (made, {"batches_done": 3}, "batches_done=3: give it a function, such as lambda: number"),
        (made, {"rank": 1}, "rank=1, size=None: give both, with the rank from 0 to size - 1, or none of them"),
        (made, {"rank": 2, "size": 2}, "rank=2, size=2: give both"), (made, {"size": 0}, "rank=None, size=0: give both"),
        (lambda: made(drop_last=True), {"ends": "repeat"}, "ends='repeat' of a DataLoader with drop_last=True: leave"),
        (made, {"ends": "pad"}, """ends='pad': use "drop", "weight" or "repeat\""""),
        (lambda: DataLoader(Augmented(), 4, sampler=Endless()), {}, "as one without an end: let it end after an epoch"),
        (lambda: DataLoader(Augmented(), 4, sampler=torch.utils.data.DistributedSampler(Augmented(), 2, 0)), {},
         "the DataLoader has a DistributedSampler: leave it out, the samples are sharded for you"),
        (lambda: type("DataLoaderShard", (DataLoader,), {"__module__": "accelerate.data_loader"})(Augmented()), {},
         "the DataLoader is accelerate's: give exact_loader yours, and leave it out of prepare()"),
    ],
)  # fmt: skip
def test_what_is_refused(make, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        exact_loader(make(), **options)


def test_too_few_samples_for_a_step():
    with pytest.raises(ValueError, match="an epoch has 3, fewer than the 8 samples of a step: use fewer"):
        len(exact_loader(made(count=3, drop_last=True), rank=0, size=2))
    with pytest.raises(ValueError, match="the DataLoader has no samples"):
        len(exact_loader(made("in order", count=0)))


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({"count": N + 1}, 2, "the state is of samples=40, the loader has 41: use the same, or begin anew"),
        (
            {"batch": 3},
            2,
            "of batch_size=4, the loader has batch_size=3 on 2 ranks: use batch_size=4, which keeps 8",
        ),
        ({"batch": 3}, 1, "of batch_size=4, the loader has batch_size=3 on 1 ranks"),
        (
            {"kind": "in order"},
            2,
            "the state is of another order of samples: use the same shuffle=, sampler and data set",
        ),
        ({"drop_last": True}, 2, "the state is of ends='weight', the loader has 'drop'"),
        ({"kind": "buckets"}, 2, "the state is of batch_size=4, the loader has batch_size=None on 2 ranks"),
    ],
)
def test_a_state_of_something_else(options, size, message):
    state = loaders(2, made)[0].state_dict()
    with pytest.raises(ValueError, match=re.escape(message)):
        loaders(size, lambda: made(**options), state)


def test_a_state_that_is_none():
    for wrong in ({}, None, {"epoch": 3}, exact_loader(made()).state_dict() | {"epoch": 0.0}):
        with pytest.raises(ValueError, match="something else than what state_dict"):
            exact_loader(made()).load_state_dict(wrong)
    with pytest.raises(ValueError, match="the state is of seed=0, the loader has 1"):
        exact_loader(made(), seed=1).load_state_dict(exact_loader(made()).state_dict())


def test_a_batch_size_that_keeps_the_global_batch():
    state = loaders(2, made)[0].state_dict()
    assert [len(loaders(size, lambda: made(batch=8 // size), state)[0]) for size in (1, 4)] == [5, 5]  # noqa: B023


# ---- who it is


@pytest.mark.parametrize("who", ["distributed", "horovod", "accelerate", "torchrun", "mpirun", "nobody"])
def test_rank_and_size(who, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("horovod.torch", "accelerate.state"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if who in ("distributed", "horovod"):
        there = SimpleNamespace(is_initialized=lambda: True, rank=lambda: 2, size=lambda: 5)
        monkeypatch.setitem(sys.modules, "horovod.torch", there)
    if who == "distributed":
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 5)
        monkeypatch.setattr(sys.modules["horovod.torch"], "size", lambda: 6)
    if who == "accelerate":
        state = SimpleNamespace(_shared_state={"process_index": 2, "num_processes": 5})
        monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(PartialState=state))
    names = {"torchrun": ("RANK", "WORLD_SIZE"), "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")}
    loader = exact_loader(made("in order"))
    for name, value in zip(names.get(who, ()), ("2", "5"), strict=False):  # ranks may be started later than the loader
        monkeypatch.setenv(name, value)
    assert indices(loader)[0] == (0 if who == "nobody" else 2)


def test_importing_it_imports_torch_and_nothing_else():
    code = (
        "import sys, torch, torch.utils.data; before = set(sys.modules); import hvdtrain.loader;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names),"
        "'hvdtrain.training' in sys.modules, 'hvdtrain.loop.run' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "hvdtrain False False\n"


def test_it_has_what_programs_ask_of_a_dataloader():
    given = DataLoader(torch.arange(9.0), 2, collate_fn=torch.stack, pin_memory=False)
    loader = exact_loader(given)
    assert (loader.batch_size, loader.num_workers, loader.collate_fn) == (2, 0, torch.stack)
    with pytest.raises(AttributeError, match="ExactLoader has no batch_sampler"):  # whose batches are not these
        print(loader.batch_sampler)
    with pytest.raises(AttributeError):
        loader.batch_size = 3


@pytest.mark.parametrize("given", [True, False])
def test_it_has_the_drop_last_of_its_dataloader(given):
    assert exact_loader(DataLoader(torch.arange(9.0), 2, drop_last=given)).drop_last is given
