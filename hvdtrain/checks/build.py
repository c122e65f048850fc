"""Python, torch, Horovod and MPI: their versions, and whether they fit this machine."""

import contextlib
import platform
from importlib import metadata

import torch

from hvdtrain.checks.findings import Findings, Here


def check_build(findings: Findings, here: Here) -> None:
    """Check torch and Horovod, and note the versions that must be the same on every rank."""
    versions = here.versions
    versions |= {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    if here.flags.engine != "horovod":
        findings.ok(f"torch {versions['torch']}, Python {versions['python']}")
        return
    try:
        import horovod.torch as hvd
    except ImportError as error:
        do = "make setup, or launch/build_horovod.py"
        findings.problem(f"Horovod cannot be imported: {error}", "--engine horovod needs it", do)
        return
    built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": bool(hvd.nccl_built())}
    versions |= {"horovod": metadata.version("horovod"), "built with": ", ".join(name for name in built if built[name])}
    if built["MPI"]:
        with contextlib.suppress(ImportError, RuntimeError):
            import mpi4py

            mpi4py.rc.initialize = False
            from mpi4py import MPI

            versions["mpi"] = MPI.Get_library_version().split(",")[0].splitlines()[0]
    findings.ok(f"torch {versions['torch']}, Horovod {versions['horovod']} with {versions['built with']}")
