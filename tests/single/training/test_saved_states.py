"""What programs keep in optimizers and registered objects: a resumed run has the same, or is refused in its first minute."""

import contextlib
import copy
import decimal
import gc
import sys
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain import training
from hvdtrain.checkpoint import contents, resumed_epoch
from hvdtrain.engines import portable
from hvdtrain.engines.collectives import load_exactly
from hvdtrain.engines.errors import UserError
from tests.single.training.small import Killed, N, Trained, X, Y, flags_for, killed, resumed, saving, train


class Own(torch.optim.SGD):
    """SGD with a state of its own. update: of a parameter, its state and its group."""

    update = None

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                rate = type(self).update(parameter, self.state[parameter], group)
                parameter.sub_(parameter.grad, alpha=float(rate))


def counted(dtype):
    def update(parameter, state, group):
        count = state.setdefault("count", torch.zeros((), dtype=dtype))
        state["count"] = count.logical_not() if dtype == torch.bool else count + 1
        assert state["count"].dtype == dtype
        return 0.1 / (1 + float(state["count"]))

    return update


def momentum(dtype):
    def update(parameter, state, group):
        held = state.setdefault("m", torch.zeros_like(parameter, dtype=dtype))
        held.mul_(0.9).add_(parameter.grad.to(dtype) / 3)
        assert held.dtype == dtype
        return 0.1 * held.float().abs().mean()

    return update


def in_group(parameter, state, group):
    group["norm"] = group.get("norm", torch.zeros(1, dtype=torch.float64)) * 0.9 + parameter.grad.norm()
    return 0.1 / group["norm"]


def nested(parameter, state, group):
    inner = state.setdefault("inner", {"half": [torch.ones((), dtype=torch.float16)], "name": "text", "at": (1, 2)})
    inner["half"][0] = inner["half"][0] * 0.7
    assert (inner["name"], inner["at"], inner["half"][0].dtype) == ("text", (1, 2), torch.float16)
    return 0.1 * inner["half"][0]


def text(parameter, state, group):
    state["phase"] = "b" if state.get("phase", "b") == "a" else "a"
    return 0.1 if state["phase"] == "a" else 0.2


def one_in_group_and_state(parameter, state, group):
    state["shared"] = group.setdefault("shared", torch.zeros(()))  # which torch copies when it loads groups
    return 0.5 / state["shared"].add_(1)


UPDATES = {
    **{f"a count of {dtype}": counted(dtype) for dtype in (torch.int64, torch.int32, torch.bool, torch.float64)},
    **{f"{dtype}": momentum(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)},
    "a tensor in a group": in_group,
    "nested": nested,
    "text": text,
}


def run_to_the_end(directory, make, stop=None, register=None, **how):
    """Train the small regression; return its state. make: the optimizer. stop: the step after which to end."""
    how |= dict(optimizer=make, registered=lambda t: register or {}, kill=stop)
    state = Trained(*saving(stop), out=directory, **how).net.state_dict()
    return torch.cat([value.reshape(-1) for value in state.values()])


def is_resumed(directory, make, **how):
    whole, again = resumed(lambda out, stop: run_to_the_end(out, make, stop, **how), directory, 7)
    return torch.equal(whole, again)


@pytest.mark.parametrize("name", UPDATES)
def test_an_optimizer_has_the_state_that_it_had(name, tmp_path):
    """torch's load_state_dict converts it to the type of the weights: other bits, or a traceback in the next step."""
    kind = type("Kind", (Own,), {"update": staticmethod(UPDATES[name])})
    assert is_resumed(tmp_path, lambda parameters: kind(parameters, 0.1))


class Numbered(torch.optim.SGD):
    """Counts its parameters in a way of its own."""

    def state_dict(self):
        state = super().state_dict()
        groups = [dict(group, params=[number + 100 for number in group["params"]]) for group in state["param_groups"]]
        return dict(state, param_groups=groups)

    def load_state_dict(self, state):
        groups = [dict(group, params=[number % 100 for number in group["params"]]) for group in state["param_groups"]]
        super().load_state_dict(dict(state, param_groups=groups))


def test_a_state_dict_of_its_own_form_is_taken_back(tmp_path):
    assert is_resumed(tmp_path, lambda parameters: Numbered(parameters, 0.1, momentum=0.9))


def test_a_rate_that_is_a_tensor_and_statistics_in_float64_go_on(tmp_path):
    double = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()  # noqa: E731
    how = dict(net=double, data=(X.double(), Y.double()), seed=5)
    assert is_resumed(tmp_path, lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)), **how)


class Forgets(torch.optim.SGD):
    def load_state_dict(self, state):
        super().load_state_dict(dict(state, state={}))


class Fails(torch.optim.SGD):
    def load_state_dict(self, state):
        raise AttributeError("no way back")


class Holds:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"v": [self.value]}

    def load_state_dict(self, state):
        (self.value,) = state["v"]


class Twice(torch.optim.SGD):
    """Its state has a number of a kind that no checkpoint holds."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rate"] = decimal.Decimal("0.1")


class Both(torch.optim.SGD):
    """Has the state_dicts of two optimizers."""

    def state_dict(self):
        return {"one": super().state_dict(), "two": {}}

    def load_state_dict(self, state):
        super().load_state_dict(state["one"])


REFUSED = [
    (lambda p: Both(p, 0.1), {}, "^the state_dict of Both has no 'state' and 'param_groups', as torch's: give run.prepare"),
    (lambda p: Forgets(p, 0.1, momentum=0.9), {}, r"^the state of Forgets cannot be restored: \['state'\].*another length"),
    (lambda p: type("Shares", (Own,), {"update": staticmethod(one_in_group_and_state)})(p, 0.1), {},
     r"^the state of Shares cannot be restored: \['param_groups'\]\[0\]\['shared'\] is one with another Tensor"),
    (lambda p: Fails(p, 0.1), {}, r"^the state of Fails cannot be restored: .*no way back"),
    (lambda p: Twice(p, 0.1), {}, r"^the state of Twice holds a Decimal at \['state'\]\[0\]\['rate'\], which a checkpoint"),
    (lambda p: torch.optim.SGD(p, 0.1), {"held": Holds(decimal.Decimal(1))}, r"register\(held=.*Decimal at \['v'\]\[0\]"),
    (lambda p: torch.optim.SGD(p, 0.1), {"held": Holds(type("Rows", (list,), {})())}, r"a Rows at \['v'\]\[0\]"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "register", "told"), REFUSED, ids=range(len(REFUSED)))
def test_what_could_not_be_restored_is_said_at_the_first_checkpoint(make, register, told, tmp_path):
    with pytest.raises(UserError, match=told):
        run_to_the_end(tmp_path, make, register=register)
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_a_setting_that_is_a_number_of_numpy_is_restored(tmp_path):
    """No resume took it: "momentum is 0.9"."""

    def program(directory, stop):
        def schedule(t):
            t.optimizer.param_groups[0].update(lr=np.float64(0.1), momentum=np.float32(0.9))

        sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        return Trained(*saving(stop), out=directory, kill=stop, optimizer=sgd, at_step=schedule).losses

    whole, apart = resumed(program, tmp_path, 3)
    assert whole[-len(apart) :] == apart


def test_a_registered_state_of_many_values_and_levels_is_read_back(tmp_path):
    deep: list = [list(range(300_000))]
    for _ in range(60):
        deep = [deep]
    killed(run_to_the_end, tmp_path, lambda p: torch.optim.SGD(p, 0.1), stop=3, register={"held": Holds(deep)})
    back = Holds(None)
    run_to_the_end(tmp_path, lambda p: torch.optim.SGD(p, 0.1), register={"held": back})
    assert back.value == deep


class Lookahead(torch.optim.SGD):
    """Its slow weights are an attribute, as authors write it."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.count, self.slow, self.every = 0, [one.detach().clone() for one in self.param_groups[0]["params"]], 3
        self.parameters = list(self.param_groups[0]["params"])
        self.averages = [self.state[one].setdefault("average", torch.zeros_like(one)) for one in self.parameters]

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.count += 1
        for weight, slow, average in zip(self.parameters, self.slow, self.averages, strict=True):
            slow.lerp_(weight, 0.5)
            average.lerp_(weight, 0.5)


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (Lookahead, {"count", "slow"}),
        *[
            (lambda parameters, kind=kind: kind(parameters, lr=0.1), set())
            for kind in (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam)
        ],
    ],
)
def test_what_an_optimizer_keeps_outside_of_its_state_is_said_once(make, lost, tmp_path, capsys):
    """After a resume, the slow weights were those of the start: other weights, exit code 0."""
    run_to_the_end(tmp_path, make)
    lines = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint has it" in line]
    assert sorted(line.split()[1] for line in lines) == sorted({*lost, "self.losses"})  # that of small.Training, too


class Average:
    """Of the loss. saves: the attributes in its state. computes: `load_state_dict` computes the others."""

    def __init__(self, *saves, computes=False):
        self.count, self.rate, self.begun, self.mean, self.total = 0, 1.0, False, torch.zeros(()), torch.zeros(())
        self.saves, self.computes = saves, computes

    def step(self, value):
        self.count, self.rate, self.begun = self.count + 1, 1 / (self.count + 2), True
        self.total += value
        self.mean = self.total * self.rate

    def state_dict(self):
        return {"total": self.total, "within": [{f"of {name}": getattr(self, name) for name in self.saves}]}

    def load_state_dict(self, state):
        assert self.total is state["total"] or self.total.data_ptr() != state["total"].data_ptr()
        self.total.copy_(state["total"])
        for name in self.saves:
            setattr(self, name, state["within"][0][f"of {name}"])
        if self.computes:
            self.rate, self.begun = 1 / (self.count + 1), self.count > 0


class Tally:
    """Counts in tensors, as a metric of torchmetrics does, or in arrays. kept: which of them its state has. computes:
    `load_state_dict` computes the others."""

    def __init__(self, *kept, copies=False, computes=False, kind=torch.tensor):
        self.kept, self.copies, self.computes = kept, copies, computes
        self.hits, self.rows, self.fixed = kind([0.0] * N), [torch.zeros(2)], torch.ones(2)

    def state_dict(self):
        state = {name: getattr(self, name) for name in self.kept}
        return copy.deepcopy(state) if self.copies else state

    def load_state_dict(self, state):
        vars(self).update(state)
        if self.computes:
            self.rows = [torch.zeros(2), *[torch.ones(2)] * int(self.hits[0])]

    def step(self):
        self.hits, self.rows = self.hits + 1, [*self.rows, torch.ones(2)]


class Persistent(Tally):
    def persistent(self, mode):
        """As of torchmetrics."""


class Averaged(torch.optim.swa_utils.AveragedModel):
    """The library's, with a counter of its own."""

    def update_parameters(self, model):
        super().update_parameters(model)
        self.times = getattr(self, "times", 0) + 1


class Within:
    """Holds others with a state, as a warm-up holds a scheduler. loads: those to which its load_state_dict gives theirs."""

    def __init__(self, *inner, loads=()):
        self.first, self.second, self.loads = *inner, loads

    def step(self, *value):
        for one in (self.first, self.second):
            one.step(*value)

    def state_dict(self):
        return {name: getattr(self, name).state_dict() for name in ("first", "second")}

    def load_state_dict(self, state):
        for name in self.loads:
            getattr(self, name).load_state_dict(state[name])


def within(*loads):
    return lambda _, o: Within(Average("count", "rate", "begun"), schedulers.ReduceLROnPlateau(o), loads=loads)


def averaged(kind, net, **attributes):
    average = kind(net)
    vars(average).update(attributes)
    return average


def scheduled(kind, *arguments, **named):
    return lambda net, optimizer: kind(optimizer, *arguments, **named)


schedulers = torch.optim.lr_scheduler
COUNTERS = [
    (within("first", "second"), {}),
    (within("first"), {"second.best": "inf", "second.num_bad_epochs": "0", "second.last_epoch": "0"}),
    (within("second"), {"first.count": "0", "first.rate": "1.0", "first.begun": "False"}),
    (lambda net, _: Average(), {"count": "0", "rate": "1.0", "begun": "False"}),
    (lambda net, _: Average("count", computes=True), {}),
    (lambda net, _: Average("count", "begun", "rate"), {}),
    (lambda net, _: Average("rate", "begun"), {"count": "0"}),
    (lambda net, _: Tally("hits", "rows"), {}),
    (lambda net, _: Tally("hits", "rows", copies=True), {}),
    (lambda net, _: Tally("hits"), {"rows": "that of a new one: add it to"}),
    (lambda net, _: Tally("hits", computes=True), {}),  # the others are computed from it
    (lambda net, _: Tally("hits", "rows", kind=np.array), {}),
    (lambda net, _: Tally("rows", kind=np.array), {"hits": "that of a new one: add it to"}),
    (lambda net, _: Tally(), {"hits": "that of a new one: add it to"}),
    (lambda net, _: Persistent(), {"hits": "that of a new one: call its persistent(True)"}),
    (lambda net, _: averaged(Averaged, net, times=0), {"times": "0"}),
    (lambda net, _: averaged(torch.optim.swa_utils.AveragedModel, net, training=False), {}),
    (scheduled(schedulers.StepLR, 2), {}),
    (scheduled(schedulers.LambdaLR, lambda step: 0.9**step), {}),
    (scheduled(schedulers.OneCycleLR, 0.2, total_steps=10), {}),
    (scheduled(schedulers.CyclicLR, 0.1, 0.2, 3), {}),
    (scheduled(schedulers.CosineAnnealingWarmRestarts, 3), {}),
    (scheduled(schedulers.ReduceLROnPlateau, patience=1), {}),
    (lambda _, o: schedulers.SequentialLR(o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)], [4]), {}),
]


@pytest.mark.parametrize(("make", "lost"), COUNTERS, ids=range(len(COUNTERS)))
def test_a_number_of_a_registered_object_that_no_resume_would_bring_back_is_said_once(make, lost, tmp_path, capsys):
    """An average went on as if it had just begun, with the sum that it had: other numbers, exit code 0. A metric of
    torchmetrics has an empty state_dict, and began anew in the middle of an epoch."""

    def each(t):
        if isinstance(t.what, torch.optim.swa_utils.AveragedModel):
            t.what.update_parameters(t.net)
        else:
            t.what.step(*[1.0] * isinstance(t.what, (Average, Within, schedulers.ReduceLROnPlateau)))

    for end in (7, None):
        capsys.readouterr()
        with contextlib.suppress(Killed):
            Trained(*saving(end), out=tmp_path, registered=lambda t: dict(what=make(t.net, t.optimizer)),
                    each=each, kill=end)  # fmt: skip
        lines = [line for line in capsys.readouterr().out.splitlines() if "has changed" in line]
        told = [line.partition("its ")[2].split(" has changed, and a resumed run would begin with ") for line in lines]
        assert sorted(name for name, _ in told) == sorted(lost)
        assert all(rest.startswith(lost[name]) for name, rest in told)


class Critic(nn.Module):
    """A part of a loss that trains itself. keeps: whether its state has its optimizer's."""

    def __init__(self, keeps):
        super().__init__()
        self.layer, self.keeps = nn.Linear(1, 1), keeps
        nn.init.ones_(self.layer.weight)
        self.optimizer = torch.optim.Adam(self.layer.parameters())

    def step(self):
        self.optimizer.zero_grad()
        self.layer(torch.ones(1)).square().sum().backward()
        self.optimizer.step()

    def get_extra_state(self):
        return self.optimizer.state_dict() if self.keeps else None

    def set_extra_state(self, state):
        if self.keeps:
            self.optimizer.load_state_dict(state)


@pytest.mark.parametrize(("keeps", "more", "told"), [(False, False, True), (False, True, False), (True, False, False)])
def test_an_optimizer_of_a_registered_object_is_said_once_or_goes_on(keeps, more, told, tmp_path, capsys):
    def registered(t):
        t.critic = Critic(keeps)
        return dict(critic=t.critic) | (dict(optimizer=t.critic.optimizer) if more else {})

    ends = []
    for kill in (7, None, None):
        with contextlib.suppress(Killed):
            folder = tmp_path / str(len(ends))  # at last, a run that was not killed
            t = Trained(*saving(kill), out=folder, registered=registered, each=lambda t: t.critic.step(), kill=kill)
            ends.append(t.critic.layer.weight.item())
    said = (
        "warning: run.register(critic=...): the state of its optimizer is not in its own state: register it, too, as "
    )
    assert capsys.readouterr().out.count(f"{said}optimizer=critic.optimizer") == 3 * told
    assert (ends[0] == ends[1]) != told


@pytest.mark.parametrize(
    "value",
    [float("nan"), {"a", "b", "c"}, {"x": float("nan")}, print, object()],
    ids=["nan", "set", "nan within", "function", "object"],
)
def test_a_run_goes_on_whatever_its_flags_and_data_are(value, tmp_path):
    """NaN is not equal to itself, a set is text in any order, and objects have an address."""
    lines = []
    for _ in range(2):
        flags = flags_for("--output-dir", str(tmp_path), epochs=1)
        flags.mine = {*value} if isinstance(value, set) else value
        with training.start(flags) as run:
            run.describe_data("own", "a table", value=value if type(value) in (float, set, dict) else 1)
            net = nn.Linear(3, 1)
            model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            lines.append(len(train(run, model)))
    assert lines == [5, 0]


def test_an_optimizer_in_another_takes_its_rates_after_a_load():
    """As in lookahead_pytorch, which shares the groups: of all ranks but the first, they were other dictionaries."""
    inner = torch.optim.Adam(nn.Linear(3, 1).parameters())
    outer = torch.optim.SGD([torch.zeros(1)])
    outer.param_groups, outer.state = inner.param_groups, defaultdict(dict)
    load_exactly(outer, outer.state_dict())
    outer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5


class Holding(torch.optim.Optimizer):
    """As many have Lookahead. whole: whether the state of the inner one is in that of this one."""

    def __init__(self, inner, whole=False):
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = inner.state if whole else defaultdict(dict)

    def step(self, closure=None):
        self.inner.step(closure)


class Delegating(Holding):
    def step(self, closure=None):
        self.inner.step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("slow_buffer", parameter.detach() * 0.5)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


@pytest.mark.parametrize(
    ("kind", "inner", "line"),
    [
        (
            Holding,
            torch.optim.Adam,
            "no checkpoint has the state of inner in Holding: let its state_dict() have it in",
        ),
        (partial(Holding, whole=True), torch.optim.Adam, ""),
        (Holding, torch.optim.SGD, ""),  # without a state
        (Delegating, torch.optim.Adam, "no checkpoint has the slow weights of Delegating: let its state_dict() have"),
    ],
)
def test_what_an_optimizer_in_another_has_learned_is_told(kind, inner, line, tmp_path, capsys):
    def made(parameters):
        return kind(inner(parameters, lr=0.1))

    Trained("--checkpoint-steps", "4", out=tmp_path, optimizer=made)
    said = capsys.readouterr().out
    assert said.count("no checkpoint has the") == said.count(line or "no line") == bool(line), said


def test_a_save_of_many_groups_looks_at_what_has_changed(monkeypatch, tmp_path):
    passes, counts, told = [], [], []
    pack, state_dict, differs = contents.pack, torch.optim.SGD.state_dict, resumed_epoch.difference_of_values

    def packed(value, prefix, *rest):
        gc.callbacks.append(lambda phase, _: passes.append(phase) if prefix else None)  # none: before training
        counts.append(0)
        try:
            return pack(value, prefix, *rest)
        finally:
            gc.callbacks.pop()

    def counted_states(optimizer):
        counts.append(counts.pop() + 1 if counts else 0)
        return state_dict(optimizer)

    monkeypatch.setattr(contents, "pack", packed)
    monkeypatch.setattr(torch.optim.SGD, "state_dict", counted_states)
    monkeypatch.setattr(resumed_epoch, "difference_of_values", lambda *pair: told.append(pair) or differs(*pair))
    net = nn.Sequential(nn.Linear(3, 8), *(nn.Linear(8, 8) for _ in range(200)), nn.Linear(8, 1))
    groups = [{"params": [weight]} for weight in net.parameters()]
    optimizer = torch.optim.SGD(groups, 1e-5, momentum=0.9)
    Trained("--checkpoint-steps", "1", out=tmp_path, net=net, optimizer=lambda _: optimizer)
    assert not passes  # of Python's garbage collector, each through all objects of the process
    assert not told  # of the settings of groups, which no head of an epoch has changed
    assert {*counts[3:-1]} == {1}


def test_parts_of_one_tensor_are_compared_with_their_neighbours():
    def calls(count):
        seen = []
        parts = list(torch.zeros(2 * count).split(2))
        sys.setprofile(lambda frame, event, _: seen.append(event) if event == "call" else None)
        try:
            portable.to_json(parts)
        finally:
            sys.setprofile(None)
        return len(seen)

    assert calls(400) < 2.1 * calls(200)
