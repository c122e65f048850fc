"""Reads measured training steps and all-reduces for the prediction.

A directory has scaling.json, benchmark.json, or reduce.json of `hvdtrain.reduce --sweep`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.analysis.predicting.fitting import Point
from hvdtrain.analysis.predicting.formulas import Ranks
from hvdtrain.engines.errors import UserError

WIRE_DTYPES = {"none": "float32", "fp16": "float16"}  # by --compression


class Step(NamedTuple):
    """One run of hvdtrain.benchmark: the mean step on the slowest rank."""

    engine: str  # with its transport, as "horovod over Gloo"
    communicates: bool
    ranks: Ranks
    round: object  # runs with the same value can be compared: the directory, and the round of hvdtrain.scaling
    compression: str
    batch_size: int  # per rank
    gradient_bytes: int  # in the parameters' dtype
    seconds: float
    compute_seconds: float
    trained: str  # model, batch, precision, ...: must be the same in all runs of a prediction


class Sum(NamedTuple):
    """One size of a sweep; seconds per all-reduce."""

    engine: str
    ranks: Ranks
    dtype: str
    bytes: int
    seconds: float  # median of the blocks
    least: float
    most: float


class Measured(NamedTuple):
    """All measured steps and all-reduces."""

    steps: list[Step]
    sums: list[Sum]


def read(directories: Sequence[Path]) -> Measured:
    """Return the measurements in all `directories`. Raises UserError if one has none, or has damaged ones."""
    steps: list[Step] = []
    sums: list[Sum] = []
    for directory in directories:
        found = {name: load(directory / f"{name}.json") for name in ("scaling", "benchmark", "reduce")}
        if not any(found.values()):
            said = "has no scaling.json, benchmark.json or reduce.json: name the --output-dir of hvdtrain.scaling, "
            raise UserError(f"{directory} {said}hvdtrain.benchmark or hvdtrain.reduce --sweep")
        try:
            runs = found["scaling"].get("runs", []) + [found["benchmark"]] * bool(found["benchmark"])
            steps += [step(run, (str(directory), run.get("round"))) for run in runs]
            sums += [one for row in found["reduce"].get("rows", []) for one in [summed(found["reduce"], row)]]
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            why = f"{directory} is damaged or of an older hvdtrain ({error!r}): measure it again"
            raise UserError(why) from error
    return Measured(steps, sums)


def require_alike(steps: Sequence[Step]) -> None:
    """Raise UserError unless all `steps` are of the same training."""
    trained = sorted({step.trained for step in steps})
    if len(trained) > 1:
        raise UserError(f"these runs cannot be compared: {trained[0]}; {trained[1]}: name runs that trained the same")


def load(path: Path) -> dict:
    """Return the JSON object in `path`; {} if there is no such file. Raises UserError if it is not a JSON object."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): measure it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not what hvdtrain writes: measure it again")
    return found


def name_of(result: dict) -> str:
    """Return the engine of a result, with its transport."""
    return result["description"] + ", untuned" * (result["config"].get("tuning") == "off")


def placed(size: int, hosts: int) -> Ranks:
    """Return the placement of `size` ranks. Raises ValueError if they do not fill `hosts` equally."""
    if size < 1 or hosts < 1 or size % hosts:
        raise ValueError(f"{size} ranks on {hosts} hosts")
    return Ranks(hosts, size // hosts)


def step(run: dict, which: object) -> Step:
    """Return the step of a benchmark.json. Raises KeyError, TypeError or ValueError if it is damaged."""
    size, batch = run["world_size"], run["batch_size_per_rank"]
    how = [run["model"], f"batch {batch} per rank", f"image size {run['config'].get('image_size')}", run["amp"]]
    how += [run["ranks"][0]["device"].split(":")[0], f"threads {run['ranks'][0]['threads']}"]
    return Step(
        engine=name_of(run), communicates=run["communicates"] and size > 1, ranks=placed(size, run["hosts"]), round=which,
        compression=run["config"]["compression"], batch_size=batch, gradient_bytes=int(run["gradient_bytes"]),
        seconds=batch * size / run["samples_per_second"]["mean"],
        compute_seconds=batch * run["seconds_per_sample"]["compute"], trained=", ".join(how),
    )  # fmt: skip


def summed(sweep: dict, row: dict) -> Sum:
    """Return one row of a reduce.json. Raises KeyError, TypeError or ValueError if it is damaged."""
    ranks = placed(sweep["world_size"], sweep["hosts"])
    times = [float(row[name]) for name in ("seconds", "seconds_least", "seconds_most")]
    return Sum(name_of(sweep), ranks, row["dtype"], row["bytes"], *times)


def points(measured: Measured, engine: str, compression: str) -> list[Point]:
    """Return the all-reduces of `engine` on one host.

    They come from a sweep or, without one, from the differences between steps with and without communication. As these are
    differences of two noisy numbers, their errors are relative to the whole step.
    """
    swept = [one for one in measured.sums if one.engine == engine and one.ranks.hosts == 1 and one.ranks.total > 1]
    swept = [one for one in swept if one.dtype == WIRE_DTYPES[compression]]
    if swept:
        return [Point(one.ranks.total, one.bytes, one.seconds, one.seconds) for one in swept]
    apart = {(one.round, one.ranks): one for one in measured.steps if not one.communicates}
    here = [one for one in measured.steps if one.communicates and one.ranks.hosts == 1 and one.engine == engine]
    pairs = [(one, apart.get((one.round, one.ranks))) for one in here if one.compression == compression]
    size = [wire_bytes(one.gradient_bytes, compression) for one, _ in pairs]
    return [
        Point(one.ranks.total, bytes_, one.seconds - other.seconds, one.seconds)
        for (one, other), bytes_ in zip(pairs, size, strict=True)
        if other is not None
    ]


def wire_bytes(gradient_bytes: int, compression: str) -> float:
    """Return the bytes of the gradients after compression."""
    return gradient_bytes / (2 if compression == "fp16" else 1)
