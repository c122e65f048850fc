"""Run a program as `python -m` or `python FILE` would, and kill rank 1 after its GOLDEN_KILL-th optimizer step, if set.

It uses nothing of hvdtrain: a hook of PyTorch counts the steps.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
kill_after = int(os.environ.get("GOLDEN_KILL") or 0)
steps = 0


def count(*_: object) -> None:
    global steps
    steps += 1
    if steps == kill_after:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if kill_after and next((os.environ[name] for name in VARIABLES if name in os.environ), "") == "1":
        register_optimizer_step_post_hook(count)
    sys.argv = sys.argv[1:]
    if sys.argv[0].endswith(".py"):
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
