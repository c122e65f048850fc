"""Programs that hvdtrain.audit looks at, and the server that forks them; an audit of a command line."""

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.audited import forked
from tests.e2e.launchers import ROOT, environment
from tests.waiting import wait_for


def audit(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """Perform an audit in a folder, by the arguments on its command line."""
    line = [sys.executable, "-m", "hvdtrain.audit", *shlex.split(words)]
    env = environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=380)


@contextlib.contextmanager
def serving(directory: Path, python: str = sys.executable, modules: Sequence[str] = (), **extra: str) -> Iterator[str]:
    """Return the socket of a server of forked.py, which ends with the block. It has imported the modules."""
    path = directory / "socket"
    line = [python, forked.__file__, "serve", str(path), *modules]
    process = subprocess.Popen(line, env=environment(OMP_NUM_THREADS="1", **extra))
    try:
        wait_for(lambda: path.exists() or process.poll() is not None, "it does not listen", 600)
        assert process.poll() is None, f"it has ended with {process.poll()}"
        yield str(path)
        assert process.poll() is None, f"it has ended with {process.poll()}, before it was told to"
    finally:
        process.kill()
        process.wait()
