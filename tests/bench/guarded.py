"""`hvdtrain.mnist`, with the seconds that guards and checkpoints take from the training loop counted on rank 0.

mpirun -np 2 python tests/bench/guarded.py --checkpoint-steps 50 --output-dir OUT      the last line printed is JSON
"""

import json
import sys
import time
from collections import defaultdict

from hvdtrain import mnist
from hvdtrain.engines.launchers import announced
from hvdtrain.launching.exit_codes import run
from hvdtrain.training import step
from hvdtrain.training.guard import Guard
from hvdtrain.training.resume import Checkpoints

seconds: dict[str, float] = defaultdict(float)
inside = [""]  # the outermost of our calls; what it calls counts as its own


def counted(owner: type, name: str, kind: str) -> None:
    real = getattr(owner, name)

    def wrapped(*args, **kwargs):
        if inside[0]:
            return real(*args, **kwargs)
        inside[0], began = kind, time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            seconds[kind] += time.perf_counter() - began
            inside[0] = ""

    setattr(owner, name, wrapped)


counted(step, "finite", "guards")
for name in ("begin_step", "should_stop", "compare_replicas"):
    counted(Guard, name, "guards")
counted(Checkpoints, "save", "checkpoints")
sys.argv[0] = "hvdtrain/mnist.py"


def main() -> int:
    code = mnist.main()
    if announced().rank == 0:
        print(json.dumps(seconds), flush=True)
    return code


run(main)
