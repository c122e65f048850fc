"""Which engine trains where nobody says: `--engine auto`. Does not import torch."""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from hvdtrain.engines.launchers import announced, in_batch_shell

OF_DDP = ("torchrun", "Kubeflow")  # launchers whose ranks Horovod cannot see
NO_HOROVOD = "Horovod is not installed here; `make setup` builds it"


class Choice(NamedTuple):
    """An engine, and why it was chosen: a clause that follows its name."""

    engine: str
    reason: str


def choose(
    environment: Mapping[str, str] = os.environ,
    *,
    supports: Callable[[str], bool] = lambda engine: True,
    installed: Callable[[], bool] | None = None,
) -> Choice:
    """Return the engine for this process, the same on every rank of a job. Raises UserError as `announced` does.

    supports: whether an engine takes the flags given. installed: whether Horovod is (default: looks for it).
    """
    launcher, size = (place := announced(environment)).launcher, place.size
    if launcher in OF_DDP:
        return Choice("ddp", f"{launcher} started the ranks")
    there = (installed or horovod_is_installed)()
    if launcher == "none" or (size == 1 and not there):
        if supports("serial"):
            tasks = environment.get("SLURM_NTASKS", "1") if in_batch_shell(environment) else "1"
            rest = f", not the {tasks} tasks of this Slurm job: srun or mpirun starts them" if tasks != "1" else ""
            return Choice("serial", f"one process{rest}")
        return Choice("horovod", "for these flags") if there else Choice("ddp", f"for these flags; {NO_HOROVOD}")
    return Choice("horovod", f"{launcher} started the ranks") if there else Choice("ddp", NO_HOROVOD)


def horovod_is_installed() -> bool:
    """Return whether there is a Horovod with its PyTorch extension. It is not imported.

    `pip install horovod` without a compiler leaves one without it.
    """
    if "horovod.torch" in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec("horovod")
    except (ImportError, ValueError):  # an import hook that forbids it; a stand-in without a specification
        return False
    places = (spec.submodule_search_locations if spec else None) or []
    return any(any(Path(place, "torch").glob("mpi_lib*.so")) for place in places)
