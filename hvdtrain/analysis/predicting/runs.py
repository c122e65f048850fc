"""Measured runs in the form that the prediction needs: training steps, and all-reduces alone.

A directory holds scaling.json (hvdtrain.scaling), benchmark.json (.benchmark) or reduce.json (.reduce --sweep).
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
    """One run of the benchmark: a mean step, on the slowest rank."""

    engine: str  # what carried the gradients: "horovod over Gloo"
    communicates: bool
    ranks: Ranks
    round: object  # of hvdtrain.scaling: runs of one round can be compared; or where the run lies
    compression: str
    batch_size: int  # per rank
    gradient_bytes: int  # in the parameters' own type
    seconds: float
    compute_seconds: float
    trained: str  # what all runs of one prediction must have in common


class Sum(NamedTuple):
    """One size of a sweep."""

    engine: str
    ranks: Ranks
    dtype: str
    bytes: int
    seconds: float  # median of the blocks
    least: float
    most: float


class Measured(NamedTuple):
    steps: list[Step]
    sums: list[Sum]


def read(directories: Sequence[Path]) -> Measured:
    """Read all `directories`. Raises UserError where one has nothing that can be read."""
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
    """Raise UserError where `steps` are not all of the same training."""
    trained = sorted({step.trained for step in steps})
    if len(trained) > 1:
        raise UserError(f"these runs cannot be compared: {trained[0]}; {trained[1]}: name runs that trained the same")


def load(path: Path) -> dict:
    """Return the JSON object in `path`; empty where there is no such file. Raises UserError where it is not JSON."""
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
    return result["description"] + ", untuned" * (result["config"].get("tuning") == "off")


def placed(size: int, hosts: int) -> Ranks:
    if size < 1 or hosts < 1 or size % hosts:
        raise ValueError(f"{size} ranks on {hosts} hosts")
    return Ranks(hosts, size // hosts)


def step(run: dict, which: object) -> Step:
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
    ranks = placed(sweep["world_size"], sweep["hosts"])
    times = [float(row[name]) for name in ("seconds", "seconds_least", "seconds_most")]
    return Sum(name_of(sweep), ranks, row["dtype"], row["bytes"], *times)


def points(measured: Measured, engine: str, compression: str) -> list[Point]:
    """Return the all-reduces of `engine` on one host: those of a sweep; without one, what steps took more than apart ones.

    The second are differences of two noisy numbers: their errors are compared with the whole step.
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
    return gradient_bytes / (2 if compression == "fp16" else 1)
