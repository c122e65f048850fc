"""hvdtrain.benchmark: what is computed, how often, and what is written."""

import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hvdtrain import benchmark
from hvdtrain.benchmark import parse
from hvdtrain.engines.single import SerialEngine
from hvdtrain.output.clock import RankTimes

QUICK = "--engine serial --threads 1 --model convnet --batch-size 4 --warmup-steps 1 --repeats 1 --steps 1"


def batches(engine, flags, number, shape=(1, 28, 28)):
    return list(itertools.islice(benchmark.random_batches(parse(flags.split()), engine, 10, shape), number))


def test_a_language_model_gets_windows_of_tokens_and_the_next_ones(engine):
    (tokens, following), (another, _) = batches(engine, "--model shakespeare-cpu --batch-size 3", 2, (64,))
    assert (tokens.shape, tokens.dtype, following.shape) == ((3, 64), torch.int64, (3, 64))
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    assert not torch.equal(tokens, another)


@pytest.mark.parametrize(("flags", "shape"), [("gpt-small", (256,)), ("convnet", (1, 28, 28))])
def test_batches_are_made_on_the_device(flags, shape):
    """A step copies nothing there. The meta device is a stand-in for a GPU: it would refuse a tensor of the CPU."""
    somewhere = SimpleNamespace(device=torch.device("meta"), rank=0)
    for batch in batches(somewhere, f"--model {flags} --batch-size 2", 9, shape):
        assert {part.device.type for part in batch} == {"meta"}


def test_images_are_others_each_time_and_the_same_for_a_seed(engine):
    flags = "--model convnet --batch-size 4 --channels-last"
    mine, same = (batches(engine, flags, 9) for _ in range(2))
    assert not torch.equal(mine[0][0], mine[1][0])
    assert all(torch.equal(one[0], other[0]) for one, other in zip(mine, same, strict=True))
    assert mine[0][0].is_contiguous(memory_format=torch.channels_last)
    assert (mine[0][0].shape, mine[0][0].dtype, mine[0][1].shape) == ((4, 1, 28, 28), torch.float32, (4,))
    assert 0 <= mine[0][0].min() < mine[0][0].max() <= 1


def test_defaults_follow_the_model():
    assert [getattr(parse([]), name) for name in ("model", "batch_size", "image_size")] == ["resnet50", 32, 224]
    small = parse(["--model", "convnet"])
    assert (small.batch_size, small.image_size) == (64, 28)
    assert parse(["--model", "inception_v3"]).image_size == 299
    assert (small.repeats, parse(["--np", "2"]).repeats, parse(["--np", "2"]).model) == (10, 5, "convnet")
    assert (parse(["--model", "gpt-small"]).batch_size, parse(["--model", "gpt-small"]).image_size) == (12, None)


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


def test_samples_per_second_are_all_samples_over_the_slowest_ranks_time(engine, monkeypatch):
    def ranks(*elapsed: float) -> list[RankTimes]:
        return [RankTimes(0.1 * e, 0.6 * e, 0.3 * e, e, 0.0, 2.0**30 * e, 0.0) for e in elapsed]

    repeats = iter([ranks(9, 8), ranks(1, 2), ranks(1, 2), ranks(4, 1)])  # warm-up, trial, two that count
    monkeypatch.setattr(engine, "size", 2)
    monkeypatch.setattr(engine, "all_gather_object", lambda facts, name: [facts, {**facts, "rank": 1}])
    flags = parse(["--engine", "serial", "--batch-size", "10", "--repeats", "2", "--model", "convnet"])
    trainer = SimpleNamespace(flags=flags, engine=engine, repeat=lambda steps: next(repeats))
    found = benchmark.measure_training(trainer)  # type: ignore[arg-type]
    assert (found["steps"], found["warmup_seconds"]) == (1, 9)
    assert found["samples_per_second_repeats"] == [20 / 2, 20 / 4]
    assert found["samples_per_second"] == dict(mean=7.5, least=5, most=10, n=2)
    assert [rank["samples_per_second"] for rank in found["ranks"]] == [20 / 5, 20 / 3]
    assert found["ranks"][0]["seconds_per_sample"] == pytest.approx(
        dict(loading=0.025, compute=0.15, communication=0.075)
    )
    assert found["seconds_per_sample"] == pytest.approx(dict(loading=0.02, compute=0.12, communication=0.06))
    assert found["peak"]["resident_bytes"] == 4 * 2**30
    shown = "\n".join(benchmark.block(benchmark.summarize_training(flags, engine, found)))
    assert "7.5 samples/s (5.0 to 10.0, n = 2 of 1 steps)" in shown
    assert "us per sample    loading 20,000.0 (10%)  compute 120,000.0 (60%)  communication 60,000.0 (30%)" in shown


def test_amp_and_memory_format(plain, many):
    assert {output.dtype for output in plain.outputs} == {torch.float32}
    assert {output.dtype for output in many.outputs} == {torch.bfloat16}
    assert many.result["ranks"][0]["threads"] == many.threads == 3
    assert plain.threads == 1


def test_images_have_the_size_and_layout_that_were_asked_for(tmp_path):
    pytest.importorskip("torchvision")
    flags = "--model squeezenet1_1 --image-size 33 --batch-size 2 --channels-last"
    seen = measured(flags, tmp_path)
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images in seen.inputs)
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

    monkeypatch.setattr("hvdtrain.engines.choice.engine_class", lambda name: Other)
    assert measured("", tmp_path).engines == ["other"]
    assert measured("--no-communication", tmp_path).engines == ["serial"]
