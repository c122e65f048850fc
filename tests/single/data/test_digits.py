"""The digits of hvdtrain.datasets.mnist_data: the digits in the package are the UCI set's, and the same bytes everywhere."""

import gzip
import hashlib
from pathlib import Path

import pytest
import torch

from hvdtrain.datasets import mnist_data
from hvdtrain.engines.errors import UserError


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


def test_enlarged_as_torch_interpolates() -> None:
    small = torch.randint(0, 17, (50, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    large = mnist_data.enlarge(small)
    assert large.shape == (50, 28, 28)
    expected = torch.nn.functional.interpolate(small.unsqueeze(1).double(), size=24, mode="bilinear").squeeze(1)
    assert (large[:, 2:-2, 2:-2] - expected * 255 / 16).abs().max() <= 0.5 + 1e-9
    margin = large.clone()
    margin[:, 2:-2, 2:-2] = 0
    assert margin.count_nonzero() == 0


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
