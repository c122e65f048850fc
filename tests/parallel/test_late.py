"""Gradients that are not finite, read one step late as on an accelerator: on all ranks as if they had been read at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.checkpoint.writer import CheckpointInterval
from hvdtrain.engines.errors import Failure
from hvdtrain.features import non_finite
from hvdtrain.features.non_finite import LateVerdict
from hvdtrain.inputs.sharding import epoch_order
from hvdtrain.loop.stopping import Decision, Stopping
from hvdtrain.output.run_output import RunOutput
from tests.parallel.test_loop import N, X, Y, a_run
from tests.single.training.small import fit

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4):
    pytest.skip("fused optimizers of a CPU are in torch 2.4 and newer", allow_module_level=True)


SAID = r"step 3: gradients are not finite: rank \d+ on .*, the loss; .*: the same command with --find-non-finite"


class Arrived:
    """In place of `Delayed`: a CPU's values are there."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def values(self):
        return self.tensor.tolist()


@pytest.fixture(autouse=True)
def flags(monkeypatch):
    """Let the fused optimizers of a CPU take flags, as those of an accelerator do."""
    monkeypatch.setattr(non_finite, "of", LateVerdict)
    monkeypatch.setattr(non_finite, "takes_flag", lambda optimizer: bool(optimizer.param_groups[0].get("fused")))
    monkeypatch.setattr(non_finite, "Delayed", Arrived)


def train(engine, *argv) -> list[list[float]]:
    """Train on samples of which one, in the third step, is NaN. Return the weights and batch norm's statistics."""
    samples = X.clone()
    samples[epoch_order(N, 1, 0)[2 * engine.size * 2]] = float("nan")
    with a_run(engine, *argv, epochs=1, batch_size=2) as run:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1, fused=True))
        # Twice: a single sample has no variance.
        fit(run, [samples, Y], lambda step, x, y: F.mse_loss(model(x.repeat(2, 1)), y.repeat(2, 1)))
    return [tensor.tolist() for tensor in net.state_dict().values()]


def test_a_step_is_left_out_on_all_ranks_as_if_it_had_been_read_at_once(engine, monkeypatch):
    messages: list[str] = []
    event = RunOutput.event

    def noted(self, name, **fields):
        if name == "error":
            messages.append(fields["message"])
        event(self, name, **fields)

    monkeypatch.setattr(RunOutput, "event", noted)
    read: list[int] = []
    monkeypatch.setattr(Arrived, "values", lambda self: read.append(1) or self.tensor.tolist())
    late = train(engine, "--max-skipped", "1")
    assert read  # else this compares two runs that read at once
    del read[:]
    at_once = train(engine, "--max-skipped", "1", "--log-steps", "1")
    assert not read
    assert late == at_once
    assert messages[0] == messages[1]
    assert "step 3: gradients are not finite: rank " in messages[0]
    assert ", the loss; 1 step in a row, --max-skipped 1" in messages[0]


def test_a_save_that_nobody_expected_learns_of_its_step_first(engine, monkeypatch):
    """As after a signal, or when a checkpoint is due by the clock."""
    monkeypatch.setattr(CheckpointInterval, "due_at", property(lambda self: 0.0, lambda self, at: None), raising=False)
    decided = {3: Decision.SAVE}
    monkeypatch.setattr(Stopping, "decide", lambda self, step, due: decided.get(step, Decision.GO_ON))
    with pytest.raises(Failure, match=SAID):
        train(engine)


def test_where_none_may_be_left_out_all_ranks_end_and_name_the_step_and_the_rank(engine):
    with pytest.raises(Failure, match=SAID):
        train(engine)
