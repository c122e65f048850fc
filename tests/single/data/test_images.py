"""Image folders, shards and synthetic images in one process: who gets which sample, and what of corrupt ones."""

import functools
import io
import os
import pickle
import random
import re
import shutil
import struct
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from hvdtrain import imagenet
from hvdtrain.datasets import decoding, images, make_shards, shards
from hvdtrain.datasets.corrupt import CorruptSample, CorruptSamples
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs import loading
from hvdtrain.loop import optimizers
from hvdtrain.loop.evaluation import Evaluation, Means
from hvdtrain.loop.state import Initial, TrainState
from hvdtrain.models import classifiers as models
from hvdtrain.output.run_output import RunOutput
from tests import image_set

pytestmark = image_set.needs_torchvision
SIDE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return image_set.write(tmp_path_factory.mktemp("folder"), train=48, test=31)


@pytest.fixture(scope="module")
def tars(folder, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("shards")
    assert make_shards.make(folder / "train", target / "train", per_shard=12, seed=1) == 4
    assert make_shards.make(folder / "val", target / "val", per_shard=11, seed=1) == 3
    return target


@pytest.fixture
def own_tars(tars, tmp_path) -> Path:
    return Path(shutil.copytree(tars, tmp_path / "tars"))


@pytest.mark.parametrize(("device", "expected"), [("cuda", 256), ("cpu", imagenet.TEST_BATCH)])
def test_evaluations_on_a_gpu_have_batches_of_the_trainings_size(device, expected, folder, engine, monkeypatch):
    """The name of a device is a stand-in for a GPU: nothing is computed."""
    run = SimpleNamespace(device=torch.device(device), engine=engine, raising_together=engine.raising_together)

    def opened(*_: object, test_batch: int, **how: object) -> None:
        raise InterruptedError(test_batch)

    monkeypatch.setattr(imagenet, "open_folder", opened)
    with pytest.raises(InterruptedError, match=f"^{expected}$"):
        imagenet.open_source(imagenet.parse(f"--batch-size 256 --workers 0 --data-dir {folder}".split()), run)


def test_batches_of_a_folder_follow_the_order_of_the_interface(folder, engine):
    source = images.open_folder(engine, folder, side=SIDE, seed=3, workers=0)
    plan = loading.Plan(48, 48, 3, epochs=2, rank=1, size=2, batch_size=7)
    got = [batch.labels.tolist() for batch in source.train(plan)]
    labels = torch.tensor([label for label in range(6) for _ in range(8)])  # in order of class
    expected = []
    for epoch in range(2):
        mine = labels[torch.randperm(48, generator=torch.Generator().manual_seed(3 + epoch))[1::2]]
        expected += [some.tolist() for some in mine.split(7)]
    assert got == expected


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_an_evaluation_has_batches_of_the_size_that_it_is_given(kind, folder, tars, engine):
    options = dict(side=SIDE, seed=1, workers=0, test_batch=9)
    if kind == "folder":
        source = images.open_folder(engine, folder, **options)
    else:
        source = shards.open_shards(engine, tars, (None, None), classes=None, **options)
    sizes = [loaded.samples for loaded in source.test()]
    assert sizes == [9] * (sum(sizes) // 9) + [sum(sizes) % 9]


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_images_do_not_depend_on_workers_and_change_with_the_epoch(kind, folder, tars, engine, worker_server):
    def batches(workers: int, size: int = 1) -> list[torch.Tensor]:
        if kind == "folder":
            source = images.open_folder(engine, folder, side=SIDE, seed=1, workers=workers)
        else:
            options = dict(side=SIDE, seed=1, workers=workers, classes=None)
            source = shards.open_shards(engine, tars, (None, None), **options)
        plan = loading.Plan(48, 48, 1, epochs=2, rank=0, size=size, batch_size=8)
        return [batch.images for batch in source.train(plan)]

    def pictures(some: list[torch.Tensor]) -> Counter[bytes]:
        return Counter(image.numpy().tobytes() for batch in some for image in batch)

    state = torch.get_rng_state()
    alone = batches(0)
    assert torch.equal(torch.get_rng_state(), state)  # dropout's draws are not ours
    assert all(torch.equal(a, b) for a, b in zip(alone, batches(0), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(alone, batches(2), strict=True))
    assert not pictures(alone[:6]) & pictures(alone[6:])  # the second epoch cuts other parts


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_an_input_worker_of_a_rank_with_a_gpu_does_not_start_cuda(kind, folder, tars, engine, monkeypatch):
    """What is sent to the workers names no device: CUDA would take 0.5 GB of GPU memory in each."""
    engine.device = torch.device("cuda", 0)
    sent = []

    def noted(dataset, workers, device, jobs, **options):
        sent.append(pickle.dumps((dataset, next(iter(jobs)))))
        return []

    def start() -> None:
        raise AssertionError("CUDA started in a DataLoader worker")

    if kind == "folder":
        source = images.open_folder(engine, folder, side=SIDE, seed=1, workers=2)
    else:
        source = shards.open_shards(engine, tars, (None, None), side=SIDE, seed=1, workers=2, classes=None)
    monkeypatch.setattr(images, "loader", noted)
    monkeypatch.setattr(shards, "loader", noted)
    flags = SimpleNamespace(seed=1, batch_size=8, accumulate=1)
    source.train(images.Images(engine, source, 1, 8, None).plan(engine, flags, Initial(1, 8, 1), TrainState(), 1))
    source.test()
    monkeypatch.setattr(torch.cuda, "_lazy_init", start)
    for bundle in sent:
        dataset, job = pickle.loads(bundle)
        assert dataset[job].samples > 0
    assert len(sent) == 2


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
    prepare, photo = decoding.Prepare(32, 1, train=train, reduced=True), photograph(904, 1200)
    decode, random_part = decoding.decode, decoding.random_part
    scales = []

    def part_of_whole(image, box, side, draw):
        return random_part(image, tuple(length * scales[-1] for length in box), side, draw)

    for number in range(40):
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "decode", lambda content, scale=1: scales.append(scale) or decode(content, scale))
            reduced = prepare(photo, 0, f"{number}.jpg").float()
            patch.setattr(decoding, "decode", lambda content, scale=1: decode(content))
            patch.setattr(decoding, "random_part", part_of_whole)
            whole = prepare(photo, 0, f"{number}.jpg").float()
        assert (reduced - whole).abs().mean() < 1
    assert set(scales) == ({2, 4, 8} if train else {8})


def test_an_image_too_small_to_be_reduced_keeps_its_pixels():
    for content in (photograph(), jpeg(kind="PNG")):
        for number in range(5):
            whole, reduced = (
                decoding.Prepare(224, 1, train=True, reduced=reduced)(content, 0, f"{number}")
                for reduced in (False, True)
            )
            assert torch.equal(whole, reduced)


def test_random_parts_are_distributed_as_torchvisions():
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(1)
    draw, picture = random.Random(1), torch.zeros(3, 375, 500)
    ours = torch.tensor([decoding.random_box(375, 500, draw) for _ in range(4000)]).double()
    scale, ratio = [0.08, 1.0], [3 / 4, 4 / 3]
    theirs = torch.tensor([RandomResizedCrop.get_params(picture, scale, ratio) for _ in range(4000)]).double()
    for boxes in (ours, theirs):
        top, left, height, width = boxes.T
        assert (torch.stack([top, left, 375 - top - height, 500 - left - width]) >= 0).all()
        assert (height > 0).all()
    tolerance = 4 * (2 / 4000) ** 0.5  # of a mean of 4,000, in standard deviations
    for column in range(4):
        a, b = ours[:, column], theirs[:, column]
        assert abs(a.mean() - b.mean()) < tolerance * b.std(), column
        assert abs(a.std() / b.std() - 1) < 0.1, column
    areas = [float((boxes[:, 2] * boxes[:, 3]).mean()) / (375 * 500) for boxes in (ours, theirs)]
    assert areas[0] == pytest.approx(areas[1], abs=0.02)


@pytest.mark.parametrize("size", [(1, 1000), (1000, 1), (1, 1), (10, 300)])
def test_of_a_narrow_image_the_middle_is_taken_as_torchvision_has_it(size):
    from torchvision.transforms import RandomResizedCrop

    class Least(random.Random):
        """Draws whatever fits no such image."""

        def uniform(self, low: float, high: float) -> float:
            return 1e9 if high == 1.0 else low

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "uniform_", lambda tensor, low, high: tensor.fill_(1e9 if high == 1.0 else low))
        theirs = RandomResizedCrop.get_params(torch.zeros(3, *size), [0.08, 1.0], [3 / 4, 4 / 3])
    assert decoding.random_box(*size, Least()) == tuple(theirs)


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
            decoding.Prepare(SIDE, train=True, reduced=True)(content, 0, "a.jpg")
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


def test_broken_files_of_a_folder_are_named_and_the_others_stay(folder, engine, tmp_path):
    root = Path(shutil.copytree(folder, tmp_path / "copy"))
    victims = sorted((root / "val" / "red").iterdir())[:4]
    victims[0].write_bytes(b"")
    victims[1].write_bytes(victims[1].read_bytes()[:-200])
    source = images.open_folder(engine, root, side=SIDE, seed=1, workers=0)
    victims[2].unlink()
    victims[3].unlink()
    os.mkfifo(victims[3])
    batches = list(source.test())
    assert sum(batch.samples for batch in batches) == 27
    assert all(len(batch.images) == len(batch.labels) == batch.samples for batch in batches)
    corrupt = {each.name: each.why for batch in batches for each in batch.corrupt}
    assert set(corrupt) == {str(path) for path in victims}
    assert corrupt[str(victims[2])] == "No such file or directory"
    assert corrupt[str(victims[3])] == "a pipe or a device, not a file"


@pytest.fixture
def output():
    lines: list[str] = []
    return SimpleNamespace(lines=lines, say=lines.append, event=lambda name, **fields: None)


def test_losses_count_a_name_once_and_stop_over_the_limit(engine, output):
    losses = CorruptSamples(0.1, 30)
    for _ in range(3):
        losses.note([CorruptSample("a", "cut"), CorruptSample("b", "cut", lost=2)])
        losses.settle(engine, output)
    assert (losses.total(), losses.limit) == (3, 3)
    assert output.lines == ["skipped: a: cut", "skipped: b: cut"]
    losses.note([CorruptSample("c", "empty")])
    with pytest.raises(UserError, match=r"4 samples cannot be read, such as c \(empty\): --max-corrupt allows 3: fix"):
        losses.settle(engine, output)


def test_patterns(tars, monkeypatch):
    monkeypatch.chdir(tars)
    two = [str(tars / "train" / f"00000{number}.tar") for number in (1, 2)]
    assert shards.find("train", "train/00000[12].tar", None) == two
    assert shards.find("train", "train/000001.tar", None) == two[:1]
    assert len(shards.find("val", None, tars)) == 3
    for pattern in ("train/{000001..000002}.tar", "nothing*.tar", "http://host/a.tar"):
        with pytest.raises(UserError, match=r"--train-shards: no file .*: give a path or a glob"):
            shards.find("train", pattern, None)


def test_synthetic_batches_have_the_planned_sizes(engine):
    source = images.open_synthetic(engine, SIDE, 8, classes=5, train_count=20, test_count=11)
    plan = loading.Plan(20, 20, 1, epochs=1, rank=0, size=1, batch_size=8)
    batches = list(source.train(plan))
    assert [batch.samples for batch in batches] == [8, 8, 4]
    assert batches[0].images.data_ptr() == batches[1].images.data_ptr()
    assert sum(batch.samples for batch in source.test()) == 11
    assert int(batches[0].labels.max()) < 5


REFUSALS = {
    "no directory": ("", "--dataset folder needs --data-dir"),
    "not there": ("--data-dir {tmp}/nowhere", "{tmp}/nowhere does not exist: name the directory"),
    "wrong directory": ("--data-dir {folder}/train", "{folder}/train/train does not exist"),
    "class without images": ("--data-dir {empty}", "Found no valid file for the classes white"),
    "other classes": ("--data-dir {other}", "train/ has 6 classes, val/ has 5: 'yellow' is only in train/"),
    "weights of another model": ("--data-dir {folder} --weights {tmp}/w.pt --model shufflenet_v2_x0_5",
        "fc.weight is (1000, 1024) in the file, (6, 1024) in the model: choose the --model, and data with as many"),
    "no such model": ("--dataset synthetic --model resnet51", "--model resnet51: torchvision has no such classifier"),
    "model of another size": ("--dataset synthetic --model vit_b_16 --image-size 33", "--image-size 33"),
    "shards nowhere": ("--dataset shards --data-dir {tmp}/nowhere", "{tmp}/nowhere does not exist"),
    "folder as shards": ("--dataset shards --data-dir {folder}", "has neither train/*.tar nor train-*.tar"),
    "not these classes": ("--dataset shards --data-dir {tars} --classes 7", "--classes 7, but"),
    "negative workers": ("--workers -1", "'-1' is not a whole number of at least 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line(case, folder, tars, tmp_path, monkeypatch):
    empty, other = (Path(shutil.copytree(folder, tmp_path / name)) for name in ("empty", "other"))
    (empty / "train" / "white").mkdir()
    shutil.rmtree(other / "val" / "yellow")
    if "weights" in case:
        torch.save(models.build_model("shufflenet_v2_x0_5", 1000, 224).state_dict(), tmp_path / "w.pt")
    names = dict(tmp=tmp_path, folder=folder, tars=tars, empty=empty, other=other)
    flags, complaint = (text.format(**names) for text in REFUSALS[case])
    monkeypatch.setattr(
        "sys.argv", ["imagenet", "--engine", "serial", "--workers", "0", "--no-progress", *flags.split()]
    )
    with pytest.raises(UserError) as refused:
        imagenet.main()
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchvision", None)
    monkeypatch.setattr("sys.argv", ["imagenet", "--engine", "serial", "--workers", "0", "--data-dir", "."])
    with pytest.raises(UserError, match=r"torchvision.*: pip install"):
        imagenet.main()


def test_shards_are_made_once_and_from_the_same_classes(folder, tars, tmp_path, monkeypatch):
    for arguments, complaint in (
        ([tars, tmp_path / "new"], "train is not a directory|no folder|Found no|has no directory for each class"),
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


def test_evaluation_counts_readable_samples_only(engine):
    """As imagenet evaluates: the first, and the first five."""
    logits = torch.eye(8)[[3, 3, 0]] + torch.arange(8, 0, -1) / 100  # best, then 0, 1, 2, ...
    labels = torch.tensor([3, 2, 7])  # first; among the first five; neither
    batches = [
        loading.Loaded(logits[:2], labels[:2], 2, []),
        loading.Loaded(logits[2:], labels[2:], 1, []),
        loading.Loaded(logits[:1], labels[:1], 0, [CorruptSample("x", "y")]),
    ]
    source = loading.Source("test", "", 8, 9, lambda plan: [], lambda: batches, corrupt=CorruptSamples(1, 9))
    evaluation = Evaluation(engine, source, lambda _: images.evaluated_images(engine, source, 1), lambda: None, Means())
    for outputs, truth in evaluation.mine():
        hits = outputs.topk(5).indices == truth[:, None]
        evaluation.add({"first": hits[:, 0], "five": hits.any(1)}, None)
    assert evaluation.means() == {"first": pytest.approx(1 / 3), "five": pytest.approx(2 / 3), "count": 3}
    source.corrupt.settle(engine, RunOutput(engine, None, progress=False))
    assert source.corrupt.total() == 1


def test_biases_and_norms_do_not_decay():
    model = models.build_model("resnet18", 5, SIDE)
    built = optimizers.build_optimizer("sgd", optimizers.decay_groups(model), 0.1, 0.9, 5e-5)
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
