"""The embedded digits: 1,797 scanned digits from the UCI repository, included in the package for use without a network.

Source, citation and licence (CC BY 4.0) are in digits.txt next to this file.
"""

import gzip
import hashlib
import zlib
from pathlib import Path

import torch
from torch import Tensor

from hvdtrain.engines.errors import UserError

FILE = Path(__file__).with_name("digits.gz")
SHA256 = "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2"  # of the content
COUNT, ROW = 1797, 65  # a row has 64 pixels from 0 to 16, then the label
SIDE, MARGIN = 24, 2  # pixels: 8 x 8 is enlarged to 24 x 24, and padded to 28 x 28 like MNIST

# The rows are ordered by form, about 130 rows each. With a random split, the same handwriting would be in both sets: 98 %
# accuracy instead of 95 % for new handwriting. Therefore the last three forms, 382 rows, are the test set.
TRAIN_COUNT = 1415


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images, uint8 [1415, 1, 28, 28], training labels, int64 [1415], and 382 test images and labels.

    Raises UserError if the file in the package is damaged.
    """
    try:
        with gzip.open(FILE) as file:
            content = file.read(COUNT * ROW + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{FILE} cannot be read ({error}): install hvdtrain again") from None
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"{FILE} is not the file that hvdtrain came with: install hvdtrain again")
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(COUNT, ROW)
    images = enlarge(rows[:, :64].view(COUNT, 8, 8)).unsqueeze(1)
    labels = rows[:, 64].long()
    return images[:TRAIN_COUNT], labels[:TRAIN_COUNT], images[TRAIN_COUNT:], labels[TRAIN_COUNT:]


def enlarge(small: Tensor) -> Tensor:
    """Return uint8 [n, 8, 8] images (0 to 16) enlarged to uint8 [n, 28, 28] (0 to 255). Bilinear, align_corners=False.

    The weights are multiples of 1/6, computed as integers. All values stay below 2^24, so float32 is exact, and the result
    is the same on any processor and with any number of threads.
    """
    weights = torch.zeros(SIDE, 8)
    for i in range(SIDE):  # center of pixel i, in sixths of a small pixel: 2i - 2
        whole, sixths = divmod(min(max(2 * i - 2, 0), 42), 6)
        weights[i, whole] = 6 - sixths
        if sixths:
            weights[i, whole + 1] = sixths
    large = (weights @ small.float() @ weights.T).int()  # 0 to 16 * 36
    scaled = ((large * 255 + 288) // 576).to(torch.uint8)  # + 288: rounds to nearest
    return torch.nn.functional.pad(scaled, (MARGIN, MARGIN, MARGIN, MARGIN))
