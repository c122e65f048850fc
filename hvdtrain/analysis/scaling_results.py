"""Results of hvdtrain.scaling: bounds, speed-up and efficiency over rounds, as a table, files and plots."""

import csv
import os
import statistics
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.analysis import measuring, other_work, plotting
from hvdtrain.engines import files
from hvdtrain.training.records.telemetry import versions

ALONE, APART = "alone", "apart"  # the bounds


class Configuration(NamedTuple):
    """One configuration to measure. name: a variant of an engine, or a bound."""

    name: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.name}, {self.ranks} rank{'s'[: self.ranks > 1]}"


Rounds = list[dict[Configuration, dict]]  # by round: the benchmark.json of each configuration that succeeded


class Spread(NamedTuple):
    """Median, minimum and maximum over rounds."""

    median: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread | None:
    """Return median, minimum and maximum; None without values."""
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def rate(result: dict) -> float:
    """Return the samples per second of a benchmark.json."""
    return result["samples_per_second"]["mean"]


def joules(result: dict) -> float | None:
    """Return the joules per sample of a benchmark.json; None if they were not measured."""
    return result.get("energy", {}).get("per_sample_joules")


def summarize(rounds: Rounds, planned: list[Configuration]) -> list[dict]:
    """Return one row per configuration that succeeded at least once.

    speed_up: relative to one rank alone; efficiency_alone: that divided by N; efficiency_apart: relative to N ranks that do
    not communicate. Each is taken within a round, and None if no round has both.
    """
    rows = []
    for which in planned:
        here = [results for results in rounds if which in results]
        if not here:
            continue
        alone, apart = Configuration(ALONE, 1), Configuration(APART if which.ranks > 1 else ALONE, which.ranks)
        speed_up = [rate(results[which]) / rate(results[alone]) for results in here if alone in results]
        beside = [rate(results[which]) / rate(results[apart]) for results in here if apart in results]
        rows.append(
            dict(
                name=which.name,
                ranks=which.ranks,
                rounds=len(here),
                samples_per_second=spread([rate(results[which]) for results in here]),
                speed_up=spread(speed_up),
                efficiency_alone=spread([value / which.ranks for value in speed_up]),
                efficiency_apart=spread(beside),
                joules_per_sample=spread([known for results in here if (known := joules(results[which])) is not None]),
                **{
                    f"{phase}_seconds": statistics.median(
                        results[which]["seconds_per_sample"][phase] for results in here
                    )
                    for phase in ("loading", "compute", "communication")
                },
            )
        )
    return rows


def table(rows: list[dict]) -> str:
    """Return the rows as a Markdown table: median (minimum to maximum)."""

    def cell(value: Spread | None, pattern: str) -> str:
        if value is None:
            return "-"
        return f"{value.median:{pattern}} ({value.least:{pattern}} to {value.most:{pattern}})"

    measured = any(row["joules_per_sample"] is not None for row in rows)  # no column if energy was not measured
    lines = [
        "| | ranks | samples/s | speed-up | of one alone x N | of N apart | communication |" + " J/sample |" * measured,
        "|---|---:|---:|---:|---:|---:|---:|" + "---:|" * measured,
    ]
    for row in rows:
        seconds = [row[f"{phase}_seconds"] for phase in ("loading", "compute", "communication")]
        cells = [
            row["name"],
            str(row["ranks"]),
            cell(row["samples_per_second"], ",.0f" if row["samples_per_second"].median >= 100 else ".1f"),
            cell(row["speed_up"], ".2f"),
            cell(row["efficiency_alone"], ".2f"),
            cell(row["efficiency_apart"], ".2f"),
            f"{seconds[2] / sum(seconds):.0%}",
            *([cell(row["joules_per_sample"], ".4g")] if measured else []),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(flags: Namespace, rows: list[dict], rounds: Rounds, failed: dict[Configuration, str]) -> None:
    """Write scaling.csv, scaling.json, scaling.png, and its plots as SVG and PDF to --output-dir."""
    spreads = ("samples_per_second", "speed_up", "efficiency_alone", "efficiency_apart", "joules_per_sample")
    with files.replacing(flags.output_dir / "scaling.csv") as file:
        flat = [
            {key: value for key, value in row.items() if key not in spreads}
            | {f"{key}_{part}": getattr(row[key], part, "") for key in spreads for part in Spread._fields}
            for row in rows
        ]
        writer = csv.DictWriter(file, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
    named = [row | {key: row[key] and row[key]._asdict() for key in spreads} for row in rows]
    runs = [dict(round=number, name=which.name, **result) for number, results in enumerate(rounds, 1)
            for which, result in results.items()]  # fmt: skip
    measuring.write_json(
        flags.output_dir / "scaling.json",
        dict(
            config=vars(flags), hardware=measuring.hardware(), versions=versions(), rows=named,
            failed={str(which): why for which, why in failed.items()}, runs=runs,
        ),
    )  # fmt: skip
    draw(rows, title(rounds), flags.output_dir / "scaling.png", busy(rounds))


def title(rounds: Rounds) -> str:
    """Return the title of the plots: model, batch size, device, threads, rounds."""
    result = next(result for results in rounds for result in results.values())
    rank = result["ranks"][0]
    how = f"{result['model']}, batch {result['batch_size_per_rank']} per rank, {rank['device'].split(':')[0]}"
    return f"{how}, {rank['threads']} thread{'s'[: rank['threads'] > 1]} per rank; n = {len(rounds)}"


def busy(rounds: Rounds) -> tuple[str, ...]:
    """Return the note on other work on this machine during the runs; () if there was little."""
    others = [result.get("other_cores") for results in rounds for result in results.values()]
    return other_work.said(others, len(os.sched_getaffinity(0)))


def draw(rows: list[dict], about: str, path: Path, notes: tuple[str, ...] = ()) -> list[Path]:
    """Draw throughput and efficiency over ranks, and return the paths. Bars go from minimum to maximum."""
    counts = sorted({row["ranks"] for row in rows})
    names = [name for name in dict.fromkeys(row["name"] for row in rows) if name not in (ALONE, APART)]

    def over_ranks(axes, key: str, unit: str) -> None:
        for index, name in enumerate(names):
            style = dict(color=plotting.COLOURS[index % 6], marker=plotting.MARKERS[index % 6],
                         linestyle=plotting.STYLES[index % 6], label=name)  # fmt: skip
            bars(axes, [row for row in rows if row["name"] == name], key, **style)
        axes.set(xlabel="ranks", ylabel=unit, ylim=(0, None))
        axes.set_xticks(counts, [str(count) for count in counts])

    def throughput(axes) -> None:
        alone = [row for row in rows if row["name"] == ALONE]
        if alone:
            one = alone[0]["samples_per_second"].median
            axes.plot(
                counts, [one * n for n in counts], color="black", linewidth=1, linestyle=":", label="one alone x N"
            )
        bound = [row for row in rows if row["name"] in (ALONE, APART)]
        if len(bound) > 1:
            bars(axes, bound, "samples_per_second", color="grey", marker="x", linestyle="--", label="no communication")
        over_ranks(axes, "samples_per_second", "samples/s, all ranks")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")

    def share(axes) -> None:
        axes.axhline(1, color="grey", linewidth=1, linestyle="--")
        over_ranks(axes, "efficiency_apart", "share of no communication")

    shares = [row["efficiency_apart"] for row in rows if row["name"] in names and row["efficiency_apart"] is not None]
    above = plotting.above_one([(one.least, one.most) for one in shares])
    return plotting.write(path, about, [
        plotting.Panel("throughput", "throughput", throughput, notes),
        plotting.Panel("efficiency", "share of ranks that do not communicate", share, (*notes, *above)),
    ])  # fmt: skip


def bars(axes, rows: list[dict], key: str, **style: object) -> None:
    """Draw the medians of `key` over ranks, with bars from minimum to maximum."""
    drawn = [row for row in rows if row[key] is not None]
    middle = [row[key].median for row in drawn]
    below = [row[key].median - row[key].least for row in drawn]
    above = [row[key].most - row[key].median for row in drawn]
    axes.errorbar([row["ranks"] for row in drawn], middle, yerr=[below, above], **style)
