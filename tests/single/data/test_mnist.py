"""hvdtrain.datasets.mnist_data: MNIST files found, verified, named when wrong; and the digits of the package."""

import gzip
import hashlib
import os
import tracemalloc
import warnings
from pathlib import Path

import pytest
import torch

from hvdtrain.datasets import mnist_data
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.files import cache_directory
from tests.single.data import fake_mnist as fake

IMAGES, LABELS, TEST_IMAGES, TEST_LABELS = fake.NAMES


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The small datasets, an empty cache and working directory, and no mirrors."""
    for name in mnist_data.PUBLISHED:
        monkeypatch.setitem(mnist_data.PUBLISHED, name, fake.published(name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def check(data: mnist_data.Dataset, files: dict[str, bytes] = fake.MNIST) -> None:
    assert data.train_images.shape == (20, 1, 28, 28)
    assert data.test_images.shape == (10, 1, 28, 28)
    assert data.train_images.dtype == data.test_images.dtype == torch.uint8
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64
    assert bytes(data.train_images.flatten().tolist()) == files[IMAGES][16:]
    assert data.train_labels.tolist() == list(files[LABELS][8:])
    assert bytes(data.test_images.flatten().tolist()) == files[TEST_IMAGES][16:]
    assert data.test_labels.tolist() == list(files[TEST_LABELS][8:])


@pytest.mark.parametrize("folder", ["", "MNIST/raw"])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("cached", [True, False])
def test_found_in_both_layouts(
    tmp_path: Path, folder: str, compressed: bool, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cached:
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    directory = fake.write(tmp_path / "d" / folder, compressed=compressed)
    with warnings.catch_warnings(action="error"):  # torch warns of read-only buffers
        for _ in range(2):
            data = mnist_data.load_dataset("mnist", tmp_path / "d")
            check(data)
            assert data.name == "mnist"
            assert data.reason == f"MNIST from {directory} (content verified)"
    assert sorted(path.name.removesuffix(".gz") for path in directory.iterdir()) == sorted(fake.NAMES)  # and no more


def test_files_may_be_mixed_and_names_do_not_say_how_they_are_compressed(tmp_path: Path) -> None:
    fake.write(tmp_path)
    content = (tmp_path / IMAGES).read_bytes()
    (tmp_path / IMAGES).rename(tmp_path / f"{IMAGES}.gz")
    check(mnist_data.load_dataset("mnist", tmp_path))
    (tmp_path / f"{IMAGES}.gz").write_bytes(gzip.compress(content[:1000]) + gzip.compress(content[1000:]))
    check(mnist_data.load_dataset("mnist", tmp_path))
    (tmp_path / f"{IMAGES}.gz").rename(tmp_path / IMAGES)
    check(mnist_data.load_dataset("mnist", tmp_path))


def test_without_a_directory_data_and_the_cache_are_searched() -> None:
    digits = mnist_data.load_dataset("auto", download=False)
    assert digits.name == "digits"
    assert digits.reason.endswith("because MNIST is missing: no MNIST in ./data or the cache, and downloads are off")
    assert mnist_data.load_dataset("digits").reason.endswith("as asked")
    shared = fake.write(cache_directory("mnist"), compressed=True)
    assert mnist_data.load_dataset("auto").reason == f"MNIST from {shared} (content verified)"
    fake.write(Path("data/MNIST/raw"))
    data = mnist_data.load_dataset("auto")
    assert data.reason == "MNIST from data/MNIST/raw (content verified)"
    check(data)


# Refused


def refused(name: str, directory: Path | str | None) -> str:
    with pytest.raises(UserError) as caught:
        mnist_data.load_dataset(name, directory, download=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["auto", "mnist", "digits"])
def test_a_data_directory_that_is_not_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert f"--data-dir: {tmp_path / 'file'} is not a directory" in refused(name, tmp_path / "file")
    assert f"--data-dir: {tmp_path / 'no'} does not exist" in refused(name, tmp_path / "no")
    assert "--data-dir is empty" in refused(name, "")
    assert "does not exist" in refused(name, "a\nb")


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert f"no MNIST in {tmp_path}, and downloads are off" in refused("mnist", tmp_path)
    fake.write(tmp_path)
    (tmp_path / LABELS).unlink()
    (tmp_path / TEST_LABELS).unlink()
    os.mkfifo(tmp_path / TEST_LABELS)  # opening it would hang
    message = refused("mnist", tmp_path)
    assert f"{tmp_path} lacks {LABELS}, {TEST_LABELS} (plain or .gz" in message
    assert "--data-dir" in message
    assert "lacks" in mnist_data.load_dataset("auto", tmp_path, download=False).reason


WRONG = {
    "empty": (IMAGES, b"", f"not MNIST's {IMAGES} but 0 bytes, of 15,696, with sha256 "),
    "page": (IMAGES, b"<!DOCTYPE html>", f"not MNIST's {IMAGES} but 15 bytes, of 15,696, with sha256 "),
    "long": (LABELS, fake.MNIST[LABELS] + b"\0", f"not MNIST's {LABELS} but more bytes, of 28, with sha256 "),
    "test for training": (IMAGES, fake.MNIST[TEST_IMAGES], f"not MNIST's {IMAGES} but MNIST's {TEST_IMAGES})"),
    "fashion": (TEST_IMAGES, fake.FASHION[TEST_IMAGES], f"but Fashion-MNIST's {TEST_IMAGES})"),
    "one bit": (IMAGES, fake.MNIST[IMAGES][:-1] + b"\0", "but 15,696 bytes, of 15,696, with sha256 "),
}
PACKED = gzip.compress(fake.MNIST[IMAGES])
WRONG_GZIP = {
    "cut": (IMAGES, PACKED[:500], "Compressed file ended before the end-of-stream marker was reached"),
    "its checksum": (IMAGES, PACKED[:-8] + bytes(8), "CRC check failed"),
    "more after it": (IMAGES, PACKED + b"tail", "Not a gzipped file"),
    "twice": (IMAGES, PACKED + PACKED, "but more bytes, of 15,696"),
}


@pytest.mark.parametrize(
    ("compressed", "case"),
    [(False, case) for case in WRONG | WRONG_GZIP] + [(True, case) for case in WRONG],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, case: str, compressed: bool) -> None:
    name, content, expected = (WRONG | WRONG_GZIP)[case]
    fake.write(tmp_path, compressed=compressed)
    fake.write(tmp_path, {name: content}, compressed=compressed)
    for dataset in ("mnist", "auto"):  # no digits instead
        message = refused(dataset, tmp_path)
        assert message.startswith(f"{tmp_path / name}{'.gz' * compressed} cannot be used (")
        assert expected in message
        assert message.endswith("): check it, replace it, or remove it")


def test_a_gzip_bomb_is_not_unpacked_and_a_sparse_giant_not_read(tmp_path: Path) -> None:
    fake.write(tmp_path, compressed=True)
    bomb = gzip.compress(fake.MNIST[LABELS] + bytes(2 << 20))
    assert len(bomb) < 4096  # short enough to be read whole
    (tmp_path / f"{LABELS}.gz").write_bytes(bomb)
    tracemalloc.start()
    try:
        assert "but more bytes, of 28" in refused("mnist", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
        fake.write(tmp_path)
        os.truncate(tmp_path / IMAGES, 1 << 40)
        assert "but more bytes, of 15,696" in refused("mnist", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
    finally:
        tracemalloc.stop()


def test_a_cache_where_others_write_is_not_used(tmp_path: Path) -> None:
    fake.write(tmp_path / "d", compressed=True)
    shared = cache_directory("mnist")
    shared.chmod(0o777)
    assert cache_directory("mnist") is None
    check(mnist_data.load_dataset("mnist", tmp_path / "d"))
    assert not list(shared.iterdir())
    shared.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(shared, 12345, 12345)
        assert cache_directory("mnist") is None


# ---- the digits of the package


def test_shapes_ranges_and_the_split() -> None:
    train_images, train_labels, test_images, test_labels = mnist_data.load_digits()
    assert train_images.shape == (1415, 1, 28, 28)
    assert test_images.shape == (382, 1, 28, 28)
    assert train_labels.shape == (1415,)
    assert test_labels.shape == (382,)
    assert train_images.dtype == test_images.dtype == torch.uint8
    assert train_labels.dtype == test_labels.dtype == torch.int64
    assert train_images.min() == 0
    assert train_images.max() == 255
    # As the UCI page counts its 1,797 test samples.
    counts = torch.bincount(torch.cat([train_labels, test_labels])).tolist()
    assert counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    # The split is where a form begins: each begins with 0 to 9, three times.
    assert train_labels[:30].tolist() == test_labels[:30].tolist() == [*range(10)] * 3


def test_the_same_bytes_on_every_machine() -> None:
    train_images, _, test_images, _ = mnist_data.load_digits()
    content = bytes(torch.cat([train_images, test_images]).flatten().tolist())
    assert hashlib.sha256(content).hexdigest() == "2bae2174a30390301b23dbdba141ddc539f0a2acaa6286c45568055700255b12"


@pytest.mark.parametrize("damage", ["missing", "not gzip", "truncated", "other content"])
def test_a_damaged_package_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    content = mnist_data.DIGITS_FILE.read_bytes()
    monkeypatch.setattr(mnist_data, "DIGITS_FILE", tmp_path / "digits.gz")
    if damage != "missing":
        damaged = {"not gzip": b"x", "truncated": content[:-20], "other content": gzip.compress(bytes(116805))}[damage]
        mnist_data.DIGITS_FILE.write_bytes(damaged)
    with pytest.raises(UserError, match="install hvdtrain again"):
        mnist_data.load_digits()


def test_source_and_licence_lie_beside_the_data() -> None:
    text = mnist_data.DIGITS_FILE.with_suffix(".txt").read_text()
    for needed in ("10.24432/C50P49", "Alpaydin", "Kaynak", "CC BY 4.0", mnist_data.DIGITS_SHA256):
        assert needed in text
