"""The benchmark's arithmetic, its input, its flags."""

import itertools

import pytest
import torch

from hvdtrain import benchmark
from hvdtrain.benchmark import Repeat, count_flops, parse, phases, throughput
from hvdtrain.models.convnet import ConvNet
from hvdtrain.models.gpt import GPT, SIZES


def test_throughput_is_all_samples_over_the_slowest_ranks_time():
    fast, slow = Repeat(1.0, 0, 100, 0, 0, 0), Repeat(2.0, 0, 60, 0, 0, 0)
    assert throughput([fast, slow]) == throughput([slow, fast]) == 80


def test_phases_are_weighted_by_samples():
    few, many = Repeat(1.0, 5.0, 10, 0.1, 0.2, 0.3), Repeat(1.0, 3.0, 30, 0.5, 0.6, 0.7)
    assert phases([few, many]) == pytest.approx({"loading": 0.4, "compute": 0.5, "communication": 0.6})
    assert benchmark.cpu_seconds([few, many]) == pytest.approx(0.2)


def test_flops_are_those_of_the_layers():
    first, second, last = 28 * 28 * 16 * 25, 14 * 14 * 32 * 16 * 25, 1568 * 10  # multiplications, and as many additions
    forward_and_backward = 3 * (first + second + last) - first  # nobody asks for the images' gradient
    assert count_flops(ConvNet(), (1, 28, 28)) == 2 * forward_and_backward


def test_what_cannot_be_counted_is_none():
    class Reads(torch.nn.Module):
        def forward(self, images):
            return images * images.sum().item()  # no value is there to be read

    assert count_flops(Reads(), (1, 2, 2)) is None
    assert count_flops(torch.nn.BatchNorm2d(1), (1, 2, 2)) is None  # nothing that the counter knows


def batches(engine, flags, number, shape=(1, 28, 28)):
    return list(itertools.islice(benchmark.random_batches(parse(flags.split()), engine, 10, shape), number))


def test_a_language_model_gets_windows_of_tokens_and_the_next_ones(engine):
    (tokens, following), (another, _) = batches(engine, "--model shakespeare-cpu --batch-size 3", 2, (64,))
    assert (tokens.shape, tokens.dtype, following.shape) == ((3, 64), torch.int64, (3, 64))
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    assert not torch.equal(tokens, another)
    net = GPT(SIZES["shakespeare-cpu"], 65)
    assert count_flops(net, (64,), torch.int64) == pytest.approx(64 * net.flops_per_token(), rel=0.02)


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
    assert (parse(["--model", "gpt-small"]).batch_size, parse(["--model", "gpt-small"]).image_size) == (12, None)


@pytest.mark.parametrize("flags", ["--amp bf16 --channels-last", "--amp fp16 --batch-size 2", "--no-communication"])
def test_measure_and_summary_agree(flags, engine):
    flags = parse(f"--engine serial --model convnet --warmup-steps 1 --repeats 3 --steps 2 {flags}".split())
    engine.size = 1
    stream = benchmark.random_batches(flags, engine, 10, (1, 28, 28))
    found = benchmark.measure(benchmark.Trainer(flags, engine, ConvNet(), stream))
    repeats, result = found.repeats, benchmark.summarize(flags, engine, found, 1000, 4 * 29034)
    assert result["warmup_seconds"] > 0
    assert [len(repeat) for repeat in repeats] == [1, 1, 1]
    shares = []
    for (mine,) in repeats:
        assert mine.cpu_seconds > 0
        assert mine.samples == 2 * flags.batch_size
        shares.append((mine.loading + mine.compute + mine.communication) * mine.samples / mine.seconds)
    # The three phases are all of the time: nothing is counted twice or lost, but where another program came between.
    assert min(abs(share - 1) for share in shares) < 0.02
    rate = result["samples_per_second"]
    assert rate["mean"] == pytest.approx(sum(result["samples_per_second_repeats"]) / 3)
    assert result["flops_per_second"] == pytest.approx(1000 * rate["mean"])
    assert result["communicates"] == (not flags.no_communication)
    assert result["peak"]["resident_bytes"] > 50 * 2**20
    assert f"{rate['mean']:,.1f} samples/s" in "\n".join(benchmark.block(result))
