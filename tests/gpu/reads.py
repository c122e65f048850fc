"""Run a program and count where it waits for the GPU: python -m tests.gpu.reads FILE MODULE FLAGS.

torch warns of operations for which the host waits. They are counted by the innermost line of hvdtrain that led to them.
"""

import json
import runpy
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

SYNCHRONIZES = "synchronizing CUDA operation"  # c10/cuda/CUDAFunctions.cpp, warn_or_error_on_sync


def count_reads(module: str, flags: list[str], result: Path) -> None:
    """Run `module` as a program, and write the counts to `result`, however it ends."""
    lines: Counter[str] = Counter()
    show = warnings.showwarning

    def count(message: Warning | str, *about: Any, **more: Any) -> None:
        if SYNCHRONIZES not in str(message):
            show(message, *about, **more)
            return
        frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
        where = ([frame for frame in frames if "hvdtrain" in Path(frame.filename).parts] or frames)[-1]
        lines[f"{'/'.join(Path(where.filename).parts[-2:])}:{where.lineno} {where.line}"] += 1

    warnings.simplefilter("always")
    warnings.showwarning = count
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    sys.argv = [module, *flags]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        result.write_text(json.dumps(lines))


if __name__ == "__main__":
    count_reads(sys.argv[2], sys.argv[3:], Path(sys.argv[1]))
