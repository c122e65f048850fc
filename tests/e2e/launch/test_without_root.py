"""An ordinary user: few processes, a umask, a /proc that hides others or is missing, a checkout that belongs to root.

Root starts these tests and becomes `nobody` in the jobs. Set-up as such a user, and file systems without links and locks
or with a quota: docs/install.md#without-root has what was run by hand.
"""

import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, Done, launch, summary

NOBODY = 65534
BECOME = f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups"


def why_not() -> str:
    """Return why this machine cannot play an ordinary user, or an empty string."""
    if os.geteuid() != 0:
        return "becoming another user needs root"
    missing = [tool for tool in ("unshare", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)}: apt install util-linux"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, timeout=60)
    return f"the kernel gives no mount namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def why_no_user() -> str:
    if reason := why_not():
        return reason
    # Through a shell: what setpriv itself starts, it starts with root's permissions.
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import hvdtrain, torch"
    command = [*BECOME.split(), "bash", "-c", f"exec {PYTHON} -c {shlex.quote(code)}"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
    said = (tried.stderr.strip().splitlines() or [""])[-1]
    return f"nobody may not run {PYTHON}, or read this checkout: {said}" if tried.returncode else ""


@pytest.fixture(scope="module")
def user() -> None:
    if reason := why_no_user():
        pytest.skip(reason)


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(reason := why_not()), reason=reason or "-")]


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty home of `nobody`. Not tmp_path, which only root may enter."""
    directory = Path(tempfile.mkdtemp(prefix="hvdtrain-home-", dir="/var/tmp"))
    os.chown(directory, NOBODY, NOBODY)
    yield directory
    shutil.rmtree(directory)


def as_user(home: Path, command: str, *, before: str = ":", proc: str = ":") -> Done:
    """Run a command line as `nobody`, after `before` in its shell and `proc` in a mount namespace of its own."""
    script = home.with_name(f"{home.name}.sh")
    script.write_text(f"set -e\ncd {home}\n{before}\n{command}\n")
    script.chmod(0o755)
    namespace = home.with_name(f"{home.name}.namespace.sh")
    namespace.write_text(f"set -e\nmount --make-rprivate /\n{proc}\nexec {BECOME} bash {script}\n")
    try:
        return launch(
            f"unshare --mount bash {namespace}", cwd=Path("/"), timeout=600, HOME=str(home), TMPDIR=str(home),
            XDG_CACHE_HOME="", PYTHONPATH=str(ROOT),
        )  # fmt: skip
    finally:
        script.unlink()
        namespace.unlink()


CONDITIONS = {
    "nothing in HOME": {},
    "a umask of 077": {"before": "umask 077"},
    "200 processes": {"before": "ulimit -u 200"},
    "hidden": {"proc": "mount -t proc -o hidepid=1 proc /proc"},
    "invisible": {"proc": "mount -t proc -o hidepid=2 proc /proc"},
    "no home": {"before": "export HOME=/nonexistent"},
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("launcher", ["mpirun", "gloo", "starter"])  # horovodrun starts mpirun
def test_an_ordinary_user_trains(user, home, condition, launcher):
    flags = f"--dataset digits --epochs 1 --no-progress --output-dir {home}/out"
    start = LAUNCHERS[launcher].format(ranks=2)
    done = as_user(home, f"{start} {PYTHON} -m hvdtrain.mnist {flags}", **CONDITIONS[condition])
    assert done.code == 0, done
    assert done.left_behind == 0, done
    assert summary(home / "out")["world_size"] == 2
    if "umask" in condition:
        readable = [path for path in home.rglob("*") if stat.S_IMODE(path.lstat().st_mode) & 0o077]
        assert [path for path in readable if not path.is_symlink()] == []


def test_the_wrapper_of_horovodrun_needs_no_home(user, home):
    command = f"{ROOT}/launch/horovodrun.sh -np 2 {PYTHON} -m hvdtrain.mnist --dataset digits --epochs 1 --no-progress"
    done = as_user(home, command, **CONDITIONS["no home"])
    assert done.code == 0, done
    assert "2 ranks on 1 host" in done.stdout, done


NO_PROC = "no /proc here, which MPI and Horovod read: mount it (as root: mount -t proc proc /proc)"


@pytest.mark.parametrize(
    "command",
    [
        f"{PYTHON} -m hvdtrain.mnist",
        f"{PYTHON} -m hvdtrain.starter --local-ranks 2 -m hvdtrain.mnist",
        f"horovodrun --gloo -np 2 {PYTHON} -m hvdtrain.mnist",
        f"{ROOT}/launch/mpirun.sh -np 2 {PYTHON} -m hvdtrain.mnist",
        f"{ROOT}/launch/horovodrun.sh -np 2 {PYTHON} -m hvdtrain.mnist",
        f"{PYTHON} -m hvdtrain.doctor",
        f"{PYTHON} {ROOT}/launch/setup",
        f"{PYTHON} {ROOT}/launch/build_horovod.py",
        f"{PYTHON} {ROOT}/launch/prove.py",
    ],
    ids=lambda command: command.split("/")[-1],
)
def test_without_proc_one_line_says_so(command, tmp_path):
    script = tmp_path / "namespace.sh"
    script.write_text(f"mount --make-rprivate / && mount -t tmpfs none /proc && exec {command}\n")
    done = launch(f"unshare --mount bash {script}", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.code == 2, done
    assert (done.stdout + done.stderr).count(NO_PROC) == 1, done
    assert "Traceback" not in done.stderr, done


def test_a_checkout_of_root_is_not_written_to(user, home):
    copy = home.with_name(f"{home.name}.checkout")
    shutil.copytree(ROOT / "launch", copy / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    copy.chmod(0o755)
    try:
        done = as_user(home, f"{PYTHON} {copy}/launch/setup")
        assert done.code == 2, done
        assert (
            done.stderr
            == f"setup: {copy} cannot be written to: cp -r {copy} DIR, chmod -R u+w DIR, and make setup there\n"
        )
        assert sorted(path.name for path in copy.iterdir()) == ["launch", "pyproject.toml"]
    finally:
        shutil.rmtree(copy)
