"""The recorder by itself: a digest is of a tensor's values, wherever they lie in memory; what counts as training."""

import importlib.util
from pathlib import Path

import pytest
import torch

from hvdtrain import audit


@pytest.fixture
def recorder(monkeypatch):
    """The module that runs inside of an audited program."""
    path = Path(audit.__file__).parent / "boot/sitecustomize.py"
    spec = importlib.util.spec_from_file_location("recorder", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # without HVDTRAIN_AUDIT in the environment, it attaches itself to nothing
    module.torch, module.ORDER = torch, {"log": "", "out": "", "whole": True, "kill": None}
    return module


@pytest.mark.parametrize("count", [3, 2_000, 2_001])
def test_where_a_tensor_begins_in_memory_does_not_count_and_each_value_does(recorder, count):
    values = torch.arange(1.0, count + 1)
    apart = torch.cat([torch.zeros(1), values])[
        1:
    ]  # as a part of a broadcast of many: it begins within a word of 64 bits
    assert recorder.raw(values) == recorder.raw(apart)
    changed = values.clone()
    changed[count // 2] = -1.0
    assert recorder.raw(values) != recorder.raw(changed)


@pytest.mark.parametrize(("inner", "grad", "rows"), [(True, True, 2), (False, True, 0), (True, False, 0)])
def test_a_wrapper_trains_if_a_module_in_it_does(inner, grad, rows, recorder):
    """Lightning leaves the flag of its DistributedDataParallel in evaluation: no sample of two ranks was seen."""
    wrapper = torch.nn.Sequential(torch.nn.Linear(3, 1))
    wrapper.training, wrapper[0].training = False, inner
    recording = recorder.Recorder()
    recording.losses.append(torch.tensor(0.0))  # of a backward pass before any sample: it is of no step
    with torch.set_grad_enabled(grad):
        place = next(recording.module_call(wrapper, torch.ones(2, 3)))
    assert (len(recording.rows), place, len(recording.losses)) == (rows, "" if rows else "evaluation", rows == 0)


def test_a_step_that_only_makes_an_optimizers_state_is_none_of_the_training(recorder, monkeypatch):
    """set_state_dict of torch.distributed.checkpoint makes one, and Composer by it, with a learning rate of 0."""
    lines, recording = [], recorder.Recorder()
    monkeypatch.setattr(recording, "write", lambda kind, **line: lines.append(line))
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.0)
    assert list(recording.step(optimizer)) == ["within"]
    for _ in range(2):  # of a warm-up, which begins with 0
        recording.losses.append(torch.tensor(1.0))
        assert list(recording.step(optimizer)) == ["within", "step"]
        weight.data.clamp_(max=0.5)  # as programs do after a step
    assert [line["first"] for line in lines] == [True, False]
    assert lines[0]["after"][0] != lines[1]["before"][0] == lines[1]["after"][0]  # with a learning rate of 0
    assert {line["key"].rpartition(" ")[2] for line in lines} == {"0"}
