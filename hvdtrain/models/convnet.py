"""Models for MNIST and Fashion-MNIST, used in mnist.py and in the benchmarks."""

import math

import torch
from torch import Tensor, nn


class ConvNet(nn.Sequential):
    """Two blocks of convolution, batch norm, pooling and ReLU, then one linear layer: 29,034 parameters.

    Input float32 [b, 1, 28, 28] in [0, 1], output logits [b, 10]; 5.7 million floating-point operations forward, per sample.
    Without `norm`, training on N ranks is equivalent to training on one rank with the global batch. With it, each rank
    normalizes with the statistics of its own samples.
    """

    def __init__(self, norm: bool = True) -> None:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            normalize = [nn.BatchNorm2d(outputs)] if norm else []
            # ReLU before MaxPool2d gives the same result, but processes four times as many values: 8 % of a step.
            return [nn.Conv2d(inputs, outputs, 5, padding=2), *normalize, nn.MaxPool2d(2), nn.ReLU()]

        super().__init__(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(7 * 7 * 32, 10))


class CosineNet(nn.Sequential):
    """A fixed cosine transform, two trained convolutions with batch norm, one linear layer: 41,207 parameters, 525 fixed.

    Input float32 [b, 1, 28, 28] in [0, 1], output logits [b, 10]; 1.8 million floating-point operations forward, per
    sample. Designed to reach 99 % on MNIST in the shortest time (docs/evidence/accuracy.md describes the search). The first
    layer computes the lowest frequencies of the discrete cosine transform of 5 x 5 pixels, with both signs, at every second
    pixel. A fixed first layer with both signs is known from the whitening layer of arXiv:2404.00498; here it does not depend
    on the data.
    """

    def __init__(self) -> None:
        transform = nn.Conv2d(1, 21, 5, stride=2, padding=2, bias=False)  # [b, 21, 14, 14]
        with torch.no_grad():
            transform.weight.copy_(cosines(21, 5))
        super().__init__(
            # Not trained: it has no backward pass, and the next layer needs no gradient of its input.
            transform.requires_grad_(False), nn.ReLU(),
            nn.Conv2d(21, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),  # [b, 32, 7, 7]
            nn.Conv2d(32, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),  # [b, 64, 5, 5]
            nn.Flatten(), nn.Linear(5 * 5 * 64, 10),
        )  # fmt: skip


def cosines(count: int, side: int) -> Tensor:
    """Return float32 [count, 1, side, side]: the mean, then each wave of the 2-D discrete cosine transform (DCT-II) and its
    negative, from low frequencies to high.

    The amplitude grows with the frequency as (1 + u + v) / 2.
    """
    # In Python, so that the result is bitwise the same on all processors.
    waves = [[math.cos(math.pi * (at + 0.5) * u / side) for at in range(side)] for u in range(side)]
    unit = [[value / math.hypot(*wave) for value in wave] for wave in waves]
    filters: list[list[list[float]]] = []
    for total, u, v in sorted((u + v, u, v) for u in range(side) for v in range(side)):
        for sign in (1, -1) if total else (1,):  # pixels are not negative, so neither is their mean
            # Images have less energy at high frequencies: the amplitude grows with u + v.
            scale = sign * (1 + total) / 2
            filters.append([[scale * down * across for across in unit[v]] for down in unit[u]])
    return torch.tensor(filters[:count]).unsqueeze(1)


MODELS = {"convnet": ConvNet, "convnet-nonorm": lambda: ConvNet(norm=False), "cosinenet": CosineNet}
