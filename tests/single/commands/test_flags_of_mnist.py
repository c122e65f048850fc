"""What each flag of hvdtrain.mnist does: which type, how many samples, which rate, which file. Most are of every script."""

import math

import pytest
import torch
import torch.nn.functional as F

from hvdtrain import mnist
from hvdtrain.data import idx
from hvdtrain.data.published import PUBLISHED
from hvdtrain.data.sharding import epoch_order
from hvdtrain.models.convnet import MODELS
from hvdtrain.training import checkpoint
from hvdtrain.training.resume import Checkpoints
from tests.single.data import fake_mnist
from tests.single.trained import Trained, trained

PLAIN = "--dataset digits --threads 1 --model convnet-nonorm"


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Trained:
    """Nearly every flag with a value that no recipe has: 2 epochs of 3 steps of 2 micro-batches of 8."""
    flags = (
        "--dataset digits --model convnet-nonorm --epochs 2 --train-samples 48 --batch-size 8 --accumulate 2 --amp bf16"
    )
    flags += " --lr 0.25 --lr-scaling linear --lr-schedule cosine --optimizer sgd --momentum 0.25 --weight-decay 0.125"
    flags += " --label-smoothing 0.5 --seed 7 --log-steps 2 --threads 3 --checkpoint-steps 2 --keep 1"
    with pytest.MonkeyPatch.context() as patch:
        save, steps = Checkpoints.save, []

        def saved(self, state, *parts, **options):
            steps.append(state.step)
            save(self, state, *parts, **options)
            self._writer.flush()  # otherwise a newer one may take the place of one that waits

        patch.setattr(Checkpoints, "save", saved)
        seen = trained(mnist, flags, tmp_path_factory.mktemp("many") / "out")
    assert seen.code == 0
    seen.saved = steps  # type: ignore[attr-defined]
    return seen


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Trained:
    """The classic recipe, given weights, a warm-up of an epoch, and fp16: an epoch of 4 steps of 16."""
    root = tmp_path_factory.mktemp("few")
    torch.manual_seed(123)
    torch.save(MODELS["convnet"]().state_dict(), root / "w.pt")
    flags = (
        "--dataset digits --recipe classic --epochs 1 --train-samples 64 --batch-size 16 --lr 0.0625 --warmup-epochs 1"
    )
    flags += f" --amp fp16 --optimizer adamw --weights {root}/w.pt --threads 1 --log-steps 1"
    seen = trained(mnist, flags, root / "out")
    assert seen.code == 0
    return seen


def test_epochs_samples_batches_and_micro_batches(many):
    assert (many.summary["epochs"], many.summary["steps"], many.summary["samples"]) == (2, 6, 96)
    assert [len(images) for images in many.inputs] == [8] * 12
    assert len(many.losses) == 2 * len(many.rates) == 12


def test_rates_follow_rate_scaling_and_schedule(many, few):
    peak = 0.25 * 2  # linear scaling: of a step that is two micro-batches
    assert many.rates == pytest.approx([peak * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)])
    assert few.rates == pytest.approx([0.0625 * step / 4 for step in range(4)])  # constant, after a warm-up from zero


def test_the_optimizer_and_its_settings(many, few):
    group = many.optimizer.param_groups[0]
    assert isinstance(many.optimizer, torch.optim.SGD)
    assert (group["momentum"], group["weight_decay"]) == (0.25, 0.125)
    assert isinstance(few.optimizer, torch.optim.AdamW)


def test_amp_computes_in_its_type_in_training_and_in_evaluation(many, few):
    assert {output.dtype for output in [*many.outputs, *many.tested]} == {torch.bfloat16}
    assert {output.dtype for output in [*few.outputs, *few.tested]} == {torch.float16}
    assert many.run._prepared.scaler.get_scale() == 1.0
    assert few.run._prepared.scaler.get_scale() > 1.0  # without it, small gradients are lost


def test_label_smoothing_is_in_the_loss_that_is_trained_and_not_in_the_recorded_one(many, few):
    data = idx.load("digits", None)
    order = epoch_order(48, 7, 0)[:8]
    logits = many.outputs[0].float()
    expected = F.cross_entropy(logits, data.train_labels[order], label_smoothing=0.5)
    assert many.losses[0] == pytest.approx(expected.item(), rel=1e-2)
    assert many.losses[0] != pytest.approx(F.cross_entropy(logits, data.train_labels[order]).item(), rel=1e-3)
    recorded = [event["loss"] for event in few.events("train")]
    assert few.losses == pytest.approx(recorded, rel=1e-3)


def test_the_seed_is_that_of_the_weights_and_of_the_order(many):
    torch.manual_seed(7)
    weights = MODELS["convnet-nonorm"]().state_dict()
    assert all(torch.equal(many.before[name], value) for name, value in weights.items())
    images = idx.load("digits", None).train_images
    order = epoch_order(48, 7, 0)
    assert torch.equal(torch.cat(many.inputs[:6]), mnist.scaled(images[order]))


def test_weights_are_those_of_the_file(few):
    torch.manual_seed(123)
    weights = MODELS["convnet"]().state_dict()
    assert all(torch.equal(few.before[name], value) for name, value in weights.items())


def test_a_recipe_sets_what_is_not_given(few):
    config = few.events("start")[0]["config"]
    assert (config["model"], config["lr_schedule"], config["label_smoothing"]) == ("convnet", "constant", 0.0)
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in few.model.modules())


def test_threads(many, few):
    assert (many.threads, few.threads) == (3, 1)


def test_records_are_written_at_log_steps_and_epochs_ends(many, few):
    assert [event["step"] for event in many.events("train")] == [1, 2, 3, 4, 6]
    assert [event["step"] for event in few.events("train")] == [1, 2, 3, 4]


def test_checkpoints_at_checkpoint_steps_and_as_many_as_are_kept(many):
    assert many.saved == [2, 3, 4, 6, 6]  # and at the end of each epoch
    left = checkpoint.listed(many.out / "checkpoints")
    assert left[0].name == "step-00000006.safetensors"
    assert len(left) <= 2  # the newest, and the best where that is another


def test_the_output_directory_has_every_file(many):
    names = {path.name for path in many.out.iterdir()}
    assert {"metrics.jsonl", "summary.json", "checkpoints"} <= names


def test_without_an_output_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert trained(mnist, f"{PLAIN} --epochs 1 --train-samples 16 --batch-size 16").code == 0
    assert list(tmp_path.iterdir()) == []


def test_resume_never_begins_anew_and_a_path_starts_from_it(few, tmp_path):
    flags = "--dataset digits --recipe classic --epochs 2 --train-samples 64 --batch-size 16 --threads 1"
    flags += " --optimizer adamw"
    held = few.out / "checkpoints" / "step-00000004.safetensors"
    continued = trained(mnist, f"{flags} --resume {held}", tmp_path / "out")
    after = {name: value for name, value in few.model.state_dict().items() if "running" not in name}
    assert all(torch.equal(continued.before[name], value) for name, value in after.items())
    assert len(continued.rates) == 4  # of its second epoch alone
    assert len(trained(mnist, f"{flags} --epochs 1 --resume never", tmp_path / "out").rates) == 4
    assert (tmp_path / "out" / "checkpoints.1").is_dir()


@pytest.mark.parametrize(("goal", "code"), [("0.05", 0), ("1", 3)])
def test_target_accuracy_ends_training_or_is_missed(goal, code, tmp_path):
    flags = f"{PLAIN} --epochs 2 --train-samples 64 --batch-size 16 --lr 1e-3 --target-accuracy {goal}"
    seen = trained(mnist, flags, tmp_path)
    assert (seen.code, seen.summary["epochs"]) == (code, 1 if code == 0 else 2)


@pytest.mark.parametrize(("choice", "expected"), [("auto", "cuda"), ("cpu", "cpu"), ("cuda", "cuda")])
def test_a_device_that_is_chosen(choice, expected, engine, monkeypatch):
    """On a machine with a GPU, as far as torch says."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("init", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert engine.choose_device(choice).type == expected


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


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_data_set_and_directory(name, tmp_path, monkeypatch):
    monkeypatch.setitem(PUBLISHED, name, fake_mnist.published(name))
    fake_mnist.write(tmp_path, fake_mnist.MNIST if name == "mnist" else fake_mnist.FASHION)
    seen = trained(mnist, f"--dataset {name} --data-dir {tmp_path} --epochs 1 --batch-size 8", tmp_path / "out")
    assert (seen.summary["dataset"], seen.summary["samples"], seen.summary["test_count"]) == (name, 20, 10)
