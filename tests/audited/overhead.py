"""What the audit's recorder costs in a step: python -m tests.audited.overhead. Times of the processor, of one thread."""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BOOT = Path(__file__).resolve().parents[2] / "hvdtrain/audit/boot"
MODELS = {
    "MLP, 200 parameters": "nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)",
    "MLP, 70,000 parameters": "nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)",
    "12 layers, 790,000 parameters": "nn.Linear(8, 256), *[nn.Linear(256, 256) for _ in range(12)], nn.Linear(256, 2)",
}
PROGRAM = """
import sys, time, torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential({model})
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(64, 8), torch.zeros(64, dtype=torch.long)
for step in range({steps}):
    if step == {steps} // 10:
        began = time.process_time()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print((time.process_time() - began) / ({steps} * 0.9))
"""


def milliseconds(model: str, recorded: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        order = f'{{"log": "{folder}/log", "out": "{folder}", "whole": true, "kill": null}}'
        env = {**os.environ, **({"PYTHONPATH": str(BOOT), "HVDTRAIN_AUDIT": order} if recorded else {})}
        line = [sys.executable, "-c", PROGRAM.format(model=model, steps=500)]
        return 1000 * float(subprocess.run(line, env=env, capture_output=True, text=True, check=True).stdout)


for name, model in MODELS.items():
    times = [(milliseconds(model, False), milliseconds(model, True)) for _ in range(5)]
    without, recorded = (statistics.median(column) for column in zip(*times, strict=True))
    ratios = sorted(b / a for a, b in times)
    spread = f"{statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"{name}: {without:.2f} ms, recorded {recorded:.2f} ms: {spread}")
