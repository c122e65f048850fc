"""The image of containers/Containerfile at work: as root, with podman and charliecloud, see containers/README.md.

HVDTRAIN_TEST_IMAGE=NAME pytest -m slow tests/e2e/launch/test_images.py   podman must have that image

Each container has what a strict site leaves it: 64 MB of /dev/shm, a read-only root, no network but what a test joins, a
user without privileges, no capabilities. The image must be of this checkout: two ranks there end with the same bits as here.
"""

import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, needs_hosts
from tests.e2e.launchers import LAUNCHERS, PYTHON, Done, events, launch, summary
from tests.waiting import wait_for

IMAGE = os.environ.get("HVDTRAIN_TEST_IMAGE", "")
USER = 1000  # of the image
SECONDS = 200  # of one container
TRAIN = "-m hvdtrain.mnist --dataset digits --model convnet --epochs 12 --threads 1 --log-steps 1 --no-progress"
SHORT = "--epochs 1"  # more ranks than cores: that they start and end is what is looked at
# What is to be shown: said where it is not so, and then the command is not run.
CONFINED = """
test "$(id -u)" != 0 || { echo "root"; exit 90; }
test "$(df -k --output=size /dev/shm | tail -1)" -le 65536 || { echo "more than 64 MB of /dev/shm"; exit 91; }
! touch /here 2>/dev/null || { echo "the root file system can be written to"; exit 92; }
exec "$@"
"""


def why_not() -> str:
    """Return why these tests cannot run, or an empty string."""
    if not IMAGE:
        return "no image named: HVDTRAIN_TEST_IMAGE=NAME, built from containers/Containerfile"
    if os.geteuid() != 0:
        return "mounting an image needs root"
    missing = [name for name in ("podman", "ch-run", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: apt install podman charliecloud util-linux"
    if subprocess.run(["podman", "image", "exists", IMAGE], timeout=60).returncode != 0:
        return f"podman has no image {IMAGE}: containers/README.md says how it is built"
    return ""


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(reason := why_not()), reason=reason or "-")]


@pytest.fixture
def out(tmp_path) -> Path:
    """A directory that the image's user may write to, and reach."""
    for parent in (tmp_path, *tmp_path.parents[:2]):  # pytest's own, which are their maker's alone
        parent.chmod(0o755)
    directory = tmp_path / "out"
    directory.mkdir()
    os.chown(directory, USER, USER)
    return directory


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> str:
    """The final parameters of two ranks on this machine, without a container."""
    directory = tmp_path_factory.mktemp("here")
    done = launch(f"{LAUNCHERS['mpirun'].format(ranks=2)} {PYTHON} {TRAIN} --output-dir {directory}")
    assert done.code == 0, done
    return summary(directory)["parameters_sha256"]


def contained(command: str, out: Path, *options: str, name: str = "", network: str = "none", **variables: str) -> Done:
    """Run a command in a container of the image, in which `out` is /out. It is killed after SECONDS."""
    words = ["podman", "run", "--rm", "--name", name or f"hvdtrain-{uuid.uuid4().hex[:12]}", "--timeout", str(SECONDS)]
    words += ["--read-only", "--network", network, "--cap-drop", "all", "--security-opt", "no-new-privileges"]
    words += ["--volume", f"{out}:/out", *options]
    for variable, value in variables.items():
        words += ["--env", f"{variable}={value}"]
    return launch(shlex.join([*words, IMAGE, "sh", "-c", CONFINED, "sh", *shlex.split(command)]), timeout=SECONDS + 60)


def wait_for_step(directory: Path, step: int) -> None:
    record = directory / "metrics.jsonl"
    reached = lambda: record.exists() and len(events(directory, "train")) >= step  # noqa: E731
    wait_for(reached, f"step {step} was not reached", SECONDS)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("launcher", ["mpirun", "gloo", "starter"])
def test_ranks_in_one_confined_container(launcher, ranks, expected, out):
    start = LAUNCHERS[launcher].replace(PYTHON, "python").format(ranks=ranks)
    home = {"HOME": "/tmp"} if launcher == "gloo" else {}  # horovodrun keeps a cache there
    done = contained(f"{start} python {TRAIN} {SHORT if ranks > 2 else ''} --output-dir /out", out, **home)
    assert done.code == 0, done
    assert summary(out)["world_size"] == ranks
    if ranks == 2:
        assert summary(out)["parameters_sha256"] == expected


def test_a_rank_killed_in_a_container_and_resumed_there(expected, out):
    name = f"hvdtrain-{uuid.uuid4().hex[:12]}"
    command = f"mpirun -np 2 python {TRAIN} --checkpoint-steps 5 --output-dir /out"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(contained, command, out, name=name)
        wait_for_step(out, 40)
        pid = events(out, "start")[0]["ranks"][1]["pid"]  # as the container counts
        subprocess.run(["podman", "exec", name, "sh", "-c", f"kill -KILL {pid}"], check=True, timeout=60)
        killed = running.result()
    assert killed.code not in (0, 75), killed
    done = contained(command, out)
    assert done.code == 0, done
    assert events(out, "resume")[0]["step"] > 0
    assert summary(out)["parameters_sha256"] == expected


def test_a_stopped_container_saves_and_goes_on(expected, out):
    """`podman stop`, as Kubernetes ends a pod: SIGTERM to process 1, to which Linux delivers only what it handles."""
    name = f"hvdtrain-{uuid.uuid4().hex[:12]}"
    command = f"python -m hvdtrain.starter --local-ranks 2 {TRAIN} --output-dir /out"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(contained, command, out, name=name)
        wait_for_step(out, 40)
        subprocess.run(["podman", "stop", "--time", "60", name], check=True, timeout=120, stdout=subprocess.DEVNULL)
        stopped = running.result()
    assert stopped.code == 75, stopped
    done = contained(command, out)
    assert done.code == 0, done
    assert events(out, "resume")[0]["step"] >= 40
    assert summary(out)["parameters_sha256"] == expected


@needs_hosts
def test_starter_between_two_containers_one_killed_and_both_resumed(expected, out, tmp_path):
    """Each container on a host of its own: network namespaces, joined by a bridge."""
    command = f"python -m hvdtrain.starter {TRAIN} --checkpoint-steps 5 --output-dir /out"
    with Cluster(tmp_path, ["a", "b"]) as cluster, ThreadPoolExecutor(2) as pool:
        known = [option for host in "ab" for option in ("--add-host", f"{host}:{cluster.address(host)}")]

        def both(names: list[str]) -> list:
            return [
                pool.submit(
                    contained, command, out, "--hostname", host, *known, name=names[rank],
                    network=f"ns:{cluster.network(host)}", RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="a",
                    MASTER_PORT="9000",
                )
                for rank, host in enumerate("ab")
            ]  # fmt: skip

        names = [f"hvdtrain-{uuid.uuid4().hex[:12]}" for _ in "ab"]
        running = both(names)
        wait_for_step(out, 40)
        subprocess.run(["podman", "kill", names[1]], check=True, timeout=60, stdout=subprocess.DEVNULL)
        first, second = [container.result() for container in running]
        assert second.code == 137, second
        assert first.code not in (0, 75), first
        for done in [container.result() for container in both([f"{name}-again" for name in names])]:
            assert done.code == 0, done
    assert [rank["host"] for rank in events(out, "start")[0]["ranks"]] == ["a", "b"]
    assert events(out, "resume")[0]["step"] > 0
    assert summary(out)["parameters_sha256"] == expected


@pytest.fixture(scope="module")
def mounted() -> Iterator[str]:
    """The image as a directory: what `ch-convert` or `podman export` would make, without 6 GB of copies."""
    yield subprocess.run(
        ["podman", "image", "mount", IMAGE], check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()
    subprocess.run(["podman", "image", "umount", IMAGE], check=True, timeout=120, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("ranks", [2, 4])
def test_hosts_mpirun_around_one_charliecloud_container_per_rank(ranks, expected, mounted, out, tmp_path):
    """As an ordinary user; each rank in a user namespace of its own, so that no rank may read another's memory."""
    root = tmp_path / "image"
    root.mkdir()
    temporary = Path(os.environ["TMPDIR"])
    os.chown(temporary, USER, USER)
    words = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1"; shift; exec "$@"', mounted, str(root)]
    words += ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"]
    # TMPDIR is set: ch-run shows that directory as /tmp, and mpirun has told the ranks its path.
    words += ["mpirun", "--oversubscribe", "-np", str(ranks), "ch-run", f"--bind={out}:/mnt", str(root), "--"]
    words += ["/opt/hvdtrain/containers/run", "python", *TRAIN.split(), *(SHORT.split() if ranks > 2 else ())]
    words += ["--output-dir", "/mnt"]
    done = launch(shlex.join(words), timeout=SECONDS, cwd=temporary, USER="user", HOME=str(temporary))
    assert done.code == 0, done
    assert summary(out)["world_size"] == ranks
    if ranks == 2:
        assert summary(out)["parameters_sha256"] == expected
