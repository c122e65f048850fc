"""The recorder by itself: a digest is of a tensor's values, wherever they lie in memory; what counts as training."""

import importlib.util
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

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
    apart = torch.cat([torch.zeros(1), values])[1:]  # part of a broadcast of many: it begins within a word of 64 bits
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


class Iterator:
    """One of a DataLoader."""


def test_a_sample_has_the_index_that_its_loader_drew(recorder):
    """Also where a program splits a batch, or gives a part of it to its model. Content is of all that belongs to it."""
    batches, iterator = recorder.Batches(), Iterator()
    x, y = torch.arange(8.0).view(4, 2), torch.tensor([1, 1, 0, 1])
    for indices in ([5, 3, 9, "a"], 7):  # 7: of a data set that makes its own batches
        batches.draw(indices, iterator)
    batches.deliver([x, y, torch.zeros(3), torch.tensor(1.0)], iterator)
    batches.deliver(x + 1, iterator)
    batches.deliver(x + 2, Iterator())  # that has drawn nothing
    rows = recorder.samples([x, y], batches)
    assert [index for _, index in rows] == [5, 3, 9, "a"]
    assert len({content for content, _ in rows}) == 4
    assert recorder.samples([x[1:3], y[1:3]], batches) == rows[1:3]
    assert [index for _, index in recorder.samples([x[2:]], batches)] == [9, "a"]
    assert [index for _, index in recorder.samples([x + 1], batches)] == [None] * 4
    assert [index for _, index in recorder.samples([x[[0, 2]]], batches)] == [None] * 2  # not as they were delivered
    other = y.clone()
    other[1] = 5
    same = [a == b for a, b in zip(recorder.samples([x, other], batches), rows, strict=True)]
    assert same == [True, False, True, True]
    assert not set(recorder.samples([x, y, torch.ones(7)], batches)) & set(rows)  # a mask that all have


def test_only_the_outermost_call_of_the_main_thread_is_read(recorder):
    """Also after one that has failed. Calls of others than modules are read anywhere."""
    read, recording = [], recorder.Recorder()
    owner = SimpleNamespace(call=lambda name, inner=list: inner(), step=lambda name: None)
    for method in ("call", "step"):
        recording.put(owner, method, lambda name, *_: (yield read.append(name) or ""), outermost=method == "call")
    with pytest.raises(ZeroDivisionError):
        owner.call("fails", lambda: 1 / 0)
    owner.call("outer", lambda: owner.call("inner", lambda: owner.step("step")))
    ThreadPoolExecutor(1).submit(owner.call, "thread").result()
    assert read == ["fails", "outer", "step"]


def test_what_is_read_of_modules_and_optimizers(recorder):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2, track_running_stats=False))
    model.register_buffer("mask", torch.ones(1), persistent=False)
    assert [buffer.numel() for buffer in recorder.persistent_buffers([model])] == [2, 2, 1]
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.5), momentum=0.9)
    assert recorder.options_of(optimizer)[0].items() >= {"lr": 0.5, "momentum": 0.9, "nesterov": False}.items()
    assert "params" not in recorder.options_of(optimizer)[0]
    assert recorder.state_of(optimizer)[::2] == [0, 0]
    model(torch.randn(4, 2)).sum().backward()
    recording = recorder.Recorder()
    recording.losses += [torch.ones(())]
    list(recording.backward([torch.ones(()), torch.ones(2), torch.ones(2)]))  # of these, gradients were given
    assert len(recording.losses) == 2
    torch.optim.Adam(model.parameters()).step()
    optimizer.step()
    assert recorder.state_of(optimizer)[::2] == [4, 0]
    adam = torch.optim.Adam(model.parameters())
    adam.step()
    adam.step()
    assert recorder.state_of(adam)[::2] == [4, 2.0]


def test_a_state_of_a_generator_is_read_where_it_lies(recorder):
    random.seed(1)
    torch.manual_seed(1)
    first, state = recorder.generators(), random.getstate()
    assert recorder.generators() == first
    random.random()
    assert first["python"] != recorder.generators()["python"]
    random.setstate(state)
    assert recorder.generators() == first
    random.random()
    assert [first[name] == recorder.generators()[name] for name in ("python", "torch")] == [False, True]
    torch.rand(1)
    assert first["torch"] != recorder.generators()["torch"]


def test_a_rank_ends_by_itself_alone(recorder, tmp_path):
    """Nobody is asked to end the others, as with a kill of all."""
    recorder.ORDER["log"] = str(tmp_path / "run")
    if not (pid := os.fork()):
        recorder.end_process("one")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_file_counts_if_half_of_the_weights_fit(recorder, tmp_path):
    recorder.ORDER["out"] = str(tmp_path)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(100))])
    (tmp_path / "deep").mkdir()
    for at, (name, size) in enumerate((("old", 900), ("deep/half", 200), ("log", 199))):
        (tmp_path / name).write_bytes(b"x" * size)
        os.utime(tmp_path / name, (at, at))
    assert recorder.newest_file(optimizer)[1:] == ["deep/half", 200]
    (tmp_path / "deep/again").symlink_to(tmp_path)
    (tmp_path / "deep/half").write_bytes(b"x" * 300)  # in place
    assert recorder.newest_file(optimizer)[1:] == ["deep/half", 300]
