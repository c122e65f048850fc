"""hvdtrain.tuned: a script runs as without it, and gets what it did not set itself. (tests/e2e has ranks.)"""

import math
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.engines.cores import cpu_quota, share_of_host
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import Announced
from hvdtrain.engines.library_settings import FAST
from hvdtrain.launching import processes, run_script
from hvdtrain.launching.processes import Process
from hvdtrain.tuned import refuse_torchrun, say_in_one_write, tune

ROOT = Path(__file__).resolve().parents[3]
SET = ("OMP_NUM_THREADS", *FAST, "OMPI_MCA_ess_singleton_isolated")

MAIN = """
import json, sys
print(json.dumps([sorted(globals()), __name__, __file__, repr(__spec__), __package__, __doc__, type(__loader__).__name__]))
print(sys.argv, sys.path[0], sys._getframe().f_code.co_filename, sys.modules["__main__"].__dict__ is globals())
print(sys.flags, sys.excepthook is sys.__excepthook__, sys._getframe().f_code.co_flags)
"""
WORKERS = """
import multiprocessing, sys
class Thing:
    def __init__(self, value): self.value = value
def work(thing):
    return Thing(thing.value + 1), __name__, sys.argv, sys.path[0]
if __name__ == "__main__":
    for kind in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(kind).Pool(1) as pool:
            thing, *rest = pool.apply(work, (Thing(1),))
            print(kind, thing.value, type(thing) is Thing, rest)
"""
SCRIPTS = {
    "facts": MAIN,
    "docstring": '"""About it."""\nfrom __future__ import annotations\nx: int = 1\nprint(__doc__, __annotations__)',
    "cookie": "# -*- coding: latin-1 -*-\nprint(len('\xe9'), '\xe9' == chr(233))",
    "neighbour": "import neighbour; print(neighbour.__file__, neighbour.__name__)",
    "exit": "import sys; sys.exit(3)",
    "exit with words": "import sys; sys.exit('some words')",
    "exit with nothing": "raise SystemExit",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
    "left": "import os; print('a', flush=True); os._exit(7)",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "error": "def f():\n    raise ValueError('bad')\nf()",
    "error from an error": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('bad') from e",
    "syntax": "def f(:\n    pass",
    "own hook": "import sys, traceback\nsys.excepthook = lambda *e: print('own', traceback.format_exception(*e))\n1 / 0",
    "at exit": (
        "import atexit, pickle, threading, time\nclass C: pass\n"
        "atexit.register(lambda: print('exit', type(pickle.loads(pickle.dumps(C()))) is C))\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread', C.__module__, pickle.dumps(C())[:2]))).start()\n"
    ),
    "error in a thread": "import threading; threading.Thread(target=lambda: 1 / 0).start()",
    "input": "import sys; print(sys.stdin.read())",
    "workers": WORKERS,
}


def start(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    base = {name: value for name, value in os.environ.items() if name not in SET and not name.startswith("PYTHON")}
    base |= {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"} | environment
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=base, input="some input", capture_output=True, text=True, timeout=60
    )


def without_ours(text: str) -> str:
    """Leave out our own lines, the interpreter's way to a module (`-m`), and addresses, which differ from run to run."""
    theirs = "".join(
        line for line in text.splitlines(True) if not re.match('hvdtrain.tuned: |  File "<frozen runpy>"', line)
    )
    return re.sub(r"0x[0-9a-f]+", "0x", theirs)


def assert_the_same(words: list[str], cwd: Path, interpreter: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    plain = start(*interpreter, *words, cwd=cwd)
    ours = start(*interpreter, "-m", "hvdtrain.tuned", *words, cwd=cwd)
    assert ours.returncode == plain.returncode, ours.stderr
    assert without_ours(ours.stdout) == without_ours(plain.stdout)
    assert without_ours(ours.stderr) == without_ours(plain.stderr)
    assert "hvdtrain/" not in plain.stderr
    return ours


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_file_runs_as_without_us(name, tmp_path):
    (tmp_path / "in it").mkdir()
    (tmp_path / "in it" / "train.py").write_text(SCRIPTS[name], encoding="latin-1")
    (tmp_path / "in it" / "neighbour.py").write_text("")
    assert_the_same(["in it/train.py", "--watch", "a b", "-m", "x"], tmp_path)


@pytest.mark.parametrize("name", ["facts", "error", "exit", "workers", "neighbour"])
def test_a_module_runs_as_without_us(name, tmp_path):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("" if name == "workers" else "print('imported')")  # two processes, no order
    (package / "inner" / "__init__.py").write_text("")
    script = SCRIPTS[name].replace("import neighbour", "from . import neighbour")
    for path in (package / "train.py", package / "inner" / "__main__.py"):
        path.write_text(script)
        (path.parent / "neighbour.py").write_text("")
    assert_the_same(["-m", "package.train", "-m", "x"], tmp_path)
    if name != "workers":  # whose new interpreters do not import a package's __main__, with or without us
        assert_the_same(["-m", "package.inner"], tmp_path)


def test_a_link_and_flags_of_the_interpreter(tmp_path):
    (tmp_path / "real").mkdir()
    script = tmp_path / "real" / "train.py"
    script.write_text(MAIN + "assert not __debug__, 'not reached'")
    (tmp_path / "link.py").symlink_to(script)
    assert_the_same(["link.py"], tmp_path, ("-O", "-X", "utf8"))
    assert_the_same(["real/train.py"], tmp_path)


def test_signals_come_to_the_script(tmp_path):
    (tmp_path / "train.py").write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(75))\n"
        "print('ready', flush=True)\ntime.sleep(300)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain.tuned", "train.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 75
    process.stdout.close()


SHOW = f"""
import os, sys
for n in {SET}: print(n, os.environ.get(n))
assert "torch" not in sys.modules and "numpy" not in sys.modules  # the threads must be set first
assert "HOROVOD_DISABLE_GROUP_FUSION" not in os.environ  # fused by groups, join would break
"""


def test_what_is_set_and_what_the_user_had_stays(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    done = start("-m", "hvdtrain.tuned", "show.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = dict(line.split() for line in done.stdout.splitlines())
    assert shown.pop("OMP_NUM_THREADS") == str(math.floor(min(len(os.sched_getaffinity(0)), cpu_quota())) or 1)
    assert shown == {**FAST, "OMPI_MCA_ess_singleton_isolated": "1"}
    mine = dict.fromkeys(SET, "7") | {"MALLOC_TRIM_THRESHOLD_": "5000"}
    done = start("-m", "hvdtrain.tuned", "show.py", cwd=tmp_path, **mine)
    assert dict(line.split() for line in done.stdout.splitlines()) == dict.fromkeys(SET, "7")
    assert "everything is set already" in done.stderr


def test_a_script_without_horovod_is_told_so_at_its_end(tmp_path):
    (tmp_path / "train.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    done = start("-m", "hvdtrain.tuned", "train.py", "0", cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        0,
        "hvdtrain.tuned: warning: train.py never imported Horovod",
    )
    done = start("-m", "hvdtrain.tuned", "train.py", "5", cwd=tmp_path)
    assert done.returncode == 5
    assert "never imported" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "nothing to run"),
        ("-m", "nothing to run"),
        ("absent.py", "absent.py cannot be read (No such file or directory)"),
        (".", ". is a directory"),
        ("-m absent", "-m absent: no such module"),
        ("-m json.absent.more", "-m json.absent.more: no such module"),
        ("-m xml", "-m xml: a package without __main__"),
        ("-m .x", "-m .x: no such module"),
        ("--unknown 3 x.py", "unrecognized arguments"),
        ("--watch soon x.py", "argument --watch: 'soon' is not a number of seconds"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(words, said, tmp_path):
    done = start("-m", "hvdtrain.tuned", *words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"hvdtrain.tuned: error: {said}")
    assert done.stderr.count("\n") == 1


def test_an_error_of_a_package_is_its_own_traceback(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import absent_elsewhere")
    (tmp_path / "package" / "train.py").write_text("")
    done = start("-m", "hvdtrain.tuned", "-m", "package.train", cwd=tmp_path)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'absent_elsewhere'" in done.stderr


def test_torchrun_is_refused_once(tmp_path):
    (tmp_path / "train.py").write_text("print('not reached')")
    began = time.monotonic()
    for rank, lines in (("0", 1), ("1", 0)):
        done = start("-m", "hvdtrain.tuned", "train.py", cwd=tmp_path, RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", lines)
    assert time.monotonic() - began > 1.5  # rank 1 lets rank 0 speak first
    with pytest.raises(UserError, match="torchrun"):
        refuse_torchrun(Announced("torchrun", 0, 1))


def test_threads_are_left_alone_where_the_launcher_does_not_tell_the_ranks_of_this_host(monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    said = tune(Announced("Flux", 0, 64), repeatable=False)
    assert "OMP_NUM_THREADS" not in os.environ
    assert "Flux does not tell how many on this host: set OMP_NUM_THREADS" in said


@pytest.mark.parametrize(
    ("mine", "job", "ranks", "quota", "expected"),
    [
        (16, 16, 4, float("inf"), (4, 16)),  # nobody is bound: each a share
        (1, 16, 4, float("inf"), (1, 16)),  # each bound to a core
        (8, 16, 4, float("inf"), (4, 16)),  # bound to a socket of eight, which two share
        (4, 16, 2, float("inf"), (4, 16)),  # bound to four, nobody else has them
        (64, 64, 2, 3.0, (1, 3.0)),  # a container that may use three
        (2, 2, 8, float("inf"), (1, 2)),  # more ranks than cores
        (8, 4, 2, float("inf"), (4, 8)),  # who started it is bound more tightly than the rank
    ],
)
def test_threads_by_cores_that_a_rank_really_has(monkeypatch, mine, job, ranks, quota, expected):
    """Also where the launcher started a script, which is bound like the rank that it starts."""
    chain = [Process(98, 0, "process"), Process(99, 0, "mpirun"), Process(100, 0, "process"), Process(101, 0, "srun")]
    cores = {99: job, 100: 128, 101: 128}  # of processes; around the launcher are those of other jobs
    monkeypatch.setattr(processes, "launchers", lambda: chain)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores.get(pid, mine))))
    assert share_of_host(ranks, quota) == expected


def test_frames_of_ours_between_those_of_the_script_are_hidden(monkeypatch):
    between: dict = {}
    exec(compile("def call(function):\n    function()", "ours.py", "exec"), between)
    monkeypatch.setattr(run_script, "HIDDEN", {"ours.py"})

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError) as raised:  # noqa: PT011
        between["call"](fail)
    shown = [frame.name for frame in traceback.extract_tb(run_script.without_hidden(raised.value.__traceback__))]
    assert shown == ["test_frames_of_ours_between_those_of_the_script_are_hidden", "fail"]
    assert run_script.without_hidden(None) is None


def test_a_line_is_one_write(monkeypatch):
    """Launchers put their tag before each write."""
    written = []
    stream = SimpleNamespace(write=written.append, flush=lambda: None)
    monkeypatch.setattr("sys.stderr", stream)
    say_in_one_write("2 ranks")
    assert written == ["hvdtrain.tuned: 2 ranks\n"]
