"""What the flags of hvdtrain.mnist, imagenet and lm do: in EFFECTS, what a run with them has computed or written.

The flags of every script are those of the runs of hvdtrain.mnist.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from hvdtrain import imagenet, lm, mnist
from hvdtrain.checkpoint import checkpoint
from hvdtrain.checkpoint import writer as writers
from hvdtrain.datasets import decoding, make_shards
from hvdtrain.datasets import mnist_data as mnist_files
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs import loading
from hvdtrain.inputs.sharding import epoch_order
from hvdtrain.models.convnet import MODELS
from tests import image_set
from tests.single.data import fake_mnist
from tests.single.trained import Trained, trained

PLAIN = "--dataset digits --threads 1 --model convnet-nonorm"
SMALL_IMAGES = "--model squeezenet1_1 --threads 1 --workers 0 --epochs 1"
SMALL_LM = "--layers 1 --heads 2 --width 16 --context 8 --threads 1 --batch-size 4"
BOOK = "the quick brown fox jumps over the lazy dog\n" * 20
TRAIN, TEST = 12, 6  # images of the folder
RUNS = {
    # Nearly every flag with a value that no recipe has: 2 epochs of 3 steps of 2 micro-batches of 8.
    "many": (mnist, "--dataset digits --model convnet-nonorm --epochs 2 --train-samples 48 --batch-size 8 --accumulate 2"
        " --amp bf16 --lr 0.25 --lr-scaling linear --lr-schedule cosine --optimizer sgd --momentum 0.25 --weight-decay 0.125"
        " --label-smoothing 0.5 --seed 7 --log-steps 2 --threads 3 --checkpoint-steps 2 --keep 1"),
    # The classic recipe, given weights, a warm-up of an epoch, and fp16: an epoch of 4 steps of 16.
    "few": (mnist, "--dataset digits --recipe classic --epochs 1 --train-samples 64 --batch-size 16 --lr 0.0625"
        " --warmup-epochs 1 --amp fp16 --optimizer adamw --weights {root}/w.pt --threads 1 --log-steps 1"),
    # 8 images in 2 steps of 2 micro-batches of 2.
    "synthetic": (imagenet, "--dataset synthetic --classes 5 --train-samples 8 --batch-size 2 --accumulate 2 --image-size 40"
        f" {SMALL_IMAGES} --memory-format contiguous --recipe goyal --lr 0.25 --lr-scaling none --lr-schedule constant"
        " --warmup-epochs 1 --optimizer adam --momentum 0.25 --weight-decay 0.125 --label-smoothing 0.5 --log-steps 1"),
    "folder": (imagenet, f"--data-dir {{root}}/images --batch-size 4 --image-size 33 {SMALL_IMAGES} --log-steps 1"),
    "shards": (imagenet, "--dataset shards --train-shards {root}/shards/train/000000.tar"
        f" --test-shards {{root}}/shards/val/000000.tar --classes 6 --batch-size 3 --image-size 33 {SMALL_IMAGES}"),
    # 4 steps of 2 micro-batches of 3 windows.
    "text": (lm, "--text {root}/book.txt --layers 2 --heads 4 --width 24 --context 8 --tied --bias --dropout 0.5 --steps 4"
        " --batch-size 3 --accumulate 2 --lr 0.25 --min-lr 0.125 --warmup-steps 2 --beta2 0.75 --weight-decay 0.5"
        " --clip-norm 0.0625 --sample-tokens 7 --tokens bytes --log-steps 1 --threads 1"),
    "passes": (lm, f"--text {{root}}/book.txt {SMALL_LM} --epochs 1 --sample-tokens 0 --no-tied --no-bias"),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Callable[[str], Trained]:
    """Return what one of RUNS did. It runs when it is asked for, once."""
    root = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(name: str) -> Trained:
        script, flags = RUNS[name]
        (root / "book.txt").write_text(BOOK)
        torch.manual_seed(123)
        torch.save(MODELS["convnet"]().state_dict(), root / "w.pt")
        if script is imagenet and not (root / "images").exists():
            folder = image_set.write(root / "images", TRAIN, TEST)
            for split in ("train", "val"):
                make_shards.make_shards(folder / split, root / "shards" / split, per_shard=6, seed=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
            put = writers.Writer.put  # otherwise a newer one may take the place of one that waits
            patch.setattr(writers.Writer, "put", lambda self, *what: (put(self, *what), self.flush()))
            seen = trained(script, flags.format(root=root), root / name)
        assert seen.code == 0
        return seen

    return run


@pytest.fixture
def book(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text(BOOK)
    return tmp_path / "book.txt"


def summary(*names: str) -> Callable[[Trained], Any]:
    return lambda seen: [seen.summary[name] for name in names]


def config(*names: str) -> Callable[[Trained], Any]:
    return lambda seen: [seen.events("start")[0]["config"][name] for name in names]


def group(number: int, *names: str) -> Callable[[Trained], Any]:
    return lambda seen: [type(seen.optimizer).__name__, *(seen.optimizer.param_groups[number][name] for name in names)]


def rates(seen: Trained) -> list[float]:
    return seen.rates


def sizes(seen: Trained) -> list[tuple[int, ...]]:
    return [tuple(inputs.shape) for inputs in seen.inputs]


def begins_with_the_file(seen: Trained) -> bool:
    torch.manual_seed(123)
    return all(torch.equal(seen.before[name], value) for name, value in MODELS["convnet"]().state_dict().items())


def in_format(layout: torch.memory_format) -> Callable[[Trained], bool]:
    return lambda seen: all(inputs.is_contiguous(memory_format=layout) for inputs in seen.inputs)


FALLING = [0.125 + 0.125 * (1 + math.cos(math.pi * done)) / 2 for done in (0.0, 0.5)]
# Script -> flags -> the run that has them, what is looked at, and what that has to be.
EFFECTS: dict[str, list[tuple[str, str, Callable[[Trained], Any], Any]]] = {
    "every script": [
        ("--batch-size --accumulate",
         "many", lambda seen: (sizes(seen), len(seen.losses), len(seen.rates)), ([(8, 1, 28, 28)] * 12, 12, 6)),
        ("--amp", "many", lambda seen: {part.dtype for part in [*seen.outputs, *seen.tested]}, {torch.bfloat16}),
        ("--amp", "few", lambda seen: {part.dtype for part in [*seen.outputs, *seen.tested]}, {torch.float16}),
        ("--weights", "few", begins_with_the_file, True),
        ("--threads", "many", lambda seen: seen.threads, 3),
        ("--log-steps", "many", lambda seen: [line["step"] for line in seen.events("train")], [1, 2, 3, 4, 6]),
        ("--checkpoint-steps",  # and at the end of each epoch
         "many", lambda seen: [line["step"] for line in seen.events("checkpoint")], [2, 3, 4, 6, 6]),
        ("--keep",  # the newest, and the best where that is another
         "many", lambda seen: len(checkpoint.checkpoints_in(seen.out / "checkpoints")) <= 2, True),
        ("--output-dir", "many", lambda seen: (seen.out / "checkpoints").is_dir(), True),
    ],
    "mnist": [
        ("--epochs --train-samples", "many", summary("epochs", "steps", "samples"), [2, 6, 96]),
        ("--lr --lr-scaling --lr-schedule",  # linear scaling: of a step that is two micro-batches
         "many", rates, pytest.approx([0.5 * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)])),
        ("--warmup-epochs", "few", rates, pytest.approx([0.0625 * step / 4 for step in range(4)])),
        ("--optimizer --momentum --weight-decay", "many", group(0, "momentum", "weight_decay"), ["SGD", 0.25, 0.125]),
        ("--optimizer", "few", group(0), ["AdamW"]),
        ("--recipe", "few", config("model", "lr_schedule", "label_smoothing"), ["convnet", "constant", 0.0]),
    ],
    "imagenet": [
        ("--lr --lr-scaling --lr-schedule --warmup-epochs", "synthetic", rates, pytest.approx([0.0, 0.125])),
        ("--optimizer --weight-decay", "synthetic", group(0, "weight_decay"), ["Adam", 0.125]),
        ("--weight-decay", "synthetic", group(1, "weight_decay"), ["Adam", 0.0]),  # of vectors
        ("--momentum", "synthetic", lambda seen: seen.optimizer.param_groups[0]["betas"][0], 0.25),
        ("--label-smoothing",  # the recorded loss is without
         "synthetic", lambda seen: abs(sum(seen.losses[:2]) / 2 - seen.events("train")[0]["loss"]) > 1e-4, True),
        ("--dataset --train-samples --epochs", "synthetic", summary("dataset", "samples"), ["synthetic", 8]),
        ("--image-size", "synthetic", sizes, [(2, 3, 40, 40)] * 4),
        ("--classes", "synthetic", lambda seen: seen.outputs[0].shape[1], 5),
        ("--memory-format", "synthetic", in_format(torch.contiguous_format), True),
        ("--memory-format", "folder", in_format(torch.channels_last), True),
        ("--recipe", "folder", config("lr_schedule", "label_smoothing"), ["cosine", 0.1]),
        ("--data-dir", "folder", summary("dataset", "samples", "test_count"), ["folder", TRAIN, TEST]),
        ("--data-dir", "folder", lambda seen: seen.outputs[0].shape[1], len(image_set.CLASSES)),
        ("--model", "folder", lambda seen: type(seen.model).__name__, "SqueezeNet"),
        ("--train-shards --test-shards", "shards", summary("dataset", "samples", "test_count"), ["shards", 6, 6]),
    ],
    "lm": [
        ("--layers --heads --width --context --tied --bias",
         "text", lambda seen: seen.model.sizes, lm.Sizes(2, 4, 24, 8, bias=True, tied=True)),
        ("--bias", "text", lambda seen: any(name.endswith("bias") for name in seen.before), True),
        ("--tied --bias", "passes", lambda seen: (seen.model.sizes.tied, seen.model.sizes.bias), (False, False)),
        ("--context", "text", sizes, [(3, 8)] * 8),
        ("--steps", "text", summary("steps"), [4]),
        ("--tokens", "text", lambda seen: seen.model.vocabulary, 256),
        ("--tokens", "passes", lambda seen: seen.model.vocabulary, 28),  # characters are the default
        ("--lr --min-lr --warmup-steps", "text", rates, pytest.approx([0.25 / 3, 0.5 / 3, *FALLING])),
        ("--beta2 --weight-decay", "text", group(0, "betas", "weight_decay"), ["AdamW", (0.9, 0.75), 0.5]),
        ("--weight-decay", "text", group(1, "weight_decay"), ["AdamW", 0.0]),  # of vectors
        ("--clip-norm", "text", lambda seen: max(seen.norms), pytest.approx(0.0625, rel=1e-3)),
        ("--sample-tokens",  # a byte that is no character takes three
         "text", lambda seen: 0 < len(seen.events("sample")[0]["text"].encode("utf-8", "replace")) <= 7 * 3, True),
        ("--sample-tokens", "passes", lambda seen: seen.events("sample"), []),
        ("--epochs --text", "passes", summary("epochs", "samples"), [1, (len(BOOK) * 9 // 10 - 1) // 8]),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "look", "expected"),
    [
        pytest.param(*row, id=f"{script}: {flags}", marks=image_set.needs_torchvision if script == "imagenet" else ())
        for script, rows in EFFECTS.items()
        for flags, *row in rows
    ],
)
def test_effect(name, look, expected, run):
    assert look(run(name)) == expected


# ---- every script


def test_the_loss_scaler_is_that_of_fp16(run):
    assert run("many").run.shared().prepared.scaler.get_scale() == 1.0
    assert run("few").run.shared().prepared.scaler.get_scale() > 1.0  # without it, small gradients are lost


def test_the_seed_is_that_of_the_weights_and_of_the_order(run):
    torch.manual_seed(7)
    weights = MODELS["convnet-nonorm"]().state_dict()
    assert all(torch.equal(run("many").before[name], value) for name, value in weights.items())
    order = epoch_order(48, 7, 0)
    assert torch.equal(
        torch.cat(run("many").inputs[:6]),
        mnist.scaled_digits(mnist_files.load_dataset("digits", None).train_images[order]),
    )


def test_without_an_output_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert trained(mnist, f"{PLAIN} --epochs 1 --train-samples 16 --batch-size 16").code == 0
    assert list(tmp_path.iterdir()) == []


def test_resume_never_begins_anew_and_a_path_starts_from_it(run, tmp_path):
    few = run("few")
    flags = "--dataset digits --recipe classic --epochs 2 --train-samples 64 --batch-size 16 --threads 1"
    flags += " --optimizer adamw"
    held = few.out / "checkpoints" / "step-00000004.safetensors"
    continued = trained(mnist, f"{flags} --resume {held}", tmp_path / "out")
    after = {name: value for name, value in few.model.state_dict().items() if "running" not in name}
    assert all(torch.equal(continued.before[name], value) for name, value in after.items())
    assert len(continued.rates) == 4  # of its second epoch alone
    assert len(trained(mnist, f"{flags} --epochs 1 --resume never", tmp_path / "out").rates) == 4
    assert (tmp_path / "out" / "checkpoints.1").is_dir()


@pytest.mark.parametrize("asked", [False, True])
def test_deterministic_reaches_the_engine_and_is_said_to_do_nothing_on_a_cpu(asked, tmp_path, capsys):
    """What it does on GPUs: tests/single/engines/test_gpu_numbers.py."""
    flags = f"{PLAIN} --epochs 1 --train-samples 16 --batch-size 16 --device cpu{' --deterministic' * asked}"
    assert trained(mnist, flags, tmp_path).code == 0
    assert ("--deterministic changes nothing on CPUs" in capsys.readouterr().out) == asked
    assert not torch.are_deterministic_algorithms_enabled()


def test_progress_is_shown_unless_it_is_not_wanted(capsys, monkeypatch):
    monkeypatch.setattr("hvdtrain.output.progress.PLAIN_LINE_SECONDS", 0.0)
    flags = f"{PLAIN} --epochs 1 --train-samples 64 --batch-size 8 --log-steps 1"
    monkeypatch.setattr("sys.argv", ["mnist.py", "--engine", "serial", *flags.split()])
    assert mnist.main() == 0
    shown = capsys.readouterr().out
    assert trained(mnist, flags).code == 0  # with --no-progress
    assert "step 4/8" in shown
    assert "step 4/8" not in capsys.readouterr().out


def test_verbose_names_each_automatic_setting(capsys):
    for flags, counted in (("", True), ("-v", False)):
        assert trained(mnist, f"{PLAIN} --epochs 1 --train-samples 16 --batch-size 16 {flags}").code == 0
        assert ("(-v: which)" in capsys.readouterr().out) == counted


def test_other_recipes_set_what_is_not_given():
    goyal, gpt2 = imagenet.parse(["--recipe", "goyal"]), lm.parse(["--recipe", "gpt2"])
    assert (goyal.batch_size, goyal.lr_schedule, goyal.weight_decay) == (32, "step", 1e-4)
    assert (gpt2.layers, gpt2.tokens, gpt2.steps) == (12, "pairs", 600_000)


# ---- hvdtrain.mnist


def test_label_smoothing_is_in_the_loss_that_is_trained_and_not_in_the_recorded_one(run):
    many, few = run("many"), run("few")
    data = mnist_files.load_dataset("digits", None)
    order = epoch_order(48, 7, 0)[:8]
    logits = many.outputs[0].float()
    expected = F.cross_entropy(logits, data.train_labels[order], label_smoothing=0.5)
    assert many.losses[0] == pytest.approx(expected.item(), rel=1e-2)
    assert many.losses[0] != pytest.approx(F.cross_entropy(logits, data.train_labels[order]).item(), rel=1e-3)
    recorded = [event["loss"] for event in few.events("train")]
    assert few.losses == pytest.approx(recorded, rel=1e-3)


@pytest.mark.parametrize(("goal", "code"), [("0.05", 0), ("1", 3)])
def test_target_accuracy_ends_training_or_is_missed(goal, code, tmp_path, capsys):
    flags = f"{PLAIN} --epochs 2 --train-samples 64 --batch-size 16 --lr 1e-3 --target-accuracy {goal}"
    seen = trained(mnist, flags, tmp_path)
    assert (seen.code, seen.summary["epochs"]) == (code, 1 if code == 0 else 2)
    assert ("target accuracy 100.00% not reached" in capsys.readouterr().out) == (code == 3)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_data_set_and_directory(name, tmp_path, monkeypatch):
    monkeypatch.setitem(mnist_files.PUBLISHED, name, fake_mnist.published(name))
    fake_mnist.write(tmp_path, fake_mnist.MNIST if name == "mnist" else fake_mnist.FASHION)
    seen = trained(mnist, f"--dataset {name} --data-dir {tmp_path} --epochs 1 --batch-size 8", tmp_path / "out")
    assert (seen.summary["dataset"], seen.summary["samples"], seen.summary["test_count"]) == (name, 20, 10)


# ---- hvdtrain.imagenet


@image_set.needs_torchvision
def test_more_corrupt_images_than_allowed_end_the_run(tmp_path):
    broken = image_set.write(tmp_path / "broken", TRAIN, TEST)
    for path in sorted((broken / "train").rglob("*.jpg"))[:2]:
        path.write_bytes(b"no image")
    flags = f"--data-dir {broken} --batch-size 4 --image-size 33 {SMALL_IMAGES} --max-corrupt"
    assert trained(imagenet, f"{flags} 2", tmp_path / "out").summary["corrupt"] == 2
    with pytest.raises(UserError, match="cannot be read"):
        trained(imagenet, f"{flags} 1")


@image_set.needs_torchvision
def test_reduced_decode_reads_fewer_pixels(tmp_path, monkeypatch):
    for split, name in [(split, name) for split in ("train", "val") for name in ("one", "two")]:
        (tmp_path / split / name).mkdir(parents=True)
        Image.new("RGB", (640, 480)).save(tmp_path / split / name / "large.jpg")
    decode, sizes = decoding.decode, []

    def noted(*arguments, **options):
        sizes.append(tuple(decode(*arguments, **options).shape[-2:]))
        return decode(*arguments, **options)

    monkeypatch.setattr(decoding, "decode", noted)
    flags = f"--data-dir {tmp_path} --batch-size 2 --image-size 33 {SMALL_IMAGES}"
    trained(imagenet, flags)
    assert set(sizes) == {(480, 640)}
    del sizes[:]
    trained(imagenet, f"{flags} --reduced-decode")
    assert max(sizes) < (480, 640)


@image_set.needs_torchvision
def test_workers_load_the_images(tmp_path, monkeypatch):
    asked = []

    def loader(samples, workers, *rest, **options):
        asked.append(workers)
        return real(samples, 0, *rest, **options)

    real = loading.loader
    monkeypatch.setattr(loading, "loader", loader)
    monkeypatch.setattr(imagenet, "start_workers_early", lambda: None)
    folder = image_set.write(tmp_path, TRAIN, TEST)
    trained(imagenet, f"--data-dir {folder} --batch-size 6 --image-size 33 {SMALL_IMAGES} --workers 3")
    assert set(asked) == {3}


# ---- hvdtrain.lm


def test_dropout_zeroes_in_training_alone(run):
    model, tokens = run("text").model, torch.arange(8).unsqueeze(0)
    assert model.dropout == model.blocks[0].dropout == 0.5
    assert not torch.equal(model.train()(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


def test_temperature_decides_how_likely_the_unlikely_is(book, tmp_path, capsys):
    out = tmp_path / "out"
    assert trained(lm, f"--text {book} {SMALL_LM} --steps 1 --sample-tokens 0", out).code == 0
    capsys.readouterr()
    said = {}
    for temperature in ("0.0001", "1000"):
        flags = f"{SMALL_LM} --sample fox --sample-tokens 60 --temperature {temperature} --output-dir {out}"
        assert trained(lm, flags).code == 0
        said[temperature] = capsys.readouterr().out
    assert len(set(said["1000"])) > len(set(said["0.0001"])) + 5


@pytest.mark.parametrize("kept", [False, True])
def test_byte_pairs_have_the_size_that_was_asked_for_or_are_read(kept, book, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    flags = f"--text {book} {SMALL_LM} --steps 1 --sample-tokens 0 --tokens pairs"
    if kept:
        learned = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
        alphabet = sorted(set(BOOK))
        learned.train_from_iterator([BOOK], tokenizers.trainers.BpeTrainer(vocab_size=40, initial_alphabet=alphabet))
        learned.save(str(tmp_path / "own.json"))
        seen = trained(lm, f"{flags} --tokenizer {tmp_path}/own.json")
        assert seen.model.vocabulary == learned.get_vocab_size()
    else:
        assert trained(lm, f"{flags} --vocabulary-size 270", tmp_path / "out").model.vocabulary == 270
        assert trained(lm, f"{SMALL_LM} --sample über --output-dir {tmp_path / 'out'}").code == 0
        assert "über" in capsys.readouterr().out  # a character that was not in the text


def test_the_embedding_of_the_large_recipe_is_padded_and_such_a_run_is_evaluated_and_sampled(book, tmp_path, capsys):
    flags = f"--recipe gpt2 --text {book} {SMALL_LM} --tokens characters --sample-tokens 0 --steps 2"
    whole = trained(lm, flags, tmp_path / "whole")
    assert whole.model.tokens.weight.shape[0] == 64 > whole.model.vocabulary
    assert trained(lm, f"--evaluate {tmp_path / 'whole'}").code == 0
    capsys.readouterr()
    assert trained(lm, f"{SMALL_LM} --sample fox --sample-tokens 60 --output-dir {tmp_path / 'whole'}").code == 0
    assert set(capsys.readouterr().out.strip()) <= set(BOOK)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        pytest.param(imagenet, f"--dataset synthetic --train-samples 2 --batch-size 2 --image-size 33 {SMALL_IMAGES}",
                     marks=image_set.needs_torchvision),
        (lm, f"--text {{book}} {SMALL_LM} --steps 1 --sample-tokens 0"),
    ],
)  # fmt: skip
def test_compile_compiles(script, flags, book, monkeypatch):
    compiled = []
    monkeypatch.setattr(script, "compiled", lambda model, device: compiled.append(model) or model)
    assert compiled == [trained(script, f"{flags.format(book=book)} --compile").model]
