"""The recipes under Apptainer itself, as an ordinary user builds and runs them. Needs root, and a root file system:

tests/e2e/roots/apptainer.sh DIR
HVDTRAIN_TEST_APPTAINER=DIR python -m pytest -m slow tests/e2e/launch/test_apptainer.py   20 minutes on two cores, 10 GB

No registry of images is needed: the base is made by debootstrap. `build --fakeroot`, %test and all that follows run with
TMPDIR naming a directory that no container sees, as many centres set it.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.launchers import BIN, LAUNCHERS, PYTHON, ROOT, Done, launch, members, running, summary
from tests.waiting import wait_for

HERE = Path(os.environ.get("HVDTRAIN_TEST_APPTAINER", ""))
IMAGE = "/scratch/hvdtrain.sif"
BUILT_FROM = ("containers", "hvdtrain", "launch", "pyproject.toml", "setup.py", ":!*.md")
APPTAINER = "apptainer --silent exec"
TRAIN = "-m hvdtrain.mnist --dataset digits --epochs 2 --threads 1 --log-steps 1 --no-progress"
LONG = TRAIN.replace("--epochs 2", "--epochs 60")


def why_not() -> str:
    """Return why these tests cannot run, or an empty string."""
    if not os.environ.get("HVDTRAIN_TEST_APPTAINER"):
        return "no root with Apptainer: HVDTRAIN_TEST_APPTAINER=DIR, made by tests/e2e/roots/apptainer.sh"
    if os.geteuid() != 0:
        return "entering another root file system needs root"
    return (
        ""
        if (HERE / "host" / "usr" / "bin" / "apptainer").exists()
        else f"{HERE}/host has no Apptainer: tests/e2e/roots/apptainer.sh makes it"
    )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(5700),
    pytest.mark.skipif(bool(reason := why_not()), reason=reason or "-"),
]


def user(command: str) -> str:
    """Return a command line as an ordinary user of that root, who has this checkout, and a TMPDIR that containers lack."""
    paths = [str(ROOT), "/etc/ssl/certs", str(HERE / "checkout"), f"{HERE}/base=/base"]
    paths += [f"{HERE}/gpu-base=/gpu-base"] if (HERE / "gpu-base").exists() else []
    paths += ["/etc/pip.conf"] if Path("/etc/pip.conf").exists() else []
    bound = [word for path in paths for word in ("--bind", path)]
    enter = [str(ROOT / "tests" / "e2e" / "roots" / "enter.sh"), str(HERE / "host"), "--user", "1234"]
    words = [*enter, *bound, "env", "TMPDIR=/scratch/job1"]
    return shlex.join([*words, "sh", "-euc", command])


def as_user(command: str, timeout: float = 200) -> Done:
    return launch(user(command), timeout=timeout)


def tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=True).stdout
    return [os.fsdecode(name) for name in listed.split(b"\0") if name]


def built(recipe: str, base: str, image: str, options: str = "") -> str:
    """Build `image` from a recipe of this checkout on another base, and return what was said, %test's lines among it."""
    checkout, scratch = HERE / "checkout", HERE / "host" / "scratch"
    shutil.rmtree(checkout, ignore_errors=True)
    for name in tracked():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name)
    text = (ROOT / "containers" / recipe).read_text()
    text = re.sub(r"^Bootstrap:.*\nFrom:.*\n", f"Bootstrap: localimage\nFrom: {base}\n", text, flags=re.M)
    ours = [path for path in ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt") if Path(path).exists()]
    text = text.replace(
        "    . /opt/hvdtrain\n", "    . /opt/hvdtrain\n" + "".join(f"    {path} {path}\n" for path in ours)
    )
    (checkout / "local.def").write_text(text)
    for directory in (scratch, scratch / "job1", scratch / "build"):
        directory.mkdir(exist_ok=True)
    subprocess.run(["chown", "-R", "1234:1234", checkout, scratch, scratch / "job1", scratch / "build"], check=True)
    settings = "APPTAINER_TMPDIR=/scratch/build APPTAINER_CACHEDIR=/scratch"
    command = f"cd {checkout}; rm -rf {image}; {settings} apptainer build --fakeroot {options} {image} local.def"
    done = as_user(command, timeout=5400)
    assert done.code == 0, done
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def image() -> Path:
    """Build the image of this checkout, unless it is there from before: its %test has passed then."""
    digest = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in tracked(*BUILT_FROM))).hexdigest()
    built_from = HERE / "host" / "scratch" / "built-from"
    if not built_from.exists() or built_from.read_text() != digest:
        assert "2 ranks add up: mpirun" in built("hvdtrain-cpu.def", "/base", IMAGE)
        built_from.write_text(digest)
    return HERE / "host" / "home" / "someone"


@pytest.mark.skipif(not (HERE / "gpu-base").exists(), reason="no DIR/gpu-base: tests/e2e/roots/gpu_base.sh makes it")
def test_the_recipe_for_gpus_on_a_base_that_is_not_nvidias():
    """No GPU is there: its %test adds up over MPI, and NCCL is built in."""
    said = built("hvdtrain.def", "/gpu-base", "/scratch/gpu", "--sandbox")
    assert "2 ranks add up: mpirun" in said, said
    assert "NCCL" in said, said


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> str:
    """The final parameters of two ranks on this machine, without a container."""
    directory = tmp_path_factory.mktemp("here")
    done = launch(f"{LAUNCHERS['mpirun'].format(ranks=2)} {PYTHON} {TRAIN} --output-dir {directory}")
    assert done.code == 0, done
    return summary(directory)["parameters_sha256"]


@pytest.fixture
def out(image, request) -> Path:
    """A directory in the user's home, which containers see; the user's name for it is out/NAME."""
    directory = image / "out" / re.sub(r"\W+", "-", request.node.name)
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def said(done: Done) -> list[str]:
    assert done.code == 0, done
    return done.stdout.splitlines()


def test_user_files_and_namespaces(image):
    inside = "id -u; readlink /proc/self/ns/user; touch /here 2>&1 || true; ls /tmp/here; hostname; which python; pwd"
    inside += "; echo $$"
    lines = said(
        as_user(f"touch /tmp/here; readlink /proc/self/ns/user; hostname; {APPTAINER} {IMAGE} sh -c '{inside}'")
    )
    outer, host, uid, inner, refused, found, name, python, directory, pid = lines
    assert (uid, found, name, directory) == ("1234", "/tmp/here", host, "/home/someone")
    assert inner != outer
    assert "Read-only file system" in refused
    assert python == "/opt/hvdtrain/.venv/bin/python"
    assert int(pid) > 50  # the host's numbers


def test_the_hosts_variables_inside(image):
    told = (
        "PYTHONPATH=/sw OPAL_PREFIX=/sw LD_PRELOAD= XDG_CACHE_HOME=/scratch/x MPLCONFIGDIR=~/mpl OMPI_MCA_btl=self,tcp"
    )
    lines = said(as_user(f"export {told} LINES_='a\nb'; {APPTAINER} {IMAGE} env"))
    assert not {line for line in lines if line.startswith(("TMPDIR", "PYTHONPATH", "OPAL", "XDG_CACHE_HOME"))}
    assert {"MPLCONFIGDIR=/home/someone/mpl", "OMPI_MCA_btl=self,tcp", "LINES_=a", "PYTHONNOUSERSITE=1"} <= set(lines)
    bound = said(as_user(f"export {told}; {APPTAINER} --bind /scratch {IMAGE} env"))
    assert {"TMPDIR=/scratch/job1", "XDG_CACHE_HOME=/scratch/x"} <= set(bound)
    asked = said(as_user(f"export {told} APPTAINERENV_PYTHONPATH=/mine; {APPTAINER} {IMAGE} env"))
    assert "PYTHONPATH=/mine" in asked
    for option in ("--cleanenv", "--containall"):
        assert "OMPI_MCA_btl=self,tcp" not in said(as_user(f"export {told}; {APPTAINER} {option} {IMAGE} env"))


def test_runscript_and_test(image):
    done = as_user(f"apptainer --silent run {IMAGE} doctor; apptainer --silent test {IMAGE}", timeout=300)
    assert "0 problems" in done.stdout, done
    assert "resumed after" in done.stdout, done
    assert done.code == 0, done


@pytest.mark.parametrize("launcher", ["mpirun", "gloo", "starter"])
def test_launchers_inside_one_container(launcher, image, expected, out):
    start = LAUNCHERS[launcher].replace(PYTHON, "python").format(ranks=2)
    done = as_user(f"{APPTAINER} {IMAGE} {start} python {TRAIN} --output-dir out/{out.name}")
    assert done.code == 0, done
    assert "session_dir" not in done.stdout + done.stderr, done
    assert summary(out)["parameters_sha256"] == expected


@pytest.mark.parametrize("options", ["", "--sharens", "--pid", "--contain --bind /home/someone"])
def test_the_hosts_mpirun_around_containers(options, image, expected, out):
    """As the page prints it, with the mpirun of `make setup`."""
    directory = f"/home/someone/out/{out.name}"
    done = as_user(f"'{BIN}/mpirun' -np 2 {APPTAINER} {options} {IMAGE} python {TRAIN} --output-dir {directory}")
    assert done.code == 0, done
    assert ("MPI over TCP: each rank has a PID namespace" in done.stdout) == (options == "--pid"), done
    assert "contain" in options or done.stderr == "", done
    assert summary(out)["parameters_sha256"] == expected


def test_an_mpirun_of_open_mpi_5_around_containers(image, expected, out):
    """Debian 13 has 5.0.7. What its PMIx 5 sends, the PMIx 3 of the image's Open MPI 4 cannot read."""
    mpirun = (
        "unset OPAL_PREFIX; /usr/bin/mpirun -np 2 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29511"  # that of our 4.1.8
    )
    ranks = f"{mpirun} {APPTAINER} {IMAGE} python"
    done = as_user(f"{ranks} {TRAIN} --output-dir out/{out.name}")
    assert done.code == 2, done
    assert "announced 2 ranks, but horovod sees 1: this Horovod was built for another MPI" in done.stderr, done
    done = as_user(f"{ranks} -m hvdtrain.starter {TRAIN} --output-dir out/{out.name}")
    assert done.code == 0, done
    assert summary(out)["parameters_sha256"] == expected


def steps(directory: Path) -> int:
    record = directory / "metrics.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    return sum(json.loads(line).get("event") == "train" for line in lines)


def signalled(command: str, directory: Path, program: str, signal: str) -> int:
    """Start a long run, send `signal` to the process of that command line after 30 steps, and return the exit code."""
    with running(user(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as (process, job):
        wait_for(lambda: steps(directory) >= 30, "30 steps were not reached", 200)
        found = []
        for pid in members(job):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if Path(words[0]).name.startswith("python") and words[1:3] == ["-m", program]:
                found.append(pid)
        subprocess.run(["kill", f"-{signal}", str(max(found))], check=True)
        return process.wait(timeout=120)


@pytest.mark.parametrize(
    ("start", "program", "signal", "code"),
    [
        ("python", "hvdtrain.mnist", "USR1", 75),
        ("python -m hvdtrain.starter --local-ranks 2", "hvdtrain.starter", "TERM", 75),
        ("mpirun -np 2 python", "hvdtrain.mnist", "KILL", 137),
    ],
    ids=["SIGUSR1", "SIGTERM to the starter", "a rank killed"],
)
def test_stopped_or_killed_and_resumed(start, program, signal, code, image, out):
    command = f"{APPTAINER} {IMAGE} {start} {LONG} --checkpoint-steps 10 --output-dir out/{out.name}"
    assert signalled(f"exec {command}", out, program, signal) == code
    before = steps(out)
    assert before < 700
    done = as_user(command)
    assert done.code == 0, done
    assert "resumed after step" in done.stdout, done


def test_a_rank_killed_under_the_hosts_mpirun(image, out):
    ranks = f"'{BIN}/mpirun' -np 2 {APPTAINER} {IMAGE} python {LONG} --checkpoint-steps 10 --output-dir out/{out.name}"
    assert signalled(ranks, out, "hvdtrain.mnist", "KILL") == 137
    done = as_user(ranks)
    assert done.code == 0, done
    assert "resumed after step" in done.stdout, done
