"""Latency and bandwidth from measured all-reduces, by non-negative least squares."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdtrain.engines.errors import UserError

FEWEST = 3  # points: with fewer, two unknowns leave no residual to judge the fit by


class Point(NamedTuple):
    """One measured all-reduce. scale: seconds to which an error is relative; the weight of the point is 1/scale."""

    ranks: int
    bytes: float
    seconds: float
    scale: float


class Fit(NamedTuple):
    """seconds = overhead + 2(n-1) latency + 2(n-1)/n bytes/bandwidth, on one host.

    The overhead occurs once per all-reduce, the latency at every step of the ring. Measurements at a single number of ranks
    cannot separate the two: then `latency` is None, and `overhead` is their sum.
    """

    overhead: float
    latency: float | None
    bandwidth: float  # bytes per second; infinite if the size made no difference
    residual: float  # root mean square of (fitted - measured) / measured, weighted
    points: int
    ranks: tuple[int, ...]  # numbers of ranks that were measured


def fit(points: Sequence[Point], what: str) -> Fit:
    """Return the fit to `points`. Raises UserError, which names `what`, if they cannot separate latency from bandwidth."""
    counts = tuple(sorted({point.ranks for point in points}))
    different = len({(point.ranks, point.bytes) for point in points})
    sizes = len({point.bytes for point in points})
    if different < FEWEST or (sizes < 2 and len(counts) < FEWEST):
        said = f"{what}: too few points to fit latency and bandwidth ({different} different ones, {sizes} sizes): "
        raise UserError(said + "add the --output-dir of `hvdtrain.reduce --sweep` under the same launcher on one host")
    columns = [lambda p: 1.0, lambda p: 2 * (p.ranks - 1) / p.ranks * p.bytes, lambda p: 2.0 * (p.ranks - 1)]
    if len(counts) == 1:
        columns = columns[:2]
    weighted = torch.tensor([[c(p) / p.scale for c in columns] for p in points], dtype=torch.float64)
    target = torch.tensor([p.seconds / p.scale for p in points], dtype=torch.float64)
    found = least_squares(weighted, target)
    off = weighted @ found - target
    residual = (off.square().sum() / target.square().sum()).sqrt().item()
    overhead, per_byte, *latency = found.tolist()
    bandwidth = 1 / per_byte if per_byte > 0 else float("inf")
    return Fit(overhead, latency[0] if latency else None, bandwidth, residual, len(points), counts)


def least_squares(matrix: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return x [k] >= 0 that minimizes |matrix [m, k] @ x - target [m]|: the best over all choices of zeros."""
    scale = matrix.norm(dim=0).clamp_min(1e-300)
    best, least = torch.zeros(matrix.shape[1], dtype=matrix.dtype), target.square().sum()
    for count in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), count):
            part = (matrix / scale)[:, chosen]
            solved = torch.linalg.lstsq(part, target.unsqueeze(1)).solution[:, 0]
            off = (part @ solved - target).square().sum()
            if solved.min() >= 0 and off < least:
                least = off
                best = torch.zeros_like(best)
                best[list(chosen)] = solved / scale[list(chosen)]
    return best
