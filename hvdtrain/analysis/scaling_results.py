"""Results of hvdtrain.scaling: bounds, speed-up and efficiency over rounds, as a table, a file and plots."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.analysis import measuring, plotting
from hvdtrain.cli import Flags
from hvdtrain.engines import files
from hvdtrain.output.clock import PHASES
from hvdtrain.output.run_output import versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALONE, APART = "alone", "apart"  # the bounds
SHOWN = {ALONE: "one rank", APART: "no communication"}


class Configuration(NamedTuple):
    """One configuration to measure. name: a variant of an engine, or a bound."""

    name: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.name}, {self.ranks} rank{'s'[: self.ranks > 1]}"


Benchmark = dict[str, Any]  # the content of benchmark.json
Rounds = list[dict[Configuration, Benchmark]]  # by round: the configurations that succeeded


class Spread(NamedTuple):
    """Median, minimum and maximum over rounds."""

    median: float
    least: float
    most: float

    def show(self, pattern: str) -> str:
        """Return the spread as text, each number formatted by `pattern`."""
        return f"{self.median:{pattern}} ({self.least:{pattern}} to {self.most:{pattern}})"


class ScalingRow(NamedTuple):
    """The results of one configuration. A ratio is taken within a round, and None if no round has both sides."""

    name: str
    ranks: int
    rounds: int
    samples_per_second: Spread
    speed_up: Spread | None  # relative to one rank alone
    efficiency_alone: Spread | None  # that divided by the number of ranks
    efficiency_apart: Spread | None  # relative to as many ranks that do not communicate
    seconds: dict[str, float]  # per sample, by phase


def rate(result: Benchmark) -> float:
    """Return the samples per second of a benchmark.json."""
    return float(result["samples_per_second"]["mean"])


def summarize(rounds: Rounds, planned: Sequence[Configuration]) -> list[ScalingRow]:
    """Return one row per configuration that succeeded at least once."""

    def spread(values: Sequence[float | None]) -> Spread | None:
        known = [value for value in values if value is not None]
        return Spread(statistics.median(known), min(known), max(known)) if known else None

    rows = []
    for which in planned:
        here = [results for results in rounds if which in results]
        rates = spread([rate(results[which]) for results in here])
        if rates is None:
            continue
        alone, apart = Configuration(ALONE, 1), Configuration(APART if which.ranks > 1 else ALONE, which.ranks)
        speed_up = [rate(results[which]) / rate(results[alone]) for results in here if alone in results]
        beside = [rate(results[which]) / rate(results[apart]) for results in here if apart in results]
        each = [results[which]["seconds_per_sample"] for results in here]
        rows.append(
            ScalingRow(
                which.name, which.ranks, len(here), rates, spread(speed_up),
                spread([value / which.ranks for value in speed_up]), spread(beside),
                {phase: statistics.median(seconds[phase] for seconds in each) for phase in PHASES},
            )
        )  # fmt: skip
    return rows


def table(rows: Sequence[ScalingRow]) -> str:
    """Return the rows as a Markdown table: median (minimum to maximum)."""
    lines = [
        "| | ranks | samples/s | speed-up | of one rank x N | of N without communication | communication |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [SHOWN.get(row.name, row.name), str(row.ranks)]
        cells.append(row.samples_per_second.show(",.0f" if row.samples_per_second.median >= 100 else ".1f"))
        cells += [
            value.show(".2f") if value else "-" for value in (row.speed_up, row.efficiency_alone, row.efficiency_apart)
        ]
        cells.append(f"{row.seconds['communication'] / sum(row.seconds.values()):.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(flags: Flags, rows: Sequence[ScalingRow], rounds: Rounds, failed: dict[Configuration, str]) -> None:
    """Write scaling.json and its plots, scaling.png, to --output-dir. Raises UserError."""
    named = [
        {key: value._asdict() if isinstance(value, Spread) else value for key, value in row._asdict().items()}
        for row in rows
    ]
    runs = [
        dict(round=number, name=which.name, **result)
        for number, results in enumerate(rounds, 1)
        for which, result in results.items()
    ]
    content: dict[str, object] = dict(
        config=flags.given(), hardware=measuring.hardware(), versions=versions(), rows=named, runs=runs
    )
    content["failed"] = {str(which): why for which, why in failed.items()}
    measuring.write_json(flags.output_dir / "scaling.json", content)
    result = next(result for results in rounds for result in results.values())
    rank = result["ranks"][0]
    title = f"{result['model']}, batch {result['batch_size_per_rank']} per rank, {rank['device'].split(':')[0]}, "
    title += f"{rank['threads']} thread{'s'[: rank['threads'] > 1]} per rank; n = {len(rounds)}"
    with files.output_to(flags.output_dir):
        draw(rows, title, flags.output_dir / "scaling.png")


def draw(rows: Sequence[ScalingRow], title: str, path: Path) -> None:
    """Draw throughput and efficiency over ranks. Bars go from minimum to maximum."""
    counts = sorted({row.ranks for row in rows})
    names = [name for name in dict.fromkeys(row.name for row in rows) if name not in (ALONE, APART)]
    bounds = [row for row in rows if row.name in (ALONE, APART)]

    def bars(axes: "Axes", chosen: Sequence[ScalingRow], key: str, **style: Any) -> None:
        found: list[tuple[int, Spread]] = [(row.ranks, value) for row in chosen if (value := getattr(row, key))]
        middle = [value.median for _, value in found]
        ends = [[v.median - v.least for _, v in found], [v.most - v.median for _, v in found]]
        axes.errorbar([ranks for ranks, _ in found], middle, yerr=ends, **style)

    def over_ranks(axes: "Axes", key: str, unit: str) -> None:
        for place, name in enumerate(names):
            bars(axes, [row for row in rows if row.name == name], key, label=name, **plotting.look(place))
        axes.set(xlabel="ranks", ylabel=unit, ylim=(0, None))
        axes.set_xticks(counts, [str(count) for count in counts])

    def throughput(axes: "Axes") -> None:
        for row in bounds[:1]:
            if row.name == ALONE:
                ideal = [row.samples_per_second.median * count for count in counts]
                axes.plot(counts, ideal, color="black", linestyle=":", label="one rank x N")
        if len(bounds) > 1:
            look = dict(color="grey", marker="x", linestyle="--", label="no communication")
            bars(axes, bounds, "samples_per_second", **look)
        over_ranks(axes, "samples_per_second", "samples/s, all ranks")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")

    def share(axes: "Axes") -> None:
        axes.axhline(1, color="grey", linestyle="--")
        over_ranks(axes, "efficiency_apart", "share of no communication")

    plotting.write(path, title, [throughput, share])
