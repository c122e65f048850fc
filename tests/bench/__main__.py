"""Measure hvdtrain against its bounds and its peers, and print the rows; on request, write them into docs/evidence/speed.md.

make bench BENCH="--data-dir DIR"                                    all rows, 7 repeats: hours on two cores
make bench BENCH="--rows none --docs docs/evidence"                  write what was measured into docs/evidence/speed.md
python -m tests.bench --rows throughput-2,start-2 --repeats 3        some of them
python -m tests.bench --rows whole --add --data-dir DIR --peers PEERS

Each repeat runs every side of a comparison once, in a random order, and takes the ratio: a slow minute touches both sides.
The table has the median over repeats, and the range. DIR has MNIST's files. PEERS has examples as their authors
published them: `pytorch_mnist.py` and `pytorch_synthetic_benchmark.py` (horovod/horovod, examples/pytorch), and `main.py`
(pytorch/examples, mnist).
"""

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from hvdtrain.analysis import measuring
from hvdtrain.engines import atomic
from hvdtrain.output.run_output import versions
from tests.bench.measurements import ROOT, Left
from tests.bench.rows import SHOWN, Group, groups, measure_once

HEAD = """# Speed

| | |
|---|---|
| Claim | What each row says: throughput unless another unit is named, compared with a bound or with another program |
| Command | `make bench BENCH="--data-dir DIR --peers PEERS"`; some: `python -m tests.bench --rows jpeg` ([names](#dates)) |
| Machine | two cores of an AMD EPYC, no GPU; torch 2.15.0, Horovod 0.28.1, Open MPI 4.1.8; load at the end [below](#dates) |
| Runs, spread | n interleaved runs, both sides of a ratio in each; median and range |
| Date | [below](#dates) |

More is better, except for a time or a share. The table [below](#all-rows) has the ranges and the missed targets.

{shown}

## All rows

DDP has our input, memory format and malloc. Untuned Horovod has one thread per rank. `cosinenet` is the default network.
Folders are read by 2 ranks with a worker each. A row that misses its target says why, if it is known. How rows
are measured is in `tests/bench/measurements.py` and `tests/bench/peers.py`. A row stays until it is measured again.

"""


def main() -> int:
    known = {group.name: group for group in groups()}
    parser = argparse.ArgumentParser(
        prog="tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(known), help="default: %(default)s; none: only write")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--add", action="store_true", help="to the repeats that were measured earlier")
    parser.add_argument("--data-dir", type=lambda text: Path(text).resolve(), help="where MNIST's files are")
    parser.add_argument("--peers", type=lambda text: Path(text).resolve(), help="where the peers' examples are")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "bench", help="what was measured, row by row")
    parser.add_argument(
        "--docs",
        type=Path,
        help="write speed.md there; rows not measured keep what it has",
    )
    flags = parser.parse_args()
    wanted = [] if flags.rows == "none" else flags.rows.split(",")
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"--rows: {unknown[0]!r} is not one of {', '.join(known)}")
    for directory in filter(None, (flags.results, flags.docs)):  # before hours of measuring
        directory.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        measure(known[name], flags)
    if flags.docs is not None:
        found = collect(list(known.values()), flags.results, flags.docs / "speed.md")
        write(list(known.values()), found, flags.results, flags.docs)
    shown = [known[name] for name in wanted] or list(known.values())
    print(table(shown, collect(shown, flags.results, ROOT / "docs" / "evidence" / "speed.md")))
    return 0


def measure(group: Group, flags: argparse.Namespace) -> None:
    """Fill `results`/GROUP.json, anew, or add to it."""
    path, left = flags.results / f"{group.name}.json", ""
    values: dict[str, list[float]] = json.loads(path.read_text())["values"] if flags.add and path.exists() else {}
    first = max(map(len, values.values()), default=0) + 1
    for repeat in range(first, first + flags.repeats):
        began = time.monotonic()
        try:
            once = measure_once(group, flags.data_dir, flags.peers, repeat)
        except Left as why:
            left = " ".join(str(why).split())[-200:]
            print(f"{group.name}  left out: {left}", flush=True)
            break
        for key, value in once.items():
            values.setdefault(key, []).append(value)
        said = "  ".join(f"{key} {value:.4g}" for key, value in once.items())
        print(
            f"{group.name}  {repeat}/{first + flags.repeats - 1}  {time.monotonic() - began:.0f} s  {said}", flush=True
        )
    measuring.write_json(
        path,
        dict(values=values, left=left, date=time.strftime("%Y-%m-%d"), hardware=measuring.hardware(), versions=versions()),
    )  # fmt: skip


class Found(NamedTuple):
    """A row's least, median and greatest value over so many repeats; or why there are none."""

    values: tuple[float, float, float] | None
    repeats: int = 0
    why: str = ""

    def __str__(self) -> str:
        if self.values is None:
            return self.why
        least, median, most = self.values
        return f"**{median:.3g}** ({least:.3g} to {most:.3g})"


NOT_YET = "not measured yet"
# A row of speed.md: key, what, target, measured, repeats, what limits it.
ROW = re.compile(
    r"\| (?P<key>\S+) \|.*?\|.*?\| \*\*(?P<median>\S+)\*\* \((?P<least>\S+) to (?P<most>\S+)\) \| (?P<repeats>\d+) \|"
)


def collect(known: list[Group], results: Path, page: Path) -> dict[str, Found]:
    """Return what each row has, by its key: from `results`, or else as an earlier run wrote it into `page`."""
    lines = page.read_text().splitlines() if page.exists() else []
    earlier = {match["key"]: match for match in map(ROW.match, lines) if match}
    found = {}
    for group in known:
        path = results / f"{group.name}.json"
        content = json.loads(path.read_text()) if path.exists() else {"values": {}, "left": NOT_YET}
        for row in group.rows:
            if values := content["values"].get(row.key, []):
                found[row.key] = Found((min(values), statistics.median(values), max(values)), len(values))
            elif match := earlier.get(row.key):
                kept = float(match["least"]), float(match["median"]), float(match["most"])
                found[row.key] = Found(kept, int(match["repeats"]))
            else:
                found[row.key] = Found(None, why=content["left"] or "not measured here")
    return found


def table(known: list[Group], found: dict[str, Found]) -> str:
    lines = [
        "| row | what | target | measured: median (range) | n | what limits it |",
        "|---|---|---|---|---:|---|",
    ]
    unknown = []
    for row in (row for group in known for row in group.rows):
        one = found[row.key]
        if one.why == NOT_YET:
            unknown.append(row.key)
            continue
        cells = (row.key, row.what, row.target, str(one), str(one.repeats), row.limit)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *(["", f"Rows not measured yet: `{', '.join(unknown)}`."] if unknown else [])])


def for_users(known: list[Group], found: dict[str, Found]) -> str:
    """Return a table of the rows that users ask about."""
    lines = ["| what | against | ratio | `tests.bench --rows` |", "|---|---|---:|---|"]
    names = {row.key: group.name for group in known for row in group.rows}
    for key, cells in SHOWN.items():
        if (values := found[key].values) is not None:
            lines.append(f"| {' | '.join(cells)} | {values[1]:.3g} | `{names[key]}` |")
    return "\n".join(lines)


DATED = re.compile(r"([\w-]+) \(([\d.]+)\)")  # a group and its load


def dates(known: list[Group], results: Path, page: Path) -> list[str]:
    """Return a line per date: the groups that were measured then, each with the load at the end."""
    lines = page.read_text().splitlines() if page.exists() else []
    earlier = {
        name: (line[2:12], load) for line in lines if line.startswith("- 20") for name, load in DATED.findall(line)
    }
    by_date: dict[str, list[str]] = {}
    for group in known:
        path, found = results / f"{group.name}.json", earlier.get(group.name)
        if path.exists():
            content = json.loads(path.read_text())
            found = content["date"], f"{content['hardware']['load_average']:.1f}"
        if found:
            by_date.setdefault(found[0], []).append(f"{group.name} ({found[1]})")
    return [f"- {date}: {', '.join(groups)}" for date, groups in sorted(by_date.items())]


def write(known: list[Group], found: dict[str, Found], results: Path, docs: Path) -> None:
    parts = [
        HEAD.format(shown=for_users(known, found)),
        table(known, found),
        "\n\n## Dates\n\n",
        "\n".join(dates(known, results, docs / "speed.md")),
        "\n",
    ]
    with atomic.replacing(docs / "speed.md") as file:
        file.write("".join(parts))


if __name__ == "__main__":
    sys.exit(main())
