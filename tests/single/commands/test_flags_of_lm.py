"""What the flags of hvdtrain.lm alone do: sizes of the model, rates, text, samples."""

import math

import pytest
import torch

from hvdtrain import lm
from hvdtrain.models.gpt import GPT
from tests.single.trained import Trained, trained

BOOK = "the quick brown fox jumps over the lazy dog\n" * 20
SIZES = "--layers 2 --heads 4 --width 24 --context 8"
SMALL = "--layers 1 --heads 2 --width 16 --context 8 --threads 1 --batch-size 4"


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(BOOK)
    return path


@pytest.fixture(scope="module")
def many(book, tmp_path_factory) -> Trained:
    """4 steps of 2 micro-batches of 3 windows."""
    flags = f"--text {book} {SIZES} --tied --bias --dropout 0.5 --steps 4 --batch-size 3 --accumulate 2 --lr 0.25"
    flags += " --min-lr 0.125 --warmup-steps 2 --beta2 0.75 --weight-decay 0.5 --clip-norm 0.0625 --sample-tokens 7"
    flags += " --tokens bytes --log-steps 1 --threads 1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return trained(lm, flags, tmp_path_factory.mktemp("many") / "out")


def net(seen: Trained) -> GPT:
    assert isinstance(seen.model, GPT)
    return seen.model


def test_the_model_has_the_sizes_that_were_asked_for(many):
    assert many.code == 0
    sizes = net(many).sizes
    assert (sizes.layers, sizes.heads, sizes.width, sizes.context) == (2, 4, 24, 8)
    assert (sizes.tied, sizes.bias) == (True, True)
    names = set(many.before)
    assert any(name.endswith("bias") for name in names)


def test_dropout_zeroes_in_training_alone(many):
    model, tokens = net(many), torch.arange(8).unsqueeze(0)
    assert model.dropout == model.blocks[0].dropout == 0.5
    assert not torch.equal(model.train()(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


def test_windows_steps_and_tokens(many):
    assert [tuple(inputs.shape) for inputs in many.inputs] == [(3, 8)] * 8
    assert many.summary["steps"] == len(many.rates) == 4
    assert many.outputs[0].shape[-1] == 256  # bytes


def test_rates_rise_and_fall_between_the_two_that_were_given(many):
    falling = [0.125 + 0.125 * (1 + math.cos(math.pi * done)) / 2 for done in (0.0, 0.5)]
    assert many.rates == pytest.approx([0.25 / 3, 0.5 / 3, *falling])


def test_the_optimizers_settings(many):
    matrices, vectors = many.optimizer.param_groups
    assert (matrices["betas"], matrices["weight_decay"], vectors["weight_decay"]) == ((0.9, 0.75), 0.5, 0.0)


def test_gradients_are_clipped(many):
    assert max(many.norms) == pytest.approx(0.0625, rel=1e-3)


def test_samples_have_the_length_that_was_asked_for(many):
    (event,) = many.events("sample")
    assert 0 < len(event["text"].encode("utf-8", "replace")) <= 7 * 3  # a byte that is no character takes three


def test_a_recipe_sets_what_is_not_given():
    parsed = [lm.parse(["--recipe", name]) for name in ("shakespeare-cpu", "gpt2")]
    assert [(flags.layers, flags.tokens, flags.steps) for flags in parsed] == [
        (4, "characters", 2000),
        (12, "pairs", 600_000),
    ]


def test_epochs_are_passes_through_the_text(book, tmp_path):
    seen = trained(lm, f"--text {book} {SMALL} --epochs 1 --sample-tokens 0 --no-tied --no-bias", tmp_path / "out")
    windows = (len(BOOK) * 9 // 10 - 1) // 8
    assert (seen.summary["epochs"], seen.summary["samples"]) == (1, windows)
    assert (net(seen).sizes.tied, net(seen).sizes.bias) == (False, False)
    assert seen.outputs[0].shape[-1] == 28  # characters are the default
    assert seen.events("sample") == []


def test_temperature_decides_how_likely_the_unlikely_is(book, tmp_path, capsys):
    out = tmp_path / "out"
    assert trained(lm, f"--text {book} {SMALL} --steps 1 --sample-tokens 0", out).code == 0
    capsys.readouterr()
    said = {}
    for temperature in ("0.0001", "1000"):
        flags = f"{SMALL} --sample fox --sample-tokens 60 --temperature {temperature} --output-dir {out}"
        assert trained(lm, flags).code == 0
        said[temperature] = capsys.readouterr().out
    assert len(set(said["1000"])) > len(set(said["0.0001"])) + 5


@pytest.mark.parametrize("kept", [False, True])
def test_byte_pairs_have_the_size_that_was_asked_for_or_are_read(kept, book, tmp_path, monkeypatch, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = f"--text {book} {SMALL} --steps 1 --sample-tokens 0 --tokens pairs"
    if kept:
        learned = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
        alphabet = sorted(set(BOOK))
        learned.train_from_iterator([BOOK], tokenizers.trainers.BpeTrainer(vocab_size=40, initial_alphabet=alphabet))
        learned.save(str(tmp_path / "own.json"))
        seen = trained(lm, f"{flags} --tokenizer {tmp_path}/own.json")
        assert seen.outputs[0].shape[-1] == learned.get_vocab_size()
    else:
        assert trained(lm, f"{flags} --vocabulary-size 270", tmp_path / "out").outputs[0].shape[-1] == 270
        assert trained(lm, f"{SMALL} --sample über --output-dir {tmp_path / 'out'}").code == 0
        assert "über" in capsys.readouterr().out  # a character that was not in the text


def test_compile_compiles(book, monkeypatch):
    compiled = []
    monkeypatch.setattr(lm, "compiled", lambda model, device: compiled.append(model) or model)
    seen = trained(lm, f"--text {book} {SMALL} --steps 1 --sample-tokens 0 --compile")
    assert compiled == [seen.model]


def test_the_embedding_of_the_large_recipe_is_padded_and_such_a_run_is_evaluated_and_sampled(book, tmp_path, capsys):
    flags = f"--recipe gpt2 --text {book} {SMALL} --tokens characters --sample-tokens 0 --steps 2"
    whole = trained(lm, flags, tmp_path / "whole")
    assert net(whole).tokens.weight.shape[0] == 64 > net(whole).vocabulary
    assert trained(lm, f"--evaluate {tmp_path / 'whole'}").code == 0
    capsys.readouterr()
    assert trained(lm, f"{SMALL} --sample fox --sample-tokens 60 --output-dir {tmp_path / 'whole'}").code == 0
    assert set(capsys.readouterr().out.strip()) <= set(BOOK)
