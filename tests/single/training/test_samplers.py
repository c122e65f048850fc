"""Any sampler: an epoch's list is drawn once, alike everywhere; killed, on other ranks, each index is used as drawn."""

import gc
import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data import WeightedRandomSampler as Weighted

from hvdtrain.engines.single import SerialEngine
from hvdtrain.inputs.plan import Plan, batches_after
from hvdtrain.inputs.samplers import Drawn
from tests.single.training import small

N = 40
DATA = TensorDataset(torch.arange(N).float().unsqueeze(1), torch.arange(N).float().unsqueeze(1))


class Own(Sampler):
    """Draws from the generator that it is given; `shuffle` is of random.Random and of numpy's."""

    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return N

    def __iter__(self):
        order = list(range(N))
        self.generator.shuffle(order)
        return iter(order)


class Epochs(Own):
    """As in the documentation of DistributedSampler: set_epoch decides."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(i * 7 + self.epoch) % N for i in range(N)])


class Buckets(Sampler):
    """Batches of similar lengths, whose number of samples varies, shuffled."""

    def __len__(self):
        return N // 4

    def __iter__(self):
        order = torch.randperm(N).tolist()
        sizes = itertools.cycle([3, 5, 4])
        batches = []
        while order:
            size = next(sizes)
            batches.append(sorted(order[:size]))
            del order[:size]
        random.shuffle(batches)
        return iter(batches)


WEIGHTS = [float(i % 3) for i in range(N)]
PLAIN = {
    "weights": lambda: Weighted(WEIGHTS, 30),
    "weights, its own generator": lambda: Weighted(WEIGHTS, 60, generator=torch.Generator()),
    "a subset": lambda: SubsetRandomSampler(range(0, N, 2)),
    "with replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=50),
    "Python": lambda: Own(random),
    "Python's own": lambda: Own(random.Random()),
    "numpy": lambda: Own(np.random),
    "numpy's own": lambda: Own(np.random.default_rng()),
    "numpy's old own": lambda: Own(np.random.RandomState()),
    "set_epoch": Epochs,
}
BATCHES = {
    "buckets": Buckets,
    "weights in batches": lambda: BatchSampler(Weighted(WEIGHTS, 30, generator=torch.Generator()), 4, drop_last=False),
}


def fitted(loader, *argv, epochs=3, **how):
    return small.Trained(*argv, net=nn.Linear(1, 1), lr=1e-6, data=[loader], epochs=epochs, batch_size=4, **how)


def serial() -> SerialEngine:
    return SerialEngine(tuning=False, rank=0, size=1, launcher="none")


@pytest.mark.parametrize("kind", [*PLAIN, *BATCHES])
def test_an_epoch_is_drawn_alike_in_another_process_and_unlike_the_one_before(kind):
    made = [Drawn(serial(), (PLAIN | BATCHES)[kind](), 1, N, in_batches=kind in BATCHES) for _ in range(2)]
    torch.rand(5)
    epochs = [
        [one.order(1, epoch).tolist() for epoch in epochs]
        for one, epochs in zip(made, ((0, 1, 2), (2, 1, 0)), strict=True)
    ]
    assert epochs[0] == epochs[1][::-1]
    assert epochs[0][0] != epochs[0][1] != epochs[0][2]


class Counting(Own):
    """Counts its own draws, and has no set_epoch."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        order = [(i * (7 if self.epoch > 1 else 1) + self.epoch) % N for i in range(N)]
        self.epoch += 1
        return iter(order)


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_sampler_that_counts_its_own_draws_draws_as_in_a_plain_loop(in_batches):
    """The draws of our checks counted: batches that were to be sorted in three epochs were shuffled in the second."""
    made, plain = (BatchSampler(Counting(), 4, drop_last=False) if in_batches else Counting() for _ in range(2))
    drawn = Drawn(serial(), made, 1, N, in_batches=in_batches)
    orders = [list(itertools.chain(*plain)) if in_batches else list(plain) for _ in range(4)]
    assert [drawn.order(1, epoch).tolist() for epoch in (3, 1, 2, 0)] == [orders[epoch] for epoch in (3, 1, 2, 0)]


def test_a_list_is_a_batch_sampler_too():
    loader = DataLoader(DATA, batch_sampler=[[3, 1], [2], [0, 5, 4]])
    assert train(loader) == {epoch: [3, 1, 2, 0, 5, 4] for epoch in range(3)}


class Augmented(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.rand(1)


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_sample_that_is_drawn_again_is_augmented_anew(in_batches):
    """And alike when the epoch is trained again. The first time, as without the others."""

    def augmented(indices):
        options = dict(batch_sampler=[indices]) if in_batches else dict(batch_size=4, sampler=indices)
        seen = []

        def loss(t, x, y):
            assert t.step.batch.indices.tolist() == x[:, 0].tolist()
            seen.extend(zip(x[:, 0].int().tolist(), y[:, 0].tolist(), strict=True))
            return small.mse(t, x, y)

        fitted(DataLoader(Augmented(), **options), loss=loss, epochs=1)
        assert [index for index, _ in seen] == [index % 4 for index in indices]
        return seen

    drawn = augmented([2, 0, 2, 1, -2, 0])
    assert len({value for _, value in drawn}) == 6
    assert augmented([2, 0, 2, 1, -2, 0]) == drawn
    once = dict(augmented([0, 1, 2, 3]))
    assert [once[index] for index in (2, 0, 1)] == [drawn[place][1] for place in (0, 1, 3)]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shuffle": True, "generator": torch.Generator()}, True),
        ({"sampler": Weighted(torch.ones(N), N, generator=torch.Generator())}, True),
        ({"sampler": Weighted(torch.ones(N), N)}, False),
        ({"sampler": Own(random.Random(3))}, False),  # which may seed it itself, by the epoch
    ],
)
def test_a_generator_of_torch_whose_seed_has_no_effect_is_told_once(options, told, capsys):
    fitted(DataLoader(DATA, 4, **options), epochs=2)
    assert capsys.readouterr().out.count("a generator= of its own") == int(told)


def test_drawing_leaves_the_generators_alone():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    Drawn(serial(), Buckets(), 1, N, in_batches=True)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def train(loader, *argv, **how):
    """Return, by epoch, what the model saw: the index of each sample."""
    seen = {}

    def loss(t, x, y):
        assert t.step.batch.count == len(x)
        assert t.step.batch.indices.tolist() == x[:, 0].tolist()
        seen.setdefault(t.run.state.epoch, []).extend(x[:, 0].int().tolist())
        return small.mse(t, x, y)

    fitted(loader, *argv, loss=loss, **how)
    return seen


@pytest.mark.parametrize("kind", [*PLAIN, *BATCHES])
def test_a_run_uses_what_was_drawn_also_after_it_was_killed(kind, tmp_path):
    def loader():
        sampler = (PLAIN | BATCHES)[kind]()
        return DataLoader(DATA, batch_sampler=sampler) if kind in BATCHES else DataLoader(DATA, 4, sampler=sampler)

    expected = Drawn(serial(), (PLAIN | BATCHES)[kind](), 1, N, in_batches=kind in BATCHES)
    whole = train(loader())
    assert whole == {epoch: expected.order(1, epoch).tolist() for epoch in range(3)}

    small.killed(train, loader(), *small.saving(9), out=tmp_path, kill=9)
    rest = train(loader(), out=tmp_path)
    used = sum((len(samples) for samples in rest.values()), 0)
    assert list(itertools.chain(*rest.values())) == list(itertools.chain(*whole.values()))[-used:]
    assert 0 < used < 3 * expected.samples


class Fewer(Epochs):
    """In each epoch the same samples, in one batch less."""

    def __iter__(self):
        return iter(part.tolist() for part in torch.arange(24).tensor_split(6 - self.epoch))


def test_a_resumed_run_counts_the_steps_as_it_did_at_its_beginning(tmp_path):
    """A schedule that is made of them goes on as it was."""
    told = []
    for epochs in (1, 3):
        loader = DataLoader(DATA, batch_sampler=Fewer())
        count = lambda t, loader=loader: told.append(t.run.total_steps(loader, 3))  # noqa: E731
        fitted(loader, out=tmp_path, epochs=epochs, before=count, end=lambda t: told.append(t.run.metrics_logger.steps))
    assert told == [18, 6, 18, 18]


@pytest.mark.parametrize("kind", BATCHES)
def test_on_four_then_three_then_two_ranks_each_index_is_used_as_drawn_and_batches_stay_whole(kind):
    drawn = Drawn(serial(), BATCHES[kind](), 1, N, in_batches=True)
    whole = drawn.batches(1, 0)
    taken, used, weights = 0, [], []
    for size, most in ((4, 1), (3, 1), (2, None)):  # steps of four batches, as the run began on four ranks
        plans = [
            Plan(N, drawn.samples, 1, 1, rank, size, 4, 1, 16, 0, taken, batches=drawn.batches, batches_per_step=4)
            for rank in range(size)
        ]
        for steps in itertools.islice(zip(*(plan.epoch(0) for plan in plans), strict=True), most):
            assert len({len(step.batches) for step in steps}) == 1
            counted = [batch for step in steps for batch in step.batches if batch.local_count]
            used += [batch.indices.tolist() for batch in counted]
            assert sum(batch.local_count for batch in counted) == steps[0].count
            weights.append(sum(batch.weight for step in steps for batch in step.batches) / size)
            taken += steps[0].count
    assert Counter(map(tuple, used)) == Counter(tuple(batch.tolist()) for batch in whole)
    assert weights == pytest.approx([1.0] * len(weights))


def test_the_position_in_batches_follows_from_the_samples():
    batches = [torch.arange(3), torch.arange(2), torch.arange(4)]
    lengths = [3, 5, 9]
    for number, taken in enumerate((0, *lengths)):
        left = batches_after(batches, taken)
        assert left is not None
        assert len(left) == 3 - number
    assert batches_after(batches, 4) is None
    assert batches_after(batches, 10) is None


class Drawing(Sampler):
    def __init__(self):
        self.draws = []

    def __len__(self):
        return N

    def __iter__(self):
        self.draws.append(torch.initial_seed())
        return iter(range(N))


def test_a_sampler_is_drawn_once_in_an_epoch_and_once_more_for_a_comparison():
    """One of five million weights takes seconds."""
    sampler = Drawing()
    small.Trained(net=nn.Linear(1, 1), data=[DataLoader(DATA, 8, sampler=sampler)], epochs=3)
    assert len(sampler.draws) == 4


def test_a_weighted_sampler_is_drawn_once_in_an_epoch(monkeypatch):
    draws, draw = [], Weighted.__iter__
    monkeypatch.setattr(Weighted, "__iter__", lambda sampler: draws.append(1) or draw(sampler))
    small.Trained(net=nn.Linear(1, 1), data=[DataLoader(DATA, 8, sampler=Weighted(torch.ones(N), N))], epochs=3)
    assert len(draws) == 3


def test_many_batches_lie_in_few_tensors():
    batches = [[k, k + 1, k + 2] for k in range(N - 3)] * 10
    count = lambda: sum(type(one) is torch.Tensor for one in gc.get_objects())  # noqa: E731
    before = count()
    drawn = Drawn(serial(), batches, 1, N, in_batches=True)
    assert count() - before < 10
    assert [batch.tolist() for batch in drawn.batches(1, 0)] == batches
    assert [batch.tolist() for batch in drawn.batches(1, 0)[5::7]] == batches[5::7]
