"""launch/setup without its slow parts: what it shows, keeps, takes over and withholds."""

from __future__ import annotations

import argparse
import errno
import hashlib
import importlib.machinery
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
sys.path.insert(0, str(LAUNCH))

import activation  # noqa: E402
import build_horovod  # noqa: E402
import packages  # noqa: E402
import siblings  # noqa: E402
import stages  # noqa: E402
import steps  # noqa: E402
import wheel_cache  # noqa: E402
from steps import Refusal  # noqa: E402

# ------------------------------------------------------------------------------------------------------------ .venv


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "check out"
    shutil.copytree(LAUNCH, root / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(LAUNCH.parent / "pyproject.toml", root)
    return root


def setup(root: Path, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "launch" / "setup"), "--cache-dir", str(root / "cache"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | env)


def test_a_venv_that_is_not_ours_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").write_text("mine")
    result = setup(checkout)
    assert result.returncode == 2
    assert "--fresh" in result.stderr
    assert (checkout / ".venv" / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    ("version", "said"),
    [("2.2.2", "hvdtrain runs on 2.3 and newer"), ("1.13.1", "hvdtrain runs on 2.3"), ("new", "give a version")],
)
def test_a_torch_that_cannot_be_used_is_refused_before_anything_is_done(
    version: str, said: str, checkout: Path
) -> None:
    result = setup(checkout, "--torch", version)
    assert result.returncode == 2
    assert f"--torch {version}: {said}" in result.stderr
    assert not (checkout / ".venv").exists()


def test_with_adds_an_extra_and_the_next_setup_keeps_it(checkout: Path) -> None:
    (checkout / "empty").mkdir()

    def requirements(*arguments: str | Path) -> str:
        assert setup(checkout, "--offline", checkout / "empty", *arguments).returncode == 2  # nothing to install from
        return " ".join(json.loads((checkout / ".venv" / "hvdtrain-setup.json").read_text())["wanted"]["requirements"])

    assert "sphinx" not in requirements()
    (checkout / ".venv" / "hvdtrain-setup.json").write_text('{"state": "creating"}')
    assert re.search(r"\bsphinx==\d.* pytest|pytest.* sphinx==\d", requirements("--with", "docs"))
    assert "sphinx" in requirements()
    refused = setup(checkout, "--with", "docs,vision")  # vision is in every set-up
    assert (refused.returncode, "--with vision: it is one of docs" in refused.stderr) == (2, True)


def test_a_failed_setup_is_never_half_used_and_the_next_goes_on_from_there(checkout: Path) -> None:
    (checkout / "empty").mkdir()
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "hvdtrain-setup.json").write_text('{"state": "creating"}')  # killed before it had a Python
    result = setup(checkout, "--offline", checkout / "empty")
    assert result.returncode == 2, result.stderr
    assert "--download" in result.stderr.splitlines()[-1]
    venv = checkout / ".venv"
    assert json.loads((venv / "hvdtrain-setup.json").read_text())["state"] == "creating"
    assert (venv / "bin" / "python").exists()
    assert not list((venv / "bin").glob("activate*"))
    (venv / "kept").touch()
    again = setup(checkout, "--offline", checkout / "empty")
    assert "create .venv" in result.stdout
    assert "create .venv" not in again.stdout
    assert (venv / "kept").exists()


def test_another_kind_of_mpi_gets_an_environment_of_its_own(checkout: Path) -> None:
    """Or the wheel's mpirun would stay in bin/, before the system's."""
    (checkout / "empty").mkdir()
    said = []
    for mpi in ("none", "none", "system"):
        result = setup(checkout, "--offline", checkout / "empty", "--mpi", mpi)
        assert result.returncode == 2, result
        said.append("create .venv" in result.stdout)
        record = checkout / ".venv" / "hvdtrain-setup.json"
        record.write_text(record.read_text().replace('"creating"', '"updating"'))
    assert said == [True, False, True]


def test_the_environment_that_set_up_runs_in_is_left(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


# ----------------------------------------------------------------------------------------------------- without root


def test_without_links_a_venv_has_none(checkout: Path) -> None:
    (checkout / "empty").mkdir()
    without = checkout / "without"
    without.mkdir()
    refuse = "def refuse(*_, **__):\n    raise PermissionError(1, 'Operation not permitted')\n"
    (without / "sitecustomize.py").write_text(f"import os\n{refuse}os.symlink = os.link = refuse\n")
    result = setup(checkout, "--offline", checkout / "empty", PYTHONPATH=str(without))
    assert result.returncode == 2, result
    assert "--download" in result.stderr.splitlines()[-1]  # as far as with links
    assert not [path for path in (checkout / ".venv").rglob("*") if path.is_symlink()]


def test_a_checkout_of_somebody_else_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.require_writable(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(Refusal, match=f"cp -r {tmp_path} DIR"):
        steps.require_writable(tmp_path)


def test_a_user_without_a_home_has_to_name_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(Refusal, match="set HOME"):
        wheel_cache.default_cache()
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert wheel_cache.default_cache() == Path("/somewhere/hvdtrain")


def test_without_proc_nothing_begins(tmp_path: Path) -> None:
    steps.require_proc()
    with pytest.raises(Refusal, match="mount it"):
        steps.require_proc(tmp_path)


def said(main: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            steps.main_with_exit_codes(main)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EDQUOT, "free some space"), (errno.EROFS, "that you can write to"), (errno.EAGAIN, "ulimit -u")],
)
def test_an_error_of_the_system_has_its_remedy(number: int, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise OSError(number, os.strerror(number), "FILE")

    line = said(main, capsys)
    assert remedy in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("output", "remedy"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 122] Disk quota exceeded", "no space left"),
        ("RuntimeError: can't start new thread", "ulimit -u"),
        (
            "ERROR: Could not find a version that satisfies the requirement torch==2.3.1 (from versions: 2.5.0, 2.15.0)\n"
            "ERROR: No matching distribution found for torch==2.3.1\n",
            "which has 2.5.0, 2.15.0: take one of these, or another Python (make PYTHON=...)",
        ),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "ulimit -u"),
    ],
)
def test_limits_that_pip_meets_have_a_remedy(output: str, remedy: str) -> None:
    found = steps.pip_failure(output, "install torch", None)
    assert isinstance(found, Refusal)
    assert remedy in str(found)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """launch/setup as a module, which has no suffix."""
    loader = importlib.machinery.SourceFileLoader("setup_program", str(LAUNCH / "setup"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    before = os.environ.pop("PIP_NO_CACHE_DIR", None)
    yield module
    os.environ.pop("PIP_NO_CACHE_DIR", None)
    os.environ.update({"PIP_NO_CACHE_DIR": before} if before is not None else {})


def test_space_is_asked_for_where_it_is_taken(program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = {}  # GiB, by what lies there
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program.tempfile, "gettempdir", lambda: "/proc")  # another file system
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    for module in (program, steps):
        monkeypatch.setattr(
            module, "free_gib", lambda path: free["home" if tmp_path in (path, *path.parents) else "tmp"]
        )

    def asked(home: float, tmp: float, **options: Any) -> bool:
        """Return whether pip keeps its downloads."""
        os.environ.pop("PIP_NO_CACHE_DIR", None)
        free.update(home=home, tmp=tmp)
        program.require_room(argparse.Namespace(**({"torch": None, "offline": None} | options)))
        return "PIP_NO_CACHE_DIR" not in os.environ

    assert asked(9.1, 3.1)
    assert not asked(6.1, 3.1)  # .venv fits, but not also what pip would keep
    with pytest.raises(Refusal, match="torch's CPU build"):
        asked(5.9, 100)
    with pytest.raises(Refusal, match="TMPDIR"):
        asked(100, 2.9)
    assert asked(6.1, 0.0, offline=tmp_path)
    assert asked(3.1, 1.1, torch="2.15.0+cpu")
    monkeypatch.setattr(program.tempfile, "gettempdir", lambda: str(tmp_path))
    assert asked(12.1, 0.0)
    assert not asked(9.1, 0.0)
    with pytest.raises(Refusal, match="in TMPDIR"):
        asked(8.9, 100)


# --------------------------------------------------------------------------------------------------------- packages


def install(prefix: Path, name: str, files: dict[str, str], script: str = "") -> Path:
    """Make a package as pip leaves it; return its dist-info."""
    site = prefix / "lib" / "python3.11" / "site-packages"
    info = site / f"{name}-1.0.dist-info"
    files = files | {f"{info.name}/METADATA": f"Name: {name}\n"}
    if script:
        files |= {f"../../../bin/{name}": script}
    rows = []
    for file, text in files.items():
        path = Path(os.path.normpath(site / file))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        rows.append(f"{file},sha256={digest},{len(text.encode())}")
    rows += [f"{name}/__pycache__/gone.pyc,,", f"{info.name}/RECORD,,"]
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    return info


def test_what_was_left_half_way_is_forgotten_and_what_is_whole_kept(tmp_path: Path) -> None:
    whole = install(tmp_path, "whole", {"whole/a.py": "a = 1\n"}, script="#!python\n")
    cut = install(tmp_path, "cut", {"cut/a.py": "a = 1\n", "cut/b.py": "b = 2\n"})
    gone = install(tmp_path, "gone", {"gone/a.py": "a = 1\n"})
    unfinished = install(tmp_path, "unfinished", {"unfinished/a.py": "a = 1\n"})
    (cut.parent / "cut" / "b.py").write_text("b")
    (gone.parent / "gone" / "a.py").unlink()
    (unfinished / "RECORD").unlink()  # what pip writes last
    (cut.parent / "~hole").mkdir()  # what pip was replacing
    (tmp_path / "bin" / "whole").write_text("#!elsewhere\n")
    assert packages.forget_torn(tmp_path) == ["cut-1.0", "gone-1.0", "unfinished-1.0"]
    assert sorted(path.name for path in cut.parent.glob("*-info")) == [whole.name]
    assert not (cut.parent / "~hole").exists()
    assert packages.forget_torn(tmp_path) == []


@pytest.mark.parametrize("target", ["b/.venv", "b c/ü/.venv", f"{'long' * 40}/.venv"])
def test_packages_are_taken_over_with_scripts_that_start(tmp_path: Path, target: str) -> None:
    old, new = tmp_path / "a a" / ".venv", tmp_path / target
    code = "import sys\nprint(sys.argv[0], sys.argv[1])\n"
    start = packages.interpreter_line(old / "bin" / "python3")
    install(old, "tool", {"tool/lib.so": "x" * 70_000, "tool/a.py": "a = 1\n"}, script=f"{start}\n{code}")
    (new / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (new / "bin").mkdir()
    (new / "bin" / "python3").symlink_to(sys.executable)
    (old / "bin" / "tool").chmod(0o755)
    packages.take_over(old, new, list(packages.packages(old)))
    assert packages.packages(new) == packages.packages(old)
    assert packages.all_whole(new)
    a, b = (packages.site_packages(prefix) / "tool" for prefix in (old, new))
    assert (a / "lib.so").samefile(b / "lib.so")
    assert not (a / "a.py").samefile(b / "a.py")  # somebody may edit it
    shutil.rmtree(old)
    done = subprocess.run([new / "bin" / "tool", "one word"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{new / 'bin' / 'tool'} one word\n", done.stderr


def test_a_package_that_names_files_elsewhere_is_not_taken_over(tmp_path: Path) -> None:
    old, new = tmp_path / "a", tmp_path / "b"
    install(old, "tool", {"../../../../outside": "x"})
    (new / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    with pytest.raises(OSError, match="outside of its environment"):
        packages.take_over(old, new, ["tool-1.0.dist-info"])


def test_only_a_complete_and_untouched_environment_is_taken_over(tmp_path: Path) -> None:
    cache, old, new = tmp_path / "cache", tmp_path / "a" / ".venv", tmp_path / "b" / ".venv"
    info = install(old, "tool", {"tool/a.py": "a = 1\n"})
    wanted: dict[str, object] = {name: name for name in siblings.SAME} | {"root": "a"}

    def record(**changes: object) -> None:
        fields = {"state": "complete", "wanted": wanted, "packages": packages.packages(old)} | changes
        (old / siblings.RECORD).write_text(json.dumps(fields))

    assert siblings.find(cache, new, wanted) is None
    record()
    siblings.announce(cache, old)
    siblings.announce(cache, old)
    assert siblings.find(cache, new, wanted | {"root": "b"}) == old
    assert siblings.find(cache, old, wanted) is None  # not from itself
    assert siblings.find(cache, new, wanted | {"python": "3.99"}) is None
    record(state="updating")
    assert siblings.find(cache, new, wanted) is None
    record()
    added = install(old, "mine", {"mine/a.py": "a = 1\n"})  # by its user
    assert siblings.find(cache, new, wanted) is None
    shutil.rmtree(added)
    assert siblings.find(cache, new, wanted) == old
    (info.parent / "tool" / "a.py").write_text("damaged")
    assert siblings.find(cache, new, wanted) is None
    shutil.rmtree(old)
    assert siblings.find(cache, new, wanted) is None
    assert not list((cache / "environments").iterdir())  # forgotten


# ------------------------------------------------------------------------------------------------------- activation


@pytest.fixture
def activated(tmp_path: Path) -> Path:
    """An environment's bin/activate, as root sees it."""
    venv = tmp_path / "my env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    activation.withhold(venv)
    assert not list((venv / "bin").glob("activate*"))
    for _ in range(2):
        activation.release(venv)
    (tmp_path / "id").write_text("#!/bin/sh\necho ${FAKE_ID:-0}\n")
    (tmp_path / "id").chmod(0o755)
    return venv / "bin" / "activate"


SHOW = 'echo "${OMPI_ALLOW_RUN_AS_ROOT:-unset} ${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-unset}"'


def shell(activate: Path, *lines: str, options: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "_HVDTRAIN"))}
    clean["PATH"] = f"{activate.parents[2]}{os.pathsep}{clean['PATH']}"
    script = "\n".join((f'. "{activate}"', *lines))
    command = ["bash", "--norc", *options, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean | env)


def test_root_may_start_mpirun_until_it_deactivates(activated: Path) -> None:
    done = shell(activated, SHOW, "deactivate", SHOW, options=("-eu",))
    assert done.stdout.split("\n") == ["1 1", "unset unset", ""]
    assert done.stderr == ""  # only who types is told
    told = shell(activated, f'. "{activated}"', "deactivate", options=("-i",))
    assert told.stderr.count("You are root") == 1


def test_others_and_who_chose_are_left_alone(activated: Path) -> None:
    assert shell(activated, SHOW, FAKE_ID="1000").stdout == "unset unset\n"
    chosen = shell(activated, SHOW, "deactivate", SHOW, OMPI_ALLOW_RUN_AS_ROOT="0")
    assert chosen.stdout == "0 unset\n0 unset\n"


# ------------------------------------------------------------------------------------------------------------ stages


def test_a_short_stage_is_one_line_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    with stages.stage("do it"):
        pass
    assert capsys.readouterr().out == "do it ... 0.0 s\n"
    with pytest.raises(ValueError, match="no"), stages.stage("do it"):
        raise ValueError("no")
    assert capsys.readouterr().out == "do it ... failed after 0.0 s\n"


def until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_log_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(stages, "LOG_SECONDS", 0.01)
    with stages.stage("do it") as current:
        current.poll = lambda: current.progress(0.25, "at it")
        until(lambda: shown.getvalue().count("\n") >= 3)
    lines = shown.getvalue().splitlines()
    assert lines[0] == "do it ..."
    assert all(re.fullmatch(r"    25%, at it, \d+ s", line) for line in lines[1:-1])
    assert re.fullmatch(r"    \d\.\d s", lines[-1])


def test_a_terminal_has_one_running_line_with_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(stages, "TERMINAL_SECONDS", 0.01)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((60, 24)))
    with stages.stage("do it") as current:
        current.progress(0.5, "at something with a name that is much too long for this terminal")
        until(lambda: shown.getvalue().count("50%") >= 3)
    drawn = [text.removesuffix("\x1b[K") for text in shown.getvalue().split("\r")]
    assert max(map(len, drawn)) < 60
    assert re.search(r"do it \.\.\. \[##########\.{10}\] 50% \d+ s  at some", shown.getvalue())
    assert re.fullmatch(r"do it \.\.\. \d\.\d s\n", drawn[-1].removeprefix("\x1b[K"))
    assert shown.getvalue().count("\n") == 1


def test_what_pip_installs_shows_in_the_environment(tmp_path: Path) -> None:
    install(tmp_path, "one_two", {"one_two.py": ""})
    seen: list[tuple[float, str]] = []

    class Fake:
        poll = staticmethod(lambda: None)

        def note(self, text: str) -> None:
            seen.append((-1.0, text))

        def progress(self, fraction: float, note: str) -> None:
            seen.append((fraction, note))

    fake = Fake()
    listener = steps._PipListener(fake, tmp_path / "bin" / "python")  # type: ignore[arg-type]
    listener.hear("Collecting torch==2.15.0\n")
    listener.hear("Installing collected packages: one-two, torch\n")
    fake.poll()
    install(tmp_path, "torch", {"torch.py": ""})
    fake.poll()
    assert seen == [(-1.0, "Collecting torch==2.15.0"), (0.5, "installing torch"), (1.0, "")]


# ------------------------------------------------------------------------------------------------------- plain paths


def test_a_build_sees_no_path_that_compilers_break_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, odd = tmp_path / "scratch", tmp_path / "my wörk"
    scratch.mkdir()
    install(odd, "openmpi", {"../../../include/mpi.h": "x", "../../../share/a.txt": "y"}, script="ELF")
    monkeypatch.setattr(sys, "prefix", str(odd))
    monkeypatch.setattr(build_horovod.tempfile, "gettempdir", lambda: "/plain")
    prefix = build_horovod.plain_prefix(scratch)
    assert prefix == scratch / "environment"
    assert prefix.samefile(odd)
    copy = build_horovod.mpi_at_a_plain_path(scratch)
    assert (copy / "include" / "mpi.h").resolve() == copy / "include" / "mpi.h"  # CMake follows links
    assert (copy / "bin" / "openmpi").read_text() == "ELF"
    monkeypatch.setattr(build_horovod.tempfile, "gettempdir", lambda: str(odd))
    with pytest.raises(Refusal, match="set TMPDIR"):
        build_horovod.plain_prefix(scratch)
    monkeypatch.setattr(sys, "prefix", "/plain")
    assert build_horovod.plain_prefix(odd) == Path("/plain")
