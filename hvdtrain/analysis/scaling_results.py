"""Results of hvdtrain.scaling: bounds, speed-up and efficiency over rounds, as a table, a file and plots."""

import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.analysis import measuring, plotting
from hvdtrain.analysis.measuring import Spread, spread
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
Row = dict[str, Any]  # the results of one configuration: see `summarize`


def rate(result: Benchmark) -> float:
    """Return the samples per second of a benchmark.json."""
    return float(result["samples_per_second"]["mean"])


def summarize(rounds: Rounds, planned: Sequence[Configuration]) -> list[Row]:
    """Return one row per configuration that succeeded at least once: the spreads of its rates and ratios.

    Ratios are to one rank alone, that divided by the number of ranks, and to as many ranks that do not communicate. A ratio
    is taken within a round, and None if no round has both sides.
    """

    def over(which: Configuration, bound: Configuration, ranks: int = 1) -> Spread | None:
        both = [results for results in rounds if which in results and bound in results]
        return spread([rate(results[which]) / rate(results[bound]) / ranks for results in both])

    rows: list[Row] = []
    for which in planned:
        here = [results[which] for results in rounds if which in results]
        if not here:
            continue
        alone, apart = Configuration(ALONE, 1), Configuration(APART if which.ranks > 1 else ALONE, which.ranks)
        rows.append(
            dict(
                name=which.name, ranks=which.ranks, rounds=len(here), samples_per_second=spread(map(rate, here)),
                speed_up=over(which, alone), efficiency_alone=over(which, alone, which.ranks),
                efficiency_apart=over(which, apart),
                seconds={phase: statistics.median(one["seconds_per_sample"][phase] for one in here) for phase in PHASES},
            )
        )  # fmt: skip
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table: median (minimum to maximum)."""
    lines = [
        "| | ranks | samples/s | speed-up | of one rank x N | of N without communication | communication |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        rates, ratios = row["samples_per_second"], (row["speed_up"], row["efficiency_alone"], row["efficiency_apart"])
        name: str = row["name"]
        cells = [SHOWN.get(name, name), str(row["ranks"])]
        cells.append(rates.show(",.0f" if rates.median >= 100 else ".1f"))
        cells += [value.show(".2f") if value else "-" for value in ratios]
        cells.append(f"{row['seconds']['communication'] / sum(row['seconds'].values()):.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(flags: Flags, rows: Sequence[Row], rounds: Rounds, failed: dict[Configuration, str]) -> None:
    """Write scaling.json and its plots, scaling.png, to --output-dir. Raises UserError."""
    named = [
        {key: value._asdict() if isinstance(value, Spread) else value for key, value in row.items()} for row in rows
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


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw throughput and efficiency over ranks. Bars go from minimum to maximum."""
    counts = sorted({row["ranks"] for row in rows})
    names = [name for name in dict.fromkeys(row["name"] for row in rows) if name not in SHOWN]

    def bars(axes: "Axes", chosen: Collection[str], key: str, **style: Any) -> None:
        found = [(row["ranks"], row[key]) for row in rows if row["name"] in chosen and row[key]]
        ends = [[v.median - v.least for _, v in found], [v.most - v.median for _, v in found]]
        axes.errorbar([ranks for ranks, _ in found], [value.median for _, value in found], yerr=ends, **style)

    def over_ranks(axes: "Axes", key: str, unit: str) -> None:
        for place, name in enumerate(names):
            bars(axes, [name], key, label=name, **plotting.look(place))
        axes.set(xlabel="ranks", ylabel=unit, ylim=(0, None))
        axes.set_xticks(counts, [str(count) for count in counts])

    def throughput(axes: "Axes") -> None:
        grey: dict[str, Any] = dict(color="grey", marker="x", linestyle="--", label="no communication")
        bars(axes, SHOWN, "samples_per_second", **grey)
        over_ranks(axes, "samples_per_second", "samples/s, all ranks")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")

    def share(axes: "Axes") -> None:
        axes.axhline(1, color="grey", linestyle="--")
        over_ranks(axes, "efficiency_apart", "share of no communication")

    plotting.write(path, title, [throughput, share])
