"""What no checkpoint has, and what an epoch began with: kept to its end after a resume, or said once in a line."""

import contextlib
import functools
import itertools
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate
from torch.utils.data import WeightedRandomSampler as Weighted

from hvdtrain import training
from hvdtrain.checkpoint.checkpoint import read_checkpoint
from hvdtrain.checkpoint.own import BYTES, OWN
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.lines import warn_once
from hvdtrain.inputs.sameness import leaf_of
from tests.single.training.small import (
    Killed,
    N,
    Stateful,
    Trained,
    X,
    Y,
    fit,
    flags_for,
    kill_at,
    killed,
    network,
    resumed,
    saving,
)

NUMBERED = TensorDataset(X, Y, torch.arange(N))


class Beside(nn.Module):
    """change: what a forward pass in training does to the module."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.change, self.scale, self.mean = nn.Linear(3, 1), change, 2.0, torch.zeros(3)
        self.register_buffer("centre", torch.zeros(3), persistent=False)
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x):
        self.change(self, x)
        return self.layer(x)


class Extra(Beside):
    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def cooled(module, x):
    module.scale *= 0.9


BESIDE = [
    (lambda: nn.Sequential(Beside(cooled)), "0.scale"),
    (lambda: Beside(lambda module, x: setattr(module, "mean", module.mean + x.mean(0))), "mean"),
    (lambda: Beside(lambda module, x: module.centre.add_(x.mean(0))), "centre"),
    (lambda: Beside(lambda module, x: module.kept.add_(x.mean(0))), ""),
    (lambda: Beside(lambda module, x: setattr(module, "mean", module.layer(x))), ""),  # an output that it keeps
    (lambda: Extra(cooled), ""),
    (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1)), ""),
]


@pytest.mark.parametrize(("make", "told"), BESIDE, ids=range(len(BESIDE)))
def test_what_a_model_holds_and_no_checkpoint_has_is_said_once(make, told, tmp_path, capsys):
    """A resumed run began with its first value, exit code 0."""
    Trained("--checkpoint-steps", "1", out=tmp_path, net=make)
    lines = [line for line in capsys.readouterr().out.splitlines() if "has changed, and no checkpoint has it" in line]
    assert [line.split()[1] for line in lines] == [told] * bool(told)


def test_weights_that_are_set_after_they_were_restored_are_refused(tmp_path):
    """A resumed run began with new weights, exit code 0."""

    def program(directory, stop, only_at_start=False):
        def init(t):
            if not (only_at_start and t.run.state.step):
                t.net[3].reset_parameters()

        return Trained(*saving(stop), out=directory, kill=stop, before=init).losses

    killed(program, tmp_path / "a", 3)
    with pytest.raises(
        UserError, match=r"3.weight was restored by run.prepare\(\), and has been changed since: do that"
    ):
        program(tmp_path / "a", None)
    whole, apart = resumed(partial(program, only_at_start=True), tmp_path, 3)
    assert whole[-len(apart) :] == apart


def test_weights_of_each_of_several_models_are_looked_after(tmp_path):
    """Parameters of two models may have the same names: only those of the last one were compared."""

    def program(directory, stop):
        first, last = network(), network()
        optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], 0.1)
        with training.start(flags_for(*saving(stop), "--output-dir", str(directory))) as run:
            run.prepare(first, last, optimizer)
            if run.state.step:
                first[3].reset_parameters()
            fit(run, (X, Y), lambda _, x, y: (first(x) + last(x) - y).square().mean(), each=kill_at(stop))

    killed(program, tmp_path, 3)
    with pytest.raises(UserError, match=r"3.weight was restored by run.prepare\(\), and has been changed since"):
        program(tmp_path, None)


class Shifted:
    """A transform with a generator of its own."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self, x):
        return x + 0.1 * float(self.generator.random())


class Read(Dataset):
    """change: what reading a sample does to the data set."""

    def __init__(self, change=lambda data, index: None, transform=torch.clone):
        self.change, self.transforms, self.reads, self.last, self.cache = change, [transform], [0] * N, 0, {}

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.change(self, index)
        self.cache[index] = torch.ones(1)
        return self.transforms[0](X[index]), Y[index]


def counts(data, index):
    data.reads[index] += 1


def notes(data, index):
    data.last = index + 1


class Rows(Dataset):
    """rows: what it holds of each sample. once: they are changed when they are read for the first time, as a cache is."""

    def __init__(self, rows, once=False):
        self.rows, self.once, self.done = rows, once, torch.zeros(N)

    def __len__(self):
        return N

    def __getitem__(self, index):
        row = self.rows[index]
        if not (self.once and self.done[index]):
            row -= 0.1
            self.done[index] = 1.0
        return torch.as_tensor(row).clone(), Y[index]


class Columns(Rows):
    """Gives whole columns for a list of indices, as some data sets of tables do."""

    def __getitems__(self, indices):
        return {"x": self.rows[indices], "y": Y[indices]}


def test_a_look_at_what_reading_changes_ends_no_run(tmp_path):
    data = DataLoader(Columns(X.clone()), 8, collate_fn=lambda columns: (columns["x"], columns["y"]))
    Trained(out=tmp_path, data=[data])


DRIFTING = [
    (lambda: Rows(X.clone()), "rows"),
    (lambda: Rows(X.numpy().copy()), "rows"),
    (lambda: Subset(Rows([*X.numpy().copy()]), range(N // 2, N)), "rows"),
    (lambda: Rows(X.clone(), once=True), ""),
    (lambda: Read(), ""),
    (lambda: Subset(Read(), range(N)), ""),
    (lambda: Read(transform=Shifted(random)), ""),
    (lambda: Read(counts), "reads"),
    (lambda: Subset(Read(notes), range(N)), "dataset.last"),
    (lambda: Read(transform=Shifted(random.Random(1))), "transforms.generator"),
    (lambda: ConcatDataset([Read(transform=Shifted(np.random.RandomState(1)))]), "datasets.transforms.generator"),
]


def warnings_of(data, out, capfd, **how):
    """Train on a data set, and return the warnings."""
    warn_once.cache_clear()
    Trained(out=out, data=(DataLoader(data, batch_size=8, **how),))
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize(("make", "told"), DRIFTING, ids=range(len(DRIFTING)))
def test_a_data_set_that_changes_when_it_is_read_is_said_once(make, told, tmp_path, capfd):
    """A resumed run read the rest of the epoch from a new data set, exit code 0."""
    lines = [line for line in warnings_of(make(), tmp_path, capfd) if "changes when samples are read" in line]
    assert [line.split()[1] for line in lines] == [told] * bool(told)


def augmented(index):
    return X[index] + torch.rand(3)


class Cached(Dataset):
    """read: what reads a sample, before it goes into the dictionary."""

    def __init__(self, read):
        self.read, self.held = read, {}

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index not in self.held:
            self.held[index] = self.read(index)
        return self.held[index], Y[index]


class Drawn(Cached):
    def __getitem__(self, index):
        return self.read(index), Y[index]


class CachedByFunction(Cached):
    @functools.lru_cache  # noqa: B019 - as programs do
    def __getitem__(self, index):
        return self.read(index), Y[index]


class After(Cached):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(3), y


def of_a_new_generator(index):
    return X[index] + float(np.random.default_rng().random())


def of_its_number(index):
    return X[index] + float(np.random.default_rng(index).random())


UNSEEDED = [
    (of_a_new_generator, {}, 1),
    (of_a_new_generator, {"num_workers": 1}, 1),
    (of_its_number, {}, 0),
    (augmented, {}, 0),
]


@pytest.mark.parametrize(("read", "how", "told"), UNSEEDED, ids=range(len(UNSEEDED)))
def test_numbers_that_are_drawn_without_a_seed_are_said_once(read, how, told, tmp_path, capfd, worker_server):
    """A resumed run read other samples, exit code 0."""
    lines = warnings_of(Drawn(read), tmp_path, capfd, **how)
    assert [line.split(" changes when")[0] for line in lines] == [
        "warning: a generator of random numbers that is made without a seed"
    ] * told


CACHES = [
    (lambda: Cached(augmented), 1),
    (lambda: Subset(CachedByFunction(augmented), range(N)), 1),
    (lambda: Cached(X.__getitem__), 0),
    (lambda: After(X.__getitem__), 0),
]


@pytest.mark.parametrize(("make", "told"), CACHES, ids=range(len(CACHES)))
def test_a_cache_of_samples_that_were_augmented_is_said_once(make, told, tmp_path, capfd):
    """A resumed run augmented them anew, exit code 0."""
    lines = warnings_of(make(), tmp_path, capfd)
    assert sum("a cache of random samples (keep them there as they are before" in line for line in lines) == told


class Files(Dataset):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return X[self.names[index][1]], Y[self.names[index][1]]


class Named(Files):
    """With the numbers of classes by their names."""

    def __init__(self, names):
        self.names, self.numbers = sorted(names), {name: number for number, (name, _) in enumerate(names)}


class Drawing:
    """A transform that draws its weights when it is made, as AugMix may."""

    def __init__(self, seed):
        generator = np.random.default_rng(seed)
        self.weights, self.share = generator.dirichlet([1.0] * 3), generator.random()

    def __call__(self, x):
        return x * self.share * self.weights[0]


class Transformed(Files):
    def __init__(self, order):
        self.names, self.transform = [("", k) for k in range(N)], Drawing(order[0])


OTHERWISE = [
    (lambda order, at: Transformed(order), "transform.weights"),
    (lambda order, at: Named([(f"{k}.png", k) for k in order]), "numbers"),
    (lambda order, at: Files([(f"{at}/{k}.png", k) for k in order]), "names"),
    (lambda order, at: ConcatDataset([Files([(f"{at}/{k}.png", k) for k in order])]), "datasets.names"),
    (lambda order, at: TensorDataset(X[order], Y[order]), "tensors"),
    (lambda order, at: Holding(np.array([f"{k}.png" for k in order])), "held"),
]


@pytest.mark.parametrize(("make", "told"), OTHERWISE, ids=range(len(OTHERWISE)))
@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)])
def test_a_data_set_whose_order_is_another_one_at_the_resume_is_said(make, told, seeds, tmp_path, capsys):
    """Names from a set, or shuffled before training.start, were others: exit code 0."""
    for seed, stop in zip(seeds, (3, None), strict=True):
        order = list(range(N))
        random.Random(seed).shuffle(order)
        data = DataLoader(make(order, f"/copy{stop}"), batch_size=8)
        with pytest.raises(Killed) if stop else contextlib.nullcontext():
            Trained(*saving(stop), out=tmp_path, kill=stop, data=(data,))
    line = f"warning: the {told} of the data set are not those of the run so far: sort the names of files and classes"
    assert (line in capsys.readouterr().out) == (seeds == (1, 2))


class Harder:
    calls = 0

    def __call__(self, rows):
        self.calls += 1
        return default_collate(rows)

    def method(self, rows):
        return self(rows)


@pytest.mark.parametrize("make", [Harder, lambda: Harder().method])
def test_a_collate_function_that_changes_is_said(make, tmp_path, capfd):
    collate = make()
    getattr(collate, "__self__", collate).calls = 0
    first, *_ = warnings_of(TensorDataset(X, Y), tmp_path, capfd, collate_fn=collate)
    assert first.startswith("warning: calls of collate_fn changes when samples are read: a resumed")


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_resumed_epoch_keeps_its_order_where_the_weights_have_changed_since(in_batches, tmp_path, capsys):
    """Its rest was drawn by newer weights, so that samples came twice."""

    def program(directory, stop):
        order, sampler = {}, Weighted(torch.ones(N), 24)
        batches = {"batch_sampler": BatchSampler(sampler, 8, drop_last=False)}
        loader = DataLoader(NUMBERED, **(batches if in_batches else {"batch_size": 8, "sampler": sampler}))

        def head(t, epoch):
            sampler.weights = (1 / (1 + t.seen.hits)).double()

        def loss(t, x, y, numbers):
            order.setdefault(t.run.state.epoch, []).extend(numbers.tolist())
            t.seen.hits[numbers] += 5
            return (t.model(x) - y).square().mean()

        how = {
            "registered": lambda t: {"seen": Stateful(hits=torch.zeros(N))},
            "head": head,
            "loss": loss,
            "data": (loader,),
        }
        Trained(*saving(stop), out=directory, kill=stop, epochs=3, **how)
        return order

    whole, apart = resumed(program, tmp_path, 5)  # the second step of the second epoch
    assert len(apart[1]) in (8, 16)
    assert apart[1] == whole[1][-len(apart[1]) :]
    assert apart[2] == whole[2]
    line = "draws another order than when epoch 2 began: that one is kept to its end; later ones are as without a resume if"
    assert line in capsys.readouterr().out


def test_the_order_of_an_epoch_is_saved_as_numbers(tmp_path):
    """As text, that of 1.3 million samples took a tenth of a second of each save."""
    data = DataLoader(TensorDataset(X, Y), batch_size=25_000, sampler=Weighted(torch.ones(N), 50_000))
    Trained("--checkpoint-steps", "1", "--batch-size", "25000", out=tmp_path, data=(data,), epochs=1)
    _, tensors = read_checkpoint(tmp_path / "checkpoints" / "step-00000001.safetensors")
    assert len(tensors[OWN]) < 25_000
    assert 8 * len(tensors[BYTES]) > 4 * 50_000


def test_how_often_a_program_evaluates_does_not_change_what_it_draws():
    def drawn_in_steps(evaluates):
        seen = []

        def each(t):
            if t.step.number in evaluates:
                with t.run.evaluating(N):
                    t.run.record(loss=torch.rand(N, 1))

        def draw(*_):
            seen.append([torch.rand(()).item(), random.random(), float(np.random.rand())])

        Trained(at_step=draw, each=each, tail=draw)
        return seen

    assert drawn_in_steps(()) == drawn_in_steps((1, 2, 4, 5, 10))


def test_a_resumed_run_says_that_its_target_was_reached(tmp_path, capsys):
    """With more epochs, it said that training continues, and ended."""

    def tail(t, epoch):
        with t.run.evaluating(N):
            t.run.record(loss=torch.ones(N))

    for epochs in (2, 2, 3):
        capsys.readouterr()
        t = Trained(out=tmp_path, epochs=epochs, stop_at={"loss": 2.0}, metrics={"loss": "min"}, tail=tail)
        assert t.run.state.epoch == 1
    assert capsys.readouterr().out.count("this run has reached its target, and ends: another target continues it") == 1


AROUND = {  # what is around the steps: what is said
    "(steps)": "",
    "(step for _, step in enumerate(steps))": "enumerate(run.steps(...)) begins at 0 again",
    "(step for step, _ in zip(steps, X))": "zip(run.steps(...), OTHER) begins OTHER again",
    "(step for _, step in zip(itertools.cycle(Y), steps))": "zip(run.steps(...), OTHER) begins OTHER again",
}


@pytest.mark.parametrize("around", AROUND)
def test_what_begins_again_beside_the_steps_of_a_resumed_epoch_is_said(around, tmp_path, capsys):
    """A GAN's generator, updated at every third index, was updated in other steps: other weights, exit code 0. And so were
    the weights of a program that took its unlabelled samples from a second loader."""
    net = network()
    with training.start(flags_for("--output-dir", str(tmp_path), epochs=1)) as run:
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(1):
            steps = run.steps(X, Y)
            for step in eval(around, {"itertools": itertools, "X": X, "Y": Y, "steps": steps}):
                for x, y in step.batches():
                    step.backward((model(x) - y).square().mean())
                step.update()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [AROUND[around] in line for line in said] == [True] * bool(AROUND[around])


def of_labels(kind, at):
    """Return data whose labels the program computes at the head of an epoch. at: 1 where they are others than before."""
    labels = torch.arange(N) % 2 + (torch.arange(N) == 5) * at
    if kind == "tensors":
        return X, Y, labels
    if kind == "a subset":
        return (DataLoader(Subset(TensorDataset(X, Y, labels * 0), range(at, N - 2 + at)), 8),)
    return (DataLoader(TensorDataset(X, Y, labels), 8, shuffle=True),)


@pytest.mark.parametrize("kind", ["tensors", "a data set", "a subset"])
@pytest.mark.parametrize(("at", "stop"), [(1, 3), (0, 3), (1, 6)])
def test_data_of_an_epoch_that_are_others_when_it_is_resumed_are_said(kind, at, stop, tmp_path, capsys):
    """Pseudo-labels that are computed from the weights: one label of 40 was another, and the epoch went on, exit code 0."""
    for where, kill in ((0, stop), (at, None)):
        with pytest.raises(Killed) if kill else contextlib.nullcontext():
            Trained(
                *saving(kill), out=tmp_path, kill=kill, data=partial(lambda at, t: of_labels(kind, at), where),
                loss=lambda t, x, y, _: (t.model(x) - y).square().mean(), changes=kind != "tensors",
            )  # fmt: skip
    said = "warning: the data of this epoch are not those with which it began, and some samples are used twice or never"
    assert (said in (out := capsys.readouterr().out)) == (at == 1 and stop == 3), out


class Leveled(Dataset):
    def __init__(self):
        self.level = np.zeros(N, dtype=int)

    def set_epoch(self, epoch):
        self.level[:] = epoch

    def __getitem__(self, index):
        return X[index] + self.level[index], Y[index]

    def __len__(self):
        return N


def set_level(data, epoch):
    data.level = np.full(N, epoch)


@pytest.mark.parametrize("head", [Leveled.set_epoch, set_level])
@pytest.mark.parametrize("stop", [3, 6])
def test_what_a_program_sets_in_its_data_set_for_an_epoch_is_left_alone(head, stop, tmp_path, capsys):
    """It was "not those of the run so far", where a run was resumed at the end of an epoch."""
    for kill in (stop, None):
        data = Leveled()
        with pytest.raises(Killed) if kill else contextlib.nullcontext():
            Trained(*saving(kill), out=tmp_path, kill=kill, data=(DataLoader(data, 8),),
                    head=partial(lambda data, t, epoch: head(data, epoch), data))  # fmt: skip
    assert "of the run so far" not in capsys.readouterr().out


class Holding(Dataset):
    def __init__(self, held):
        self.held = held

    def __getitem__(self, index):
        return X[index], Y[index]

    def __len__(self):
        return N


HELD = {
    "texts": np.array(["a", "b"]), "objects": np.array([{1}, None]), "dates": np.array(["2020"], dtype="M8[Y]"),
    "small": np.arange(3, dtype=np.uint16), "none": np.zeros((0, 3)), "in one place": np.broadcast_to(np.arange(3), (2, 3)),
    "sparse": torch.eye(3).to_sparse(), "complex": torch.ones(2, dtype=torch.complex64),
    "half": torch.ones(2, dtype=torch.bfloat16),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", HELD)
def test_a_data_set_may_hold_arrays_of_any_kind(kind, tmp_path):
    """One of texts, such as the names of files, ended in a traceback."""
    Trained(out=tmp_path, data=(DataLoader(Holding(HELD[kind]), 8),), epochs=1)


@pytest.mark.parametrize("size", [47_040_000, 2**24 + 3])
def test_a_data_set_may_hold_more_values_than_float32_counts(size, tmp_path):
    """Those of MNIST as numbers: the last of them was looked for beyond the end, a traceback at the start."""
    data = Read()
    data.images = torch.zeros(1).expand(size)
    Trained(out=tmp_path, data=(DataLoader(data, batch_size=8),), epochs=1)
    assert leaf_of(torch.arange(size))[1][-1] == size - 1
