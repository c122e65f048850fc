"""A run that is resumed by a program that was changed: mapped by name, refused in one line, or said."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from hvdtrain import training
from hvdtrain.engines.errors import UserError
from tests.single.training.small import Killed, Trained, X, Y, killed, saving


def trained(directory, make, optimizer_of, *argv, **how):
    """Train what `make` returns. optimizer_of: makes the optimizer, of the model."""
    torch.manual_seed(3)
    net = make()
    how |= dict(net=net, optimizer=lambda _: optimizer_of(net), loss=lambda t, x, y: F.mse_loss(t.model(x), y))
    Trained(*saving(how.get("kill")), *argv, out=directory, **how)
    return net


def stopped(*arguments, **options):
    """Train three steps, of which two are in the checkpoint."""
    killed(trained, *arguments, kill=3, **options)


class Twins(nn.Module):
    """Two layers of one shape, with statistics of one shape, defined in either order."""

    def __init__(self, order="ab"):
        super().__init__()
        for name in order:
            generator = torch.Generator().manual_seed(ord(name))
            layer = nn.Linear(3, 3)
            with torch.no_grad():
                layer.weight.copy_(torch.randn(3, 3, generator=generator))
                layer.bias.zero_()
            self.add_module(name, nn.Sequential(layer, nn.BatchNorm1d(3)))
        self.last = nn.Linear(3, 1)
        nn.init.constant_(self.last.weight, 0.5)
        nn.init.zeros_(self.last.bias)

    def forward(self, x):
        return self.last(self.b(self.a(x).tanh()).tanh())


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01)


def goes_on(tmp_path, make, optimizer_of, again=None):
    """Train without an end, and stopped and then with what `again` makes: the state is the same."""
    whole = trained(tmp_path / "whole", make, optimizer_of)
    stopped(tmp_path / "apart", make, optimizer_of)
    apart = trained(tmp_path / "apart", again or make, optimizer_of)
    assert set(apart.state_dict()) == set(whole.state_dict())
    for name, value in whole.state_dict().items():
        assert torch.equal(apart.state_dict()[name], value), name


def test_layers_that_are_defined_in_another_order_keep_their_momentum_and_statistics(tmp_path):
    goes_on(tmp_path, Twins, adam, lambda: Twins("ba"))


class Halved(nn.Module):
    def __init__(self, dtype=torch.float32, width=3):
        super().__init__()
        self.register_buffer("keys", torch.ones(width, dtype=dtype))


class Quartered(Halved):
    pass


class Table:
    """Refuses a state of another number of rows."""

    def __init__(self, rows):
        self.rows = rows

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        if state["rows"] != self.rows:
            raise IndexError("rows differ")


class OneBeta(torch.optim.Optimizer):
    """Has one beta, where Adam has two: as Adafactor has two for eps."""

    def __init__(self, params):
        super().__init__(params, {"betas": 0.9})


def groups(net):
    return torch.optim.Adam(
        [{"params": [*net.a.parameters(), *net.b.parameters()]}, {"params": net.last.parameters()}], 0.01
    )


def adam_of_some(net):
    return torch.optim.Adam([*net.a.parameters(), *net.last.parameters()], lr=0.01)


MATCH, ANEW = r"^the checkpoint does not match the optimizer \(.*{}.*\): make the optimizer", r"{}.*: register the same"
OTHERS = {  # what is registered first; then, by which optimizer; and what is said
    "fewer parameters": (None, None, adam_of_some, MATCH.format("only in the checkpoint")),
    "other groups": (None, None, groups, MATCH.format("1 parameter groups in the checkpoint, 2 now")),
    "another optimizer": (None, None, lambda net: stepped(0.1)(net), MATCH.format("Adam in the checkpoint, SGD now")),
    "a setting of another form": (None, None, lambda net: type("Adam", (OneBeta,), {})(net.parameters()),
                                  MATCH.format("betas is .0.9, 0.999.")),
    "a module's dtype": (lambda t: Halved(), lambda t: Halved(torch.float16), adam,
                         ANEW.format("keys is torch.float32 in the file, torch.float16 in the")),
    "a module's shape": (lambda t: Halved(), lambda t: Halved(width=2), adam,
                         ANEW.format(r"keys is \(3,\) in the file, \(2,\) in the model")),
    "a module's class": (lambda t: Halved(), lambda t: Quartered(), adam,
                         ANEW.format("Halved in the checkpoint, Quartered now")),
    "a scheduler's class": (lambda t: StepLR(t.optimizer, 4), lambda t: CosineAnnealingLR(t.optimizer, 4), adam,
                            ANEW.format(r"^run.register\(it=...\): StepLR in the checkpoint, CosineAnnealingLR now")),
    "an object that refuses it": (lambda t: Table(2), lambda t: Table(3), adam,
                                  ANEW.format(r"^the checkpoint does not match 'it' \(rows differ\)")),
    "not registered any more": (lambda t: Table(2), None, adam,
                                ANEW.format("^the checkpoint has 'it', which is not registered now")),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_objects_and_optimizers_of_another_kind_are_refused(case, tmp_path):
    first, then, optimizer_of, why = OTHERS[case]
    stopped(tmp_path, Twins, adam, registered=lambda t: dict(it=first(t)) if first else {})
    with pytest.raises(UserError, match=why):
        trained(tmp_path, Twins, optimizer_of, registered=lambda t: dict(it=then(t)) if then else {})


def stepped(rate):
    return lambda net: torch.optim.SGD(net.parameters(), lr=rate)


def stairs(t):
    return dict(rate=StepLR(t.optimizer, 4, 0.5))


def test_a_resumed_program_may_have_hooks_of_its_own_before_a_step(tmp_path):
    """Ours was removed when it was called, and torch goes through all of them."""
    called = []
    stopped(tmp_path, Twins, adam)
    trained(tmp_path, Twins, adam,
            head=lambda t, epoch: t.optimizer.register_step_pre_hook(lambda *_: called.append(epoch)))  # fmt: skip
    assert {0, 1} == set(called)


OTHER_SETTINGS = {
    "a rate": (stepped(0.2), stairs, "SGD lr: 0.1 in the checkpoint, 0.2 now"),
    "a scheduler's factor": (stepped(0.1), lambda t: dict(rate=StepLR(t.optimizer, 4, 0.9)),
        "rate gamma: 0.5 in the checkpoint, 0.9 now"),
}  # fmt: skip


def test_other_settings_of_layers_are_refused_or_said(tmp_path, capfd):
    def with_dropout(p):
        return lambda: nn.Sequential(nn.Dropout(p), Twins())

    stopped(tmp_path / "out", with_dropout(0.1), adam)
    why = "layers Dropout.p: 0.1 in the checkpoint, 0.5 now"
    with pytest.raises(UserError, match=rf"different settings \({why}\): give the same"):
        trained(tmp_path / "out", with_dropout(0.5), adam)
    trained(tmp_path / "named", with_dropout(0.5), adam, "--resume", str(tmp_path / "out"))
    assert f"other settings than the checkpoint ({why}): those given now are used" in capfd.readouterr().err


@pytest.mark.parametrize("case", OTHER_SETTINGS)
def test_other_settings_in_the_program_are_refused_or_said(case, tmp_path, capfd):
    optimizer_of, registered, why = OTHER_SETTINGS[case]
    stopped(tmp_path / "out", Twins, stepped(0.1), registered=stairs)
    with pytest.raises(
        UserError, match=rf"out/checkpoints holds a run with different settings \({why}\): give the same"
    ):
        trained(tmp_path / "out", Twins, optimizer_of, registered=registered)
    named = ("--resume", str(tmp_path / "out"))
    changed = trained(tmp_path / "named", Twins, optimizer_of, *named, registered=registered)
    assert f"other settings than the checkpoint ({why}): those of the checkpoint are kept" in capfd.readouterr().err
    same = trained(tmp_path / "same", Twins, stepped(0.1), *named, registered=stairs)
    assert "other settings" not in capfd.readouterr().err
    assert all(map(torch.equal, changed.state_dict().values(), same.state_dict().values()))
    trained(tmp_path / "out", Twins, optimizer_of, registered=registered, epochs=3)  # they may depend on the length
    assert f"other settings than the checkpoint ({why}): those of the checkpoint are kept" in capfd.readouterr().err


def test_a_longer_run_does_not_say_that_the_earlier_schedule_is_kept(tmp_path, capfd):
    """It goes on as if it had been made as it is now from the beginning."""

    def cosine(epochs, floor):
        return lambda t: dict(rate=CosineAnnealingLR(t.optimizer, epochs, floor))

    stopped(tmp_path, Twins, stepped(0.1), registered=cosine(2, 0.01))
    trained(tmp_path, Twins, stepped(0.1), registered=cosine(3, 0.01), epochs=3)
    assert "other settings" not in capfd.readouterr().err
    trained(tmp_path, Twins, stepped(0.1), registered=cosine(4, 0.02), epochs=4)
    why = "rate eta_min: 0.01 in the checkpoint, 0.02 now"
    assert f"other settings than the checkpoint ({why}): those given now are used" in capfd.readouterr().err


def test_a_data_set_that_has_grown_is_refused_or_said(tmp_path, capsys):
    stopped(tmp_path / "out", Twins, adam)
    grown = torch.cat([X, X[:8]]), torch.cat([Y, Y[:8]])
    with pytest.raises(
        UserError, match=r"^the run was trained on 40 samples, and run.steps\(\) got 48: give the same, or"
    ):
        trained(tmp_path / "out", Twins, adam, data=grown)
    trained(tmp_path / "new", Twins, adam, "--resume", str(tmp_path / "out"), data=grown)
    assert "trained on 40 samples, and run.steps() got 48: continued with those given now" in capsys.readouterr().out


# ---- buffers that the program makes while it trains


class Late(nn.Module):
    """Has a buffer that is made in the first pass, or grows with each."""

    def __init__(self, kind, persistent):
        super().__init__()
        self.kind, self.persistent, self.body = kind, persistent, nn.Linear(3, 1)
        if kind == "none":
            self.register_buffer("center", None, persistent=persistent)
        if kind == "grows":
            self.register_buffer("center", torch.zeros(0, 3), persistent=persistent)

    def forward(self, x):
        if self.kind == "grows":
            if self.training and len(self.center) < 5:
                self.center = torch.cat([self.center, torch.ones(1, 3)])
        elif getattr(self, "center", None) is None:
            self.register_buffer("center", x.detach().mean(0, keepdim=True), persistent=self.persistent)
        return self.body(x - self.center.mean(0))


sgd = stepped(0.1)


@pytest.mark.parametrize("kind", ["none", "grows", "absent"])
def test_a_buffer_that_is_made_while_training_is_restored(kind, tmp_path):
    goes_on(tmp_path, lambda: Late(kind, True), sgd)
    trained(tmp_path / "apart", lambda: Late(kind, True), sgd, epochs=3)


@pytest.mark.parametrize("kind", ["none", "grows", "absent"])
def test_a_buffer_that_is_not_persistent_is_made_again_by_the_model(kind, tmp_path):
    stopped(tmp_path, lambda: Late(kind, False), sgd)
    apart = trained(tmp_path, lambda: Late(kind, False), sgd)
    assert "center" not in apart.state_dict()
    assert apart.center is not None


def test_a_buffer_of_another_shape_in_the_program_is_refused(tmp_path):
    def make(width):
        net = nn.Linear(3, 1)
        net.register_buffer("table", torch.zeros(width))
        return net

    stopped(tmp_path, lambda: make(4), sgd)
    with pytest.raises(UserError, match=r"table is \(4,\) in the file, \(5,\) in the model"):
        trained(tmp_path, lambda: make(5), sgd)


def test_another_name_of_the_program_is_called_so(tmp_path):
    """It was called `dataset`, of which the program says nothing."""
    for name in ("own", "other"):
        flags = training.parser(name, None).parse(
            ["--engine", "serial", "--no-progress", "--output-dir", str(tmp_path)]
        )
        waits = (
            contextlib.nullcontext()
            if name == "own"
            else pytest.raises(UserError, match="the program: own in the check")
        )
        with waits, training.start(flags) as run:
            net = Twins()
            run.prepare(net, adam(net))
            for _ in run.epochs(1):
                for step in run.steps(X):
                    for (x,) in step.batches():
                        step.backward(net(x).square().mean())
                    step.update()


def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)))


def test_a_scripted_model_is_resumed_to_the_bit(tmp_path):
    """It was optimized after some calls of a process, so that the last bits of losses were others."""
    whole = Trained(out=tmp_path / "whole", net=scripted, epochs=6)
    with pytest.raises(Killed):
        Trained(*saving(13), out=tmp_path / "apart", net=scripted, epochs=6, kill=13)
    apart = Trained(out=tmp_path / "apart", net=scripted, epochs=6)
    assert torch.equal(whole.weights(), apart.weights())


@pytest.mark.parametrize(("tail", "told"), [(lambda t, epoch: t.net.eval(), 1), (lambda t, epoch: t.net[1].eval(), 0)])
def test_a_model_that_is_left_in_evaluation_mode_is_said_once(tail, told, capsys):
    Trained(epochs=3, tail=tail)
    line = "a model that was in training mode in the epoch before is in evaluation mode: write net.train() at the head"
    assert capsys.readouterr().out.count(line) == told
