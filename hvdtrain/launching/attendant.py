"""A process that a rank starts beside training, as for --debug-page, and that takes no time from the rank."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.launching.processes import end_with_parent


def start(
    module: str, asked: dict[str, Any], *, stdin: int | None = None, stderr: int | None = None
) -> subprocess.Popen[bytes]:
    """Start `module` with `asked`, and the pid of this rank as "parent", as JSON. What it prints is read here."""
    return subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(asked | {"parent": os.getpid()})],
        stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
        cwd=Path(hvdtrain.__file__).parents[1],  # where -m finds it, wherever the program was started
    )  # fmt: skip


def attend(parent: int) -> None:
    """In the process: end with the rank `parent`, which decides what a signal to the job means, and give way to it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGKILL)
    os.nice(19)
