"""From measured runs and a wire to the time of a step on any number of ranks, as a range; and a check against measured ones.

A range goes from least to most over what is not known: the spread of the computing over rounds; the fit's residual; whether
a host's own work on a message is hidden behind the wire (bandwidth: the lesser of the two) or comes on top (1/b = 1/host +
1/wire); and, where only one number of ranks was measured, whether what an all-reduce of nothing takes is paid once or at
every step.
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

# Backward computes two products of the size of forward's one: gradients of the inputs, and of the weights.
BACKWARD_SHARE = 2 / 3


class Band(NamedTuple):
    least: float
    middle: float
    most: float


class Model(NamedTuple):
    """What the runs of one engine say. Seconds and bytes; per step and rank."""

    engine: str
    compression: str
    fit: Fit
    wire: Link  # latency of one message beyond what it takes within a host; payload's bandwidth
    size: float  # bytes that a step reduces
    buckets: int
    batch_size: int
    computing: dict[Ranks, tuple[Band, float]]  # without communication: a step; the part of it that is backward


def band(values: Sequence[float]) -> Band:
    return Band(min(values), statistics.median(values), max(values))


def computing(steps: Sequence[Step]) -> dict[Ranks, tuple[Band, float]]:
    """Return the seconds of a step without communication, and of its backward part, by the placement of ranks."""
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

    Raises UserError where there is too little to fit for any of them.
    """
    alone = computing(measured.steps)
    if not alone:
        raise UserError("no run without communication: name the --output-dir of hvdtrain.scaling, which measures alone")
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
            # A check that also has runs without communication is held against its own computing: two hosts of a test
            # may be one machine.
            computing=alone | {ranks: took for ranks, took in computing(checks.steps).items() if ranks.hosts > 1},
        )
        for engine, fitted in fits.items()
    ]  # fmt: skip
    return made, refused


def reduction(model: Model, ranks: Ranks, algorithm: str, size: float, times: int = 1) -> Band:
    """Return the seconds that `size` bytes, reduced `times` pieces one after another, take."""
    formula, fitted = ALGORITHMS[algorithm], model.fit
    if ranks.total == 1:
        return Band(0.0, 0.0, 0.0)
    off = 1 + fitted.residual
    known = fitted.latency is not None
    shared = fitted.overhead / (2 * (fitted.ranks[0] - 1))  # all of it paid at every step of the ring

    def seconds(overhead: float, latency: float, bandwidth: float) -> float:
        inside = Link(latency, fitted.bandwidth)
        between = Link(latency + model.wire.latency, bandwidth)
        return times * (overhead + formula(size / times, ranks, inside, between))

    hidden = min(fitted.bandwidth, model.wire.bandwidth)
    on_top = 1 / (1 / fitted.bandwidth + 1 / model.wire.bandwidth)
    per_step = fitted.latency or 0.0
    least = seconds(fitted.overhead, per_step, hidden)
    most = seconds(fitted.overhead if known else 0.0, per_step if known else shared, on_top)
    least, most = sorted((least, most))  # a tree of few ranks has fewer steps than the ring that was fitted
    return Band(least / off, math.sqrt(least * most), most * off)


class Prediction(NamedTuple):
    ranks: Ranks
    algorithm: str
    communication: Band  # seconds
    plain: Band  # a step, seconds: first compute, then communicate
    overlapped: Band  # buckets travel while backward goes on
    computing: float  # a step that does not communicate, seconds

    def share(self, step: float) -> float:
        """Return the efficiency: throughput over that of as many ranks that do not communicate."""
        return self.computing / step


def predict(model: Model, ranks: Ranks, algorithm: str) -> Prediction:
    """Return what `ranks` take. Raises UserError where nothing was measured with as many ranks on a host."""
    found = model.computing.get(ranks) or model.computing.get(Ranks(1, ranks.per_host))
    if found is None:
        able = ", ".join(str(one.per_host) for one in model.computing if one.hosts == 1)
        raise UserError(f"--ranks-per-host {ranks.per_host} was not measured: use {able}, or measure --ranks so many")
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
    share: Band | None = None  # measured efficiency, where the same rounds ran without communication, too

    @property
    def ratio(self) -> float:
        return self.predicted.middle / self.measured.middle


def compare(model: Model, measured: Measured) -> list[Check]:
    """Return every measured step and all-reduce of the model's engine and compression, with its prediction."""
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
