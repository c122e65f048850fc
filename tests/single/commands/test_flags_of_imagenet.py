"""What the flags of hvdtrain.imagenet alone do: which images of which size in which format, from where, how many."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from hvdtrain import imagenet
from hvdtrain.data import images, loading, make_shards
from hvdtrain.engines.errors import UserError
from tests import image_set
from tests.single.trained import Trained, trained

pytestmark = image_set.needs_torchvision
SMALL = "--model squeezenet1_1 --threads 1 --workers 0 --epochs 1"
TRAIN, TEST = 12, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return image_set.write(tmp_path_factory.mktemp("folder"), TRAIN, TEST)


@pytest.fixture(scope="module")
def tars(folder, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("shards")
    for split in ("train", "val"):
        make_shards.make(folder / split, target / split, per_shard=6, seed=1)
    return target


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory) -> Trained:
    """8 images in 2 steps of 2 micro-batches of 2."""
    flags = f"--dataset synthetic --classes 5 --train-samples 8 --batch-size 2 --accumulate 2 --image-size 40 {SMALL}"
    flags += " --memory-format contiguous --recipe goyal --lr 0.25 --lr-scaling none --lr-schedule constant"
    flags += (
        " --warmup-epochs 1 --optimizer adam --momentum 0.25 --weight-decay 0.125 --label-smoothing 0.5 --log-steps 1"
    )
    return trained(imagenet, flags, tmp_path_factory.mktemp("synthetic") / "out")


@pytest.fixture(scope="module")
def from_folder(folder, tmp_path_factory) -> Trained:
    flags = f"--data-dir {folder} --batch-size 4 --image-size 33 {SMALL} --log-steps 1"
    return trained(imagenet, flags, tmp_path_factory.mktemp("from_folder") / "out")


def test_synthetic_images_have_the_size_the_number_and_the_classes(synthetic):
    assert synthetic.code == 0
    assert [tuple(images.shape) for images in synthetic.inputs] == [(2, 3, 40, 40)] * 4
    assert synthetic.outputs[0].shape[1] == 5
    assert (synthetic.summary["dataset"], synthetic.summary["samples"]) == ("synthetic", 8)


def test_rates_and_optimizer_are_those_of_the_flags(synthetic):
    assert synthetic.rates == pytest.approx([0.0, 0.125])
    matrices, vectors = synthetic.optimizer.param_groups
    assert isinstance(synthetic.optimizer, torch.optim.Adam)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.125, 0.0)
    assert matrices["betas"][0] == 0.25


def test_the_recipe_decides_what_is_not_given(synthetic, from_folder):
    """goyal's batches are 32, the other's 64; its schedule falls in steps."""
    for seen, schedule, smoothing in ((synthetic, "constant", 0.5), (from_folder, "cosine", 0.1)):
        config = seen.events("start")[0]["config"]
        assert (config["lr_schedule"], config["label_smoothing"]) == (schedule, smoothing)
    parsed = imagenet.parse(["--recipe", "goyal"])
    assert (parsed.batch_size, parsed.lr_schedule, parsed.weight_decay) == (32, "step", 1e-4)


def test_label_smoothing_is_in_the_loss_that_is_trained(synthetic):
    recorded = synthetic.events("train")[0]["loss"]  # without it
    assert abs(sum(synthetic.losses[:2]) / 2 - recorded) > 1e-4


def test_memory_format_is_that_of_the_images(synthetic, from_folder):
    for seen, expected in ((synthetic, torch.contiguous_format), (from_folder, torch.channels_last)):
        assert all(images.is_contiguous(memory_format=expected) for images in seen.inputs)


def test_a_folder_is_read_whole(from_folder):
    assert from_folder.code == 0
    assert (from_folder.summary["dataset"], from_folder.summary["samples"]) == ("folder", TRAIN)
    assert from_folder.summary["test_count"] == TEST
    assert {tuple(images.shape[1:]) for images in from_folder.inputs} == {(3, 33, 33)}
    assert from_folder.outputs[0].shape[1] == len(image_set.CLASSES)


def test_the_model_is_the_one_named(from_folder):
    assert type(from_folder.model).__name__ == "SqueezeNet"


def test_shards_are_those_named(tars, tmp_path):
    flags = f"--dataset shards --train-shards {tars}/train/000000.tar --test-shards {tars}/val/000000.tar --classes 6"
    seen = trained(imagenet, f"{flags} --batch-size 3 --image-size 33 {SMALL}", tmp_path / "out")
    assert (seen.summary["dataset"], seen.summary["samples"], seen.summary["test_count"]) == ("shards", 6, 6)


def test_more_corrupt_images_than_allowed_end_the_run(folder, tmp_path):
    broken = image_set.write(tmp_path / "broken", TRAIN, TEST)
    for path in sorted((broken / "train").rglob("*.jpg"))[:2]:
        path.write_bytes(b"no image")
    flags = f"--data-dir {broken} --batch-size 4 --image-size 33 {SMALL} --max-corrupt"
    assert trained(imagenet, f"{flags} 2", tmp_path / "out").summary["corrupt"] == 2
    with pytest.raises(UserError, match="cannot be read"):
        trained(imagenet, f"{flags} 1")


def test_reduced_decode_reads_fewer_pixels(tmp_path, monkeypatch):
    for split, name in [(split, name) for split in ("train", "val") for name in ("one", "two")]:
        (tmp_path / split / name).mkdir(parents=True)
        Image.new("RGB", (640, 480)).save(tmp_path / split / name / "large.jpg")
    decode, sizes = loading.decode, []

    def noted(*arguments, **options):
        sizes.append(tuple(decode(*arguments, **options).shape[-2:]))
        return decode(*arguments, **options)

    monkeypatch.setattr(loading, "decode", noted)
    flags = f"--data-dir {tmp_path} --batch-size 2 --image-size 33 {SMALL}"
    trained(imagenet, flags)
    assert set(sizes) == {(480, 640)}
    del sizes[:]
    trained(imagenet, f"{flags} --reduced-decode")
    assert max(sizes) < (480, 640)


def test_workers_load_the_images(folder, monkeypatch):
    asked = []

    def loader(samples, workers, *rest, **options):
        asked.append(workers)
        return real(samples, 0, *rest, **options)

    real = loading.loader
    monkeypatch.setattr(loading, "loader", loader)
    monkeypatch.setattr(images, "loader", loader, raising=False)
    monkeypatch.setattr(imagenet, "start_workers_early", lambda: None)
    flags = f"--data-dir {folder} --batch-size 6 --image-size 33 {SMALL.replace('--workers 0', '--workers 3')}"
    trained(imagenet, flags)
    assert set(asked) == {3}


def test_compile_compiles(monkeypatch):
    compiled = []
    monkeypatch.setattr(imagenet, "compiled", lambda model, device: compiled.append(model) or model)
    seen = trained(
        imagenet, f"--dataset synthetic --classes 3 --train-samples 2 --batch-size 2 --image-size 33 {SMALL} --compile"
    )
    assert compiled == [seen.model]
