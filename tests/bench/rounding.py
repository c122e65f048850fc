"""The error of compressed gradients by number of ranks (docs/evidence/compression.md): python -m tests.bench.rounding

Relative error of the mean of gradients with a root mean square of 4.5e-5, the same on all ranks: summed in pairs, and (in
parentheses) around a ring of all ranks. Each addition rounds to the type on the wire.
"""

import sys

import torch
from torch import Tensor

from hvdtrain.engines.base import default_predivision

RANKS = (8, 64, 512)
GRADIENTS = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * 4.5e-5


def mean(wire: torch.dtype, ranks: int, predivide: float, *, ring: bool) -> Tensor:
    own = (GRADIENTS / predivide).to(wire)
    total = own
    if ring:
        for _ in range(ranks - 1):
            total = total + own
    else:
        for _ in range(ranks.bit_length() - 1):
            total = total + total
    return total.float() * (predivide / ranks)


def error(wire: torch.dtype, ranks: int, predivide: float, *, ring: bool) -> str:
    wrong = mean(wire, ranks, predivide, ring=ring) - GRADIENTS
    return f"{100 * float(wrong.norm() / GRADIENTS.norm()):.2g}"


def main() -> int:
    print("| | " + " | ".join(f"{ranks} ranks" for ranks in RANKS) + " |")
    print("|---|" + "---:|" * len(RANKS))
    for name, wire, predivide in (
        ("fp16, divided by the ranks", torch.float16, float),
        ("fp16, by default", torch.float16, lambda ranks: default_predivision("fp16", ranks)),
        ("bf16", torch.bfloat16, lambda ranks: 1.0),
    ):
        cells = [
            "{} % ({})".format(*(error(wire, ranks, predivide(ranks), ring=ring) for ring in (False, True)))
            for ranks in RANKS
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
