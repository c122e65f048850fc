"""What a user waits for: from Enter to the first line and to the end of the first step, and from Ctrl-C to the prompt.

hvdtrain.mnist beside a bare script of Horovod, of DDP or of torch alone, under the same launcher.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

from hvdtrain.analysis.launching import program
from tests.bench.measurements import SECONDS, Left, Measure, Setting, mpirun, once, users_environment

BARE = """
import sys, torch
from torch import nn
torch.set_num_threads(1)
rank, size = 0, 1
if sys.argv[1] == "torchrun":
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
elif sys.argv[1] != "alone":
    import horovod.torch as hvd
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
if rank == 0:
    print("first line:", size, "ranks", flush=True)
model = nn.Sequential(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
images, labels = torch.rand(128, 1, 28, 28), torch.zeros(128, dtype=torch.long)
model(images)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
if sys.argv[1] == "torchrun":
    model = nn.parallel.DistributedDataParallel(model)
elif sys.argv[1] != "alone":
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
step = 0
while True:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    step += 1
    if step == 1 and rank == 0:
        print("first step", flush=True)
"""
FIRST_LINE = re.compile(r"first line: |\d ranks? on")  # of the bare script, or of hvdtrain
WAITS = ("first-line", "first-step", "ctrl-c")


def start(launcher: str) -> list[str]:
    """Return what is typed before the name of a script or `-m` and a module."""
    return {
        "alone": [sys.executable],
        "mpirun": mpirun(2),
        "horovodrun": [program("horovodrun"), "-np", "2", sys.executable],
        "torchrun": [program("torchrun"), "--nproc-per-node", "2"],
    }[launcher]


def waits(launcher: str) -> Measure:
    """Seconds of hvdtrain.mnist over those of the bare script."""

    def measure(setting: Setting) -> dict[str, float]:
        seconds = once(("ours", "bare"), lambda side: dict(zip(WAITS, timed(setting, launcher, side), strict=True)))
        shown = {side: {name: round(value, 2) for name, value in each.items()} for side, each in seconds.items()}
        print(f"    {launcher}: {shown}", flush=True)
        return {f"{name}-{launcher}": seconds["ours"][name] / seconds["bare"][name] for name in WAITS}

    return measure


def command(setting: Setting) -> dict[str, float]:
    """Seconds from Enter to the first line: `hvdtrain mnist` over `python -m hvdtrain.mnist`."""
    seconds = once(("command", "module"), lambda side: timed(setting, "alone", side)[0])
    print(f"    { ({side: round(value, 2) for side, value in seconds.items()}) }", flush=True)
    return {"command": seconds["command"] / seconds["module"]}


def timed(setting: Setting, launcher: str, side: str) -> tuple[float, float, float]:
    """Start one side, press Ctrl-C after its first step; return the seconds of each of WAITS."""
    out, script = setting.scratch / side, setting.scratch / "bare.py"
    script.write_text(BARE)
    flags = ["--dataset", "digits", "--epochs", "9999", "--log-steps", "1", "--no-progress", "--output-dir", str(out)]
    words = {"bare": [*start(launcher), str(script), launcher], "command": [program("hvdtrain"), "mnist", *flags]}
    began = time.time()
    process = subprocess.Popen(
        words.get(side, [*start(launcher), "-m", "hvdtrain.mnist", *flags]),
        start_new_session=True, text=True, env=users_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines: dict[str, float] = {}  # the time at which each came
    reader = Thread(target=lambda: [lines.setdefault(line, time.time()) for line in process.stdout or ()])
    reader.start()
    try:
        while (stepped := first_step(out, lines)) is None:
            if process.poll() is not None or time.time() > began + SECONDS:
                raise Left(f"{launcher}, {side}: no first step: {' '.join(' '.join(lines).split())[-300:]}")
            time.sleep(0.01)
        pressed = time.time()
        os.killpg(process.pid, signal.SIGINT)
        process.wait(SECONDS)
        ended = time.time()
    finally:
        if process.poll() is None:
            process.kill()
        reader.join()
    first_line = next(when for line, when in lines.items() if FIRST_LINE.search(line))
    return first_line - began, stepped - began, ended - pressed


def first_step(out: Path, lines: dict[str, float]) -> float | None:
    """Return the time at which the first step had ended, or None before that."""
    for line, when in list(lines.items()):
        if line.rstrip().endswith("first step"):
            return when
    if (out / "metrics.jsonl").exists():
        for line in (out / "metrics.jsonl").read_text().splitlines(keepends=True):
            if line.endswith("\n") and (event := json.loads(line))["event"] == "train":
                return float(event["time"])
    return None
