"""Several loops over epochs: a run that is resumed leaves out those that are over, and does again what is between."""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from hvdtrain.engines.errors import UserError
from tests.single.training.small import N, Stateful, X, Y, alone, kill_at, killed, resumed, saving


def evaluate(run, net):
    with run.evaluating(N) as mine:
        run.record(loss=(net(X[mine]) - Y[mine]).square())


def program(directory, kill, *, steps=False, loops=(2, 3, 5), keep=2):
    """Train in several loops. What is between them uses all that the loop before it has left."""
    with alone("--output-dir", str(directory), "--keep", str(keep), *saving(kill)) as run:
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        net[0].requires_grad_(False)
        net, optimizer = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
        objects = dict(scheduler=ExponentialLR(optimizer, 0.9), average=copy.deepcopy(net), own=torch.Generator(),
                       counted=Stateful(steps=0))  # fmt: skip
        run.register(**objects)
        found, shift = None, 0.0
        for number, limit in enumerate(loops):
            if number:
                found = [parameter.detach().clone() for parameter in net.parameters()]
                evaluate(run, net)
                shift = 0.01 * (torch.rand(3) + torch.rand(3, generator=objects["own"]) + run.evaluation["loss"])
                shift += optimizer.param_groups[0]["lr"] + objects["average"][0].weight.sum().item()
                shift += 0.01 * (objects["counted"].steps + run.state.step + run.state.epoch)
                optimizer.param_groups[0]["lr"] *= 0.5
                optimizer.state.clear()
                net[1].running_mean.zero_()
            if number == 2:
                run.load_best()
            for epoch in run.epochs(steps=5 * limit - 3) if steps else run.epochs(limit):
                net[0].requires_grad_(epoch == 1 or number > 1)
                for step in run.steps(X, Y):
                    for x, y in step.batches():
                        held = [(p - q).square().sum() for p, q in zip(net.parameters(), found or [], strict=False)]
                        step.backward(F.mse_loss(net(x + shift), y) + 0.1 * sum(held))
                    step.update()
                    objects["counted"].steps += 1
                    objects["average"][0].weight.lerp_(net[0].weight.detach(), 0.1)
                    kill_at(kill)(step)
                evaluate(run, net)
                objects["scheduler"].step()
        return [net.state_dict(), objects["average"].state_dict(), optimizer.state_dict(), torch.rand(1)]


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("kills", [(8, 12), (11, 14), (16, 19, 21)])
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_run_is_resumed_in_the_loop_in_which_it_was_killed(steps, kills, tmp_path, capsys):
    """It was refused: the first loop had fewer epochs than were done."""
    whole, apart = resumed(lambda *where: program(*where, steps=steps), tmp_path, *kills)
    assert repr(apart) == repr(whole)
    assert "warning" not in capsys.readouterr().out


def test_a_loop_that_was_left_ends_its_epoch_before_the_next_one(tmp_path):
    """The next loop had the same epoch once more, without a step."""

    def stopped_early(directory, kill):
        with alone("--output-dir", str(directory), *saving(kill)) as run:
            net, _ = run.prepare(net := nn.Linear(3, 1), torch.optim.SGD(net.parameters(), lr=0.1))
            epochs = []
            for limit, last in ((9, 1), (9, 3)):
                for epoch in run.epochs(limit):
                    epochs.append(epoch)
                    for step in run.steps(X):
                        for (x,) in step.batches():
                            step.backward(net(x).square().mean())
                        step.update()
                        kill_at(kill)(step)
                    if epoch == last:
                        break
            return epochs, net.weight.tolist()

    assert stopped_early(tmp_path / "whole", None)[0] == [0, 1, 2, 3]
    for kill, epochs in ((11, [2, 3]), (14, [2, 3]), (18, [3])):
        killed(stopped_early, tmp_path / str(kill), kill)
        assert stopped_early(tmp_path / str(kill), None) == (epochs, stopped_early(tmp_path / "whole", None)[1])


def short(directory, kill=None, *argv, loops=(1, 3), copies=False):
    with alone("--output-dir", str(directory), *saving(kill), *argv) as run:
        net, _ = run.prepare(net := nn.Linear(3, 1), torch.optim.SGD(net.parameters(), lr=0.1))
        first = copy.deepcopy(net) if copies else None
        for limit in loops:
            for _ in run.epochs(limit):
                for step in run.steps(X):
                    for (x,) in step.batches():
                        step.backward((net(x) - (first(x) if first else 0.0)).square().mean())
                    step.update()
                    kill_at(kill)(step)
        return net.weight.tolist(), run.state.step


def test_the_checkpoint_at_the_end_of_a_loop_is_kept_and_needed_for_what_is_between_alone(tmp_path, capsys):
    whole, apart = resumed(lambda *where: short(*where, "--keep", "1"), tmp_path, 12)
    assert (apart, "warning" in capsys.readouterr().out) == (whole, False)
    killed(short, tmp_path / "lost", 12)
    (tmp_path / "lost" / "checkpoints" / "step-00000005.safetensors").unlink()
    assert short(tmp_path / "lost") == whole
    assert "warning: step-00000005.safetensors, of the end of loop 1 over run.epochs" in capsys.readouterr().out


def test_a_mirror_brings_back_the_ends_of_loops_too(tmp_path, capsys):
    pytest.importorskip("fsspec")
    mirrored = f"--keep 1 --mirror file://{tmp_path / 'mirror'}".split()
    killed(short, tmp_path / "out", 14, *mirrored)
    shutil.rmtree(tmp_path / "out")
    assert short(tmp_path / "out", None, *mirrored)[1] == 15
    text = capsys.readouterr().out
    assert ("step-00000013.safetensors copied" in text, "warning" in text) == (True, False)


def test_a_program_that_has_lost_its_later_loop_is_refused(tmp_path):
    """It would have trained nothing, and said that it was finished."""
    killed(short, tmp_path, 12)
    with pytest.raises(UserError, match=r"in loop 2 over run\.epochs, and the program has 1"):
        short(tmp_path, loops=(3,))
    assert short(tmp_path)[1] == 15


def test_a_run_of_several_loops_is_evaluated(tmp_path):
    killed(short, tmp_path, 12)
    with alone("--evaluate", str(tmp_path)) as run:
        net, _ = run.prepare(net := nn.Linear(3, 1), torch.optim.SGD(net.parameters(), lr=0.1))
        evaluate(run, net)
    assert (run.exit_code, run.state.step, len(run.evaluation)) == (0, 11, 2)


def test_only_a_run_without_a_later_loop_has_finished(tmp_path, capsys):
    killed(short, tmp_path, 6)  # the checkpoint is that of the end of the first loop
    short(tmp_path)
    assert "has finished" not in capsys.readouterr().out
    short(tmp_path)
    assert "this run has finished" in capsys.readouterr().out


@pytest.mark.parametrize("kill", [6, 8, 4])
def test_a_copy_of_what_was_restored_is_told_in_whatever_loop(kill, tmp_path, capsys):
    killed(short, tmp_path, kill, copies=True)
    short(tmp_path, copies=True)
    assert "warning: first of short() has what was restored" in capsys.readouterr().out
