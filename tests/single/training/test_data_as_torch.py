"""Data sets, samplers and loaders of all kinds: the samples of an epoch are those of torch's DataLoader, or one line is."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
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
)

from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.fetching import samples_in
from tests.single.training import small

pytestmark = pytest.mark.usefixtures("worker_server")
N = 20


class Numbers(Dataset):
    def __init__(self, n=N):
        self.n, self.extra, self.closed = n, 0.0, False

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if not 0 <= index < self.n:
            raise IndexError(index)
        return torch.tensor([index + self.extra])


class Listed(Dataset):
    """Answers only lists of indices, as a table in columns."""

    def __len__(self):
        return N

    def __getitems__(self, indices):
        return [torch.tensor([float(index)]) for index in indices]


class Both(Numbers):
    def __getitems__(self, indices):
        return [torch.tensor([index + 100.0]) for index in indices]


class Described(TensorDataset):
    def __init__(self):
        super().__init__(torch.arange(N).float().unsqueeze(1))
        self.classes, self.names, self.transform = 2, ["a", "b"], None


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(N).float().unsqueeze(1))


class EvenOnly(SequentialSampler):
    def __iter__(self):
        return iter(range(0, N, 2))


class TwiceTheFirst(RandomSampler):
    def __iter__(self):
        return itertools.chain([0], super().__iter__(), [0])


class WithoutLength(Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        return iter([3, 1, 2])


class Reversed(BatchSampler):
    def __iter__(self):
        return reversed(list(super().__iter__()))


DATA = TensorDataset(torch.arange(N).float().unsqueeze(1))
HALVES = random_split(Numbers(), [12, 8], torch.Generator().manual_seed(1))
# Loaders whose order is fixed: what torch yields, in its order.
IN_ORDER = {
    "a list": lambda: DataLoader(list(torch.arange(N).float().unsqueeze(1)), 4),
    "a tensor": lambda: DataLoader(torch.arange(N).float().unsqueeze(1), 4),
    "an array": lambda: DataLoader(np.arange(float(N))[:, None], 4),
    "a range": lambda: DataLoader(range(N), 4, collate_fn=lambda s: torch.tensor(s).float().unsqueeze(1)),
    "tensors": lambda: DataLoader(DATA, 4, collate_fn=lambda s: default_collate([x for (x,) in s])),
    "lists": lambda: DataLoader(Listed(), 4),
    "lists besides": lambda: DataLoader(Both(), 4),
    "a subset": lambda: DataLoader(HALVES[0], 4),
    "a subset of lists": lambda: DataLoader(Subset(Both(), range(5, 15)), 4),
    "a subset of a subset": lambda: DataLoader(Subset(Subset(Listed(), range(1, 19)), [3, 1]), 4),
    "a concatenation": lambda: DataLoader(ConcatDataset([Numbers(), Both()]), 4),
    "a stack": lambda: DataLoader(StackDataset(Numbers(), Both()), 4, collate_fn=lambda s: column(s, 1)),
    "a stack by name": lambda: DataLoader(StackDataset(a=Numbers()), 4, collate_fn=lambda s: column(s, "a")),
    "a stream": lambda: DataLoader(Stream(), 4),
    "a chain": lambda: DataLoader(ChainDataset([Stream(), Stream()]), 4),
    "a stream without the last batch": lambda: DataLoader(Stream(), 3, drop_last=True),
    "drop_last": lambda: DataLoader(Numbers(18), 4, drop_last=True),
    "tensors with attributes": lambda: DataLoader(Described(), 4, collate_fn=lambda s: torch.stack([x for (x,) in s])),
    "a subclass of SequentialSampler": lambda: DataLoader(Numbers(), 4, sampler=EvenOnly(DATA)),
    "SequentialSampler of less": lambda: DataLoader(Numbers(), 4, sampler=SequentialSampler(range(10))),
    "indices": lambda: DataLoader(Numbers(), 4, sampler=[7, 7, 3]),
    "without a length": lambda: DataLoader(Numbers(), 4, sampler=WithoutLength()),
    "a subclass of BatchSampler": lambda: DataLoader(Numbers(), batch_sampler=Reversed(SequentialSampler(DATA), 3, False)),
    "batches without the last": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(SequentialSampler(DATA), 3, True)),
    "batches as a list": lambda: DataLoader(Numbers(), batch_sampler=[[3, 1], [2]]),
}  # fmt: skip
SHUFFLED = {
    "shuffle": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "shuffle of lists": lambda: DataLoader(Listed(), 4, shuffle=True),
    "RandomSampler of less": lambda: DataLoader(Numbers(), 4, sampler=RandomSampler(range(10))),
    "a subclass of RandomSampler": lambda: DataLoader(Numbers(), 4, sampler=TwiceTheFirst(DATA)),
    "twice": lambda: DataLoader(Numbers(), 4, sampler=RandomSampler(DATA, num_samples=2 * N)),
    "a subset's sampler": lambda: DataLoader(Numbers(), 4, sampler=SubsetRandomSampler(range(5, 11))),
    "weights": lambda: DataLoader(Numbers(), 4, sampler=WeightedRandomSampler([1.0] * N, N, replacement=False)),
    "batches": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)),
}


def column(samples, name):
    return torch.stack([sample[name] for sample in samples])


def values(batch):
    return [int(value) for value in torch.as_tensor(batch).flatten()]


def ours(loader, epochs=2, before=small.nothing, collected=values):
    """Return the samples of each epoch of a training, and of an evaluation. before: an epoch."""
    seen, tested = [], []

    def head(t, epoch):
        before(epoch)
        seen.append([])

    def loss(t, *_):
        seen[-1] += collected(t.batch)
        return t.model(torch.zeros(2, 1)).mean()

    def end(t):
        with t.run.evaluating(loader) as mine:
            for batch in mine:
                tested.extend(collected(batch))
                t.run.record(loss=torch.as_tensor(batch))

    batch_size = loader.batch_size or 4
    linear(loader, head=head, loss=loss, end=end, epochs=epochs, batch_size=batch_size)
    return seen, tested


def on_batch(t, *_):
    return t.model(t.batch).mean()


def linear(loader, **how):
    return small.Trained(net=nn.Linear(1, 1), data=[loader], **dict(batch_size=4, loss=on_batch, lr=1e-6) | how)


@pytest.mark.parametrize("kind", IN_ORDER)
def test_a_loader_yields_what_torch_does(kind):
    expected = [value for batch in IN_ORDER[kind]() for value in values(batch)]
    assert ours(IN_ORDER[kind]()) == ([expected, expected], expected)


@pytest.mark.parametrize("kind", SHUFFLED)
def test_a_shuffled_loader_yields_what_torch_does_in_another_order(kind):
    expected = Counter(value for batch in SHUFFLED[kind]() for value in values(batch))
    (first, second), tested = ours(SHUFFLED[kind]())
    assert first != second
    assert [Counter(first), Counter(second), Counter(tested)] == [expected] * 3


class Without(Sampler):
    """Has no end."""

    def __init__(self, length=None):
        if length is not None:
            self.__class__ = type("WithoutEnd", (Without,), {"__len__": lambda self: length})

    def __iter__(self):
        return itertools.cycle(range(N))


@pytest.mark.parametrize("length", [None, N])
@pytest.mark.parametrize("batches", [False, True])
def test_a_sampler_without_an_end_is_one_line(length, batches):
    sampler = Without(length)
    how = dict(batch_sampler=BatchSampler(sampler, 4, False)) if batches else dict(batch_size=4, sampler=sampler)
    with pytest.raises(
        UserError, match=r"draws more than 100,000 times in an epoch of 20 .*run.epochs\(steps=NUMBER\)"
    ):
        ours(DataLoader(Numbers(), **how))


# ---- what changes between epochs


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (1, True)])
def test_an_attribute_that_changes_between_epochs_is_seen_by_the_next_unless_workers_persist(workers, persistent):
    loader = DataLoader(Numbers(), 4, num_workers=workers, persistent_workers=persistent)
    (first, second), _ = ours(loader, before=lambda epoch: setattr(loader.dataset, "extra", 100.0 * epoch))
    assert (first, second) == (list(range(N)), list(range(N) if persistent else range(100, 100 + N)))


@pytest.mark.parametrize("workers", [0, 1])
def test_weights_that_change_between_epochs_are_drawn_from(workers):
    weights = torch.zeros(N)
    sampler = WeightedRandomSampler(weights, 8)

    def before(epoch):
        sampler.weights = torch.eye(N)[5 + epoch]

    (first, second), _ = ours(DataLoader(Numbers(), 4, sampler=sampler, num_workers=workers), before=before)
    assert (first, second) == ([5] * 8, [6] * 8)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_of_another_length_than_in_the_epoch_before_is_one_line(workers):
    loader = DataLoader(Numbers(), 4, shuffle=True, num_workers=workers)
    with pytest.raises(UserError, match=r"run.steps\(\) got 22 samples, and 20 in the epoch before: if .*changes=True"):
        ours(loader, before=lambda epoch: setattr(loader.dataset, "n", N + 2 * epoch))


class Seeds(Numbers):
    def __getitem__(self, index):
        info = get_worker_info()
        return torch.tensor([float(info.seed % 2**20), float(info.dataset is self), getattr(self, "opened", 0.0)])


def open_it(worker):
    get_worker_info().dataset.opened = 7.0


def test_workers_of_each_epoch_have_other_seeds_and_the_data_set_of_the_script():
    """`worker_init_fn` opens files, and seeds generators, of the data set that get_worker_info() has."""
    collected = lambda batch: [tuple(batch[0].tolist())]  # noqa: E731
    seeds = []
    for _ in range(2):  # a run, and the same again
        (first, second), _ = ours(DataLoader(Seeds(), 20, num_workers=1, worker_init_fn=open_it), collected=collected)
        assert first[0][1:] == second[0][1:] == (1.0, 7.0)
        seeds.append((first[0][0], second[0][0]))
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


# ---- samples that a collate_fn leaves out


X, NAMES = torch.ones(3, 2), ["a", "b", "c"]
FOUR, NONE = [(0, 0)] * 4, [(0, 0)] * 3 + [None]
BATCHES = {
    "rows": (X, FOUR, 3),
    "as many": (torch.ones(4, 2), FOUR, 4),
    "as many, refilled": (torch.ones(4, 2), NONE, 4),
    "rows and classes": ((X, torch.ones(3)), FOUR, 3),
    "by name": ({"x": X, "names": NAMES}, FOUR, 3),
    "lists of images": (([torch.ones(3, 8, 8)] * 3, [{}] * 3), FOUR, 3),
    "lists of as many images": (([torch.ones(3, 8, 8)] * 4, [{}] * 4), FOUR, 4),
    "a list of images": ([torch.ones(3, 8, 8)] * 4, FOUR, 4),
    "nothing": (None, FOUR, 0),
    "no rows": (torch.ones(0, 2), FOUR, 0),
    "an object": (object(), NONE, 3),
    "another object": (object(), FOUR, 4),
    "two views": (torch.ones(8, 2), FOUR, 4),
    "two views of three": (torch.ones(6, 2), NONE, 3),
    "a graph": ({"nodes": torch.ones(7, 2), "edges": torch.ones(2, 9)}, FOUR, 4),
    "time before batch": (torch.ones(3, 4, 5), FOUR, 4),
    "time before batch, with lengths": ((torch.ones(3, 4), torch.ones(4)), FOUR, 4),
    "as many features as samples": (torch.ones(3, 4), [torch.ones(4)] * 4, 3),
    "nested": ([[torch.ones(4), [torch.ones(4)]], {"y": torch.ones(4)}], FOUR, 4),
    "a size beside": ({"x": torch.ones(4, 3), "size": (224, 224)}, FOUR, 4),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_samples_in_a_batch_are_counted(kind):
    batch, samples, expected = BATCHES[kind]
    assert samples_in(batch, samples, 4) == expected


class Unreadable(Numbers):
    def __getitem__(self, index):
        return None if index % 4 == 3 or index < 4 else super().__getitem__(index)


def readable(samples):
    samples = [sample for sample in samples if sample is not None]
    return torch.stack(samples) if samples else None


def mean_over_steps(indices):
    return sum(torch.tensor(part).float().mean() for part in indices)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_a_collate_fn_leaves_out_do_not_count(accumulate, workers):
    """In the gradients, in a batch of which nothing is left, and in an evaluation."""
    loader = DataLoader(Unreadable(), 4, collate_fn=readable, num_workers=workers)
    steps = [list(range(first, min(first + 4 * accumulate, N))) for first in range(0, N, 4 * accumulate)]
    left = [part for step in steps if (part := [i for i in step if i % 4 != 3 and i >= 4])]
    if accumulate == 1:
        loader = DataLoader(Subset(Unreadable(), range(4, N)), 4, collate_fn=readable, num_workers=workers)

    def end(t):
        with t.run.evaluating(DataLoader(Unreadable(), 4, collate_fn=readable)) as mine:
            for batch in mine:
                if batch is not None:
                    t.run.record(value=batch[:, 0], summed=batch.sum())

    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    flags = ["--accumulate", str(accumulate)]
    run = small.Trained(*flags, net=net, lr=1.0, data=[loader], epochs=1, batch_size=4, end=end, loss=on_batch).run
    assert net.weight.item() == pytest.approx(-float(mean_over_steps(left)))
    readable_ones = [i for i in range(4, N) if i % 4 != 3]
    assert run.evaluation["count"] == len(readable_ones)
    mean = sum(readable_ones) / len(readable_ones)
    assert run.evaluation["value"] == run.evaluation["summed"] == pytest.approx(mean)


def test_a_step_of_which_nothing_is_left_is_one_line():
    with pytest.raises(UserError, match="step 1: the collate_fn left no sample of all ranks"):
        ours(DataLoader(Unreadable(), 4, collate_fn=readable))


def two_views(samples):
    return torch.cat([default_collate(samples)] * 2)


def test_several_values_of_a_sample_are_a_mean_over_them_and_too_few_are_one_line():
    few = DataLoader(Numbers(), 4)

    def end(t):
        run = t.run
        with run.evaluating(DataLoader(Numbers(), 4, collate_fn=two_views)) as mine:
            for batch in mine:
                run.record(value=batch[:, 0])
        assert run.evaluation["value"] == pytest.approx((N - 1) / 2)
        complaint = r"run.record\(value=...\) got 15 values for 20 samples: give a value for each sample, or their sum"
        with pytest.raises(UserError, match=complaint), run.evaluating(few) as mine:
            for batch in mine:
                run.record(value=batch[:3, 0])
        with run.evaluating(N) as mine:
            run.record(value=torch.arange(N)[mine].repeat(2))
        assert run.evaluation["value"] == pytest.approx((N - 1) / 2)
        with pytest.raises(UserError, match=r"run.record\(value=...\) got 30 values for 20 samples"), run.evaluating(N):
            run.record(value=torch.ones(30))

    linear(few, epochs=1, end=end)


# ---- another split when the run is resumed


def on_a_part(directory, data, sampler=None, epochs=1):
    return linear(DataLoader(data, 4, sampler=sampler), out=directory, epochs=epochs).run.state.epoch


def test_a_run_is_not_resumed_on_another_split(tmp_path):
    whole, other = Numbers(), range(1, 13)
    complaint = "the data set is split otherwise than when the run began, .*generator=torch.Generator"
    on_a_part(tmp_path / "subset", HALVES[0])
    assert on_a_part(tmp_path / "subset", Subset(whole, list(HALVES[0].indices)), epochs=2) == 2
    with pytest.raises(UserError, match=complaint):
        on_a_part(tmp_path / "subset", Subset(whole, other), epochs=3)
    on_a_part(tmp_path / "nested", ConcatDataset([whole, Subset(whole, range(4))]))
    with pytest.raises(UserError, match=complaint):
        on_a_part(tmp_path / "nested", ConcatDataset([whole, Subset(whole, range(1, 5))]), epochs=2)
    on_a_part(tmp_path / "sampler", whole, SubsetRandomSampler(range(12)))
    with pytest.raises(UserError, match=complaint):
        on_a_part(tmp_path / "sampler", whole, SubsetRandomSampler(other), epochs=2)


# ---- how a data set reaches its workers


def test_thousands_of_tensors_reach_the_workers():
    """Also views of one tensor, each with a file descriptor if torch sends them."""
    whole = torch.arange(600.0)
    rows = [torch.tensor([float(i)]) for i in range(600)] + list(whole.view(-1, 1).unbind())
    assert ours(DataLoader(rows, 100, num_workers=1), epochs=1)[0] == [[*range(600), *range(600)]]


class Held(Dataset):
    """Holds arrays and tensors of many kinds; `state` is what a worker has of them."""

    def __init__(self, path):
        generator = np.random.default_rng(1)
        self.large = generator.random((400, 700))  # 2.2 MB: not in the pickle
        self.columns = np.asfortranarray(self.large)
        self.objects = np.array([{}, "a"], dtype=object)
        self.mapped = np.memmap(path, dtype=np.int16, mode="r", shape=(50,))
        self.mapped_from_ten = self.mapped[10:]
        self.tensor = torch.from_numpy(generator.random((500, 500)))
        numbers = generator.random(50)
        self.first, self.all = torch.from_numpy(numbers[:9]), torch.from_numpy(numbers)  # at one address
        self.view = self.tensor[7:, ::3].t()
        self.same = self.view
        self.half = torch.arange(5).half()
        self.empty = torch.empty(0, 3)
        self.scalar = torch.tensor(True)
        self.shared = torch.zeros(3).share_memory_()
        self.parameter = nn.Parameter(torch.ones(2), requires_grad=False)
        self.weight = torch.ones(2, requires_grad=True)
        self.product = self.weight * 2
        self.sparse = torch.eye(3).to_sparse()
        self.complex = torch.ones(2, dtype=torch.complex64).conj()
        self.model = nn.Linear(2, 2)
        self.function = lambda x: x + self.scalar

    def __len__(self):
        return 1

    def __getitem__(self, index):
        self.large[0] = 1.0  # a worker's own copy, which it may change
        arrays = [self.columns, self.mapped, self.mapped_from_ten]
        tensors = [
            self.view, self.half, self.empty, self.scalar, self.shared, self.parameter, self.weight, self.product,
            self.first, self.all,
        ]  # fmt: skip
        tensors += [self.sparse.to_dense(), self.complex.resolve_conj(), *self.model.parameters(), self.function(1)]
        kinds = [type(self.mapped).__name__, self.mapped.filename, self.same is self.view, self.weight.requires_grad,
                 self.view.stride(), self.objects.tolist(), type(self.parameter).__name__]  # fmt: skip
        return [one.tobytes() for one in arrays], [one.detach().numpy().tobytes() for one in tensors], kinds


def only(samples):
    return samples[0]


@pytest.mark.parametrize("nameless", [True, False])
def test_what_a_data_set_holds_is_the_same_in_a_worker(nameless, tmp_path, monkeypatch):
    if not nameless:
        monkeypatch.delattr("os.memfd_create")
    np.arange(50, dtype=np.int16).tofile(tmp_path / "mapped")
    data = Held(tmp_path / "mapped")
    before = data.large.copy()
    loader = DataLoader(data, 1, collate_fn=only, num_workers=2)
    there = []

    def evaluate(t):
        with t.run.evaluating(loader) as mine:
            there.extend(mine)
            t.run.record(loss=torch.zeros(()), count=1)

    linear(loader, epochs=0, batch_size=1, before=evaluate)
    assert np.array_equal(data.large, before)
    assert there == [data[0]]
