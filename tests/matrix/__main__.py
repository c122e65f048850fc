"""Set up and train with many combinations of Python, PyTorch and MPI, each in an environment of its own, and keep a table.

make matrix                                                            each pair of values at least once
make matrix MATRIX="--torches 2.15.0 --mpis wheel:5.0.11,none"         some of them
make matrix MATRIX="--only 3.11/2.15.0/none"                           one cell, also if it was run before
make matrix MATRIX=--list                                              what would run

A cell is PYTHON/TORCH/MPI. It is set up by `launch/setup` in a clone of this checkout's last commit, and examined by
tests/matrix/examine.py. Cells whose result is in --results (JSON, one line each) are not run again,
so the command can be stopped and repeated, also by somebody else; the wheels that they build are kept in the usual cache.
With --write the table in docs/evidence/installing.md is made from the results. Hours on two cores; a cell takes 5 to 15
minutes and 6 GB, which are freed when it is done. mpich: Debian's packages mpich and libmpich-dev, also beside another MPI.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.commit import commit

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "matrix.jsonl"
PAGE = ROOT / "docs" / "evidence" / "installing.md"
BEGIN, END = "<!-- matrix: made by `make matrix MATRIX=--write` -->", "<!-- end of matrix -->"
PYTHONS, TORCHES = ("3.11", "3.12", "3.13"), ("2.15.0", "2.13.0", "2.9.1", "2.6.0", "2.3.1")
MPIS = ("wheel:4.1.8", "wheel:5.0.11", "system", "mpich", "none")
# The first torch with a wheel for a Python that is newer than the oldest torch above: PyTorch's releases.
FIRST_TORCH = {"3.13": (2, 5), "3.14": (2, 9)}
# Debian's have names of their own beside Open MPI's, as mpicxx.mpich; hydra's proxy is looked for beside mpirun.
MPICH = ("mpicc", "mpicxx", "mpiexec", "mpirun", "hydra_pmi_proxy")
SETUP_SECONDS, EXAMINE_SECONDS = 3600, 1800


class Cell(NamedTuple):
    python: str
    torch: str
    mpi: str  # as launch/setup --mpi has it; or mpich: the system's, where there is another one, too

    def __str__(self) -> str:
        return "/".join(self)


def every_pair(*values: Iterable[str], known: Iterable[str] = ()) -> list[Cell]:
    """Return few cells in which each value of one list meets each value of every other: greedy, the first values first.

    known: cells that have a result; those of these values come first. Pairs for which there is no torch are left out.
    """
    product = [cell for row in itertools.product(*values) if there_is(cell := Cell(*row))]
    missing = {pair for row in product for pair in pairs(row)}
    chosen = [row for row in product if str(row) in known]
    missing -= {pair for row in chosen for pair in pairs(row)}
    while missing:
        best = max(product, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def there_is(cell: Cell) -> bool:
    """Tell whether this torch was ever released for this Python."""
    return tuple(map(int, cell.torch.split(".")[:2])) >= FIRST_TORCH.get(cell.python, (0, 0))


def pairs(row: Cell) -> set[tuple[str, str]]:
    return set(itertools.combinations(row, 2))


def run(cell: Cell, results: Path, work: Path) -> dict:
    """Set the cell up, examine it, and append what was found to `results`. What fails is a result, not an error."""
    interpreter = shutil.which(f"python{cell.python}")
    found: dict = {"cell": str(cell), "date": time.strftime("%Y-%m-%d"), "commit": commit()}
    began = time.monotonic()
    if interpreter is None:
        found["skipped"] = f"no python{cell.python} on PATH"
    else:
        with tempfile.TemporaryDirectory(dir=work, prefix="cell-") as folder:
            clone = Path(folder) / "clone"
            subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
            mpi = "system" if cell.mpi == "mpich" else cell.mpi
            first = mpich(Path(folder) / "bin") if cell.mpi == "mpich" else ""
            setup = [interpreter, "launch/setup", "--mpi", mpi, "--cpu", "--torch", cell.torch]
            code, said = call(setup, clone, SETUP_SECONDS, first)
            found |= {"setup_seconds": round(time.monotonic() - began)}
            if code != 0:
                found["refused" if code == 2 else "failed"] = why(said)
            else:
                examine = [clone / ".venv" / "bin" / "python", "-m", "tests.matrix.examine", "--mpi", cell.mpi]
                code, said = call(examine, clone, EXAMINE_SECONDS, first)
                lines = [line for line in said.splitlines() if line.startswith('{"checks": ')]
                found |= json.loads(lines[-1]) if code == 0 and lines else {"failed": why(said)}
            if "failed" in found:
                (work / f"matrix-{str(cell).replace('/', '-')}.log").write_text(said)
    found["seconds"] = round(time.monotonic() - began)
    with results.open("a") as file:
        file.write(json.dumps(found) + "\n")
    return found


def mpich(directory: Path) -> str:
    """Return `directory`, in which MPICH's commands have their ordinary names."""
    directory.mkdir()
    for name in MPICH:
        if (found := shutil.which(f"{name}.mpich") or shutil.which(name)) is not None:
            (directory / name).symlink_to(found)
    return str(directory)


def call(words: list, directory: Path, seconds: float, first: str = "") -> tuple[int, str]:
    """Return the exit code and the output of a command, with nothing of this environment in its own. first: on PATH."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "OPAL_PREFIX")}
    parts = [first, *(part for part in env["PATH"].split(os.pathsep) if ".venv" not in part)]
    env["PATH"] = os.pathsep.join(filter(None, parts))
    try:
        done = subprocess.run(
            words, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"not finished after {seconds:.0f} s"
    return done.returncode, done.stdout


def why(text: str) -> str:
    """Return the last line that names an error, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b", line, re.I)]
    return (errors or lines or ["no output"])[-1][:300]


def read(results: Path) -> dict[str, dict]:
    """Return the last result of each cell."""
    if not results.exists():
        return {}
    return {found["cell"]: found for found in map(json.loads, results.read_text().splitlines())}


def table(found: dict[str, dict]) -> str:
    """Return the table of docs/evidence/installing.md: by torch and Python, each MPI and what failed with it."""
    cells = {cell: tuple(cell.split("/")) for cell in found}
    pythons = sorted({python for python, _, _ in cells.values()}, key=numbers)
    lines = [f"| PyTorch | {' | '.join(f'Python {python}' for python in pythons)} |", "|---" * (len(pythons) + 1) + "|"]
    for torch in sorted({torch for _, torch, _ in cells.values()}, key=numbers):
        tried = [[f"{mpi}{outcome(found[cell])}" for cell, (python, its_torch, mpi) in sorted(cells.items())
                  if (python, its_torch) == (column, torch)] for column in pythons]  # fmt: skip
        lines.append(f"| {torch} | {' | '.join('; '.join(each) for each in tried)} |")
    return "\n".join(lines)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def outcome(row: dict) -> str:
    for kind in ("failed", "refused", "skipped"):
        if said := row.get(kind):
            return f": {kind}: {said}"
    return f": failed: {', '.join(bad)}" if (bad := bad_checks(row)) else ""


def bad_checks(row: dict) -> list[str]:
    return [name for name, outcome in row.get("checks", {}).items() if outcome != "ok"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pythons", default=",".join(PYTHONS), help="default: %(default)s")
    parser.add_argument("--torches", default=",".join(TORCHES), help="default: %(default)s")
    parser.add_argument("--mpis", default=",".join(MPIS), help="default: %(default)s")
    parser.add_argument("--only", metavar="CELL", help="PYTHON/TORCH/MPI")
    parser.add_argument("--list", action="store_true", help="print the cells and which have a result")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: matrix.jsonl in the checkout")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()), help="where clones are made, and logs of what failed"
    )
    parser.add_argument("--write", action="store_true", help="also write the table into docs/evidence/installing.md")
    flags = parser.parse_args()
    if flags.only and flags.only.count("/") != 2:
        parser.error(f"--only {flags.only}: write PYTHON/TORCH/MPI, such as 3.11/2.15.0/none")
    found = read(flags.results)
    cells = every_pair(*(text.split(",") for text in (flags.pythons, flags.torches, flags.mpis)), known=found)
    cells = [Cell(*flags.only.split("/"))] if flags.only else cells
    for number, cell in enumerate(cells, 1):
        known = str(cell) in found and not flags.only
        if flags.list or known:
            print(f"{number}/{len(cells)} {cell}: {'has a result' if known else 'to be run'}")
            continue
        print(f"{number}/{len(cells)} {cell} ...", flush=True)
        found[str(cell)] = run(cell, flags.results, flags.work)
    text = table(found)
    print(text)
    if flags.write:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    return int(any("failed" in row or bad_checks(row) for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
