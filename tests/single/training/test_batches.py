"""Batches as the loader has collated them, and several data sets in one step, each with its position kept."""

from collections import Counter, OrderedDict, UserDict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from hvdtrain.engines.accelerators import to_device
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.inputs import Indices
from hvdtrain.inputs.plan import Plan
from hvdtrain.inputs.several import of_other
from tests.single.training import small
from tests.single.training.test_streams import Numbers, Stateful

N = 22
X = torch.arange(N).float().unsqueeze(1)
Pair = namedtuple("Pair", "x y")


def trained(data, take, *argv, **how):
    """Train on what `take` returns of a batch. data: what gives that of an epoch."""
    how |= dict(net=nn.Linear(1, 1), lr=1e-6, loss=lambda t, *_: t.model(take(t, t.batch)).mean())
    return small.Trained(*argv, data=lambda t: [data()], epochs=3, batch_size=4, **how)


class Kept(UserDict):
    """As Hugging Face's BatchEncoding: a mapping that is no dict, with an attribute of its own."""

    encodings = None


class Table(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return index


COLLATED = {
    "a dict": (lambda i: {"x": X[i], "y": X[i]}, lambda b: b["x"], dict),
    "an ordered dict": (lambda i: OrderedDict(x=X[i]), lambda b: b["x"], OrderedDict),
    "a mapping": (lambda i: Kept(x=X[i]), lambda b: b["x"], Kept),
    "a named tuple": (lambda i: Pair(X[i], X[i]), lambda b: b.x, Pair),
    "a tuple": (lambda i: (X[i], X[i]), lambda b: b[0], tuple),
    "a nested list": (lambda i: [[X[i], [X[i]]], {"y": X[i]}], lambda b: b[0][1][0], list),
    "a tensor": (lambda i: X[i], lambda b: b, torch.Tensor),
    "words beside numbers": (lambda i: {"x": X[i], "names": ["a"] * len(i), "none": None}, lambda b: b["x"], dict),
}


@pytest.mark.parametrize("kind", COLLATED)
def test_a_batch_is_what_the_loader_has_collated_in_training_and_evaluation(kind):
    collate, rows, expected = COLLATED[kind]
    loader = DataLoader(Table(), 4, shuffle=True, collate_fn=lambda indices: collate(torch.tensor(indices)))
    seen = []

    def take(t, batch):
        assert type(batch) is expected
        assert rows(batch)[:, 0].int().tolist() == t.step.batch.indices.tolist()
        seen.extend(t.step.batch.indices.tolist())
        return rows(batch)

    def evaluate(t, epoch):
        evaluated = []
        with t.run.evaluating(loader) as batches:
            for batch in batches:
                assert type(batch) is expected
                evaluated.extend(rows(batch)[:, 0].int().tolist())
                t.run.record(loss=rows(batch))
        assert sorted(evaluated) == list(range(N))
        assert t.run.evaluation["loss"] == pytest.approx(X.mean().item())

    trained(lambda: loader, take, tail=evaluate)
    assert Counter(seen) == dict.fromkeys(range(N), 3)


def test_what_is_moved_keeps_its_kind_and_is_a_copy():
    device = torch.device("meta")
    kept = Kept(x=torch.zeros(2))
    moved = to_device({"a": [kept, Pair(torch.zeros(1), 1)], "b": pack_sequence([torch.zeros(2, 1)])}, device)
    assert isinstance(moved["a"][0], Kept)
    assert moved["a"][0]["x"].device == device
    assert kept["x"].device.type == "cpu"
    assert moved["a"][1].x.device == device
    assert moved["b"].data.device == device


def test_the_loss_of_a_step_is_that_of_all_micro_batches():
    losses = []

    def at_step(t):
        with pytest.raises(UserError, match=r"step\.loss before the end"):
            _ = t.step.loss

    t = small.Trained("--accumulate", "2", "--log-steps", "1", net=nn.Linear(1, 1), lr=1e-6, epochs=1, batch_size=4,
                      data=[X], at_step=at_step, loss=small.squares, each=lambda t: losses.append(t.step.loss))  # fmt: skip
    assert losses[-1] == pytest.approx(t.run.state.train["loss"])
    with pytest.raises(UserError, match=r"step\.batch outside"):
        _ = t.step.batch


# ---- two data sets

FIRST, OTHER = TensorDataset(X), TensorDataset(torch.arange(31).float().unsqueeze(1))


def two(**options):
    first, other = DataLoader(FIRST, 4, shuffle=True), DataLoader(OTHER, 12, **options)
    return {"labelled": first, "unlabelled": other}


def used(data, *argv, **how):
    seen = {"labelled": [], "unlabelled": []}

    def take(t, batch):
        for name, (x,) in batch.items():
            seen[name].extend(x[:, 0].int().tolist())
        return torch.cat([x for (x,) in batch.values()])

    trained(lambda: data, take, *argv, **how)
    return seen


@pytest.mark.parametrize("options", [{"shuffle": True}, {}, {"sampler": WeightedRandomSampler([1.0] * 31, 20)}])
def test_two_data_sets_each_keep_their_position(options, tmp_path):
    whole = used(two(**options))
    assert Counter(whole["labelled"]) == dict.fromkeys(range(N), 3)
    assert len(whole["unlabelled"]) == 3 * 3 * N  # three for each labelled one
    if "sampler" not in options:
        first = whole["unlabelled"][:31]
        assert sorted(first) == list(range(31))  # an epoch of its own
        assert (first == list(range(31))) == (not options)
        assert (whole["unlabelled"][31:62] == first) == (not options)
    goes_on(options, tmp_path, whole)


def goes_on(options, directory, whole, **how):
    saved = ("--output-dir", str(directory), "--checkpoint-steps", "1")
    small.killed(used, two(**options), *saved, kill=8, **how)
    rest = used(two(**options), *saved, **how)
    for name, samples in rest.items():
        assert 0 < len(samples) < len(whole[name])
        assert samples == whole[name][-len(samples) :]


def test_with_restart_each_epoch_begins_all_data_sets_anew(tmp_path):
    whole = used(two(shuffle=True), restart=True)
    epochs = [whole["unlabelled"][3 * N * epoch : 3 * N * (epoch + 1)] for epoch in range(3)]
    for epoch in epochs:
        assert Counter(epoch[:31]) == dict.fromkeys(range(31), 1)
        assert max(Counter(epoch).values()) - min(Counter(epoch).values()) <= 1
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each in an order of its own"
    assert used(two(), restart=True)["unlabelled"][3 * N :][:31] == list(range(31))
    goes_on({"shuffle": True}, tmp_path, whole, restart=True)


def test_tensors_go_beside_a_loader_and_a_dictionary_may_be_written_anew_in_each_epoch():
    shuffled, opened = DataLoader(FIRST, 4, shuffle=True), set()

    def take(t, batch):
        opened.add(id(t.run.data.input))
        assert [len(part[0]) for part in batch.values()] == [t.step.batch.count] * 2
        return batch["b"][1]

    trained(lambda: {"a": shuffled, "b": (X, X)}, take)
    assert len(opened) == 1


def test_over_any_number_of_ranks_a_step_takes_the_same_samples_of_both():
    other = Indices(31)
    taken = {}
    for size in (1, 2, 3, 4):
        of_ranks = []
        for rank in range(size):
            plan = Plan(N, N, 1, 2, rank, size, 12 // size)
            for (_, mine), (_, theirs) in zip(plan, of_other(plan, (other, 3), 0, 5), strict=True):
                assert theirs.local_count == 3 * mine.local_count
                assert theirs.weight == mine.weight
                of_ranks += theirs.indices[: theirs.local_count].tolist()
        taken[size] = Counter(of_ranks)
    assert taken[1] == taken[2] == taken[3] == taken[4]
    assert sum(taken[1].values()) == 2 * 3 * N


SOURCES = {
    "a sampler": lambda: DataLoader(Table(), 4, sampler=WeightedRandomSampler([1.0] * N, N)),
    "a stream": lambda: DataLoader(Stateful(), 4),
    "a stream, workers": lambda: DataLoader(Numbers(), 4, num_workers=2),
    "several": lambda: {"a": DataLoader(Table(), 4, shuffle=True), "b": (X[:9],)},
    "tensors": lambda: X,
    "workers": lambda: DataLoader(Table(), 4, shuffle=True, num_workers=1),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_second_loop_goes_on_within_the_epoch_in_which_a_limit_of_steps_ended_the_first(
    kind, tmp_path, worker_server
):
    """It began the epoch again, and never came to its end: one that has more samples than there are."""

    def seen(*limits):
        batches, source = [], SOURCES[kind]()

        def loss(step, *batch):
            batches.append((run.state.epoch, repr(batch)))
            return model(torch.ones(1, 1)).mean()

        with small.alone("--output-dir", str(tmp_path / f"{limits}"), batch_size=4) as run:
            model, _ = run.prepare(net := nn.Linear(1, 1), torch.optim.SGD(net.parameters(), 0.1))
            for steps in limits:
                small.fit(run, [source], loss, steps=steps)
            return batches, run.state.epoch, run.state.samples_of_epoch

    assert seen(2, 3, 6, 14) == seen(14)
