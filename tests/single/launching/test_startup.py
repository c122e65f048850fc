"""What commands do before they import torch, and that `import hvdtrain` does none of it."""

import errno
import gc
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.launching import exit_codes

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = ["benchmark", "datasets.make_shards", "doctor", "imagenet", "lm", "mnist", "reduce"]
LOCAL_RANKS = shlex.quote(str(ROOT / "tests" / "single" / "launching" / "without_imports.py"))
STATE = (
    "import gc, sys, threading; print(gc.isenabled(), threading.active_count(), len(sys.meta_path), file=sys.stderr)"
)


def python(directory: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"} | variables
    return subprocess.run([sys.executable, *words], cwd=directory, env=env, capture_output=True, text=True, timeout=100)


def test_importing_hvdtrain_does_nothing(tmp_path):
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "__init__.py").write_text(f"{STATE}\nimport hvdtrain\n{STATE}")
    (tmp_path / "mypkg" / "train.py").write_text(STATE)
    done = python(tmp_path, "-m", "mypkg.train", OMPI_COMM_WORLD_RANK="0")
    before, after, trains = done.stderr.splitlines()
    assert before.startswith("True 1 "), done
    assert (after, trains) == (before, before), done


@pytest.mark.parametrize("command", ["mnist --engine serial", "starter --local-ranks 1 -m hvdtrain.mnist"])
def test_a_working_directory_that_is_gone_is_named(command):
    """torch's libraries would end the process: "FATAL ERROR: Cannot load libtorch_cpu.so"."""
    gone = f"cd $(mktemp -d) && rmdir $PWD && exec {shlex.quote(sys.executable)} -m hvdtrain.{command}"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", gone], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done
    assert len(done.stderr.splitlines()) == 1
    assert "error: the working directory cannot be found" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_the_collector_rests_while_a_command_imports_torch(command, tmp_path):
    (tmp_path / "torch.py").write_text(f"{STATE}\nsys.exit(5)")
    done = python(tmp_path, "-m", f"hvdtrain.{command}")
    assert (done.returncode, done.stderr[:8]) == (5, "False 1 "), done


def test_it_does_not_rest_while_another_program_imports_a_command(tmp_path):
    (tmp_path / "torch.py").write_text(f"{STATE}\nraise KeyError")
    program = "import contextlib, importlib\nfor name in {}:\n    with contextlib.suppress(KeyError):\n"
    program += "        importlib.import_module(f'hvdtrain.{{name}}')"
    done = python(tmp_path, "-c", program.format(COMMANDS))
    assert [line[:7] for line in done.stderr.splitlines()] == ["True 1 "] * len(COMMANDS), done


def test_it_is_on_when_the_program_runs(tmp_path):
    program = f"from hvdtrain.launching import startup; startup.begin(); {STATE}; "
    program += "from hvdtrain.launching.exit_codes import run_command; "
    program += f"run_command(lambda: exec({STATE!r}) or gc.get_freeze_count() < 1)"
    (tmp_path / "torch.py").touch()
    done = python(tmp_path, "-c", program)
    assert done.returncode == 0, done
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["False", "True"], done


def test_it_stays_off_in_a_program_that_has_disabled_it():
    gc.disable()
    try:
        with pytest.raises(SystemExit) as ended:
            exit_codes.run_command(lambda: int(gc.isenabled()))
    finally:
        gc.enable()
        gc.unfreeze()
    assert ended.value.code == 0


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize(
    "command", ["-m hvdtrain.starter", "-m hvdtrain.tuned", f"{LOCAL_RANKS} starter --local-ranks 1 --oversubscribe"],
    ids=["starter", "tuned", "local ranks"],
)  # fmt: skip
def test_standard_streams_may_be_closed(command, closed, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys
print("out"); print("err", file=sys.stderr); sys.stdin.read()
first = os.open("first", os.O_CREAT | os.O_WRONLY)  # must not become a standard stream
assert first > 2
os.write(first, b"done")
""")
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" {command} script.py {closed}', sys.executable], cwd=tmp_path, timeout=100,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, (tmp_path / "first").read_text()) == (0, "done"), done
    assert done.stdout == "out\n" * (">&-" not in closed.split()), done
    assert ("err\n" in done.stderr) == ("2>&-" not in closed.split()), done


@pytest.mark.parametrize("module", ["triton", "another"])
def test_what_triton_binds_is_collected_at_the_exit(tmp_path, module):
    """torchvision imports triton, whose nanobind prints forty lines for objects that are still frozen at the exit."""
    program = (
        "import atexit, gc, sys, types\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        f"sys.modules[{module!r}] = types.ModuleType({module!r})\n"
        "from hvdtrain.launching import startup\n"
        "startup.end_of_imports()"
    )
    done = python(tmp_path, "-c", program)
    assert (done.stdout.strip(), done.stderr) == (str(module != "triton"), ""), done


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_during_the_imports_ends_them_in_one_line(number, code, tmp_path):
    (tmp_path / "torch.py").write_text(f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(60)\n")
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.mnist"], env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=60, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )  # fmt: skip
    assert done.returncode == code, done
    assert done.stderr == f"hvdtrain: {number.name} before training: nothing to save\n"


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("moment", ["main", "exit"])
def test_a_second_ctrl_c_once_the_run_is_saved_is_no_traceback(asked, moment, tmp_path):
    """Of the engine's shutdown, or of an exit handler."""
    program = (
        "import atexit, signal, time\n"
        "from hvdtrain.launching import exit_codes\n"
        "interrupt = lambda: (signal.raise_signal(signal.SIGINT), time.sleep(20))\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"exit_codes.stop_requests += ['SIGINT'] * {asked}\n"
        f"atexit.register(interrupt if {moment == 'exit'} else int)\n"
        f"exit_codes.run_command(lambda: 75 if {moment == 'exit'} else interrupt())\n"
    )
    done = python(tmp_path, "-c", program)
    assert ("KeyboardInterrupt" in done.stderr) == (not asked), done
    assert done.returncode == {"main": 130 if asked else -2, "exit": -2 if asked else 75}[moment], done


def test_a_process_that_may_open_no_more_files_says_so_in_one_line(capfd):
    def main() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.raises(SystemExit, match="2"):
        exit_codes.run_command(main)
    assert "error: this process may open no more files: raise `ulimit -n`" in capfd.readouterr().err


@pytest.mark.parametrize(
    "said",
    [
        "unable to allocate shared memory(shm) for file </torch_8424_2589672827_0>: No space left on device (28)",
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
        "shared memory. Please try to raise your shared memory limit.",
    ],
)
def test_what_torch_says_without_shared_memory_becomes_one_line_with_the_remedy(said, capfd):
    def main() -> int:
        raise RuntimeError(said)

    with pytest.raises(SystemExit, match="2"):
        exit_codes.run_command(main)
    assert "error: /dev/shm is too small for the batches of the DataLoader's workers: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("Step.backward(None, None, retain_graph=True)",
         "step.backward() got an unexpected keyword argument 'retain_graph': write step.backward(loss) once"),
        ("Run.record(None, 3.0)", "run.record() takes 1 positional argument but 2 were given: give each value a name"),
        ("int(None)", ""),
    ],
)  # fmt: skip
def test_a_call_of_ours_that_python_refuses_is_one_line(call, line, capfd):
    from hvdtrain.loop.run import Run
    from hvdtrain.loop.step import Step

    with pytest.raises(SystemExit if line else TypeError):
        exit_codes.run_command(lambda: eval(call, {"Run": Run, "Step": Step}))
    assert (f"error: <string>, line 1: {line}" in capfd.readouterr().err) == bool(line)


@pytest.mark.parametrize(
    ("line", "owner"),
    [
        ('run.output_dir / "notes.txt"', "run"),
        ("print(run.output_dir.joinpath(1))", "run"),
        ("os.path.join(run.output_dir, 'a')", "run"),
        ("Path(flags.output_dir)", "flags"),
        ("out = run.output_dir\nopen(out / 'a', 'w')", "run"),
        ("model = None\n(run.output_dir, model.weights)", ""),
        ("model = None\nprint(run.output_dir, model / 2)", ""),
        ("there = SimpleNamespace(output_dir=Path())\nthere.output_dir / None", ""),
    ],
)
def test_an_output_directory_that_is_none_is_one_line(line, owner, capfd, tmp_path):
    from hvdtrain.flags import Flags

    (program := tmp_path / "own.py").write_text(line)
    flags = Flags.__new__(Flags)
    flags.output_dir = None
    names = dict(run=SimpleNamespace(output_dir=None), flags=flags, SimpleNamespace=SimpleNamespace, Path=Path, os=os)
    with pytest.raises(SystemExit if owner else (TypeError, AttributeError)):
        exit_codes.run_command(lambda: exec(compile(line, str(program), "exec"), names))
    others = ", and on ranks other than 0, which write no files" * (owner == "run")
    message = f"line {line.count(chr(10)) + 1}: {owner}.output_dir is None without --output-dir{others}"
    remedy = f"write `if {owner}.output_dir:` around what writes there"
    assert (f"error: own.py, {message}: {remedy}\n" in capfd.readouterr().err) == bool(owner)


def test_main_that_was_called_is_named(capfd):
    with pytest.raises(SystemExit, match="2"):
        exit_codes.run_command(0)
    assert "error: training.main() got what main() returned: write training.main(main)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("said", "told"), [("Connection reset by peer", True), ("op.preamble.length <= op.nbytes", False)]
)
def test_a_rank_that_loses_another_ends_in_one_line(said, told, capfd):
    """A rank that was killed in a restore left a traceback of the others, below the line that names it."""

    def main() -> int:
        raise RuntimeError(f"[gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:3724: {said}.")

    with pytest.raises(SystemExit if told else RuntimeError):
        exit_codes.run_command(main)
    assert ("error: the connection to another rank was lost: see what that" in capfd.readouterr().err) == told
