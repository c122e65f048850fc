"""What a set-up that is complete has to be able to do. Runs in the cell's own environment; prints a line of JSON.

python -m tests.matrix.examine --mpi wheel:4.1.8
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, TORCHRUN, events, launch, summary

# Without batch norm, which sees each rank's own samples: one loss curve on every engine.
TRAIN = "-m hvdtrain.mnist --dataset digits --model convnet-nonorm --batch-size 32 --epochs 1 --log-steps 1 --threads 1"
TRAIN += " --no-progress"
LANGUAGE_MODEL = "-m hvdtrain.lm --text README.md --layers 1 --heads 2 --width 32 --context 32 --steps 20 --log-steps 1"
LANGUAGE_MODEL += " --threads 1 --no-progress"


def check(found: dict[str, str], name: str, what: Callable[[], None]) -> None:
    """Run `what`; what it raises is the outcome."""
    try:
        what()
        found[name] = "ok"
    except Exception as error:
        found[name] = (str(error) or type(error).__name__).splitlines()[0][:200]


def losses(start: str, directory: Path, flags: str = "", train: str = TRAIN) -> list[float]:
    done = launch(f"{start} {train} {flags} --output-dir {directory}", timeout=300)
    assert done.code == 0, f"exit code {done.code}: {done.stderr.strip().splitlines()[-1:]}"
    assert summary(directory)["world_size"] == 2, f"{summary(directory)['world_size']} ranks"
    return [line["loss"] for line in events(directory, "train")]


def require_close(one: list[float], other: list[float]) -> None:
    assert len(one) == len(other) > 10, f"{len(one)} and {len(other)} steps"
    worst = max(abs(a - b) / b for a, b in zip(one, other, strict=True))
    assert worst < 2e-3, f"losses differ by {worst:.1e} of the value"


def attacked(launcher: str) -> None:
    """Kill a rank somewhere and start again, twice: the same bits as undisturbed."""
    words = ["--attacks", "2", "--damages", "0", "--schedule", "", "--launchers", launcher, "--seed", "7"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.run", *words], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (done.stdout + done.stderr).strip().splitlines()[-1]


def tuned(start: str) -> None:
    done = launch(f"{start} {PYTHON} -m hvdtrain.tuned tests/foreign/mnist.py --samples 600", timeout=300)
    assert done.code == 0, f"exit code {done.code}: {done.stderr.strip().splitlines()[-1:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.matrix.examine", description=__doc__.split("\n")[0])
    parser.add_argument("--mpi", required=True, help="as for launch/setup")
    flags = parser.parse_args()
    launchers = LAUNCHERS | ({"mpirun": "mpirun -np {ranks}"} if flags.mpi == "mpich" else {})
    able = [name for name in launchers if flags.mpi != "none" or name in ("gloo", "starter")]
    struck = "gloo" if flags.mpi == "mpich" else able[0]  # attacks are started with Open MPI's options
    found: dict[str, str] = {}
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="hvd") as folder:

        def curve(name: str, start: str, words: str = "") -> None:
            curves[name] = losses(start, Path(folder) / name, words)
            require_close(curves[name], next(iter(curves.values())))

        for name in able:
            start = launchers[name].format(ranks=2)
            check(found, name, lambda name=name, start=start: curve(name, f"{start} {PYTHON}"))
        check(found, "torchrun, ddp", lambda: curve("ddp", TORCHRUN.format(ranks=2), "--engine ddp"))

        def language_model() -> None:
            start = f"{launchers[able[0]].format(ranks=2)} {PYTHON}"
            ours = losses(start, Path(folder) / "lm", train=LANGUAGE_MODEL)
            ddp = losses(TORCHRUN.format(ranks=2), Path(folder) / "lm-ddp", "--engine ddp", LANGUAGE_MODEL)
            require_close(ours, ddp)

        check(found, "language model", language_model)
    check(found, "killed and resumed", lambda: attacked(struck))
    check(found, "tuned", lambda: tuned(launchers[able[0]].format(ranks=2)))
    print(json.dumps({"checks": found, "python": platform.python_version(), "torch": torch.__version__}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
