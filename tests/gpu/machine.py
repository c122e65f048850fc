"""Where the tests and rates of tests/gpu run: how many GPUs, how ranks are started there, and what nvidia-smi says."""

import contextlib
import functools
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.launchers import LAUNCHERS, PYTHON
from tests.hidden_gpus import GIVEN, seeing

COUNT = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
# Files for what the tests saw; of several, all get the same.
SEEN = [Path(name) for name in os.environ.get("HVDTRAIN_GPU_SEEN", "").split(os.pathsep) if name]
RELEASE_SECONDS = 5.0  # for the driver to take back the memory of a process that has ended
ENGINES = {
    "horovod": f"{LAUNCHERS['horovodrun']} {PYTHON} -m",
    "ddp": f"{PYTHON} -m torch.distributed.run --standalone --nproc-per-node {{ranks}} -m",
    "serial": f"{PYTHON} -m",
}


@functools.cache
def gpus() -> int:
    """Return how many there are, asked in another process: pytest's own must not start CUDA."""
    words, own = [sys.executable, "-c", COUNT], seeing(dict(os.environ))
    done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=120)
    return int(done.stdout) if done.returncode == 0 else 0


def variables(ranks: int = 1) -> dict[str, str]:
    """Return the variables that show a launch the GPUs, shared by two ranks each where there are too few."""
    seen = GIVEN or {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus())))}
    return seen | ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if 0 < gpus() < ranks else {})


def command(engine: str, ranks: int, module: str, flags: str, device: str, out: Path | None = None) -> str:
    """Return the command line of `ranks` ranks of `module`."""
    where = f" --output-dir {out}" if out else ""
    start = f"{ENGINES[engine].format(ranks=ranks)} {module} --engine {engine}"
    return f"{start} {flags} --device {device}{where}"


def processes() -> set[int]:
    """Return the processes on GPUs. Some virtual machines list none."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        words = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        said = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
        return {int(line) for line in said.split() if line.isdecimal()}
    return set()


def left_on_gpus(pids: set[int]) -> set[int]:
    """Return those of `pids` that are still on a GPU after RELEASE_SECONDS."""
    until = time.monotonic() + RELEASE_SECONDS
    while (left := pids & processes()) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def note(text: str) -> None:
    """Add a line to each file of SEEN."""
    for path in SEEN:
        with path.open("a") as file:
            file.write(f"{text}\n")


def noted() -> list[str]:
    """Return the lines of the first file of SEEN."""
    return SEEN[0].read_text().splitlines() if SEEN and SEEN[0].exists() else []
