"""What the audit's recorder costs in a step: python -m tests.audited.overhead. Times of the processor, of one thread."""

import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

BOOT = Path(__file__).resolve().parents[2] / "hvdtrain/audit/boot"
MODELS = {  # layers between the first and the last one, and their width
    "MLP, 200 parameters": (0, 16),
    "MLP, 70,000 parameters": (1, 256),
    "12 layers, 790,000 parameters": (12, 256),
}
STEPS, PAIRS = 200, 7


def train(layers: int, width: int) -> float:
    """Return the milliseconds of a step."""
    model = nn.Sequential(nn.Linear(8, width), *[nn.Linear(width, width) for _ in range(layers)], nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(64, 8), torch.zeros(64, dtype=torch.long)
    for step in range(STEPS + 20):
        if step == 20:
            began = time.process_time()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return 1000 * (time.process_time() - began) / STEPS


def milliseconds(layers: int, width: int, recorded: bool) -> float:
    """In a process of its own, which is forked after the imports."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        if not os.fork():
            if recorded:
                os.environ["HVDTRAIN_AUDIT"] = json.dumps(
                    {"log": f"{folder}/log", "out": folder, "whole": True, "kill": None}
                )
                sys.path.insert(0, str(BOOT))
                sys.modules.pop("sitecustomize", None)
                importlib.import_module("sitecustomize")  # the recorder
            os.write(writing, str(train(layers, width)).encode())
            os._exit(0)
        os.wait()
    os.close(writing)
    with os.fdopen(reading) as answer:
        return float(answer.read())


torch.set_num_threads(1)
train(0, 1)  # a first step imports much
for name, model in MODELS.items():
    times = [(milliseconds(*model, False), milliseconds(*model, True)) for _ in range(PAIRS)]
    without, recorded = (statistics.median(column) for column in zip(*times, strict=True))
    ratios = sorted(b / a for a, b in times)
    spread = f"{statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"{name}: {without:.2f} ms, recorded {recorded:.2f} ms: {spread}", flush=True)
