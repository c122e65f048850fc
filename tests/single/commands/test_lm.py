"""hvdtrain.lm in one process: its flags, its rates, its samples, and what it refuses."""

import json
import math

import pytest

from hvdtrain import benchmark, imagenet, lm, mnist
from hvdtrain.engines.errors import UserError
from tests.single.examples import one_line

TINY = "--engine serial --threads 1 --layers 1 --heads 2 --width 16 --context 8 --batch-size 4 --steps 5 --no-progress"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    return path


def train(monkeypatch, flags: str) -> int:
    monkeypatch.setattr("sys.argv", ["hvdtrain/lm.py", *TINY.split(), *flags.split()])
    return lm.main()


def test_the_recipe_keeps_its_windows_on_any_number_of_ranks():
    for ranks in (1, 2, 3, 4, 6, 12):
        flags = lm.parse([])
        flags.batch_size = flags.accumulate = None
        lm.share_batch(flags, ranks)
        assert (flags.batch_size * ranks, flags.accumulate) == (12, 1)
    flags = lm.parse(["--recipe", "gpt2"])
    assert (flags.batch_size, flags.accumulate) == (12, 40)
    assert lm.parse(["--accumulate", "3"]).batch_size == 4
    given = lm.parse(["--batch-size", "7"])
    assert (given.batch_size, given.accumulate) == (7, 1)


@pytest.mark.parametrize(
    ("parse", "words", "expected"),
    [
        (lm.parse, "--recipe gpt2", (32, 15)),  # the same 480 sequences
        (lm.parse, "--recipe gpt2 --accumulate 60", (8, 60)),
        (lm.parse, "--recipe gpt2 --layers 36", (12, 40)),  # it may be too large
        (lm.parse, "", (12, 1)),
        (imagenet.parse, "", (256, 1)),
        (imagenet.parse, "--batch-size 64", (64, 1)),
        (imagenet.parse, "--model vit_l_16", (64, 1)),
        (benchmark.parse, "--model gpt2", (32, 1)),
        (benchmark.parse, "--model gpt2 --batch-size 4", (4, 1)),
        (benchmark.parse, "--model resnet50", (256, 1)),
    ],
)
def test_batches_are_larger_on_gpus_with_the_memory_for_them(parse, words, expected):
    flags = parse(words.split())
    before = flags.batch_size
    flags.settle(40 * 2**30)
    assert flags.batch_size == before
    flags.settle(80 * 10**9)
    assert (flags.batch_size, getattr(flags, "accumulate", 1)) == expected


@pytest.mark.parametrize(
    ("parse", "words", "expected"),
    [
        (lm.parse, "", "auto"),
        (imagenet.parse, "--model resnet18", "auto"),
        (imagenet.parse, "--model mobilenet_v3_small", "off"),
        (mnist.parse, "", "off"),
    ],
)
def test_what_is_faster_in_bf16_on_a_cpu_computes_in_it(parse, words, expected):
    flags = parse(words.split())
    assert (flags.amp, flags.amp_of_cpus) == (None, expected)


def test_ranks_that_cannot_share_the_windows_are_told_so():
    flags = lm.parse([])
    flags.batch_size = flags.accumulate = None
    with pytest.raises(UserError, match=r"12 sequences, which 5 ranks .* use -np 1, 2, 3, 4, 6, 12$"):
        lm.share_batch(flags, 5)


def test_a_run_records_what_it_promises_and_is_sampled_from(book, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert train(monkeypatch, f"--text {book} --output-dir {out}") == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["dataset"] == "text"
    assert summary["tokens"] == 5 * 4 * 8
    assert summary["tokens_per_second"] == pytest.approx(summary["samples_per_second"] * 8)
    assert summary["validation_count"] == 88 - 1  # each token but the first is a target
    assert summary["validation_perplexity"] == pytest.approx(math.exp(summary["validation_loss"]))
    bits = summary["validation_loss"] / math.log(2) * 87 / 88
    assert summary["validation_bits_per_character"] == pytest.approx(bits)
    assert summary["flops_per_second"] > 0 < summary["matrix_product_flops_per_second"]
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert events[[event["event"] for event in events].index("train")]["loss"] == pytest.approx(
        math.log(28) + 0.15, abs=0.2
    )
    (sampled,) = [event["text"] for event in events if event["event"] == "sample"]
    assert len(sampled) == 200
    assert {"throughput", "evaluate", "checkpoint"} <= {event["event"] for event in events}

    capsys.readouterr()
    said = []
    (file,) = (out / "checkpoints").iterdir()
    for place in (f"--output-dir {out}", f"--resume {out}", f"--resume {file}"):
        assert train(monkeypatch, f"{place} --sample fox --sample-tokens 30") == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]
    assert said[0].startswith("fox")
    assert len(said[0]) == 3 + 30 + 1

    with pytest.raises(UserError, match="the vocabulary has no '!', 'F'"):
        train(monkeypatch, f"--output-dir {out} --sample Fox!")
    other = tmp_path / "other.txt"
    other.write_text("0123456789\n" * 40)
    with pytest.raises(
        UserError, match=r"a different vocabulary .28 characters in the checkpoint, 11 characters here"
    ) as raised:
        train(monkeypatch, f"--text {other} --resume {file}")
    one_line(raised.value)


def test_a_sample_is_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="--sample is one process: start it without a launcher"):
        train(monkeypatch, f"--sample x --output-dir {tmp_path}")


def test_what_would_move_the_cursor_is_not_printed():
    assert lm.printable_text("a\x1b[2Jb\rc\td\ne") == "a?[2Jb?c\td\ne"


def test_the_manual_names_every_recipe():
    assert all(f"--recipe {name}" in str(lm.__doc__) for name in lm.RECIPES)


def test_a_prompt_of_any_bytes_is_continued_and_no_checkpoint_is_renamed(book, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert train(monkeypatch, f"--text {book} --tokens bytes --output-dir {out}") == 0
    damaged = out / "checkpoints" / "step-99999999.safetensors"
    damaged.write_bytes(b"of another version, perhaps")
    capsys.readouterr()
    assert train(monkeypatch, f"--output-dir {out} --sample caf\udce9 --sample-tokens 3") == 0  # Latin-1, typed
    shown = capsys.readouterr()
    assert shown.out.startswith("caf\ufffd")
    assert "trying the previous one" in shown.err
    assert damaged.exists()
