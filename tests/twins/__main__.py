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
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.launchers import LAUNCHERS, ROOT, environment
from tests.twins.catalogue import catalogue
from tests.twins.page import PAGE, Verdicts, page, worst
from tests.twins.twin import SKIPPED, Verdict

WAYS = [(engine, ranks) for engine in ("horovod", "ddp") for ranks in (1, 2, 3)]
AT_ONCE = 130  # twins in one job


def command(engine: str, ranks: int, directory: str) -> list[str]:
    """All ranks are forked from one import."""
    return [*LAUNCHERS["starter"].format(ranks=ranks).split(), "-m", "tests.twins.ranks", engine, directory]


def end(directory: Path, job: "subprocess.Popen[bytes]") -> None:
    """Kill the ranks, and wait for their launcher."""
    for path in directory.glob("pid-*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.name.removeprefix("pid-")), signal.SIGKILL)
    try:
        job.wait(20)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def run_once(engine: str, ranks: int, names: list[str]) -> Verdicts:
    """Start a job for these twins, and return the verdicts until it ended."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "names").write_text("\n".join(names))
        with (directory / "log").open("w") as log:
            job = subprocess.Popen(
                command(engine, ranks, scratch), cwd=ROOT, stdout=log, stderr=log, env=environment(), start_new_session=True
            )  # fmt: skip
            while job.poll() is None:
                time.sleep(0.1)
                if (directory / "ended").exists() or any(path.stat().st_size for path in directory.glob("stack-*")):
                    time.sleep(0.2)  # until the stack is written
                    break
            end(directory, job)
        return what_became(directory, ranks, job.returncode)


def what_became(directory: Path, ranks: int, code: int) -> Verdicts:
    """Return the verdicts that the ranks have written, with one for the twin at which the job ended."""
    by_rank = [path.read_text().splitlines() for path in sorted(directory.glob("rank-*"))]
    entries = [[json.loads(line) for line in each if line.endswith("]")] for each in by_rank]
    verdicts: Verdicts = {}
    for name in dict.fromkeys(entry[0] for each in entries for entry in each):
        found = [Verdict(*entry[1:3]) for each in entries for entry in each if entry[0] == name and len(entry) > 1]
        if len(found) < ranks and all(verdict.kind in ("works", "differs") for verdict in found):
            stacks = [path.read_text() for path in sorted(directory.glob("stack-*"))]
            frames = [line.strip() for stack in stacks for line in stack.splitlines() if "/hvdtrain/" in line][:1]
            said = (directory / "log").read_text().strip().splitlines()[-3:]
            hung = any(stacks) or found
            verdicts[name] = Verdict("HANGS", "".join(frames)) if hung else Verdict("DIES", " | ".join(said)[:200])
        else:
            verdicts[name] = worst(found)
    return verdicts


def run(engine: str, ranks: int, names: list[str]) -> Iterator[Verdicts]:
    """Yield the verdicts, a job at a time. After a twin that hung or died, the rest is run in another job."""
    while names:
        more = run_once(engine, ranks, names[:AT_ONCE])
        if not more:
            words = " ".join(command(engine, ranks, "DIRECTORY"))
            raise SystemExit(f"{engine}, {ranks} ranks: nothing was run: {words}")
        yield more
        names = [name for name in names if name not in more]


def read_json(path: Path) -> dict[str, Verdicts]:
    found = json.loads(path.read_text())
    return {way: {name: Verdict(*verdict) for name, verdict in verdicts.items()} for way, verdicts in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", metavar="TEXT", default="", help="twins whose name contains this; joined by commas")
    parser.add_argument("--ways", metavar="WAYS", default="", help="such as horovod2,ddp3")
    parser.add_argument("--list", action="store_true", help="print the names, and what has no twin")
    how = "write the verdicts, and run none that is in it; with --table, read all"
    parser.add_argument("--json", type=Path, metavar="FILE", nargs="+", help=how)
    parser.add_argument("--table", action="store_true", help="write docs/evidence/twins.md of --json FILE")
    how = "print each verdict, not only those that are not as in torch"
    parser.add_argument("-v", "--verbose", action="store_true", help=how)
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
        for more in run(engine, ranks, [name for name in names if name not in verdicts]):
            verdicts |= more
            for name, verdict in more.items():
                if flags.verbose or verdict.kind not in ("works", "differs", "torch"):
                    print(f"{engine} {ranks}  {name}: {verdict.kind} {verdict.detail}", flush=True)
            if flags.json:
                flags.json[0].write_text(json.dumps(table, indent=0))
        kinds = dict(Counter(verdict.kind for verdict in verdicts.values()))
        print(engine, ranks, kinds, f"{time.monotonic() - began:.0f} s", flush=True)
    if not words and len(ways) == len(WAYS):
        PAGE.write_text(page(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
