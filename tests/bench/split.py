"""`hvdtrain.mnist`, with the seconds of each part of its steps counted on rank 0. The last line printed is JSON.

horovodrun -np 2 python tests/bench/split.py --data-dir DIR --no-progress      milliseconds per step, by part
mpirun -np 2 python tests/bench/split.py --model convnet --checkpoint-steps 50 --output-dir OUT      also checkpoints

All but "forward" and "backward" is what a step costs whatever the network: "rest" is Python, clock and the order of samples.
The first steps are left out. A part that calls another one counts it as its own.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain import mnist
from hvdtrain.checkpoint.saving import Checkpoints
from hvdtrain.engines.base import Engine
from hvdtrain.engines.horovod import HorovodEngine
from hvdtrain.engines.launchers import announced
from hvdtrain.features import non_finite
from hvdtrain.features.replicas import Replicas
from hvdtrain.inputs.inputs import Tensors
from hvdtrain.launching.exit_codes import run_command
from hvdtrain.loop.run import Run
from hvdtrain.loop.stopping import Stopping
from hvdtrain.models.convnet import ConvNet, CosineNet

FIRST = 20  # steps left out
seconds: dict[str, float] = defaultdict(float)
state: dict[str, Any] = {"inside": "", "steps": 0, "began": 0.0, "whole": 0.0}


def counted(owner: Any, name: str, kind: str) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if state["inside"] or state["steps"] < FIRST:
            return real(*args, **kwargs)
        state["inside"], began = kind, time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            seconds[kind] += time.perf_counter() - began
            state["inside"] = ""

    setattr(owner, name, wrapped)


def count_steps() -> None:
    finish = Run._finish_step

    def finished(self: Run, *args: Any) -> None:
        finish(self, *args)
        state["steps"] += 1
        if state["steps"] == FIRST:
            state["began"] = time.perf_counter()
        state["whole"] = time.perf_counter() - state["began"]

    Run._finish_step = finished  # type: ignore[method-assign]


counted(Tensors, "load", "gather")
counted(mnist, "scaled_digits", "gather")
for net in (ConvNet, CosineNet):
    counted(net, "__call__", "forward")
counted(mnist.F, "cross_entropy", "forward")
counted(torch.Tensor, "backward", "backward")
counted(HorovodEngine, "synchronize", "all-reduce")
counted(torch.amp.GradScaler, "step", "optimizer")
counted(torch.optim.Optimizer, "zero_grad", "optimizer")
counted(non_finite, "gradients_are_finite", "guards")
counted(Stopping, "decide", "guards")
counted(Replicas, "compare", "guards")
counted(Checkpoints, "save", "checkpoints")
counted(Engine, "average_", "evaluation")
count_steps()
sys.argv[0] = "hvdtrain/mnist.py"


def main() -> int:
    evaluating = Run.evaluating

    def ended(self: Run, *args: Any, **kwargs: Any) -> Any:
        state.setdefault("training", dict(seconds))  # one epoch: what evaluation calls does not count
        return evaluating(self, *args, **kwargs)

    Run.evaluating = ended  # type: ignore[method-assign]
    code = mnist.main()
    if announced().rank == 0:
        steps, found = state["steps"] - FIRST, state["training"]
        found["rest"] = state["whole"] - sum(found.values())
        split = {kind: round(1000 * value / steps, 3) for kind, value in found.items()}
        print(json.dumps({"steps": steps, "step": round(1000 * state["whole"] / steps, 3), **split}), flush=True)
    return code


run_command(main)
