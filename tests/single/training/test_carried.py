"""What a program carries from step to step, or epoch to epoch, in variables of its own: a line says so.
What it sets anew, or what a resumed run knows, is left alone."""

import argparse
import ast
import copy
import enum
import functools
import itertools
import os
import queue
import random
import sys
import textwrap
import threading
import weakref
from collections import ChainMap
from contextvars import ContextVar
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler
from torchmetrics import MeanMetric

from hvdtrain import training
from hvdtrain.program.computed import computed_from
from tests.single.training import carrying
from tests.single.training.small import Stateful, X, Y, flags_for

# In the programs below.
USED = (
    argparse,
    functools,
    itertools,
    np,
    random,
    SimpleNamespace,
    Stateful,
    AveragedModel,
    DataLoader,
    Subset,
    TensorDataset,
)
USED += (WeightedRandomSampler, MeanMetric, carrying, copy, os, queue, threading, weakref, ChainMap, WeakKeyDictionary)
SOURCE = """
import time
bad = 0
status = {"loss": None}
def served():
    return str(status)
def worse():
    global bad
    bad += 1
def remember(value, seen={}):
    seen[len(seen)] = value
class Lazy:
    def __init__(self):
        self.size, self.table, self.by_size = 3, None, {}
    def rows(self):
        if self.table is None:
            self.table = torch.arange(self.size)
        return self.table
    def at(self, size):
        if size not in self.by_size:
            self.by_size[size] = torch.ones(size * self.size)
        return self.by_size[size]
def main(run, net, optimizer, data):
    model, _ = run.prepare(net, optimizer)
BEFORE
    for epoch in run.epochs(TIMES):
HEAD
        for step in run.steps(*data):
            for x, y in step.batches():
BATCH
                step.backward((model(x) - y).square().mean())
            step.update()
            value = step.loss
EACH
TAIL
AFTER
"""


class Buffer:
    def __init__(self):
        self.rows = []


class Flow(IterableDataset):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        self.at %= len(X)
        while self.at < len(X):
            self.at += 1
            yield X[self.at - 1], Y[self.at - 1]


class KeptFlow(Flow):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Counted:
    BAD = 0

    @classmethod
    def check(cls, value):
        cls.BAD = 0 if value < 0 else cls.BAD + 1


class Stop:
    def __init__(self):
        self.best, self.count = None, 0

    def __call__(self, value):
        if self.best is None or value < self.best:
            self.best, self.count = value, 0
        else:
            self.count += 1


class Meter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.number = 0.0, 0

    def add(self, value):
        self.total, self.number = self.total + value, self.number + 1


class Order:
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch


class Average:
    def __init__(self):
        self.decay = 0.9

    def set_decay(self, decay):
        self.decay = decay

    def __call__(self, mean, value):
        return self.decay * mean + (1 - self.decay) * value


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre, self.last = torch.zeros(1), torch.zeros(1)

    def forward(self, x):
        self.last = x.detach().mean()
        return self.last - self.centre

    def update(self, x):
        self.centre = 0.9 * self.centre + 0.1 * x.mean()


class Kind(enum.Enum):
    WARM, COLD = 1, 2


class Slots:
    __slots__ = ("sum",)

    def __init__(self):
        self.sum = 0.0

    def add(self, value):
        self.sum += value


class Weighing(nn.Module):
    def __init__(self):
        super().__init__()
        self.now = self.before = None

    def forward(self, x):
        self.now = x.detach() if self.before is None else x.detach() * self.before.mean()
        return self.now

    def keep(self):
        self.before = self.now


def averaging():
    held = torch.zeros(1)

    def average(value):
        nonlocal held
        held = 0.9 * held + 0.1 * value

    return average


class Scaled(torch.autograd.Function):
    mean = torch.ones(1)

    @staticmethod
    def forward(ctx, x):
        Scaled.mean = 0.9 * Scaled.mean + 0.1 * x.abs().mean()
        return x / Scaled.mean


def falling():
    rate = 1.0
    while True:
        yield rate
        rate *= 0.9


class Hooked:
    best = 9.0

    def __call__(self, module, inputs, output):
        self.best = min(self.best * 0.99, output.mean().item())


class Outer:
    def __init__(self, **held):
        vars(self).update(held)


class Cached(nn.Module):
    mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(3)
        return x * self.mask


CACHE, HISTORY, LAST = {}, {}, ContextVar("last", default=9.0)


def cached(key):
    return CACHE.setdefault(key, [key])


def noted(epoch, value):
    HISTORY[epoch] = value


def set_marks(rows, value):
    rows.marks = value


def tally():
    tally.calls = getattr(tally, "calls", 0) + 1


def shading(value):
    shading.shade = value


def shaded(value):
    return value * shading.shade


def noting(value):
    if not hasattr(noting, "scale"):
        noting.scale = 2.0
    noting.scaled = value * noting.scale
    return noting.scaled


class Draws:
    def __init__(self):
        self.random = np.random.RandomState(1)

    def __iter__(self):
        return iter(self.random.permutation(40).reshape(5, 8).tolist())

    def __len__(self):
        return 5


class Collate:
    def __init__(self):
        self.random = random.Random(1)

    def __call__(self, rows):
        return [torch.stack(part) for part in zip(*rows, strict=True)]


class Rows(Dataset):
    def __init__(self):
        self.marks = np.zeros(40)
        self.order, self.epoch, self.read = [(k,) for k in range(40)], 0, []

    def shuffle(self):
        self.order = [self.order[k] for k in torch.randperm(40)]

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.order = [((k + self.epoch) % 40,) for k in range(40)]

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.read.append(index)
        place = self.order[index][0] + int(0 * self.marks[index])
        return X[place], Y[place]


class Labelling:
    """Keeps a data set in an attribute, and writes into it."""

    def __init__(self, rows):
        self.rows, self.loader = rows, DataLoader(rows, 8)

    def mark(self, value):
        self.rows.order[1] = (int(value),)


class Monitor:
    def __init__(self):
        self.last_loss = self.last_note = None

    def __call__(self, loss):
        self.last_loss = [loss]

    def note(self, loss):
        self.last_note = [loss]


class Smooth:
    def call(self, loss, seen={}):  # noqa: B006
        seen["loss"] = 0.9 * seen.get("loss", loss) + 0.1 * loss


class Shown(Monitor):
    def __call__(self, loss):
        self.last_loss = self.last_loss if loss > 9 else loss

    @property
    def shown(self):
        return f"{self.last_loss:.3f}"


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = {}

    def forward(self, loss):
        self.last = {"loss": loss}


OUTPUTS = {}


def keep(module, inputs, output):
    OUTPUTS["last"] = output


class Beside:
    """As an object of a library, whose state_dict is a collective of all ranks: only one would call it."""

    __module__ = "torch"

    def __init__(self):
        self.best = 9.0

    def state_dict(self):
        raise RuntimeError("the other ranks do not call it")


class Raising:
    def __getattr__(self, name):
        raise RuntimeError("not for others")


class Odd:
    @property
    def __dict__(self):
        raise RuntimeError("not for others")


WEIGHTED = (
    "loader = DataLoader(TensorDataset(X, Y), 8, sampler=WeightedRandomSampler(torch.ones(40), 40))\ndata = (loader,)"
)
ROWS = "rows = Rows()\nloader = DataLoader(rows, 8)\ndata = (loader,)"
LABELLED = "loader = DataLoader(TensorDataset(X, Y.clone()), 8)\ndata = (loader,)"
LOST = {  # by what the line names: before the loop, at the head of an epoch, after a step, at the end of an epoch
    "loader.dataset.at": ("loader = DataLoader(Flow(), 8)", "data = [loader]", "Stateful(at=1).at", ""),
    "best": ("best, bad = 9.0, 0", "", "", "if value < best:\n    best, bad = value, 0\nelse:\n    bad += 1"),
    "best, bad": ("best, bad = None, 0", "", "", "bad += 1\nif best is None or value < best:\n    best = value"),
    "mean": ("mean = 0.0", "", "mean = 0.9 * mean + 0.1 * value", ""),
    "Scaled.mean": ("scaled = Scaled.apply", "", "scaled(x)", ""),
    "phase": ("phase = 'warm'", "print(phase)", "if value < 9:\n    phase = 'main'", ""),
    "levels": ("levels = falling()", "", "next(levels)", ""),
    "stage": ("stage = 1", "scale = stage", "if value < 9:\n    stage = 2", ""),
    "losses": ("losses = []", "", "losses.append(value)", ""),
    "kept['best']": ("kept = dict(best=9.0)", "", "", "kept['best'] = min(kept['best'], value)"),
    "buffer.rows": ("buffer = Buffer()", "", "buffer.rows.append((x, y))", ""),
    "stop.best": ("stop = Stop()", "", "", "stop(value)"),
    "averaged": ("averaged = AveragedModel(net)", "", "averaged.update_parameters(net)", ""),
    "centre": ("centre = torch.zeros(1)", "", "centre = 0.9 * centre + 0.1 * y.mean()", ""),
    "average.decay": ("average = Average()", "", "if step.number == 2:\n    average.set_decay(0.5)", ""),
    "centred.centre": ("centred = Centred()", "", "centred.update(y)", ""),
    "rows.order": (ROWS, "rows.shuffle()", "", ""),
    "loader.dataset.order": (ROWS + "\ndel rows", "random.shuffle(loader.dataset.order)", "", ""),
    "pairs": ("pairs = list(zip(X, Y))\ndata = (DataLoader(pairs, 8),)", "random.shuffle(pairs)", "", ""),
    "loader.dataset.order ": (ROWS, "loader.dataset.shuffle()", "", ""),  # which the loop has by this name alone
    "loader.dataset.tensors": (LABELLED, "", "loader.dataset.tensors[1].sub_(0.1)", ""),
    "labelling.rows.order": (
        "labelling = Labelling(Rows())\ndata = (labelling.loader,)",
        "",
        "labelling.mark(value)",
        "",
    ),
    "the global bad": ("", "", "", "worse()"),
    "Counted.BAD": ("", "", "", "Counted.check(value)"),
    "loader.sampler.weights": (WEIGHTED, "", "", "loader.sampler.weights = 1.0 + torch.rand(40).double()"),
    "trainer.stop.best": ("trainer = SimpleNamespace(stop=Stop())", "", "", "trainer.stop(value)"),
    "calls[0].best": ("calls = [Stop()]", "", "", "for call in calls:\n    call(value)"),
    "costs": ("costs = np.zeros(3)", "", "", "costs[epoch] = value"),
    "shadow": ("shadow = {'weight': torch.zeros(3)}", "", "shadow['weight'].add_(value)", ""),
    "centre.held": ("centre = averaging()", "", "centre(value)", ""),
    "numbers": ("numbers = itertools.count()", "", "", "print(next(numbers))"),
    "rates.rate": ("rates = falling()", "step_rate = next(rates)", "step.lr = step_rate", ""),
    "noise.drawn": ("noise = SimpleNamespace(drawn=torch.Generator())", "", "", "torch.rand(1, generator=noise.drawn)"),
    "rates.sum": ("rates = Slots()", "", "rates.add(value)", ""),
    "weighing.before": ("weighing = Weighing()", "", "weighing(y)", "weighing.keep()"),
    "kind": ("kind = Kind.WARM", "print(kind)", "", "kind = Kind.COLD if epoch else kind"),
    "temperature": ("temperature = np.float32(1)", "", "temperature = temperature * np.float32(0.9)", ""),
    "mode": ("mode = 'warm'", "print(mode)", "", "if value < 9:\n    mode = 'main'"),
    "the global remember.seen": ("", "", "", "remember(value)"),
    "the global carrying.COUNT": ("", "", "", "carrying.count()"),
    "the global carrying.STOP.best": ("", "", "", "carrying.STOP(value)"),
    "read": ("read = iter(DataLoader(TensorDataset(X)))", "", "", "next(read)"),
    "bits": ("bits = bytearray(3)", "", "", "bits[epoch] = 1"),
    "measured.mean_value, measured.weight": ("measured = MeanMetric()", "", "measured.update(value)", ""),
    "loader.dataset.dataset.order": (
        "loader = DataLoader(Subset(Rows(), range(40)), 8)\ndata = (loader,)",
        "loader.dataset.dataset.shuffle()",
        "",
        "",
    ),
    "stop.best  ": ("odd = Raising()\nstop = Stop()", "", "", "stop(value)"),  # beside what cannot be read
    "rows.marks": (ROWS, "", "", "rows.marks[epoch] = 1"),
    "worst": ("worst = 0.0\nrun.register(mixing=random.Random(1))", "", "", "worst = max(worst, value + epoch)"),
    "the global HISTORY": ("HISTORY.clear()", "", "noted(len(HISTORY), value)", ""),
    "loader.dataset.marks": (ROWS + "\ndel rows", "if epoch == 1:\n    set_marks(loader.dataset, np.ones(40))", "", ""),
    "scales": ("scales = ChainMap({}, {'loss': 9.0})", "", "scales['loss'] = min(scales['loss'], value)", ""),
    "noises": ("noises = itertools.cycle([0.0, 0.1, 0.2])", "", "print(next(noises))", ""),
    "pairs_read": ("pairs_read = zip(range(99), itertools.count())", "", "print(next(pairs_read))", ""),
    "local.mean": ("local = threading.local()\nlocal.mean = 9.0", "", "local.mean = min(local.mean, value)", ""),
    "the global LAST": ("", "", "LAST.set(min(LAST.get(), value))", ""),
    "the global os.environ": ("", "", "os.environ['LOSS'] = str(value + float(os.environ.get('LOSS', 0)))", ""),
    "norms": ("norms = WeakKeyDictionary()", "", "norms[net] = norms.get(net, 0.0) + value", ""),
    "line": ("line = queue.SimpleQueue()", "", "line.put(value)", ""),
    "large": ("large = np.zeros(70_000)", "", "large[60_000] += value", ""),
    "replay": ("replay = queue.Queue()", "", "replay.put(value)", ""),
    "net.weight.scale": ("net.weight.scale = 1.0", "", "net.weight.scale *= 0.9", ""),
    "model.weight.hook.held": ("net.weight.register_hook(averaging())", "", "", ""),
    "hooked.best": ("hooked = Hooked()", "", "hooked(None, None, y)", ""),
    "model.hook.best": ("net.register_forward_hook(Hooked())", "", "", ""),
    "beside.best": ("beside = Beside()", "", "beside.best = min(beside.best, value)", ""),
    "scaler._growth_tracker": ("scaler = torch.amp.GradScaler('cpu')", "", "scaler._growth_tracker = step.number", ""),
    "calls[0].last_loss": ("calls = [Shown()]", "", "for call in calls:\n    call(value)", ""),
    "smooth.call.seen": ("smooth = Smooth()", "", "smooth.call(value)", ""),
    "the global shading.shade": ("shading.shade = 1.0", "", "shaded(value)\nshading(value)", ""),
    "the global tally.calls": ("", "", "tally()", ""),
    "count": ("count = 0\ndef add():\n    nonlocal count\n    count += 1", "", "add()", ""),
}
KEPT = {
    "a stream": ("loader = DataLoader(KeptFlow(), 8)", "data = [loader]", "Stateful(at=1).at", ""),
    "hooks": (
        "norms, first = {}, {}\noptimizer.register_step_post_hook(lambda *_: norms.update(w=float(net.weight.norm())))\n"
        "net.register_full_backward_hook(lambda m, i, o: first.__setitem__(0, float(o[0].norm())))",
        "", "print(sum(norms.values()) + sum(first.values()))", "",
    ),
    "reset": ("total = 0.0\nparts = []", "total = 0.0", "total += value\nparts.append(value)", "parts.clear()"),
    "last": ("last = 0.0", "", "last = value", "print(last)"),
    "rate": ("rate = 1.0", "rate = 1 / (1 + epoch)", "step.lr = rate", ""),
    "clock": ("began = time.time()", "", "", "print(time.time() - began)\nbegan = time.time()"),
    "state": ("number = run.state.step", "", "number += 1", "print(number)"),
    "best": (
        "best = run.best.value if run.best else 9.0", "", "",
        "with run.evaluating(40):\n    run.record(loss=0 * Y + value)\nbest = min(best, run.evaluation['loss'])",
    ),
    "registered": (
        "held = Stateful(best=9.0)\nrun.register(held=held)\nbest = held.best", "", "", "best = held.best = min(best, value)"
    ),
    "meter": ("meter = Meter()", "meter.reset()", "meter.add(value)", "print(meter.total / meter.number)"),
    "after": ("meter = Meter()\nmore = []", "", "meter.add(value)\nmore.append(value)", "meter.reset()\nmore.clear()"),
    "order": ("order = Order()", "order.set_epoch(epoch)", "print(order.epoch)", ""),
    "weights": (WEIGHTED, "loader.sampler.weights = 1.0 + torch.rand(40).double()", "", ""),
    "decay": ("average = Average()", "average.set_decay(0.5 if epoch else 0.2)", "", ""),
    "centred": ("centred = Centred()", "", "centred(y)", ""),
    "rows": (ROWS, "rows.set_epoch(epoch)", "", ""),
    "rows.marks": (ROWS, "rows.marks[:] = epoch", "", ""),
    "tensors": (LABELLED, "loader.dataset.tensors[1][:] = Y * epoch", "", ""),
    "labels": (LABELLED, "print(loader.dataset.tensors[1].sum())", "", ""),
    "text": ("name = 'none'", "name = f'epoch {epoch}'", "print(name)", ""),
    "odd": ("odd = Odd()", "", "", ""),
    "served": ("", "", "status.update(loss=value)", ""),
    "of a function": ("vars(noting).clear()", "", "print(noting(value), noting.scaled)", ""),
    "outer": ("outer = Outer(scale=1.0)", "outer.scale = 1 - run.progress", "print(outer.scale)", ""),
    "cache": ("CACHE.clear()", "", "cached(step.number % 5)", ""),
    "growing": ("CACHE.clear()", "", "cached(step.number)", ""),
    "matrix": ("matrix = np.zeros(3)", "", "", "matrix.fill(0)\nmatrix[epoch] += value\nprint(matrix.sum())"),
    "sliced": (
        "matrix, rows = torch.zeros(3), [1]", "", "",
        "matrix[:], rows[:] = 0, []\nmatrix[epoch] += value\nrows.append(value)",
    ),
    "filled": ("filled = Cached()", "", "filled(x)", ""),
    "drawn": (
        "draws, collate = Draws(), Collate()\n"
        "loader = DataLoader(TensorDataset(X, Y), batch_sampler=draws, collate_fn=collate)\ndata = (loader,)",
        "", "collate.random.random()", "",
    ),
    "seeded": (
        "drawn = torch.Generator()", "drawn.manual_seed(epoch)", "torch.rand(1, generator=drawn)", "",
    ),
    "of loader": (
        "drawn = torch.Generator()\ndata = (DataLoader(TensorDataset(X, Y), 8, shuffle=True, generator=drawn),)", "", "", "",
    ),
    "model": ("held = SimpleNamespace(model=model, optimizer=optimizer, weights=list(net.parameters()))", "", "", ""),
    "of results": (
        "OUTPUTS.clear()\nnet.register_forward_hook(keep)", "", "print(OUTPUTS['last'].shape)",
        "with run.evaluating(40):\n    net(data[0])\n    run.record(loss=0 * Y)",
    ),
    "metric": ("measured = MeanMetric()", "", "", "measured.reset()\nmeasured.update(value)\nprint(measured.compute())"),
    "unread": ("calls = [Monitor()]", "", "for call in calls:\n    call.note(value)", ""),
    "freed": (
        "held = Meter()\ngone = weakref.ref(held)", "held = Meter()", "held.add(value)", "if gone() is not None:\n    1 / 0",
    ),
    "computed once": (
        "lazy, table = Lazy(), None", "",
        "if table is None:\n    table = torch.arange(3.0)\nprint(table, lazy.rows(), lazy.at(3))", "",
    ),
    "each part": (
        "sums = {'a': torch.zeros(1)}", "",
        "for one in sums.values():\n    one.zero_()\nsums['a'] += value\nprint(sums)", "",
    ),
    "out": ("product = torch.empty(8, 3)", "", "torch.mul(x, 2, out=product)\nprint(product.sum())", ""),
    "rows of the longest": ("noise = torch.zeros(9, 3)", "", "noise[: len(x)].uniform_()\nprint(noise[: len(x)].sum())", ""),
    "rows by another name": ("noise = torch.zeros(9, 3)", "", "some = noise[: len(x)]\nsome.uniform_()\nprint(some)", ""),
    "in a comprehension": ("for k in [1]:\n    pass", "", "for k in range(3):\n    [j for j in X if j is not k]", ""),
    "numbers": ("for k in range(3):\n    pass", "for k in range(2 + epoch):\n    print(k)", "", ""),
}  # fmt: skip


TABLES = [
    "LOST",
    "KEPT",
    "GATHERED",
    "COPIES",
    "ANEW",
    "ORDERS",
    "LEFT",
    "SET_BACK",
    "HOLDING",
    "LOSSES",
    "THREADS",
    "MEMORIES",
    "RECUR",
    "TRAIN",
    "FIRST",
]  # no part of a program


def trained(
    tmp_path, net, before="", head="", each="", tail="", batch="", after="", momentum=0.0, file=None, every=7, epochs=3,
    source=None,
):  # fmt: skip
    """file: where the program is, so that its source is read. every: so many steps, a checkpoint within an epoch."""
    parts = {"BEFORE": (before, 4), "HEAD": (head, 8), "EACH": (each, 12), "TAIL": (tail, 8), "BATCH": (batch, 16)}
    parts["AFTER"] = (after, 4)
    source = (source or SOURCE).replace("TIMES", str(epochs))
    for name, (text, columns) in parts.items():
        source = source.replace(name, textwrap.indent(text, " " * columns))
    program = {name: one for name, one in globals().items() if name not in TABLES}
    if file is not None:
        file.write_text(source)
    exec(compile(source, str(file or __file__), "exec"), program)
    flags = flags_for("--checkpoint-steps", str(every), "--output-dir", str(tmp_path), epochs=epochs)
    with training.start(flags) as run:
        program["main"](run, net, torch.optim.SGD(net.parameters(), 0.01, momentum), (X, Y))


GATHERED = {
    "total, count": ("", "total, count = 0.0, 0", "total += value\ncount += 1"),
    "losses": ("", "losses = []", "losses.append(value)"),
    "summed": ("", "summed = torch.zeros(())", "summed += value"),
    "meter.total, meter.number": ("", "meter = Meter()", "meter.add(value)"),
    "kept.total, kept.number": ("kept = Meter()", "kept.reset()", "kept.add(value)"),
    "more": ("", "more = iter(range(9))", "next(more)"),
    "measured.mean_value, measured.weight": ("measured = MeanMetric()", "measured.reset()", "measured.update(value)"),
    "parts": ("parts = []", "parts.clear()", "parts.append(value)"),
    "      ": ("measured = MeanMetric()", "", "measured.reset()\nmeasured.update(value)\nprint(measured.compute())"),
    "": ("stateful = Stateful()\nrun.register(stateful=stateful)", "seen = 0", "last = value\nprint(time.time())"),
    "    ": ("", "call = Monitor()", "call.last_note = [value]\nprint(call.last_note)"),
    " ": ("criterion = Criterion()", "", "criterion(value)\nprint(criterion.last)"),
    "   ": (
        "",
        "calls = [Monitor()]\ncall = Monitor()",
        "for one in (*calls, call):\n    one(value)\nprint(call.last_loss)",
    ),
    "  ": ("", "then = time.time()", "print(time.time() - then)\nthen = time.time()"),
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_an_epoch_gathers_is_said_when_it_is_resumed_within(name, tmp_path, capsys):
    """The printed mean of an epoch was that of its last steps."""
    before, head, each = GATHERED[name]
    trained(tmp_path, nn.Linear(3, 1), before, head, each + "\nif step.number == 7:\n    run.stop()")
    capsys.readouterr()
    trained(tmp_path, nn.Linear(3, 1), before, head, each)
    lines = [line for line in capsys.readouterr().out.splitlines() if "began anew" in line]
    start = (
        f"warning: {name} of main() began anew when this epoch was resumed, without its first 16 samples: keep it in"
    )
    assert [line[: len(start)] for line in lines] == [start] * bool(name.strip())


COPIES = {  # after run.prepare, at the head of an epoch; whether it is said of a resumed run
    "a module": ("reference = copy.deepcopy(net)", "print(reference(X).mean())", True),
    "tensors": (
        "reference = {n: p.detach().clone() for n, p in net.named_parameters()}",
        "print(len(reference))",
        True,
    ),
    "registered": ("reference = copy.deepcopy(net)\nrun.register(reference=reference)", "print(reference(X))", False),
    "set anew": ("reference = copy.deepcopy(net)", "reference.load_state_dict(net.state_dict())", False),
    "another module": ("reference = nn.Linear(3, 1)", "print(reference(X).mean())", False),
    "the state of an optimizer": (
        "reference = copy.deepcopy(run.prepared().optimizers[0].state_dict())",
        "print(len(reference))",
        True,
    ),
    "the model": ("reference = [model, net, *net.parameters()]", "print(len(reference))", False),
}


@pytest.mark.parametrize("case", COPIES)
def test_a_copy_of_weights_that_were_restored_is_said(case, tmp_path, capsys):
    """The reference of a penalty was another one in a resumed run, exit code 0."""
    before, head, told = COPIES[case]
    for stop in ("step.number == 7 and run.stop()", ""):
        assert "has what was restored" not in capsys.readouterr().out
        trained(tmp_path, nn.Linear(3, 1), before, head, stop, momentum=0.9)
    assert ("warning: reference of main() has what was restored, and not what" in capsys.readouterr().out) == told


def test_what_an_epoch_gathers_is_said_when_only_its_end_is_left(tmp_path, capsys):
    """A run that was killed in an evaluation ended with ZeroDivisionError at each start."""
    head, each = "total, count = 0.0, 0", "total += value\ncount += 1"
    with pytest.raises(KeyError):
        trained(tmp_path, nn.Linear(3, 1), "", head, each, "epoch == 1 and {}[0]", every=2)
    capsys.readouterr()
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, nn.Linear(3, 1), "", head, each, "total / count")
    assert (
        "total, count of main() began anew when this epoch was resumed, without its first 40" in capsys.readouterr().out
    )


@pytest.mark.parametrize("name", LOST)
def test_a_variable_that_a_program_carries_on_is_said_once(name, tmp_path, capsys):
    """A resumed run began with its first value: another patience, exit code 0."""
    trained(tmp_path, nn.Linear(3, 1), *LOST[name])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    what = name.partition("['")[0].strip()
    names = [one for line in lines for one in line.removeprefix("warning: ").partition(" of main() ")[0].split(", ")]
    assert len(names) == len(set(names))
    assert lines[0].startswith(f"warning: {what} of main() is carried on from step to step or epoch to epoch, and no")


FIRST = {  # of a step, as it is computed once; before the loop: None, or a dictionary
    "once": "if once is None:\n    once = x.mean()",
    "drawn": "if drawn is None:\n    drawn = torch.rand(3)",
    "far": "print(far)\nif value < 9:\n    far = torch.ones(3)",
    "copied": "if copied is None:\n    copied = [p.detach().clone() for p in net.parameters()]",
    "rows": "rows = torch.ones(40) if rows is None else rows\nrows[:8] = rows[:8] * 0.9",
    "mean": "mean = torch.zeros(1) if mean is None else mean\nmean.copy_(0.9 * mean + 0.1 * y.mean())",
    "sums": "sums = [torch.zeros(1)] if sums is None else sums\nfor one in sums:\n    one.copy_(0.9 * one + value)",
    "queue": "queue = torch.ones(9, 3) if queue is None else queue\nqueue[8:] = queue[:1].clone()\nqueue[:8] = x",
    "known": "if step.number % 3 not in known:\n    known[step.number % 3] = value",
}


@pytest.mark.parametrize("name", FIRST)
def test_what_is_computed_once_from_what_a_resumed_run_has_otherwise_is_said(name, tmp_path, capsys):
    begins = f"{name} = {'{}' if name == 'known' else None}"
    trained(tmp_path, nn.Linear(3, 1), begins, "", f"{FIRST[name]}\nprint({name})", file=tmp_path / "program.py")
    assert f"warning: {name} of main() is carried on" in capsys.readouterr().out


BEST = "if value < 9 + epoch:\n    held = copy.deepcopy(net.state_dict())"
LEFT = {  # before the loop, at the end of an epoch (or EACH step), after the loop; whether it is said
    "the best weights": ("held = None", BEST, "if held is not None:\n    net.load_state_dict(held)", True),
    "without a first value": ("", BEST, "net.load_state_dict(held)", True),
    "by an object": (
        "held, stop = None, Outer(least=9.0)", "stop.least = value\nif stop.least:\n    held = value", "print(held)", True,
    ),
    "by a call": ("held = None", "if Y.sum() < 9:\n    held = value", "print(held)", True),
    "by what is recorded": ("held = None", "if run.progress < 2:\n    held = value", "print(held)", True),
    "in each epoch": ("held = None", "held = value", "print(held)", False),
    "in the last epoch": ("held = None", "if epoch in (0, len(range(2))):\n    held = value", "print(held)", False),
    "in some steps": ("held = None", "EACH\nif step.number % 3 == 0:\n    held = value", "print(held)", False),
    "by the loss of a step": ("held = None", "EACH\nif step.loss < 9:\n    held = value", "print(held)", True),
    "by a flag": ("held = None", "if run.flags.epochs:\n    held = value", "print(held)", False),
    "only printed": ("held = None", "if value < 9:\n    held = value", "if held is not None:\n    print('done')", False),
    "not used": ("held = None", "if value < 9:\n    held = value", "held = 1\nprint(held)", False),
    "where it ends": ("held = None", "if value < 9 and epoch:\n    held = value\n    break", "print(held)", False),
    "a number": ("held = None", "if value < 9:\n    held = run.state.step", "print(held)", True),
    "what a registered object has": (
        "held, kept = None, Stateful(best=9.0)\nrun.register(kept=kept)", "if value < 9:\n    held = kept.best = value",
        "print(held)", False,
    ),
    "a time": ("held = None", "if value < 9:\n    held = time.time()", "print(held)", False),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_the_best_epoch_leaves_for_the_end_is_said(case, tmp_path, capsys):
    """A run that was resumed after the best epoch did not load its weights: others, exit code 0."""
    before, tail, after, told = LEFT[case]
    where = "each" if tail.startswith("EACH") else "tail"
    how = {where: tail.removeprefix("EACH\n"), "after": after, "file": tmp_path / "program.py"}
    trained(tmp_path, nn.Linear(3, 1), before, **how)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    said = (
        "warning: held of main() is set in some epochs and used after the last one, and no checkpoint has it: run.load_"
    )
    assert [line[: len(said)] for line in lines if line.startswith("warning: held")] == [said] * told


class Controller:
    def __init__(self):
        self.rows, self.cursor = [[k] for k in range(8)], 0

    def take(self):
        if self.cursor > 6:
            random.shuffle(self.rows)
            self.cursor = 0
        self.cursor += 1


def cycle(loader):
    while True:
        yield from loader


def test_what_has_two_names_is_said_once(tmp_path, capsys):
    source = TRAIN.replace(" kept = Stateful", " held = Stateful")
    source = source.replace("  train(run, model, data, kept)", "  train(run, model, data, held)")
    how = dict(batch="x = x + kept.h", each="kept.h = kept.h + 1", every=2, source=source)
    trained(tmp_path, nn.Linear(3, 3), epochs=2, file=tmp_path / "program.py", **how)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [line.partition(" is carried on")[0] for line in lines] == ["warning: kept.h of train()"]


def test_long_chains_of_branches_are_read_once():
    """Each branch is within the one before."""
    chain = "".join(f"elif a == {number}:\n    b = c\n" for number in range(99))
    assert computed_from(ast.parse(f"if a:\n    b = d\n{chain}step.backward(b)")) == {"a", "b", "c", "d"}


@pytest.mark.parametrize("epochs", [1, 2])
def test_what_steps_carry_on_in_main_is_said_within_their_epoch(epochs, tmp_path, capsys):
    """It was said between epochs alone, and a run that counts its steps may have one: another batch after a restart."""
    how = dict(batch="x = x + h", each="h = h + 1", file=tmp_path / "program.py", every=2, epochs=epochs)
    trained(tmp_path, nn.Linear(3, 1), "h = torch.zeros(3)", **how)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [line.partition(" of main() is carried on")[0] for line in lines] == ["warning: h"]


def test_each_part_of_an_object_is_said_when_it_changes(tmp_path, capsys):
    """A cursor was said, and no more: not the order of the list, which changes later."""
    trained(tmp_path, nn.Linear(3, 1), "controller = Controller()", "", "controller.take()")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [line.split(" of main()")[0] for line in lines] == ["warning: controller.cursor", "warning: controller.rows"]


@pytest.mark.parametrize("name", KEPT)
def test_a_variable_that_is_set_anew_or_that_a_resumed_run_knows_is_left_alone(name, tmp_path, capsys):
    trained(tmp_path, nn.Linear(3, 1), *KEPT[name], file=tmp_path / "program.py")
    assert "warning: " not in capsys.readouterr().out


TRAIN = """
class Remembering:
    def __init__(self):
        self.h, self.total = torch.zeros(3), torch.zeros(())

    def shifted(self, x):
        return x + self.h

    def note(self, _, __, output):
        self.h = output.detach().mean()
def train(run, model, data, kept):
HEAD
        for step in run.steps(*data):
            for x, y in step.batches():
BATCH
                step.backward((model(x) - y).square().mean())
            step.update()
            value = step.loss
EACH
def main(run, net, optimizer, data):
    model, _ = run.prepare(net, optimizer)
    kept = Stateful(h=torch.zeros(3))
BEFORE
    for epoch in run.epochs(TIMES):
        train(run, model, data, kept)
"""


RECUR = "x = x + h\nout = torch.tanh(model(x))"
MEMORIES = {  # before the loop, at the head of an epoch, for each micro-batch, after a step; what is said of it
    "a hidden state": ("", "h = torch.zeros(3)", RECUR + "\nh = out.mean().detach()", "", "h"),
    "not detached": ("", "h = torch.zeros(3)", "h = h.detach()\n" + RECUR + "\nh = out.mean()", "", "h"),
    "None at first": ("", "h = None", "x = x if h is None else x + h\nh = model(x).mean()", "h = h.detach()", "h"),
    "a queue": ("", "rows = [X[0]]", "x = x + torch.stack(rows).mean(0)", "rows.append(X[step.number])", "rows"),
    "in place": ("", "bank = torch.zeros(40, 3)", "x = x + bank.mean(0)", "bank[step.number] = X[step.number]", "bank"),
    "another loader": ("", "more = cycle(DataLoader(TensorDataset(X), 4))", "x = x + next(more)[0].mean()", "", "more"),
    "it decides": ("", "seen = set()", "if 3 not in seen:\n    x = x * 2", "seen.add(step.number)", "seen"),
    "a counter": ("", "n = 0", "x = x * min(1, n / 3)", "n += 1", "n"),
    "a temperature": ("", "heat = 1.0", "x = x * heat", "heat = max(0.1, heat * 0.9)", "heat"),
    "a sum of numbers": ("", "heat = 0.0", "heat += x.mean().item()", "print(heat)", ""),
    "a count that is printed": ("", "heat = 0", "if heat < 3:\n    print(heat)", "heat += 1", ""),
    "set after each step": ("", "heat = 1.0", "x = x * heat", "heat = 1 / step.number", "heat"),
    "by its number": ("", "", "heat = 1 / step.number\nx = x * heat", "", ""),
    "a rate": ("", "rate = 1.0\n(o,) = run.prepared().optimizers", "", "rate /= 2\no.param_groups[0]['lr'] = rate", "rate"),
    "the run's own": ("", "n = run.state.step", "x = x * min(1, n / 3)", "n += 1", ""),
    "of an object": ("", "of = Remembering()", "x = of.shifted(x)", "of.h = model(x).mean().detach()", "of.h"),
    "of one that is set first": ("", "of = Remembering()", "of.h = x.mean()\nx = of.shifted(x)", "", ""),
    "held": ("", "of = Outer(more=cycle(DataLoader(TensorDataset(X), 4)))", "x = x + next(of.more)[0][0]", "", "of.more"),
    "of hooks": ("", "of = Remembering()\nmodel.register_forward_hook(of.note)", "model(x)\nx = x + of.h", "", ""),
    "an order": ("", "order = torch.arange(3)", "x = x[:, order]", "order = order[[1, 2, 0]]", "order"),
    "counted in a list": ("", "parts = [1]", "x = x / parts[0]", "parts[0] += 1", "parts"),
    "read ahead": ("", "ahead = X[:1]", "x = x + ahead", "ahead = X[step.number : step.number + 1]", "ahead"),
    "of the module": ("global H", "global H\nH = 0.5", "x = x * H", "H = H / 2", "the global H"),
    "a sum of an object": ("", "of = Remembering()", "of.total += x.mean()\nprint(of.total)", "", ""),
    "a sum": ("", "total = torch.zeros(())", "total += x.mean()", "print(total)", ""),
    "losses": ("", "losses = []", "", "losses.append(step.loss)\nprint(losses[-1])", ""),
    "asked again": ("", "on = False", "if on or x.sum() < 99:\n    on, x = True, x * 2", "", ""),
    "the first alone": ("", "on = True", "if on:\n    on, x = False, x * 2", "", "on"),
    "drawn anew": ("", "noise = torch.empty(3)", "noise.normal_()\nx = x + noise", "", ""),
    "its rows": ("", "rows = torch.empty(9, 3)", "rows[: len(x)].copy_(x)\nx = rows[: len(x)] * 2", "", ""),
    "rows that are drawn": ("", "rows = torch.empty(9, 3)", "more = rows[:8].uniform_()\nx = x + more", "", ""),
    "rows that are set": ("", "rows = torch.empty(9, 3)", "rows[:8] = x\nx = x + rows[:8]", "", ""),
    "copied": ("", "held = torch.empty(8, 3)", "held.copy_(x)\nx = held * 2", "", ""),
    "set in each step": ("", "h = torch.zeros(3)", "h = x.mean()\nx = x + h", "print(h)", ""),
    "registered": ("run.register(kept=kept)", "h = kept.h", RECUR + "\nh = out.mean()", "kept.h = h = h.detach()", ""),
    "a copy of it": ("run.register(kept=kept)", "h = kept.h", RECUR, "h = out.mean().detach()\nkept.h = h.clone()", ""),
    "not changed": ("", "scale = torch.ones(3)", "x = x * scale", "", ""),
    "a model's": ("", "layers = [model]", "x = x + layers[0](x)", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", MEMORIES)
def test_what_a_function_for_an_epoch_carries_from_step_to_step_is_said(case, tmp_path, capsys):
    """An epoch that was resumed began with the hidden state of its first step: other bits, exit code 0."""
    before, head, batch, each, told = MEMORIES[case]
    how = dict(head=head, batch=batch, each=each, every=2, file=tmp_path / "program.py", source=TRAIN)
    trained(tmp_path, nn.Linear(3, 3), before, epochs=1, **how)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [line.partition(" of train() is carried on")[0] for line in lines] == [f"warning: {told}"] * bool(told)


def test_a_program_that_is_executed_with_names_of_its_own_keeps_them(tmp_path):
    """Of a function, names are read as a copy, which is emptied: here, they are the program's own."""
    body = SOURCE.replace("TIMES", "3")
    body = body[body.index("    model, _") :]
    source = textwrap.dedent("".join(line for line in body.splitlines(keepends=True) if not line.strip().isupper()))
    with training.start(flags_for("--output-dir", str(tmp_path), epochs=2)) as run:
        net = nn.Linear(3, 1)
        own = dict(run=run, net=net, optimizer=torch.optim.SGD(net.parameters(), 0.01), data=(X, Y), kept=7)
        exec(compile(source, __file__, "exec"), {}, own)
    assert (own["kept"], own["epoch"]) == (7, 2)


class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.last = nn.Linear(3, 1), 1.0, 0.0

    def forward(self, x):
        self.last = x.mean().item()
        return self.layer(x) * self.scale

    def set_scale(self, scale):
        self.scale = scale


class Whole(nn.Sequential):
    def set_scale(self, epoch):
        for layer in self:
            layer.scale = 1 / (1 + epoch)


ANEW = [
    ("", "net.scale = 1 - run.progress", "", 0),
    ("", "if epoch > 0:\n    net.scale = 0.5\nelse:\n    net.scale = 0.2", "", 0),
    ("", "for layer in (net, model):\n    layer.set_scale(1 - run.progress)", "", 0),
    ("", "", "net.scale = 0.5 / (1 + step.number)", 1),  # which the next step uses
    ("", "if epoch == 1:\n    net.scale = 0.5", "", 1),
    ("", "", "net.scale *= 0.9", 1),
    ("", "", "if value < 9:\n    net.set_scale(0.5)", 1),
]


@pytest.mark.parametrize(("before", "head", "each", "told"), ANEW, ids=range(len(ANEW)))
def test_what_a_program_sets_anew_in_a_model_is_left_alone(before, head, each, told, tmp_path, capsys):
    """A temperature by run.progress was said to be lost, and so was what each forward pass computes."""
    trained(tmp_path, Warm(), before, head, each)
    lines = [line for line in capsys.readouterr().out.splitlines() if "of a model has changed" in line]
    assert [line.split()[1] for line in lines] == ["scale"] * told


@pytest.mark.parametrize(("when", "told"), [("", 0), ("if epoch == 1: ", 1)])
def test_what_a_method_of_a_model_sets_anew_in_its_layers_is_left_alone(when, told, tmp_path, capsys):
    """A rate of dropout that set_epoch(epoch) of the model sets in its layers was said to be lost."""
    trained(tmp_path, Whole(Warm()), "", f"{when}net.set_scale(epoch)")
    lines = [line for line in capsys.readouterr().out.splitlines() if "of a model has changed" in line]
    assert [line.split()[1] for line in lines] == ["0.scale"] * told


class Recurrent(nn.Module):
    def __init__(self, state, buffer=False):
        super().__init__()
        self.layer, self.last = nn.Linear(3, 1), 0.0
        if buffer:
            self.register_buffer("state", state)
        else:
            self.state = state

    def forward(self, x):
        self.last = x.mean().item()
        self.state = (0.0 if self.state is None else self.state) + x.detach().mean()
        return self.layer(x)


def buffered():
    return Recurrent(torch.zeros(()), buffer=True)


SET_BACK = {  # the model; at the head of an epoch, in each micro-batch; whether it is said
    "a number": (lambda: Recurrent(0.0), "net.state = 0.0", "", True),
    "None": (lambda: Recurrent(None), "net.state = None", "", True),
    "a new buffer": (buffered, "net.state = torch.zeros(())", "", True),
    "a buffer": (buffered, "net.state.zero_()", "", True),
    "a buffer that goes on": (buffered, "", "", False),
    "in each micro-batch": (lambda: Recurrent(0.0), "net.state = 0.0", "net.state = 0.0", False),
    "of a library": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), "net(X)", "", False),
}


@pytest.mark.parametrize("case", SET_BACK)
def test_what_a_model_gathers_in_an_epoch_is_said_when_it_is_resumed_within(case, tmp_path, capsys):
    """A hidden state began anew within an epoch: other weights, exit code 0."""
    make, head, batch, told = SET_BACK[case]
    trained(tmp_path, make(), "", head, "if step.number == 7:\n    run.stop()", batch=batch)
    assert "began anew" not in capsys.readouterr().out
    trained(tmp_path, make(), "", head, batch=batch)
    lines = [line for line in capsys.readouterr().out.splitlines() if "began anew" in line]
    said = (
        "warning: state of a model began anew when this epoch was resumed, without its first 16 samples: keep it in a b"
    )
    assert [line[: len(said)] for line in lines] == [said] * told


class Rotary(Whole):
    """Keeps the longest table so far, as in public implementations of Llama."""

    max_seq_len_cached = 0

    def forward(self, x):
        self.max_seq_len_cached = max(self.max_seq_len_cached, len(x) + random.randrange(99))
        return super().forward(x)


def test_the_length_of_a_cached_table_is_no_state(tmp_path, capsys):
    trained(tmp_path, Rotary(nn.Linear(3, 1)))
    assert "has changed" not in capsys.readouterr().out


ORDERS = {  # before the loop, in the first process and in the second one; the name of what has another order
    "numbers of classes": ("index = {'cat': 0, 'dog': 1}", "index = {'dog': 0, 'cat': 1}", "index"),
    "files": ("files = ['a', 'b', 'c']", "files = ['b', 'a', 'c']", "files"),
    "other classes": ("index = {'cat': 0, 'dog': 1}", "index = {'cat': 0, 'cow': 1}", ""),
    "the same, inserted otherwise": ("index = {'cat': 0, 'dog': 1}", "index = {'dog': 1, 'cat': 0}", ""),
    "one more file": ("files = ['a', 'b']", "files = ['c', 'a', 'b']", ""),
}
HOLDING = {  # what holds a list of texts, the name of that; none: a line is not needed
    "held = Buffer()\nheld.rows = NAMES": "held.rows",
    "held = [{'words': NAMES}]": "held[0]['words']",
    "held = Centred()\nheld.names = NAMES": "held.names",
    "carrying.STOP.names = NAMES": "carrying.STOP.names",
    "loader = DataLoader(X, collate_fn=numbered(NAMES))": "loader.collate_fn.names",
    "loader = DataLoader(X, collate_fn=functools.partial(numbered(None), NAMES))": "loader.collate_fn.args[0]",
    "loader = DataLoader(carrying.Words(NAMES))": "loader.dataset.words.names",
    "held = Stateful(names=['a', 'b', 'c'])\nrun.register(held=held)\nheld.names = NAMES": "",  # as restored
    "held = argparse.Namespace(names=NAMES)": "",
    "held = Counted()\nheld.rows = dict.fromkeys(NAMES, 1)": "",
    "held = set(NAMES)": "",
}
ORDERS |= {
    how: (how.replace("NAMES", "['a', 'b', 'c']"), how.replace("NAMES", "['b', 'a', 'c']"), name)
    for how, name in HOLDING.items()
}


LOSSES = {  # before the loop; what is said of a setting that a resumed run has otherwise
    "loss = nn.HuberLoss(delta=SETTING)": "loss.delta",
    "held = Buffer()\nheld.loss = nn.CrossEntropyLoss(label_smoothing=SETTING)": "held.loss.label_smoothing",
    "losses = {'one': nn.SmoothL1Loss(beta=SETTING)}": "losses['one'].beta",
    "loss = nn.HuberLoss()\nloss.extra = {'number': SETTING}": "",
    "layer = nn.Dropout(SETTING)": "",  # not of the model
}


@pytest.mark.parametrize("case", LOSSES)
def test_another_setting_of_a_loss_at_a_resume_is_said(case, tmp_path, capsys):
    """Of a loss that is no part of the model, it was not compared: other weights, exit code 0."""
    for times, setting in enumerate(("0.5", "0.5", "0.25", "0.5")):
        trained(
            tmp_path,
            nn.Linear(3, 1),
            case.replace("SETTING", setting),
            "",
            f"step.number == {3 + 3 * times} and run.stop()",
        )
        said = " of main() is 0.25, and was 0.5 when the run began: give the same, or another --output-dir"
        lines = [line for line in capsys.readouterr().out.splitlines() if "when the run began" in line]
        assert lines == [f"warning: {LOSSES[case]}{said}"] * (times == 2 and LOSSES[case] != "")


THREADS = {  # the dictionary at first, what a thread does, what a step does; whether it is told
    "reads it": ("loss=None", "str(STATE)", "STATE['loss'] = value\nSTATE['step'] = step.number", False),
    "sets it": ("used=0.0", "STATE['used'] = os.urandom(4)", "print(STATE['used'])", False),
    "counts": ("seen=0", "STATE['seen'] = STATE['seen'] + 1", "print(STATE['seen'])", True),
    "counts otherwise": ("seen=0", "STATE['seen'] += 1", "print(STATE['seen'])", True),
    "changes it": ("loss=None", "STATE['more'] = STATE['loss']", "STATE['loss'] = value", True),
    "reads a sum": ("sum=0.0", "str(STATE)", "STATE['sum'] += value", True),
    "is called, too": ("loss=None", "str(STATE)", "STATE['loss'] = value\nwatched.__call__()", True),
}


@pytest.mark.parametrize("case", THREADS)
def test_what_each_step_or_a_thread_sets_anew_is_left_alone(case, tmp_path, capsys, monkeypatch):
    """A thread that shows the last loss had a line that this is lost."""
    state, body, each, told = THREADS[case]
    thread = f"def watched():\n    for _ in range(3 * EPOCHS):\n        {body}\n        time.sleep(0)\n"
    source = SOURCE.replace("def main(", f"EPOCHS = 3\nSTATE = dict({state})\n{thread}def main(")
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", source)
    head = "thread = threading.Thread(target=watched)\nthread.start()\nthread.join()"
    trained(tmp_path, nn.Linear(3, 1), "", head, each, file=tmp_path / "program.py")
    assert ("the global STATE of main() is carried on" in capsys.readouterr().out) == told


def numbered(names):
    def collate(samples):
        return [samples, names]

    return collate


@pytest.mark.parametrize("case", ORDERS)
def test_names_in_another_order_at_a_resume_are_said(case, tmp_path, capsys):
    """A dictionary that numbers the elements of a set, also in a collate_fn: other labels in each process, exit code 0."""
    first, second, name = ORDERS[case]
    for times, before in enumerate((first, first, second, first)):
        trained(tmp_path, nn.Linear(3, 1), before, "", f"step.number == {3 + 3 * times} and run.stop()")
        said = "has another order than when the run began: sort what comes from a set or a directory"
        line = f"warning: {name} of main() {said}"
        assert (
            (line if name else said) in capsys.readouterr().out
            if times == 2 and name
            else said not in capsys.readouterr().out
        )
