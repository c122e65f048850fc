"""Explains a failed build: its first errors and the remedy."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

from steps import LIMITS, Remedies, last_lines, remedy_of

REMEDIES: Remedies = (
    *LIMITS,
    (
        r"Killed|cc1plus.*(out of memory|terminated)|virtual memory exhausted",
        "not enough memory: --jobs 1, or more of it",
    ),
    (r"Python\.h: No such file", "install Python's headers (python3-dev or python3-devel)"),
    (r"Could NOT find MPI", "this MPI has no working mpicxx: try --mpi wheel, or --mpi none"),
    (r"Could NOT find NCCL", "pip install the nvidia-nccl wheel of your CUDA, or set HOROVOD_NCCL_HOME"),
    (r"unsupported (GNU|clang) version", "this nvcc is older than your compiler: CXX=g++-12, or a newer CUDA"),
    (r"(need|requires?|compiled with) C\+\+\D*\d\d", "this torch needs another C++ standard: see docs/install.md"),
)


def explain_failure(log: Path) -> str:
    """Return the first errors of a build log (later ones follow from them) and the remedy; keep the log in TMPDIR."""
    text = log.read_text(errors="replace")
    lines = text.splitlines()
    telling = re.compile(r"\berror:|CMake Error|fatal error|undefined reference|Killed")
    errors = [number for number, line in enumerate(lines) if telling.search(line)]
    shown = []
    for index in errors[:3]:
        following = 4 if "CMake Error" in lines[index] else 2
        shown += [f"    {line[:300]}" for line in lines[index : index + following] if line.strip()]
    remedy = remedy_of(text, REMEDIES) or "docs/evidence/installing.md lists what was built and run"
    # Not a name that another user could guess, and link to a file of this one.
    handle, kept = tempfile.mkstemp(prefix=f"horovod-build-{time.strftime('%Y%m%d-%H%M%S')}-", suffix=".log")
    with os.fdopen(handle, "wb") as file:
        file.write(log.read_bytes())
    shown = shown or [last_lines(log)]
    return "\n".join(["building Horovod failed:", *shown, f"whole log: {kept}", f"remedy: {remedy}"])
