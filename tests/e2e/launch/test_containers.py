"""containers/hvdtrain-cpu.def without Singularity: its sections run in a Debian that debootstrap makes.

HVDTRAIN_TEST_CHROOT=1 pytest tests/e2e/launch/test_containers.py     5 to 25 minutes, 12 GB under TMPDIR, as root
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, environment, launch, summary

RECIPES = sorted((ROOT / "containers").glob("*.def"))


def sections(path: Path) -> dict[str, str]:
    """Return the recipe's sections by name; the header under ""."""
    parts = re.split(r"^%(\w+)[ \t]*\n", path.read_text(), flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_are_complete(path):
    found = sections(path)
    assert {"files", "post", "environment", "test", "runscript", "labels", "help"} <= set(found)
    for name in ("post", "test", "runscript", "environment"):
        checked = subprocess.run(["sh", "-n"], input=found[name], text=True, capture_output=True)
        assert checked.returncode == 0, (name, checked.stderr)
    assert found["post"].strip().startswith("set -eu")
    for argument in re.findall(r"{{ (\w+) }}", found[""]):
        assert re.search(rf"^\s*{argument}=\S", found["arguments"], re.M), f"{argument} has no default"
    for script in re.findall(r"launch/\w+(?:\.py)?", found["post"] + found["test"]):
        assert (ROOT / script).exists(), script
    assert "prove.py --mpi" in found["test"]


def of_a_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_-]", requirement)[0]


def test_the_gpu_recipe_installs_what_the_package_needs():
    """It installs without dependencies, so as not to touch the torch and numpy of NVIDIA's image: each is named."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = list(project["dependencies"])
    for extra in ("mpi", "vision"):
        needed += project["optional-dependencies"][extra]
    words = (
        sections(ROOT / "containers" / "hvdtrain.def")["post"]
        .split("pip install --no-deps ")[-1]
        .splitlines()[0]
        .split()
    )
    of_the_image = {"torch", "torchvision", "numpy", "pyyaml"}
    for requirement in needed:
        name = of_a_name(requirement)
        below = importlib.metadata.requires(name) or []
        whole = [name, *(of_a_name(other) for other in below if "extra ==" not in other)]
        missing = [] if name in of_the_image else {other.lower() for other in whole} - of_the_image - set(words)
        assert not missing, f"{name} needs {missing}"


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_what_the_recipes_test_runs_here(path, tmp_path):
    """All but the proof of Horovod, which `make setup` runs: it writes a checkpoint, and goes on from it."""
    lines = [line for line in sections(path)["test"].splitlines() if "prove.py" not in line and "PATH=" not in line]
    done = subprocess.run(
        ["sh"],
        input="\n".join(lines),
        text=True,
        capture_output=True,
        timeout=200,
        env=environment(TMPDIR=str(tmp_path)),
    )
    assert done.returncode == 0, done
    assert "resumed after step" in done.stdout
    assert [
        path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")
    ] == []  # torchvision's import


def test_the_image_can_use_infiniband():
    """NCCL opens libibverbs where it is, and says nothing where it is not."""
    text = (ROOT / "containers" / "Containerfile").read_text()
    installed = text.split("apt-get install")[1].split("&&")[0].split()
    assert {"libibverbs1", "ibverbs-providers"} <= set(installed)


@pytest.fixture
def debian(tmp_path) -> Iterator[Path]:
    root = tmp_path / "debian"
    command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(root)]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, files)):
        (root / "opt" / "hvdtrain" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / "opt" / "hvdtrain" / name)
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.mark.skipif(
    "HVDTRAIN_TEST_CHROOT" not in os.environ, reason="5 to 25 minutes: HVDTRAIN_TEST_CHROOT=1 to run it"
)
@pytest.mark.timeout(2400)
def test_cpu_recipe_builds_and_passes_its_test(debian):
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root, and apt install debootstrap")
    recipe = sections(ROOT / "containers" / "hvdtrain-cpu.def")
    # As Singularity would build it: this machine's hosts, resolver, certificates and index, its /dev and /sys.
    for path in ("/etc/hosts", "/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt"):
        if Path(path).is_file():
            (debian / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, debian / path[1:])
    mounts = "".join(f"mount --rbind /{name} '{debian}/{name}'; " for name in ("dev", "sys"))
    mounts += f"mount -t proc proc '{debian}/proc'; "
    index = {k: v for k, v in os.environ.items() if k.startswith("PIP_") and k not in ("PIP_CERT", "PIP_FIND_LINKS")}
    for name, seconds in (("post", 2000), ("test", 300)):
        # Namespaces of their own: the mounts, and whatever was left running, go with them.
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", f"{mounts} exec chroot '{debian}' sh -eu"],
            input=recipe["environment"] + recipe[name], text=True, capture_output=True, timeout=seconds,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **index},
        )  # fmt: skip
        assert done.returncode == 0, f"%{name}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "2 ranks add up: mpirun" in done.stdout
    assert "test accuracy" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="PID namespaces need root")
def test_ranks_with_a_pid_namespace_each_train_over_tcp(tmp_path):
    """mpirun around one container per rank, with `apptainer --pid` or podman: Open MPI's shared memory would crash."""
    start = f"{LAUNCHERS['mpirun'].format(ranks=2)} unshare --pid --fork --kill-child --mount-proc {PYTHON}"
    train = "-m hvdtrain.mnist --dataset digits --model convnet --epochs 1 --no-progress"
    done = launch(f"{start} {train} --output-dir {tmp_path}")
    assert done.code == 0, done
    assert "MPI over TCP: each rank has a PID namespace of its own" in done.stdout, done
    assert summary(tmp_path)["world_size"] == 2
