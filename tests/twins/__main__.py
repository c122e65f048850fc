"""See tests/twins/__init__.py."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, TORCHRUN, environment
from tests.twins.catalogue import catalogue
from tests.twins.page import PAGE, Verdicts, page, worst
from tests.twins.twin import SKIPPED, Verdict

WAYS = [(engine, ranks) for engine in ("horovod", "ddp") for ranks in (1, 2, 3)]
STALL, ALONE = 120.0, 15.0  # seconds without a verdict of any rank; without one of the others, after a rank's


def command(engine: str, ranks: int, directory: str) -> list[str]:
    start = (TORCHRUN if engine == "ddp" else LAUNCHERS["mpirun"]).format(ranks=ranks).split()
    return [*start, *([] if engine == "ddp" else PYTHON.split()), "-m", "tests.twins.ranks", engine, directory]


def read(directory: Path) -> list[dict[str, Verdict]]:
    """Return what each rank has written."""
    found = []
    for path in sorted(directory.glob("rank-*")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        found.append({name: Verdict(kind, detail) for name, kind, detail, _ in lines})
    return found


def run_once(engine: str, ranks: int, names: list[str]) -> Verdicts:
    """Start a job for these twins, and return the verdicts until it ended or one of them hung."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "names").write_text("\n".join(names))
        with (directory / "log").open("w") as log:
            job = subprocess.Popen(
                command(engine, ranks, scratch),
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )
            state: list[int] = []
            changed = time.monotonic()
            while job.poll() is None:
                time.sleep(0.2)
                lengths = [len(rank) for rank in read(directory)]
                if lengths != state:
                    state, changed = lengths, time.monotonic()
                uneven = len(set(lengths)) > 1 or (state and len(state) < ranks)
                if time.monotonic() - changed > (ALONE if uneven else STALL):
                    job.send_signal(signal.SIGTERM)
                    try:
                        job.wait(10)
                    except subprocess.TimeoutExpired:
                        job.kill()
                    break
            job.wait()
        for path in directory.glob("pid-*"):  # those that the launcher has left
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name.removeprefix("pid-")), signal.SIGKILL)
        by_rank = read(directory)
        verdicts = {
            name: worst([rank[name] for rank in by_rank if name in rank])
            for name in names
            if any(name in rank for rank in by_rank)
        }
        for name, verdict in verdicts.items():
            silent = ranks - sum(name in rank for rank in by_rank)
            if silent and verdict.kind in ("works", "differs"):
                verdicts[name] = Verdict("HANGS", f"{silent} of {ranks} ranks")
        if len(verdicts) < len(names) and job.returncode != 0 and all(len(rank) == len(verdicts) for rank in by_rank):
            lost = next(name for name in names if name not in verdicts)
            end = (directory / "log").read_text().strip().splitlines()[-3:]
            verdicts[lost] = Verdict("DIES", " | ".join(end)[:200])
        return verdicts


def run(engine: str, ranks: int, names: list[str]) -> Verdicts:
    """Return the verdict of each twin. After one that hung or died, the rest is run in another job."""
    verdicts: Verdicts = {}
    while left := [name for name in names if name not in verdicts]:
        more = run_once(engine, ranks, left)
        if not more:
            raise SystemExit(
                f"{engine}, {ranks} ranks: nothing was run: {' '.join(command(engine, ranks, 'DIRECTORY'))}"
            )
        verdicts |= more
    return verdicts


def read_json(path: Path) -> dict[str, Verdicts]:
    found = json.loads(path.read_text())
    return {way: {name: Verdict(*verdict) for name, verdict in verdicts.items()} for way, verdicts in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", metavar="TEXT", default="", help="twins whose name contains this; joined by commas")
    parser.add_argument("--ways", metavar="WAYS", default="", help="such as horovod2,ddp3")
    parser.add_argument("--list", action="store_true", help="print the names, and what has no twin")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        nargs="+",
        help="write the verdicts, and run none that is in it; with --table, read all",
    )
    parser.add_argument("--table", action="store_true", help="write docs/evidence/twins.md of --json FILE")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print each verdict, not only those that are not as in torch"
    )
    flags = parser.parse_args()
    words = [word for word in flags.only.split(",") if word]
    warnings.simplefilter("ignore")  # of torch, about what is deprecated
    names = [twin.name for twin in catalogue() if not words or any(word in twin.name for word in words)]
    if flags.table:
        known = [read_json(path) for path in flags.json]
        PAGE.write_text(page({way: verdicts for file in known for way, verdicts in file.items()}))
        return 0
    if flags.list:
        print(*names, *(f"no twin of {name}: {why}" for name, why in SKIPPED.items()), sep="\n")
        return 0
    ways = [way for way in WAYS if not flags.ways or f"{way[0]}{way[1]}" in flags.ways.split(",")]
    table = read_json(flags.json[0]) if flags.json and flags.json[0].exists() else {}
    for engine, ranks in ways:
        began = time.monotonic()
        verdicts = table.setdefault(f"{engine}{ranks}", {})
        verdicts |= run(engine, ranks, [name for name in names if name not in verdicts])
        for name in names:
            verdict = verdicts[name]
            if flags.verbose or verdict.kind not in ("works", "differs", "torch"):
                print(f"{engine} {ranks}  {name}: {verdict.kind} {verdict.detail}", flush=True)
        print(
            engine,
            ranks,
            dict(Counter(verdict.kind for verdict in verdicts.values())),
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        if flags.json:
            flags.json[0].write_text(json.dumps(table, indent=0))
    if not words and len(ways) == len(WAYS):
        PAGE.write_text(page(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
