"""A rank's report to its wrapper that Python runs, and the time limit for importing torch. `torch` is a file of the test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.engines import importing
from hvdtrain.engines.arrival import Arrival

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "import hvdtrain, torch, faulthandler, threading; print([t.name for t in threading.enumerate()])"


def run(directory: Path, torch: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (directory / "torch.py").write_text(torch)
    clean = {name: value for name, value in os.environ.items() if name not in (*importing.RANKS, importing.PIPE)}
    env = clean | {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"} | variables
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("hang", "says"),
    [
        ("import time\ntime.sleep(1000)", True),
        ("import ctypes\nctypes.PyDLL(None).sleep(1000)", False),  # with the GIL, as while a library is loaded
    ],
)
def test_an_import_of_torch_that_hangs_ends_the_rank(hang, says, tmp_path):
    done = run(tmp_path, hang, OMPI_COMM_WORLD_RANK="0", HVDTRAIN_START_TIMEOUT="0.1")
    assert done.returncode == 1, done
    assert ("hvdtrain: error: rank 0 on " in done.stderr) == says
    assert ("could not import torch within 0 s: is its file system slow?" in done.stderr) == says
    assert f'File "{tmp_path}/torch.py", line 2' in done.stderr


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "1", "HVDTRAIN_START_TIMEOUT": "0"}, {}])
def test_a_sound_import_keeps_no_thread_and_says_nothing(variables, tmp_path):
    done = run(tmp_path, "import time\ntime.sleep(0.1)", **variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['MainThread']\n", ""), done


def test_only_ranks_are_limited(tmp_path):
    says = "import threading\nprint(len(threading.enumerate()))"
    assert run(tmp_path, says).stdout == "1\n['MainThread']\n"
    assert run(tmp_path, says, SLURM_PROCID="3").stdout == "2\n['MainThread']\n"


@pytest.mark.parametrize("failure", ["raise ImportError('no torch')", "raise ZeroDivisionError"])
def test_an_import_that_fails_is_no_longer_limited(failure, tmp_path):
    (tmp_path / "absent.py").write_text(failure)
    seen = []

    class During:
        def __enter__(self):
            seen.append("begins")

        def __exit__(self, *error):
            seen.append("ends")

    sys.path.insert(0, str(tmp_path))
    try:
        Arrival("absent", during=During)
        with pytest.raises((ImportError, ZeroDivisionError)):
            import absent  # type: ignore[import-not-found]  # noqa: F401
    finally:
        sys.path.remove(str(tmp_path))
    assert seen == ["begins", "ends", "begins", "ends"]


def test_the_wrapper_hears_of_a_rank_on_its_host_alone(monkeypatch):
    read, write = os.pipe()
    os.set_blocking(read, False)
    link = str(Path(f"/proc/self/fd/{read}").readlink())
    for told in (f"{os.getpid()} {read} pipe:[1]", f"{os.getpid()} 999 {link}", "", f"x {link}"):
        monkeypatch.setenv(importing.PIPE, told)
        importing.report_start()
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    monkeypatch.setenv(importing.PIPE, f"{os.getpid()} {read} {link}")
    importing.report_start()
    assert os.read(read, 10) == b"\n"
    os.close(read)
    os.close(write)
