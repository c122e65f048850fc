"""Set up and test with other versions of Python, PyTorch and MPI, each in a clone of this checkout's last commit.

make matrix                                                  each cell below: 5 to 15 minutes and 6 GB, freed when it is done
make matrix MATRIX="--only 3.11/2.15.0/none"                 one cell, also one that is not below
make matrix MATRIX=--list

A cell is PYTHON/TORCH/MPI. MPI is as for launch/setup --mpi; `mpich`: Debian's packages mpich and libmpich-dev, also beside
another MPI. A line is printed for each; docs/evidence/installing.md has them as a table.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Each pair of a Python, a torch, and an MPI at least once. The first torch for Python 3.13 is 2.5.
MPIS = {
    "2.15.0": {"3.11": "mpich wheel:4.1.8", "3.12": "wheel:5.0.11", "3.13": "none system"},
    "2.13.0": {"3.11": "none system wheel:5.0.11", "3.12": "wheel:4.1.8", "3.13": "mpich"},
    "2.9.1": {"3.11": "none system wheel:5.0.11", "3.12": "mpich", "3.13": "wheel:4.1.8"},
    "2.6.0": {"3.11": "mpich none wheel:4.1.8", "3.12": "system", "3.13": "wheel:5.0.11"},
    "2.3.1": {"3.11": "mpich system wheel:4.1.8 wheel:5.0.11", "3.12": "none"},
}
CELLS = [f"{python}/{torch}/{mpi}" for torch, of in MPIS.items() for python, mpis in of.items() for mpi in mpis.split()]
# One loss curve on all engines, a killed run that resumes, and a Horovod script under hvdtrain.tuned: under every launcher.
TESTS = ["tests/e2e/engines/test_engines.py", "tests/e2e/training/test_resume.py", "tests/e2e/commands/test_tuned.py"]
# Debian's have names of their own beside Open MPI's, as mpicxx.mpich; hydra's proxy is looked for beside mpirun.
MPICH = ("mpicc", "mpicxx", "mpiexec", "mpirun", "hydra_pmi_proxy")


def call(words: list[str], clone: Path, mpi: str, seconds: float) -> tuple[int, str]:
    """Return the exit code and the last line that names an error, with nothing of this environment in the command's."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "OPAL_PREFIX")}
    path = [part for part in env["PATH"].split(os.pathsep) if ".venv" not in part]
    if mpi == "mpich":
        env["HVDTRAIN_TEST_MPIRUN"] = "mpirun"  # it has no --oversubscribe
        path.insert(0, str(clone.parent / "bin"))
    env["PATH"] = os.pathsep.join(path)
    try:
        done = subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return 124, f"not finished after {seconds:.0f} s"
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return done.returncode, ([line for line in lines if re.search(r"\berror\b|^FAILED", line, re.I)] or lines)[-1][:300]


def outcome(cell: str) -> str:
    python, torch, mpi = cell.split("/")
    if (interpreter := shutil.which(f"python{python}")) is None:
        return f"skipped: no python{python} on PATH"
    with tempfile.TemporaryDirectory(prefix="cell-") as folder:
        clone, first = Path(folder, "clone"), Path(folder, "bin")
        first.mkdir()
        for name in MPICH if mpi == "mpich" else ():
            if (found := shutil.which(f"{name}.mpich") or shutil.which(name)) is not None:
                (first / name).symlink_to(found)
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        chosen = "system" if mpi == "mpich" else mpi
        setup = [interpreter, "launch/setup", "--mpi", chosen, "--cpu", "--torch", torch]
        code, said = call(setup, clone, mpi, 3600)
        if code:
            return f"{'refused' if code == 2 else 'failed'}: {said}"
        runs = [f"{clone}/.venv/bin/python", "-m", "pytest", "-q", "-m", "", *TESTS]
        runs += ["-k", "not mpirun and not horovodrun"] if mpi == "none" else []
        code, said = call(runs, clone, mpi, 3600)
        return f"failed: {said}" if code else "works"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="CELL", help="PYTHON/TORCH/MPI, joined by commas")
    parser.add_argument("--list", action="store_true", help="print the cells")
    flags = parser.parse_args()
    failed = False
    for cell in flags.only.split(",") if flags.only else CELLS:
        said = "to be run" if flags.list else outcome(cell)
        failed |= said.startswith("failed")
        print(f"{cell}: {said}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
