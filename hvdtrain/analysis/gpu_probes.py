"""Small programs that hvdtrain.gpu_day starts, each in a process of its own, because each starts CUDA.

python -m hvdtrain.analysis.gpu_probes facts FILE                   what torch and Horovod were built for, and see
python -m hvdtrain.analysis.gpu_probes reads FILE MODULE FLAGS      run MODULE, and count where it waits for the GPU
"""

import json
import platform
import runpy
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

SYNCHRONIZES = "synchronizing CUDA operation"  # c10/cuda/CUDAFunctions.cpp, warn_or_error_on_sync


def facts() -> dict[str, Any]:
    """Return the builds and the GPUs that torch sees."""
    found: dict[str, Any] = dict(python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda)
    found |= dict(gpus=[], architectures=torch.cuda.get_arch_list())
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            found["gpus"].append(dict(name=about.name, capability=[about.major, about.minor]))
    try:
        import horovod
        import horovod.torch as hvd
    except ImportError as error:
        return found | dict(horovod=None, horovod_error=str(error))
    built = dict(MPI=hvd.mpi_built(), Gloo=hvd.gloo_built(), NCCL=bool(hvd.nccl_built()), CUDA=bool(hvd.cuda_built()))
    return found | dict(horovod=horovod.__version__, built=[name for name in built if built[name]])


def count_reads(module: str, flags: list[str], result: Path) -> None:
    """Run `module` as a program, and write to `result`, however it ends, where it waited for the GPU, and how often.

    torch warns of such operations. They are counted by the innermost line of hvdtrain that led to them.
    """
    lines: Counter[str] = Counter()
    show = warnings.showwarning

    def count(message: Warning | str, *about: Any, **more: Any) -> None:
        if SYNCHRONIZES not in str(message):
            show(message, *about, **more)
            return
        frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
        where = ([frame for frame in frames if "hvdtrain" in Path(frame.filename).parts] or frames)[-1]
        path = Path(where.filename)
        lines[f"{path.parent.name}/{path.name}:{where.lineno} {where.line}"] += 1

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
    kind, place, *rest = sys.argv[1:]
    if kind == "facts":
        Path(place).write_text(json.dumps(facts()))
    else:
        count_reads(rest[0], rest[1:], Path(place))
