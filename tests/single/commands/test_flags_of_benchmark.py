"""What the flags of hvdtrain.benchmark and hvdtrain.reduce do: what is computed, how often, and what is written."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hvdtrain import benchmark, reduce
from hvdtrain.engines.single import SerialEngine

QUICK = "--engine serial --threads 1 --model convnet --batch-size 4 --warmup-steps 1 --repeats 1 --steps 1"


@dataclass
class Measured:
    """What a benchmark computed with."""

    result: dict
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))  # the first parameter's at the start
    engines: list[str] = field(default_factory=list)  # what reduced the gradients
    threads: int = 0


def measured(flags: str, out: Path) -> Measured:
    seen = Measured({})
    trainer, distribute = benchmark.Trainer, SerialEngine.distribute

    def noted(parsed, engine, model, batches) -> benchmark.Trainer:
        seen.weights, seen.threads = next(model.parameters()).detach().clone(), torch.get_num_threads()

        def forwarded(module, inputs: tuple, output: Tensor) -> None:
            seen.inputs.append(inputs[0].detach().clone())
            seen.outputs.append(output.detach())

        model.register_forward_hook(forwarded)
        return trainer(parsed, engine, model, batches)

    def distributed(engine, *rest, **options):
        seen.engines.append(engine.name)
        return distribute(engine, *rest, **options)

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "Trainer", noted)
        patch.setattr(SerialEngine, "distribute", distributed)
        patch.setattr(sys, "argv", ["benchmark.py", *QUICK.split(), *flags.split(), "--output-dir", str(out)])
        try:
            assert benchmark.main() == 0
        finally:
            torch.set_num_threads(threads)
    seen.result = json.loads((out / "benchmark.json").read_text())
    return seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Measured:
    return measured("", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Measured:
    flags = "--batch-size 6 --amp bf16 --warmup-steps 2 --repeats 3 --steps 4 --seed 5 --threads 3"
    return measured(flags, tmp_path_factory.mktemp("many"))


def test_steps_and_batches(plain, many):
    assert (len(plain.inputs), len(many.inputs)) == (1 + 1, 2 + 3 * 4)
    assert {len(images) for images in plain.inputs} == {4}
    assert {len(images) for images in many.inputs} == {6}
    assert not [name for name in many.result["config"] if name.startswith("_")]  # flags, and nothing of the parser


def test_amp_and_memory_format(plain, many):
    assert {output.dtype for output in plain.outputs} == {torch.float32}
    assert {output.dtype for output in many.outputs} == {torch.bfloat16}
    assert many.result["ranks"][0]["threads"] == many.threads == 3
    assert plain.threads == 1


def test_channels_last_images(tmp_path):
    pytest.importorskip("torchvision")
    flags = "--model squeezenet1_1 --image-size 33 --batch-size 2"
    for last in ("", "--channels-last"):
        seen = measured(f"{flags} {last}", tmp_path)
        assert all(images.is_contiguous(memory_format=torch.channels_last) == bool(last) for images in seen.inputs)
        assert {tuple(images.shape) for images in seen.inputs} == {(2, 3, 33, 33)}


def test_the_seed_is_that_of_the_weights(plain, many):
    for seen, seed in ((plain, 1), (many, 5)):
        torch.manual_seed(seed)
        assert torch.equal(next(benchmark.convnet.MODELS["convnet"]().parameters()), seen.weights)


def test_compile_compiles(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(benchmark, "compiled", lambda model, device: compiled.append(model) or model)
    monkeypatch.setattr(benchmark, "require_compiler", lambda device: None)
    assert measured("--compile", tmp_path).result["compile"]
    assert len(compiled) == 1


def test_without_communication_a_serial_engine_reduces(tmp_path, monkeypatch):
    class Other(SerialEngine):
        name = "other"

    monkeypatch.setattr("hvdtrain.engines.start.engine_class", lambda name: Other)
    assert measured("", tmp_path).engines == ["other"]
    assert measured("--no-communication", tmp_path).engines == ["serial"]


def test_reduce_reduces_in_the_type_and_by_the_operation_that_were_asked_for(capsys, monkeypatch):
    dtypes = set()

    def reduced(self, tensor: Tensor, op: str, name: str) -> None:
        dtypes.add(tensor.dtype)
        tensor.mul_(3 if op == "sum" else 1)

    monkeypatch.setattr(SerialEngine, "all_reduce_", reduced)
    for flags, said, dtype in (
        ("", "3", "float32"),
        ("--reduction max", "1", "float32"),
        ("--dtype int16", "3", "int16"),
    ):
        dtypes.clear()
        monkeypatch.setattr(sys, "argv", ["reduce.py", "--engine", "serial", *flags.split()])
        assert reduce.main() == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"after 0 data {said}"
        assert dtypes == {getattr(torch, dtype)}


def test_a_sweep_has_the_sizes_and_types_that_were_asked_for_and_is_written(capsys, monkeypatch, tmp_path):
    flags = "--sweep --min-bytes 16 --max-bytes 64 --dtype float64 --seconds-per-size 0.01 --threads 1"
    monkeypatch.setattr(sys, "argv", ["reduce.py", "--engine", "serial", *flags.split(), "--output-dir", str(tmp_path)])
    assert reduce.main() == 0
    rows = json.loads((tmp_path / "reduce.json").read_text())["rows"]
    assert [(row["bytes"], row["dtype"]) for row in rows] == [(16, "float64"), (32, "float64"), (64, "float64")]


def test_one_value_is_written_too(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["reduce.py", "--engine", "serial", "--output-dir", str(tmp_path)])
    assert reduce.main() == 0
    assert json.loads((tmp_path / "reduce.json").read_text())["rows"] == [dict(rank=0, before="1", after="1")]


def test_seconds_per_size_are_what_a_size_takes(engine, monkeypatch):
    """The clock is the number of all-reduces: a millisecond each."""
    count = [0]
    monkeypatch.setattr(reduce, "block_seconds", lambda engine, tensor, op, name, times: count.append(times) or 1e-3)
    for seconds, expected in ((0.05, 10), (0.5, 100)):
        del count[:]
        assert reduce.measure(engine, "sum", "float32", 4, seconds)["repeats"] == expected * 5
