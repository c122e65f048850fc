"""The benchmark's arithmetic, its input, its flags."""

import itertools

import pytest
import torch

from hvdtrain import benchmark
from hvdtrain.benchmark import Repeat, count_flops, parse, phases, throughput
from hvdtrain.data.endless import open_endless
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.single import SerialEngine
from hvdtrain.models.convnet import ConvNet
from hvdtrain.models.gpt import GPT, SIZES
from hvdtrain.output.energy import Energy


@pytest.fixture
def engine():
    engine = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
    engine.device = torch.device("cpu")
    return engine


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
    return list(itertools.islice(open_endless(parse(flags.split()), engine, 10, shape), number))


def test_a_language_model_gets_windows_of_tokens_and_the_next_ones(engine):
    (tokens, following), (another, _) = batches(engine, "--model shakespeare-cpu --batch-size 3", 2, (64,))
    assert (tokens.shape, tokens.dtype, following.shape) == ((3, 64), torch.int64, (3, 64))
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    assert not torch.equal(tokens, another)
    (same, _), (again, _) = batches(engine, "--model shakespeare-cpu --batch-size 3 --input mock", 2, (64,))
    assert torch.equal(same, again)
    net = GPT(SIZES["shakespeare-cpu"], 65)
    assert count_flops(net, (64,), torch.int64) == pytest.approx(64 * net.flops_per_token(), rel=0.02)


def test_real_digits_are_scaled_pixels(engine):
    (images, labels), *_ = batches(engine, "--model convnet --batch-size 8 --input real --dataset digits", 1)
    assert (images.shape, images.max().item()) == ((8, 1, 28, 28), 1.0)
    assert set(labels.tolist()) <= set(range(10))


def test_image_folders_are_decoded_for_ever(engine, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for index in range(14):
        directory = tmp_path / f"{'train' if index < 8 else 'val'}/class{index % 2}"
        directory.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (40, 30), (index * 10, 0, 255)).save(directory / f"{index}.jpg")
    flags = f"--batch-size 3 --image-size 16 --input real --data-dir {tmp_path} --workers 0"
    for images, labels in batches(
        engine, flags, 3, (3, 16, 16)
    ):  # two of three, one of two that is left out, and again
        assert images.shape == (3, 3, 16, 16)
        assert images[:, 2].min() > 0.9
        assert set(labels.tolist()) <= {0, 1}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--input real", "needs --data-dir"),
        ("--input real --data-dir {tmp}", "train does not exist"),
        (
            "--model convnet --input real --dataset digits --batch-size 5000",
            "1415 samples per rank are less than one batch",
        ),
    ],
)
def test_input_that_is_not_there(flags, complaint, engine, tmp_path):
    with pytest.raises(UserError) as caught:
        batches(engine, flags.format(tmp=tmp_path), 1)
    assert complaint in str(caught.value)


def test_defaults_follow_the_model():
    assert [getattr(parse([]), name) for name in ("model", "batch_size", "image_size")] == ["resnet50", 32, 224]
    small = parse(["--model", "convnet"])
    assert (small.batch_size, small.image_size) == (64, 28)
    assert parse(["--model", "inception_v3"]).image_size == 299
    assert (parse(["--model", "gpt-small"]).batch_size, parse(["--model", "gpt-small"]).image_size) == (12, None)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--model convnet --image-size 32", "takes images of 28 pixels"),
        ("--engine serial --compression fp16", "--compression fp16 is not for --engine serial"),
        ("--steps 0", "'0' is not a whole number"),
        ("--model gpt-small --image-size 32", "--model gpt-small takes no images: leave out --image-size"),
        ("--model gpt2 --channels-last", "--model gpt2 takes no images: leave out --channels-last"),
        ("--model gpt2 --input real", "is measured on random tokens: leave out --input real"),
    ],
)
def test_bad_flags(flags, complaint):
    with pytest.raises(UserError) as caught:
        parse(flags.split())
    assert complaint in str(caught.value)


@pytest.mark.parametrize("flags", ["--amp bf16 --channels-last", "--amp fp16 --batch-size 2", "--no-communication"])
def test_measure_and_summary_agree(flags, engine):
    flags = parse(
        f"--engine serial --model convnet --warmup-steps 1 --repeats 3 --steps 2 --input mock {flags}".split()
    )
    engine.size = 1
    stream = open_endless(flags, engine, 10, (1, 28, 28))
    found = benchmark.measure(benchmark.Trainer(flags, engine, ConvNet(), stream))
    repeats, result = found.repeats, benchmark.summarize(flags, engine, found, 1000, 4 * 29034)
    assert result["warmup_seconds"] > 0
    assert [len(repeat) for repeat in repeats] == [1, 1, 1]
    shares = []
    for (mine,) in repeats:
        assert mine.cpu_seconds > 0
        assert mine.samples == 2 * flags.batch_size
        shares.append((mine.loading + mine.compute + mine.communication) * mine.samples / mine.seconds)
    # The three phases are all of the time: nothing is counted twice, and lost only where another program came between.
    assert 0.98 < max(shares) < 1.02
    rate = result["samples_per_second"]
    assert rate["mean"] == pytest.approx(sum(result["samples_per_second_repeats"]) / 3)
    assert result["flops_per_second"] == pytest.approx(1000 * rate["mean"])
    assert result["communicates"] == (not flags.no_communication)
    assert result["peak"]["resident_bytes"] > 50 * 2**20
    assert f"{rate['mean']:,.1f} samples/s" in benchmark.block(result)


def test_energy_per_sample_is_shown_where_it_is_measured(engine, monkeypatch):
    small = "--engine serial --model convnet --warmup-steps 1 --repeats 2 --steps 1 --input mock"
    flags = parse(small.split())

    class Measures:
        def __init__(self, engine):
            self.about = dict(cpu_packages=2, gpus=0, not_measured=[])

        def total(self, engine):
            return Energy(48.0, 16.0, complete=False)

        def close(self):
            pass

    for meter, joules in ((benchmark.Meter, None), (Measures, 0.5)):
        monkeypatch.setenv("HVDTRAIN_POWERCAP", "/nowhere")
        monkeypatch.setattr(benchmark, "Meter", meter)
        trainer = benchmark.Trainer(flags, engine, ConvNet(), open_endless(flags, engine, 10, (1, 28, 28)))
        result = benchmark.summarize(flags, engine, benchmark.measure(trainer), None, 0)
        assert result["energy"]["per_sample_joules"] == joules
        said = "energy           at least 0.5 J per sample (measured: 2 CPU packages)"
        assert (said in benchmark.block(result)) == bool(joules)
