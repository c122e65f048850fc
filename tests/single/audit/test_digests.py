"""The recorder by itself: a digest is of a tensor's values, wherever they lie in memory; what counts as training."""

import importlib.util
import itertools
import os
import random
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

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


def test_a_program_may_ask_first_whether_torch_is_there(recorder, monkeypatch):
    """As transformers does: it was refused, because no step was seen."""
    attached, hook = [], recorder.AfterImport()
    monkeypatch.setattr(recorder, "attach", attached.append)
    loader = SimpleNamespace(exec_module=lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace(loader=loader))
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    for _ in ("asked for", "imported"):
        spec = hook.find_spec("torch")
    spec.loader.exec_module("torch")
    assert (attached, hook in sys.meta_path) == (["torch"], False)


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


def test_a_tensor_without_memory_of_its_own(recorder):
    """As DTensors, of which a rank has a part: what stood in unused memory was read."""
    with pytest.raises(TypeError, match="Tensor does not say where its values are"):
        recorder.memory_of(torch.empty(3, device="meta"))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    whole = torch.ones(4, 2)
    part = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
    assert (recorder.raw(part), recorder.rows_of(part)) == (recorder.raw(whole), recorder.rows_of(whole))
    distributed.destroy_process_group()


def test_a_sparse_tensor_is_where_its_values_are_too(recorder):
    at, other = (torch.sparse_coo_tensor([[0, place]], [1.0, 2.0], (9,), check_invariants=True) for place in (3, 4))
    assert recorder.raw(at) != recorder.raw(other)
    assert recorder.raw(at) == recorder.raw(at.clone())
    dense = torch.ones(9, 2)
    assert len(recorder.samples([dense, at], recorder.Batches())) == 9  # of a graph: it belongs to all
    assert recorder.samples([dense, at], recorder.Batches()) != recorder.samples([dense, other], recorder.Batches())


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


FULL = SimpleNamespace(inotify_init1=lambda flags: os.open(os.devnull, flags), inotify_add_watch=lambda *_: -1)


@pytest.mark.parametrize("kernel", [None, object(), FULL], ids=["inotify", "none", "its limit is reached"])
def test_a_file_counts_if_half_of_the_weights_fit(kernel, recorder, tmp_path, monkeypatch):
    """Whether the kernel tells of changes, or all is listed at each step. It is listed no more often than that."""
    monkeypatch.setattr(recorder, "KERNEL", kernel or recorder.KERNEL)
    recorder.ORDER["out"] = str(tmp_path / "out")
    optimizer, smaller = (torch.optim.SGD([torch.nn.Parameter(torch.ones(n))]) for n in (100, 10))
    files, looks, times = recorder.Files(), [], itertools.count()
    monkeypatch.setattr(files, "look", lambda look=files.look: (looks.append(1), look()))

    def newest(*written, of=optimizer):
        """Path and size of the newest file after more was written, and how often all was listed, of three times."""
        for path, size in ((tmp_path / name, size) for name, size in written):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * size)
            os.utime(path, (at := next(times), at))
        looks.clear()
        (found,) = {tuple(files.newest(of)[1:]) for _ in range(3)}
        return *found, len(looks)

    never, once, twice, always = range(4) if kernel is None else [3] * 4
    assert newest() == (always,)  # it is not there yet
    assert newest(("out/old", 900), ("out/deep/half", 200), ("out/log", 199)) == ("deep/half", 200, once)
    assert newest(of=smaller) == ("log", 199, never)
    assert newest(("out/deep/half", 300)) == ("deep/half", 300, once)  # in place
    assert newest(("out/.deep", 400), ("out/half.tmp", 400), ("out/metrics.jsonl", 400)) == ("deep/half", 300, once)
    assert newest(("new", 400)) == ("deep/half", 300, never)
    (tmp_path / "new").rename(tmp_path / "out/deep/new")
    assert newest() == ("deep/new", 400, once)
    assert newest(("out/later/one", 500)) == ("later/one", 500, once)
    if not os.fork():  # what is told to both would be read by one
        os._exit(newest(("out/later/one", 600)) != ("later/one", 600, once))
    assert (os.wait()[1], next(times)) == (0, 9)
    assert newest() == ("later/one", 600, once)
    (tmp_path / "out/deep/link").symlink_to(tmp_path / "elsewhere")
    for size in (700, 800):
        assert newest(("elsewhere", size)) == ("deep/link", size, always)
    (tmp_path / "out/deep/link").unlink()
    (tmp_path / "out/deep/folder").symlink_to(tmp_path)
    assert newest() == ("later/one", 600, twice)  # first, it reads what was told meanwhile
    shutil.rmtree(tmp_path / "out")
    assert newest() == (always,)
