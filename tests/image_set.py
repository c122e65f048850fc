"""A small image set for tests: discs of six colours on noise, as JPEG files in class folders."""

import importlib.util
from pathlib import Path

import pytest
import torch
from PIL import Image

# No import: each process that collects tests would pay for it.
needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="needs torchvision: pip install 'hvdtrain[vision]'"
)
COLOURS = {
    "blue": (0.0, 0.0, 1.0), "cyan": (0.0, 1.0, 1.0), "green": (0.0, 1.0, 0.0),
    "magenta": (1.0, 0.0, 1.0), "red": (1.0, 0.0, 0.0), "yellow": (1.0, 1.0, 0.0),
}  # fmt: skip
CLASSES = tuple(COLOURS)
SIDE = 40  # pixels
TRAIN, TEST = 240, 101


def draw(label: int, generator: torch.Generator) -> torch.Tensor:
    """uint8 [3, SIDE, SIDE]"""
    image = torch.rand(3, SIDE, SIDE, generator=generator) * 0.5
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    top, left = torch.randint(12, SIDE - 12, (2,), generator=generator).tolist()
    disc = (y - top) ** 2 + (x - left) ** 2 < 150
    image[:, disc] = torch.tensor(COLOURS[CLASSES[label]])[:, None]
    return (image * 255).to(torch.uint8)


def write(root: Path, train: int = TRAIN, test: int = TEST) -> Path:
    """Write so many images into root/train and root/val; the same files each time."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", train), ("val", test)):
        for number in range(count):
            label = number % len(CLASSES)
            directory = root / split / CLASSES[label]
            directory.mkdir(parents=True, exist_ok=True)
            pixels = draw(label, generator).permute(1, 2, 0).contiguous().numpy()
            Image.fromarray(pixels).save(directory / f"{number:03d}.jpg", quality=90)
    return root
