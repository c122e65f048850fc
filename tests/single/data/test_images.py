"""Image folders and shards in one process: which samples there are, how they are decoded, and what of unreadable ones."""

import functools
import io
import os
import pickle
import re
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hvdtrain import imagenet
from hvdtrain.datasets import decoding, images, make_shards, tar_shards
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs import loading
from hvdtrain.loop import optim
from hvdtrain.models import classifiers as models
from tests import image_set

pytestmark = image_set.needs_torchvision
SIDE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return image_set.write(tmp_path_factory.mktemp("folder"), train=48, test=31)


@pytest.fixture(scope="module")
def tars(folder, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("shards")
    assert make_shards.make_shards(folder / "train", target / "train", per_shard=12, seed=1) == 4
    assert make_shards.make_shards(folder / "val", target / "val", per_shard=11, seed=1) == 3
    return target


@pytest.fixture
def own_tars(tars, tmp_path) -> Path:
    return Path(shutil.copytree(tars, tmp_path / "tars"))


def data_of(flags: str, engine, **options: Any) -> imagenet.ImageData:
    run = SimpleNamespace(device=engine.device, engine=engine, raising_together=engine.raising_together, size=1, rank=0)
    run.describe_data, run.summary = (lambda *_, **__: None), (lambda **_: None)
    run.say, run.to_device = print, lambda *tensors: tensors
    vars(run).update(options)
    return imagenet.open_data(imagenet.parse(flags.split()), run)


@pytest.mark.parametrize(("device", "expected"), [("cuda", 256), ("cpu", imagenet.TEST_BATCH)])
def test_evaluations_on_a_gpu_have_batches_of_the_trainings_size(device, expected, folder, engine):
    """The name of a device is a stand-in for a GPU: nothing is computed."""
    flags = f"--batch-size 256 --workers 0 --data-dir {folder}"
    assert data_of(flags, engine, device=torch.device(device)).test.batch_size == expected


@pytest.mark.parametrize(
    ("flags", "samples", "shuffled"),
    [("", 48, True), ("--train-samples 9", 9, False), ("--train-samples 99", 48, True)],
)
def test_an_epoch_has_as_many_samples_as_are_asked_for(flags, samples, shuffled, folder, engine):
    """The record had the number that was asked for, where there are fewer."""
    said: dict[str, object] = {}
    options = dict(describe_data=lambda *_, **facts: said.update(facts))
    train = data_of(f"--workers 0 --batch-size 4 --data-dir {folder} {flags}", engine, **options).train
    assert said["train_samples"] == samples
    assert (len(train.sampler), train.sampler.num_samples == len(train.dataset)) == (samples, shuffled)


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_an_input_worker_of_a_rank_with_a_gpu_does_not_start_cuda(kind, folder, tars, engine, monkeypatch):
    """What is sent to the workers names no device: CUDA would take 0.5 GB of GPU memory in each."""

    def start() -> None:
        raise AssertionError("CUDA started in a DataLoader worker")

    where = folder if kind == "folder" else tars
    flags = f"--dataset {kind} --data-dir {where} --workers 2 --image-size {SIDE}"
    data = data_of(flags, engine, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "_lazy_init", start)
    for loader in (data.train, data.test):
        image, label = pickle.loads(pickle.dumps(loader.dataset))[5]
        assert (image.shape, 0 <= label < 6) == ((3, SIDE, SIDE), True)


def jpeg(mode: str = "RGB", kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((40, 30), 100).convert(mode).save(file, kind, **options)
    return file.getvalue()


IMAGES = {
    "colour": jpeg(), "grey": jpeg("L"), "progressive": jpeg(progressive=True),
    "no pixel left out": jpeg(subsampling=0), "four colours": jpeg("CMYK"), "alpha": jpeg("RGBA", "PNG"),
    "palette": jpeg("P", "PNG"), "BMP": jpeg("RGB", "BMP"),
}  # fmt: skip
OF_PILLOW = {"four colours", "alpha", "palette", "BMP"}


@pytest.mark.parametrize("name", IMAGES)
def test_every_kind_of_image_becomes_rgb_with_the_pixels_of_pillow(name, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "fast_decoder", lambda: None)
        expected = decoding.decode(IMAGES[name])
    if name not in OF_PILLOW:
        monkeypatch.setattr(Image, "open", lambda file, **_: pytest.fail("Pillow was asked"))
    image = decoding.decode(IMAGES[name])
    assert (image.dtype, image.shape) == (torch.uint8, (3, 30, 40))
    assert torch.equal(image, expected)


def test_a_larger_image_is_decoded_at_a_fraction_of_its_size(monkeypatch):
    """In place of 144 megapixels, 36: the crop is scaled to 224 pixels anyway."""
    whole = decoding.decode(IMAGES["colour"])
    for limit, size in ((1200, (3, 30, 40)), (1199, (3, 15, 20)), (299, (3, 8, 10)), (79, (3, 4, 5))):
        monkeypatch.setattr(decoding, "LARGEST_IMAGE", limit)
        image = decoding.decode(IMAGES["colour"])
        assert image.shape == size
        assert abs(image.float().mean() - whole.float().mean()) < 8
    for limit, content in ((19, IMAGES["colour"]), (1199, jpeg(kind="PNG"))):
        monkeypatch.setattr(decoding, "LARGEST_IMAGE", limit)
        with pytest.raises(ValueError, match=r"0 megapixels in (JPEG|PNG): at most 0: make it smaller"):
            decoding.decode(content)


def test_an_image_that_would_fill_the_memory_is_refused(monkeypatch):
    """Pillow's limit holds, whoever decodes: a file of some bytes may say that it has 65,500 x 65,500 pixels."""
    content = bytearray(jpeg())
    frame = content.index(b"\xff\xc0")  # then two bytes of length and one of precision, height and width
    content[frame + 5 : frame + 9] = struct.pack(">HH", 65_500, 65_500)
    monkeypatch.setattr(decoding.fast_decoder(), "decode_jpeg", lambda content: pytest.fail("memory was asked for"))
    with pytest.raises(Image.DecompressionBombError):
        decoding.decode(bytes(content))


@functools.cache
def photograph(height: int = 901, width: int = 1203) -> bytes:
    """Return a JPEG image with about a photograph's spectrum: the amplitude falls with the frequency; colours vary less."""
    generator = torch.Generator().manual_seed(1)
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)).clamp_min(1 / width)

    def noise(deviation: float) -> torch.Tensor:
        white = torch.fft.rfft2(torch.randn(height, width, generator=generator))
        pixels = torch.fft.irfft2(white / frequency, s=(height, width))
        return deviation * pixels / pixels.std()

    light = 120 + noise(55)
    pixels = torch.stack([light + noise(12) for _ in range(3)]).clamp(0, 255).byte()
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=90)
    return file.getvalue()


@pytest.mark.parametrize("decoder", ["simplejpeg", "Pillow"])
def test_an_image_is_decoded_at_a_fraction_of_its_size_rounded_up(decoder, monkeypatch):
    if decoder == "Pillow":
        monkeypatch.setattr(decoding, "fast_decoder", lambda: None)
    assert decoding.jpeg_size(photograph()) == (901, 1203)
    shapes = [tuple(decoding.decode(photograph(), scale).shape) for scale in (2, 4, 8)]
    assert shapes == [(3, 451, 602), (3, 226, 301), (3, 113, 151)]


@pytest.mark.parametrize("train", [True, False])
def test_a_reduced_decode_prepares_the_same_image_within_a_grey_level(train, monkeypatch):
    prepare, photo = decoding.Prepare(32, train=train, reduced=True), photograph(904, 1200)
    decode, part = decoding.decode, decoding.Prepare._part
    scales = []

    def part_of_whole(prepare, image, box):
        return part(prepare, image, tuple(length * scales[-1] for length in box))

    for number in range(40):
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "decode", lambda content, scale=1: scales.append(scale) or decode(content, scale))
            torch.manual_seed(number)
            reduced = prepare(photo).float()
            patch.setattr(decoding, "decode", lambda content, scale=1: decode(content))
            patch.setattr(decoding.Prepare, "_part", part_of_whole)
            torch.manual_seed(number)
            whole = prepare(photo).float()
        assert (reduced - whole).abs().mean() < 1
    assert set(scales) == ({2, 4, 8} if train else {8})


def prepared(content: bytes, seed: int, **options: bool) -> torch.Tensor:
    torch.manual_seed(seed)
    return decoding.Prepare(224, train=True, **options)(content)


def test_an_image_too_small_to_be_reduced_keeps_its_pixels():
    for content in (photograph(), jpeg(kind="PNG")):
        for number in range(5):
            assert torch.equal(prepared(content, number), prepared(content, number, reduced=True))


def test_parts_are_cut_and_flipped_as_torchvision_does():
    from torchvision.transforms import v2

    theirs = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])
    whole = decoding.decode(photograph())
    for number in range(5):
        torch.manual_seed(number)
        assert torch.equal(theirs(whole), prepared(photograph(), number)), number


@pytest.mark.parametrize(
    "content", [b"", b"no image", jpeg()[:400], jpeg()[:-30]], ids=["empty", "text", "head", "cut"]
)
def test_what_is_no_image_raises(content):
    with pytest.raises((ValueError, OSError, RuntimeError)):
        decoding.decode(content)


def test_an_image_is_of_a_format_that_folders_have_and_no_program_is_run_for_it(tmp_path, monkeypatch):
    """Pillow goes by the content: PostScript in a file named .jpg is given to `gs`."""
    ran = tmp_path / "ran"
    (tmp_path / "gs").write_text(f"#!/bin/sh\necho $* >> {ran}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\nshowpage\n%%EOF\n"
    others = [jpeg(kind=kind) for kind in ("JPEG2000", "GIF", "PCX", "ICO")]
    for content in (postscript, *others):
        with pytest.raises(ValueError, match="not an image of a known format: JPEG, PNG"):
            decoding.Prepare(SIDE, train=True, reduced=True)(content)
    assert not ran.exists()
    for kind in ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP"):
        assert decoding.decode(jpeg(kind=kind)).shape == (3, 30, 40)


def test_a_folder_is_listed_as_by_torchvision(folder, tmp_path):
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    root = Path(shutil.copytree(folder / "train", tmp_path / "train"))
    below = root / "red" / "Below" / "more"
    below.mkdir(parents=True)
    for path in (below / "b.PNG", below / "a.txt", root / "red" / "Below.jpg", root / "red" / "none"):
        path.write_bytes(b"")
    (root / "blue" / "linked").symlink_to(below)
    (root / "blue" / "twice").symlink_to(root / "red")
    (root / "white").symlink_to(root / "red")
    (root / "blue" / "lost").symlink_to(tmp_path / "nowhere")
    classes, listing = images.list_folder(root)
    got = [(str(root / listing.name(i)), int(label)) for i, label in enumerate(listing.labels)]
    assert got == make_dataset(str(root), {name: i for i, name in enumerate(classes)}, IMG_EXTENSIONS)
    assert {str(root / "blue" / "linked" / "b.PNG"), str(root / "white" / "Below" / "more" / "b.PNG")} < dict(
        got
    ).keys()


def test_links_to_a_directory_above_are_refused(folder, tmp_path):
    """Two such links were followed for 2**40 directories."""
    root = Path(shutil.copytree(folder / "train", tmp_path / "train"))
    for number in range(3):
        (root / "red" / f"again{number}").symlink_to(root if number else root / "red")
    with pytest.raises(UserError, match=r"red/again\d(/red)? leads to a directory above it: remove the link"):
        images.list_folder(root)


def test_broken_files_of_a_folder_are_named_and_are_of_no_class(folder, engine, tmp_path, capsys):
    root = Path(shutil.copytree(folder, tmp_path / "copy"))
    victims = sorted((root / "val" / "red").iterdir())[:4]
    victims[0].write_bytes(b"")
    victims[1].write_bytes(victims[1].read_bytes()[:-200])
    _, test, _ = images.open_folders(engine, root, SIDE)
    victims[2].unlink()
    victims[3].unlink()
    os.mkfifo(victims[3])
    found = [test[index] for index in range(len(test))]
    assert [label for _, label in found].count(images.UNREADABLE) == 4
    assert {image.shape for image, _ in found} == {(3, SIDE, SIDE)}
    told = dict(line.removeprefix("warning: skipped: ").split(": ", 1) for line in capsys.readouterr().err.splitlines())
    assert set(told) == {str(path) for path in victims}
    assert told[str(victims[2])] == "No such file or directory"
    assert told[str(victims[3])] == "a pipe or a device, not a file"


def test_unreadable_samples_of_an_epoch_are_counted_up_to_the_limit(engine):
    run, said = SimpleNamespace(engine=engine, summary=lambda **fields: said.append(fields)), []
    unreadable = imagenet.Unreadable(run, 0.1, 30, lost=1)
    for _ in range(2):  # as many in each epoch
        unreadable.count(torch.tensor([-100, 1, -100]))
        unreadable.settle()
        unreadable.settle(ended=True)
    assert said == [{"corrupt": 3}, {"corrupt": 3}]
    unreadable.count(torch.tensor([-100] * 3))
    with pytest.raises(
        UserError, match=r"^4 samples cannot be read: --max-corrupt allows 3: fix the data, or raise it$"
    ):
        unreadable.settle()


def test_an_unreadable_sample_has_no_part_in_loss_and_accuracy():
    """The others keep their weight."""
    logits, labels = torch.randn(4, 6, requires_grad=True), torch.tensor([1, -100, 3, 2])
    losses = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
    assert losses[1] == 0
    (losses.sum() / 4).backward()
    alone = logits.detach().clone().requires_grad_()
    (torch.nn.functional.cross_entropy(alone[[0, 2, 3]], labels[[0, 2, 3]], label_smoothing=0.1) * 3 / 4).backward()
    assert torch.allclose(logits.grad, alone.grad)


def test_patterns(tars, monkeypatch):
    monkeypatch.chdir(tars)
    two = [str(tars / "train" / f"00000{number}.tar") for number in (1, 2)]
    assert tar_shards.find_shards("train", "train/00000[12].tar", None) == two
    assert tar_shards.find_shards("train", "train/000001.tar", None) == two[:1]
    assert len(tar_shards.find_shards("val", None, tars)) == 3
    for pattern in ("train/{000001..000002}.tar", "nothing*.tar", "http://host/a.tar"):
        with pytest.raises(UserError, match=r"--train-shards: no file .*: give a path or a glob"):
            tar_shards.find_shards("train", pattern, None)


def test_synthetic_batches_are_the_first_of_the_same_images(engine):
    data = data_of(f"--dataset synthetic --classes 5 --train-samples 20 --batch-size 8 --image-size {SIDE}", engine)
    batches = [data.batch(SimpleNamespace(indices=range(count))) for count in (8, 4)]
    assert [len(images) for images, _ in batches] == [8, 4]
    assert batches[0][0].data_ptr() == batches[1][0].data_ptr()
    assert int(batches[0][1].max()) < 5
    assert (data.train, data.test, [len(x) for x, _ in data.test_batches(slice(0, 2))]) == (20, 2, [2])


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchvision", None)
    monkeypatch.setattr("sys.argv", ["imagenet", "--engine", "serial", "--workers", "0", "--data-dir", "."])
    with pytest.raises(UserError, match=r"torchvision.*: pip install"):
        imagenet.main()


def test_shards_are_made_once_and_from_the_same_classes(folder, tars, tmp_path, monkeypatch):
    for arguments, complaint in (
        ([tars, tmp_path / "new"], "train has no directory for each class: --dataset shards reads its tar files"),
        ([folder, tars], "exists: name a new directory"),
        ([folder / "nowhere", tmp_path / "new"], "is not a directory"),
    ):
        monkeypatch.setattr("sys.argv", ["make_shards", *map(str, arguments)])
        with pytest.raises(UserError, match=complaint):
            make_shards.main()


def test_a_classifier_of_each_family_of_torchvision_can_be_built():
    from torchvision import models as theirs

    families: dict[str, str] = {}
    for name in theirs.list_models(module=theirs):
        families.setdefault(re.match(r"[a-z]+(_v\d)?", name)[0], name)
    assert len(families) > 15
    for name in (families | {"regnet": "regnet_y_400mf"}).values():
        with torch.device("cpu" if name.startswith("regnet") else "meta"):
            model = models.build_model(name, classes=7, side=224)
        last = [module for module in model.modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)][-1]
        assert last.weight.shape[0] == 7, name


@pytest.mark.parametrize(("name", "side"), [("googlenet", 64), ("vit_b_32", 64), ("resnet18", SIDE)])
def test_models_give_one_output_in_training(name, side):
    model = models.build_model(name, classes=7, side=side)
    assert model(torch.zeros(2, 3, side, side)).shape == (2, 7)


def test_biases_and_norms_do_not_decay():
    model = models.build_model("resnet18", 5, SIDE)
    built = optim.build_optimizer("sgd", optim.decay_groups(model), 0.1, 0.9, 5e-5)
    decay = {id(p): group["weight_decay"] for group in built.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        norm_or_bias = "bn" in name or "downsample.1" in name or name.endswith("bias")
        assert decay[id(parameter)] == (0.0 if norm_or_bias else 5e-5), name
    assert len(decay) == len(list(model.parameters()))


def test_default_workers():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [loading.default_workers(cores, gpu) for cores in (1, 2, 8)] == [1, 1, 7]
    assert [loading.default_workers(cores, cpu) for cores in (1, 2, 8)] == [1, 1, 2]


@pytest.mark.parametrize("kind", ["grey16.png", "grey16.tif", "int32.tif", "float.tif"])
def test_grey_images_of_more_than_8_bits_keep_their_levels(kind, tmp_path):
    """Pillow's conversion to RGB makes them white, or black."""
    levels = np.arange(256).reshape(16, 16)
    dtype = {"int32.tif": np.int32, "float.tif": np.float32}.get(kind, np.uint16)
    Image.fromarray((levels / 255 if dtype is np.float32 else levels * 257).astype(dtype)).save(tmp_path / kind)
    decoded = decoding.decode((tmp_path / kind).read_bytes())
    assert decoded.shape == (3, 16, 16)
    assert (decoded - torch.from_numpy(levels)).abs().max() <= 1
    Image.fromarray(np.full((2, 2), -1.0, dtype=np.float32)).save(tmp_path / "below.tif")
    with pytest.raises(ValueError, match="grey values from -1 to -1: at most 0 to 1: scale them"):
        decoding.decode((tmp_path / "below.tif").read_bytes())
