"""What a step and an epoch do beside the training itself, as numbers of calls: times would depend on the machine."""

import ast
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from hvdtrain import loader
from hvdtrain.inputs import fetching, sharding
from hvdtrain.launching import processes
from hvdtrain.program.shown import only_decides_prints
from tests.single.training.small import N, Trained, X, Y, squares

BATCH = 8


class Own(Dataset):
    """A data set of a program, whose `read` is its __getitem__."""

    def __init__(self, read=None, **held):
        vars(self).update(held)
        if read is not None:
            self.__class__ = type("Read", (Own,), {"__getitem__": read})

    def __len__(self):
        return N


OWN_GLOBAL = X


def shifted(x):
    return x + random.random()


DRAWING = {
    "by torch": lambda self, i: (self.x[i] + torch.rand(1), self.y[i]),
    "by Python": lambda self, i: (self.x[i] + random.random(), self.y[i]),
    "by numpy": lambda self, i: (self.x[i] + np.random.rand(), self.y[i]),
    "in a function": lambda self, i: (shifted(self.x[i]), self.y[i]),
    "in what it holds": lambda self, i: (self.change(self.x[i]), self.y[i]),
    "by a method of a tensor": lambda self, i: (self.x[i].clone().normal_(), self.y[i]),
    "by a function whose name it has, too": lambda self, i: (self.x[i] + torch.rand(1), self.rand),
    "in a comprehension": lambda self, i: (self.x[i], [torch.rand(1) for _ in range(2)]),
    "of a list of objects": lambda self, i: (self.x[i], self.objects[i].change()),
    "of the module": lambda self, i: (OWN_GLOBAL[i], self.y[i]),
    "in another's hand": lambda self, i: (shifted(self), self.y[i]),
}
LOOKING_UP = {
    "tensors": TensorDataset(X, Y),
    "a part of them": Subset(TensorDataset(X, Y), range(N)),
    "a list": list(zip(X, Y, strict=True)),
    "its own tensors": Own(lambda self, i: (self.x[i], self.y[i]), x=X, y=Y),
    "arrays": Own(lambda self, i: (torch.from_numpy(self.x[i]).float() / self.scale, self.y[i]), x=X.numpy(), y=Y, scale=2),
    "lists": Own(lambda self, i: {"x": torch.tensor(self.x[i]), "y": float(self.y[i])}, x=X.tolist(), y=[1.0] * N),
}  # fmt: skip


@pytest.mark.parametrize("how", DRAWING)
def test_what_may_draw_is_seeded_for_each_sample(how):
    data = Own(DRAWING[how], x=X, y=Y, change=shifted, rand=1.0, objects=[fetching] * N)
    assert not fetching.Samples(DataLoader(data), 1).only_looks_up


@pytest.mark.parametrize("what", LOOKING_UP)
def test_what_draws_nothing_is_read_without_a_seed(what, monkeypatch):
    samples, seeds = fetching.Samples(DataLoader(LOOKING_UP[what]), 1), []
    monkeypatch.setattr(fetching, "seed_generators", seeds.append)
    read = samples[0, [3, 5]].batch
    assert seeds == []
    x = read["x"] if isinstance(read, dict) else read[0]
    assert torch.equal(x * (2 if what == "arrays" else 1), X[[3, 5]])
    # What collates may draw: it has the numbers of the last sample, as ever.
    own = fetching.Samples(DataLoader(LOOKING_UP[what], collate_fn=lambda some: default_collate(some)), 1)
    own[0, [3, 5]]
    assert seeds == [sharding.mixed_seed(1, 0, 5)]


def counted(monkeypatch, calls):
    """Count the calls of these functions, (module, name), from now on."""
    counts = Counter()
    for module, name in calls:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _n=name, _r=real, **k: counts.update([_n]) or _r(*a, **k))
    return counts


@pytest.mark.parametrize(
    ("data", "seeds"),
    [
        (Own(DRAWING["by torch"], x=X, y=Y), 2 + BATCH),  # of the step, of each sample, and of the step again
        (TensorDataset(X, Y), 1),
    ],
    ids=["drawing", "looking up"],
)
def test_a_step_of_a_loader_seeds_the_generators_and_does_not_keep_their_states(data, seeds, monkeypatch):
    counts, seen = counted(monkeypatch, [(np.random, "get_state"), (random, "getstate"), (random, "seed")]), []
    Trained(
        data=(DataLoader(data, BATCH),),
        epochs=1,
        at_step=lambda t: counts.clear(),
        each=lambda t: seen.append(dict(counts)),
    )
    assert seen[1:] == [{"seed": seeds}] * 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_numbers_drawn_in_a_step_do_not_depend_on_what_reads_its_samples(accumulate):
    def numbers(*data):
        drawn = []

        def loss(t, *parts):
            drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
            return squares(t, t.batch["a"][0] if isinstance(t.batch, dict) else parts[0])

        Trained("--accumulate", str(accumulate), data=data, loss=loss, batch_size=BATCH // accumulate)
        return drawn

    kinds = [Own(DRAWING["by numpy"], x=X, y=Y), TensorDataset(X, Y)]
    of_loaders = [numbers(DataLoader(data, BATCH // accumulate)) for data in kinds]
    two = numbers({"a": DataLoader(kinds[0], BATCH // accumulate), "b": DataLoader(kinds[0], BATCH // accumulate)})
    assert [*of_loaders, two] == [numbers(X, Y)] * 3


def test_the_same_batch_is_given_on_a_cpu():
    collated = []

    def collate(some):
        collated.append({"a": [torch.stack([x for x, _ in some]), ({"b": 1}, [])]})
        return collated[-1]

    data = (DataLoader(TensorDataset(X, Y), BATCH, collate_fn=collate),)
    same = dict(each=lambda t: collated.append(t.batch is collated[-1]))
    Trained(data=data, epochs=1, loss=lambda t, *_: t.model(t.batch["a"][0]).square().mean(), **same)
    assert collated[1::2] == [True] * 5


def test_exact_loader_keeps_no_states_and_asks_once_for_ranks(monkeypatch):
    counts = counted(monkeypatch, [(np.random, "get_state"), (random, "getstate"), (random, "seed")])
    asked = counted(monkeypatch, [(loader, "place_in_use")])
    assert len(list(loader.exact_loader(DataLoader(Own(DRAWING["by torch"], x=X, y=Y), 1)))) == N
    assert counts == {"seed": 2 * N + 1}  # of each sample, of each step, and of the end
    assert asked.total() < 5  # in each epoch, whatever its number of batches


def test_a_logged_step_reads_one_file(monkeypatch, tmp_path):
    counts, seen = counted(monkeypatch, [(processes, "read_at_once")]), []
    Trained("--log-steps", "1", out=tmp_path, epochs=1, at_step=lambda t: seen.append(counts["read_at_once"]))
    assert np.diff(seen).tolist() == [1] * 4


def test_the_source_is_walked_once_for_all_names(monkeypatch, tmp_path):
    (path := tmp_path / "program.py").write_text(
        "def main():\n    if one or two:\n        print(1)\n" + "def f(x):\n    return x + 1\n" * 200
    )
    counts, walked = counted(monkeypatch, [(ast, "iter_child_nodes")]), []
    (main, *_) = [one for one in compile(path.read_text(), str(path), "exec").co_consts if hasattr(one, "co_name")]
    for name in ("one", "two", "one"):
        assert only_decides_prints(main, name)
        walked.append(counts.total())
        counts.clear()
    assert walked[0] < 200 * 10  # nodes of a function
    assert walked[1] < 30  # the branch
    assert walked[2] == 0
