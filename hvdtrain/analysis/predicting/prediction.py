"""Predicts the time of a step on any number of ranks, as a range, and compares it with measurements.

A range covers what is not known: the spread of the compute time over rounds; the residual of the fit; whether a host's work
on a message overlaps with the network (bandwidth: the lower of the two) or adds to it (1/b = 1/host + 1/network); and, if
only one number of ranks was measured, whether the fixed cost of an all-reduce occurs once or at every step.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.analysis.predicting.fitting import Fit, fit
from hvdtrain.analysis.predicting.formulas import ALGORITHMS, Link, Ranks, exposed
from hvdtrain.analysis.predicting.runs import WIRE_DTYPES, Measured, Step, points, wire_bytes
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.horovod import bucket_bytes

# Backward computes two products, the gradients of inputs and of weights, for each one of forward.
BACKWARD_SHARE = 2 / 3


class Band(NamedTuple):
    """A range: minimum, middle value and maximum."""

    least: float
    middle: float
    most: float


class Model(NamedTuple):
    """The model fitted to the runs of one engine, in seconds and bytes per step and rank."""

    engine: str
    compression: str
    fit: Fit
    wire: Link  # latency of one message in addition to that within a host; bandwidth of the payload
    size: float  # bytes reduced per step
    buckets: int
    batch_size: int
    computing: dict[Ranks, tuple[Band, float]]  # without communication: seconds of a step, and of its backward part


def band(values: Sequence[float]) -> Band:
    """Return minimum, median and maximum."""
    return Band(min(values), statistics.median(values), max(values))


def computing(steps: Sequence[Step]) -> dict[Ranks, tuple[Band, float]]:
    """Return, by placement of ranks, the seconds of a step without communication and of its backward part."""
    silent = [step for step in steps if not step.communicates]
    return {
        ranks: (
            band([step.seconds for step in silent if step.ranks == ranks]),
            BACKWARD_SHARE * statistics.median(step.compute_seconds for step in silent if step.ranks == ranks),
        )
        for ranks in sorted({step.ranks for step in silent})
    }


def models(measured: Measured, checks: Measured, wire: Link, compression: str) -> tuple[list[Model], list[str]]:
    """Return one model per engine that communicated on one host, and why others have none.

    Raises UserError if there are too few measurements for any model.
    """
    alone = computing(measured.steps)
    if not alone:
        raise UserError("no run without communication: name the --output-dir of hvdtrain.scaling, which has such runs")
    engines = {one.engine for one in measured.sums if one.ranks.total > 1 and one.ranks.hosts == 1}
    engines |= {one.engine for one in measured.steps if one.communicates and one.ranks.hosts == 1}
    usable = {engine: found for engine in sorted(engines) if (found := points(measured, engine, compression))}
    if not usable:
        dtype = WIRE_DTYPES[compression]
        said = f"no run of several ranks of one host with --compression {compression}: add the --output-dir of "
        raise UserError(f"{said}`hvdtrain.reduce --sweep` ({dtype}) there")
    fits: dict[str, Fit] = {}
    refused: list[str] = []
    for engine, found in usable.items():
        try:
            fits[engine] = fit(found, engine)
        except UserError as error:
            refused.append(str(error))
    if not fits:
        raise UserError("; ".join(refused))
    full = measured.steps[0].gradient_bytes
    made = [
        Model(
            engine=engine, compression=compression, fit=fitted, wire=wire,
            size=wire_bytes(full, compression), buckets=math.ceil(full / bucket_bytes(full)),
            batch_size=measured.steps[0].batch_size,
            # If the runs to check also include ones without communication, those give the compute time: two hosts of a
            # test may be one machine.
            computing=alone | {ranks: took for ranks, took in computing(checks.steps).items() if ranks.hosts > 1},
        )
        for engine, fitted in fits.items()
    ]  # fmt: skip
    return made, refused


def reduction(model: Model, ranks: Ranks, algorithm: str, size: float, times: int = 1) -> Band:
    """Return the seconds to reduce `size` bytes in `times` pieces, one after another."""
    formula, fitted = ALGORITHMS[algorithm], model.fit
    if ranks.total == 1:
        return Band(0.0, 0.0, 0.0)
    off = 1 + fitted.residual
    known = fitted.latency is not None
    shared = fitted.overhead / (2 * (fitted.ranks[0] - 1))  # as if all of it were latency of the ring's steps

    def seconds(overhead: float, latency: float, bandwidth: float) -> float:
        inside = Link(latency, fitted.bandwidth)
        between = Link(latency + model.wire.latency, bandwidth)
        return times * (overhead + formula(size / times, ranks, inside, between))

    hidden = min(fitted.bandwidth, model.wire.bandwidth)
    on_top = 1 / (1 / fitted.bandwidth + 1 / model.wire.bandwidth)
    per_step = fitted.latency or 0.0
    least = seconds(fitted.overhead, per_step, hidden)
    most = seconds(fitted.overhead if known else 0.0, per_step if known else shared, on_top)
    least, most = sorted((least, most))  # a small tree has fewer steps than the fitted ring
    return Band(least / off, math.sqrt(least * most), most * off)


class Prediction(NamedTuple):
    """The predicted times of a step on `ranks`."""

    ranks: Ranks
    algorithm: str
    communication: Band  # seconds
    plain: Band  # seconds of a step that computes first, then communicates
    overlapped: Band  # seconds of a step that reduces buckets during backward
    computing: float  # seconds of a step that does not communicate

    def share(self, step: float) -> float:
        """Return the efficiency: throughput relative to the same number of ranks that do not communicate."""
        return self.computing / step


def predict(model: Model, ranks: Ranks, algorithm: str) -> Prediction:
    """Return the prediction for `ranks`. Raises UserError if that number of ranks per host was not measured."""
    found = model.computing.get(ranks) or model.computing.get(Ranks(1, ranks.per_host))
    if found is None:
        able = ", ".join(str(one.per_host) for one in model.computing if one.hosts == 1)
        raise UserError(f"--ranks-per-host {ranks.per_host} was not measured: use {able}, or measure that number first")
    took, backward = found
    travel = reduction(model, ranks, algorithm, model.size, model.buckets)
    plain = Band(*(one + other for one, other in zip(took, travel, strict=True)))
    waits = [exposed(seconds, backward, model.buckets) for seconds in travel]
    overlapped = Band(*(one + other for one, other in zip(took, waits, strict=True)))
    return Prediction(ranks, algorithm, travel, plain, overlapped, took.middle)


class Check(NamedTuple):
    """A measured time and the model's prediction of it (for a ring). Seconds."""

    what: str
    ranks: Ranks
    bytes: float
    measured: Band
    predicted: Band
    share: Band | None = None  # measured efficiency, if the same rounds also ran without communication

    @property
    def ratio(self) -> float:
        """Return predicted over measured seconds."""
        return self.predicted.middle / self.measured.middle


def compare(model: Model, measured: Measured) -> list[Check]:
    """Return every measured step and all-reduce of the model's engine and compression with its prediction."""
    checks = []
    steps = [one for one in measured.steps if one.communicates and one.engine == model.engine]
    steps = [one for one in steps if one.compression == model.compression]
    for ranks in sorted({one.ranks for one in steps}):
        if ranks not in model.computing and Ranks(1, ranks.per_host) not in model.computing:
            continue
        mine = [one for one in steps if one.ranks == ranks]
        silent = {one.round: one.seconds for one in measured.steps if not one.communicates and one.ranks == ranks}
        shares = [silent[one.round] / one.seconds for one in mine if one.round in silent]
        took = band([one.seconds for one in mine])
        predicted = predict(model, ranks, "ring").overlapped
        checks.append(Check("step", ranks, model.size, took, predicted, band(shares) if shares else None))
    for one in measured.sums:
        if (one.engine, one.dtype) == (model.engine, WIRE_DTYPES[model.compression]) and one.ranks.hosts > 1:
            measured_band = Band(one.least, one.seconds, one.most)
            predicted = reduction(model, one.ranks, "ring", one.bytes)
            checks.append(Check("all-reduce", one.ranks, one.bytes, measured_band, predicted))
    return checks
