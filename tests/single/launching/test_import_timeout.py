"""A rank's report to its wrapper that Python runs, and the time limit for importing torch. `torch` is a file of the test."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.engines.launchers import LAUNCHERS, without_launcher
from hvdtrain.launching import import_timeout
from tests.single.unwritable import full_pipe

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "from hvdtrain.launching.import_timeout import import_torch; import_torch()"
PROGRAM += "; import threading; print([t.name for t in threading.enumerate()])"


RANK_0 = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}


def run(
    directory: Path, torch: str, *, program: tuple[str, ...] = ("-c", PROGRAM), **variables: str
) -> subprocess.CompletedProcess[str]:
    (directory / "torch.py").write_text(torch)
    env = without_launcher() | {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"} | variables
    env.pop(import_timeout.PIPE, None)
    return subprocess.run(
        [sys.executable, *program], env=env, cwd=directory, capture_output=True, text=True, timeout=100
    )


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


def test_a_program_may_ask_first_whether_a_module_is_there(tmp_path, monkeypatch):
    (tmp_path / "asked_for.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    hook = import_timeout.ImportHook("asked_for", seen.append)
    assert importlib.util.find_spec("asked_for") is not None
    module = importlib.import_module("asked_for")
    assert (seen, hook in sys.meta_path) == ([module], False)


def test_a_rank_whose_output_nobody_reads_is_ended_too(tmp_path):
    """Neither the message nor the stack can be written, and no thread can run Python: the kernel ends it."""
    (tmp_path / "torch.py").write_text("import ctypes\nctypes.PyDLL(None).sleep(1000)")
    reader, writer = full_pipe()
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "RANK": "0", "HVDTRAIN_START_TIMEOUT": "0.1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, stdout=writer, stderr=writer, timeout=60)
    assert done.returncode == -signal.SIGALRM
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    "variables", [{"RANK": "1"}, {}, *({"RANK": "1", "HVDTRAIN_START_TIMEOUT": most} for most in ("0", "inf"))]
)
def test_a_sound_import_keeps_no_thread_and_says_nothing(variables, tmp_path):
    done = run(tmp_path, "import time\ntime.sleep(0.1)", **variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['MainThread']\n", ""), done


def test_only_ranks_are_limited(tmp_path):
    says = "import threading\nprint(len(threading.enumerate()))"
    assert run(tmp_path, says).stdout == "1\n['MainThread']\n"
    for launcher in LAUNCHERS:
        assert run(tmp_path, says, **{launcher.rank: "3"}).stdout == "2\n['MainThread']\n", launcher


def test_an_import_that_fails_is_no_longer_limited(tmp_path):
    """Neither by the kernel's timer, nor by a thread, nor by faulthandler, which cannot be asked whether it waits."""
    (tmp_path / "train.py").write_text(
        "import faulthandler, signal, threading\nfrom hvdtrain.launching.import_timeout import import_torch\n"
        "cancel = faulthandler.cancel_dump_traceback_later\n"
        "faulthandler.cancel_dump_traceback_later = lambda: (print('canceled'), cancel())\n"
        "try:\n    import_torch()\nexcept ImportError:\n"
        "    print(signal.getitimer(signal.ITIMER_REAL)[0], [thread.name for thread in threading.enumerate()])\n"
    )
    done = run(tmp_path, "raise ImportError", program=("train.py",), **RANK_0)
    expected = 2 * "canceled\n" + "0.0 ['MainThread']\n"  # of the search for torch, and of its import
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, ""), done


@pytest.mark.parametrize(
    "program",
    [
        ("-m", "hvdtrain.mnist"),
        ("-c", "from hvdtrain import training"),
        ("-m", "hvdtrain.tuned", "train.py"),
        ("-m", "hvdtrain.starter", "train.py"),
        ("-m", "hvdtrain.starter", "-m", "hvdtrain.mnist"),
    ],
)
def test_commands_and_programs_of_ours_and_those_that_ours_run_are_limited(program, tmp_path):
    (tmp_path / "train.py").write_text("import torch")
    hang = "import ctypes\nctypes.PyDLL(None).sleep(1000)"
    done = run(tmp_path, hang, program=program, **RANK_0, HVDTRAIN_START_TIMEOUT="0.1")
    assert done.returncode == 1, done
    assert f'File "{tmp_path}/torch.py", line 2' in done.stderr


TUNED = ("-m", "hvdtrain.tuned", "train.py")


@pytest.mark.parametrize("program", [TUNED, ("-m", "hvdtrain.starter", "-m", "hvdtrain.mnist")])
def test_an_import_that_hangs_is_said_once(program, tmp_path):
    (tmp_path / "train.py").write_text("import torch\nfrom hvdtrain import training")
    done = run(tmp_path, "import time\ntime.sleep(1000)", program=program, **RANK_0, HVDTRAIN_START_TIMEOUT="0.1")
    assert done.returncode == 1, done
    assert done.stderr.count("rank 0 on ") == done.stderr.count("could not import torch within 0 s") == 1, done


def test_a_search_for_torch_that_hangs_is_limited(tmp_path):
    """As where a directory of sys.path is on a file system that does not answer."""
    (tmp_path / "train.py").write_text(
        "import importlib.util, time\nimportlib.util.find_spec = lambda name: time.sleep(1000)\nimport torch\n"
    )
    done = run(tmp_path, "", program=TUNED, **RANK_0, HVDTRAIN_START_TIMEOUT="0.1")
    assert done.returncode == 1, done
    assert "could not import torch within 0 s" in done.stderr, done


def test_a_script_whose_torch_is_broken_sees_no_frame_of_ours_and_keeps_its_alarm(tmp_path):
    (tmp_path / "train.py").write_text(
        "import signal, traceback\nsignal.setitimer(signal.ITIMER_REAL, 1000)\n"
        "try:\n    import torch\nexcept ImportError:\n    print(signal.getitimer(signal.ITIMER_REAL)[0] > 900)\n    raise\n"
    )
    done = run(tmp_path, "raise ImportError('broken')", program=TUNED, **RANK_0)
    assert done.stdout == "True\n", done
    assert "ImportError: broken" in done.stderr, done
    assert "hvdtrain/" not in done.stderr, done


def test_the_wrapper_hears_of_a_rank_on_its_host_alone(monkeypatch):
    read, write = os.pipe()
    os.set_blocking(read, False)
    link = str(Path(f"/proc/self/fd/{read}").readlink())
    for told in (f"{os.getpid()} {read} pipe:[1]", f"{os.getpid()} 999 {link}", "", f"x {link}"):
        monkeypatch.setenv(import_timeout.PIPE, told)
        import_timeout.report_start()
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    monkeypatch.setenv(import_timeout.PIPE, f"{os.getpid()} {read} {link}")
    import_timeout.report_start()
    assert os.read(read, 10) == b"\n"
    os.close(read)
    os.close(write)
