"""Programs as people write them: torch's schedulers, compiled models, and a run that is made longer."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel

from hvdtrain import training
from hvdtrain.checkpoint import checkpoint
from hvdtrain.engines.errors import UserError
from hvdtrain.features.schedule_rules import require_length
from tests.e2e.launchers import summary
from tests.single.training.small import N, Trained, X, Y, fit, flags_for, network, train

# ---- schedules


def one_cycle(optimizer, steps):
    return OneCycleLR(optimizer, 0.1, total_steps=steps)


def scheduled(make, steps, by_steps=None, **others):
    """Train with a scheduler for `steps` steps. Two epochs of five steps. others: that are made, too, by name."""

    def made(t):
        return dict(scheduler=make(t.optimizer, steps)) | {name: one(t.optimizer) for name, one in others.items()}

    Trained(steps=by_steps, registered=made, each=lambda t: t.scheduler.step())


@pytest.mark.parametrize(("steps", "by_steps"), [(20, None), (11, None), (9, None), (10, 7)])
def test_one_cycle_of_another_length_than_the_run_is_refused(steps, by_steps):
    complaint = rf"^scheduler: OneCycleLR is made for {steps} steps, and this run has {by_steps or 10} steps"
    with pytest.raises(UserError, match=complaint) as caught:
        scheduled(one_cycle, steps, by_steps=by_steps)
    assert ("run.total_steps(data, 2)" in str(caught.value)) == (by_steps is None)


HUGGING_FACE = "Hugging Face's"


def as_hugging_face(optimizer, steps):
    def factor(current_step, *, num_training_steps):
        return max(0.0, 1 - current_step / num_training_steps)

    return LambdaLR(optimizer, partial(factor, num_training_steps=steps))


def test_schedules_of_one_optimizer_may_add_up_to_the_run_and_those_of_two_do_not():
    one, other = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    for second, lines in ((one, 0), (other, 2)):
        registered = dict(a=CosineAnnealingLR(one, 4), b=CosineAnnealingLR(second, 6))
        assert len(require_length(registered, 10, 2, {1})) == lines


OTHER_LENGTHS = {
    "cosine": lambda o, n: CosineAnnealingLR(o, n),
    "polynomial": lambda o, n: PolynomialLR(o, n),
    "linear decay": lambda o, n: LinearLR(o, 1.0, 0.0, n),
    "warm-up, then cosine": lambda o, n: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 3), CosineAnnealingLR(o, n - 3)], [3]),
    HUGGING_FACE: as_hugging_face,
}


@pytest.mark.parametrize("kind", OTHER_LENGTHS)
def test_a_schedule_of_another_length_than_the_run_is_reported(kind, capsys):
    for steps, warned in ((20, True), (10, False)):
        scheduled(OTHER_LENGTHS[kind], steps)
        assert (
            f"is made for {steps} steps, and this run has 10 steps in 2 epochs" in capsys.readouterr().out
        ) == warned


def test_a_schedule_of_epochs_a_warm_up_and_one_without_an_end_are_not_reported(capsys):
    scheduled(lambda o, n: CosineAnnealingLR(o, n), 2)
    scheduled(lambda o, n: LinearLR(o, 0.1, 1.0, n), 4)
    scheduled(lambda o, n: StepLR(o, n), 4)
    scheduled(lambda o, n: CosineAnnealingLR(o, n), 7, beside=lambda o: LinearLR(o, 0.1, total_iters=3))
    assert "warning" not in capsys.readouterr().out


def test_total_steps_are_those_of_all_ranks_and_micro_batches():
    data = torch.utils.data.TensorDataset(X, Y)
    for argv, expected in (((), 10), (("--accumulate", "2"), 6)):
        with training.start(flags_for(*argv)) as run:
            loader = torch.utils.data.DataLoader(data, batch_size=8)
            assert [run.total_steps(given, 2) for given in (X, N, loader)] == [expected] * 3


# ---- torch.compile


def compiled(out, whole=True, part=False, epochs=2):
    """Train a model that is compiled as a whole or in part, with an average of it."""
    torch.manual_seed(3)
    net = network()
    if part:
        net[0] = torch.compile(net[0], backend="eager")
    ready = torch.compile(net, backend="eager") if whole else net
    return Trained(out=out, net=ready, epochs=epochs, registered=lambda t: dict(averaged=AveragedModel(ready)))


def test_a_compiled_model_is_saved_under_its_own_names(tmp_path):
    sums = []
    for name, whole, part in (("plain", False, False), ("whole", True, False), ("part", False, True)):
        compiled(tmp_path / name, whole, part)
        newest = checkpoint.checkpoints_in(tmp_path / name / "checkpoints")[0]
        tensors = checkpoint.read_checkpoint(newest)[1]
        assert {key for key in tensors if key.startswith("model")} == {f"model.{n}" for n in network().state_dict()}
        assert "_orig_mod" not in bytes(tensors["objects"].tolist()).decode()
        sums.append(summary(tmp_path / name)["parameters_sha256"])
    assert len(set(sums)) == 1


def test_a_run_may_be_continued_compiled_or_not_also_from_an_older_checkpoint(tmp_path):
    compiled(tmp_path, epochs=1)
    newest = checkpoint.checkpoints_in(tmp_path / "checkpoints")[0]
    facts, tensors = checkpoint.read_checkpoint(newest)
    old = {name.replace("model.", "model._orig_mod."): tensor for name, tensor in tensors.items()}
    checkpoint.write_checkpoint(newest, facts, old)
    assert compiled(tmp_path, False, epochs=2).run.state.epoch == 2
    assert compiled(tmp_path, epochs=3).run.state.epoch == 3


# ---- a longer run


def lengthened(directory, make=None, steps=False, epochs=2):
    """Train with an optional scheduler for the length given; return the parameters' hash and the rates."""
    rates = []

    def registered(t):
        return dict(scheduler=make(t.optimizer, t.run.total_steps(X, epochs))) if make else {}

    def each(t):
        rates.append(t.step.lr)
        if make:
            t.scheduler.step()

    Trained(out=directory, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), epochs=epochs,
            registered=registered, steps=epochs if steps else None, each=each)  # fmt: skip
    told = summary(directory)
    return told["parameters_sha256"], rates, (told["epochs"], told["steps"])


@pytest.mark.parametrize("make", [None, lambda o, n: StepLR(o, 4, 0.5)], ids=["constant", "without an end"])
@pytest.mark.parametrize("steps", [False, True], ids=["epochs", "steps"])
def test_a_run_made_longer_ends_as_one_that_was_so_long_from_the_beginning(make, steps, tmp_path, capsys):
    short, more = (7, 13) if steps else (2, 4)
    whole = lengthened(tmp_path / "whole", make=make, steps=steps, epochs=more)
    lengthened(tmp_path / "parts", make=make, steps=steps, epochs=short)
    capsys.readouterr()
    parts = lengthened(tmp_path / "parts", make=make, steps=steps, epochs=more)
    assert f"--epochs {more} instead of {short}: training continues" in capsys.readouterr().out
    assert parts[0] == whole[0]
    assert parts[1] == whole[1][-len(parts[1]) :]
    assert parts[2] == whole[2]


@pytest.mark.parametrize("kind", ["one cycle", *(kind for kind in OTHER_LENGTHS if kind != HUGGING_FACE)])
def test_a_schedule_with_an_end_follows_the_new_end(kind, tmp_path):
    make = OTHER_LENGTHS.get(kind, one_cycle)
    _, whole, _ = lengthened(tmp_path / "whole", make=make, epochs=4)
    lengthened(tmp_path / "parts", make=make, epochs=2)
    _, parts, _ = lengthened(tmp_path / "parts", make=make, epochs=4)
    assert parts == pytest.approx(whole[10:])


def test_fewer_epochs_than_are_done_are_refused_and_as_many_end_at_once(tmp_path):
    lengthened(tmp_path, epochs=3)
    with pytest.raises(UserError, match=r"^run.epochs\(\) for 2 epochs, but epoch 3 has been reached"):
        lengthened(tmp_path, epochs=2)
    assert lengthened(tmp_path, epochs=3)[1] == []
    lengthened(tmp_path / "steps", steps=True, epochs=7)
    with pytest.raises(UserError, match=r"^run.epochs\(\) for 6 steps, but step 7 has been reached"):
        lengthened(tmp_path / "steps", steps=True, epochs=6)


def test_a_function_among_the_flags_is_known_by_its_name():
    """Its address is another one in each process: ranks would differ, and a resumed run."""
    flags = flags_for()
    flags.command = train
    assert flags.given()["command"] == "train"


# ---- names


def test_messages_call_a_model_by_the_name_that_it_was_given():
    with pytest.raises(UserError, match=r"^critic\.weight got no gradient"), training.start(flags_for()) as run:
        generator, critic = nn.Linear(3, 1), nn.Linear(1, 1)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic)]
        g, _, g_optimizer, c_optimizer = run.prepare(
            generator=generator, critic=critic, g_optimizer=optimizers[0], c_optimizer=optimizers[1]
        )
        assert [g_optimizer, c_optimizer] == optimizers
        fit(run, [X], lambda step, x: g(x).mean())
