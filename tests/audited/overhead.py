"""What the audit's recorder costs in a step: python -m tests.audited.overhead. Times of the processor, of one thread.

Two processes train in turn, one of them recorded: what else the machine does falls on both.
"""

import itertools
import json
import os
import runpy
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

RECORDER = str(Path(__file__).resolve().parents[2] / "hvdtrain/audit/boot/sitecustomize.py")
MODELS = {"MLP, 200 parameters": (0, 16), "70,000 parameters": (1, 256), "12 layers, 790,000 parameters": (12, 256)}
STEPS, TURNS, PAIRS = 20, 10, 7


def train(layers: int, width: int, turn: int, over: int, turns: int = TURNS) -> float:
    """Return the milliseconds of a step. layers: between the first and the last; turn, over: descriptors that tell of it."""
    model = nn.Sequential(nn.Linear(8, width), *[nn.Linear(width, width) for _ in range(layers)], nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y, times = torch.randn(64, 8), torch.zeros(64, dtype=torch.long), []
    while len(times) <= turns and os.read(turn, 1):
        began = time.process_time()
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        times.append(time.process_time() - began)
        os.write(over, b"x")
    return 1000 * statistics.mean(times[1:]) / STEPS


def start(recorded: str, folder: str, *model: int) -> None:
    """Train in a process of its own, forked after the imports. It writes into a file how long a step took."""
    if not os.fork():
        if recorded:
            os.mkdir(out := f"{folder}/out")  # as programs do at their start, or with their first checkpoint
            os.environ["HVDTRAIN_AUDIT"] = json.dumps(dict(log=f"{folder}/log", out=out, whole=recorded, kill=None))
            runpy.run_path(RECORDER)
        Path(folder, f"step-{recorded}").write_text(str(train(*model)))
        os._exit(0)


torch.set_num_threads(1)
train(0, 1, os.open("/dev/zero", os.O_RDONLY), os.open("/dev/null", os.O_WRONLY), 1)  # a first step imports much
for (name, model), read in itertools.product(MODELS.items(), ("weights", "state")):  # of the first run, of the second
    times = []
    for _ in range(PAIRS):
        with tempfile.TemporaryDirectory() as folder:
            (first, end_of_second), (second, end_of_first) = os.pipe(), os.pipe()
            start("", folder, *model, first, end_of_first)
            start(read, folder, *model, second, end_of_second)
            os.write(end_of_second, b"x")
            os.wait(), os.wait()
            times.append([float(Path(folder, f"step-{what}").read_text()) for what in ("", read)])
    without, with_it = (statistics.median(column) for column in zip(*times, strict=True))
    ratios = sorted(b / a for a, b in times)
    spread = f"{statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"{name}, {read}: {without:.2f} ms, recorded {with_it:.2f} ms: {spread}", flush=True)
