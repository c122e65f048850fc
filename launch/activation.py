"""Controls `source .venv/bin/activate`: only a complete environment can be activated, and root may start mpirun in it."""

from __future__ import annotations

from pathlib import Path

# Open MPI refuses root unless two variables allow it. Users in containers are often root. Set for this environment only.
_ALLOW = """
# Set by hvdtrain (launch/activation.py).
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
    if _ALLOW not in text:
        path.write_text(text.replace(_DEACTIVATE, _DEACTIVATE + _FORBID, 1) + _ALLOW)
