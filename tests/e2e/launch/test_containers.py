"""containers/hvdtrain-cpu.def without Singularity: its sections run in a Debian that debootstrap makes.

HVDTRAIN_TEST_CHROOT=1 pytest tests/e2e/launch/test_containers.py     5 to 25 minutes, 12 GB under TMPDIR, as root
"""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_each_part_of_an_image_begins_with_its_own_environment(path):
    found = sections(path)
    for name in ("post", "environment", "test"):
        lines = [line.strip() for line in found[name].splitlines() if line.strip() != "set -eu"]
        assert lines[0] == ". /opt/hvdtrain/containers/environment.sh", name


OF_THE_HOST = {
    "PYTHONPATH": "/sw/python/site-packages", "PYTHONHOME": "/sw/python",
    "LD_LIBRARY_PATH": "/sw/lib:/usr/local/cuda/lib64:/sw/lib64:/.singularity.d/libs",
    "OPAL_PREFIX": "/sw/openmpi", "PMIX_INSTALL_PREFIX": "/sw/pmix", "UCX_MODULE_DIR": "/sw/ucx",
    "OMPI_MCA_mca_base_component_path": "/sw/openmpi/lib", "OMPI_MCA_orte_tmpdir_base": "/etc/hosts/x",
    "TMPDIR": "/etc/hosts/x", "TMP": "/etc/hosts/x", "TEMP": "/etc/hosts/x", "MPLCONFIGDIR": "/etc/hosts/x/mpl",
    "XDG_CACHE_HOME": "/etc/hosts/x/cache", "XDG_RUNTIME_DIR": "/etc/hosts/x/1000", "TRITON_CACHE_DIR": "relative",
    "PMIX_SERVER_TMPDIR": "/etc/hosts/x/ompi", "PMIX_SYSTEM_TMPDIR": "/etc/hosts/x",
    "PMIX_DSTORE_21_BASE_PATH": "/etc/hosts/x/d",
    "OMPI_MCA_orte_top_session_dir": "/etc/hosts/x/o", "OMPI_MCA_orte_jobfam_session_dir": "/etc/hosts/x/o/1",
}  # fmt: skip
SOURCED = f". '{ROOT}/containers/environment.sh'"
SHELLS = [pytest.param(shell, id=shell[0]) for shell in (["sh"], ["bash", "--posix"])]


def inside(shell: list[str], told: dict[str, str]) -> dict[str, str]:
    """Return the environment that a program gets in an image whose host has these variables."""
    env = {"PATH": os.environ["PATH"], "HOME": "/root", **told}
    command = [*shell, "-euc", f"export LD_PRELOAD=/sw/xalt.so; {SOURCED}; exec env -0"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    found = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    for name in ("PATH", "HOME", "PWD", "SHLVL", "_", "OLDPWD"):
        found.pop(name, None)
    return found


OWN = {"LC_ALL": "C.UTF-8", "PYTHONNOUSERSITE": "1"}


@pytest.mark.parametrize("shell", SHELLS)
def test_what_only_the_host_has_does_not_come_along(shell):
    libraries = {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64:/.singularity.d/libs"}
    assert inside(shell, OF_THE_HOST) == OWN | libraries | {"PMIX_GDS_MODULE": "hash"}
    assert inside(shell, {}) == OWN


@pytest.mark.parametrize("shell", SHELLS)
def test_what_is_there_for_the_image_stays(shell, tmp_path):
    job = {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "SLURM_PROCID": "0", "RANK": "0", "HOROVOD_RANK": "0"}
    folders = ("TMPDIR", "TMP", "TEMP", "XDG_RUNTIME_DIR", "PMIX_SERVER_TMPDIR", "PMIX_SYSTEM_TMPDIR", "MPLCONFIGDIR")
    here = {name: str(tmp_path) for name in (*folders, "OMPI_MCA_orte_tmpdir_base")}
    made = dict.fromkeys(("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCH_HOME"), f"{tmp_path}/not/yet")
    others = {"OMPI_MCA_btl": "self,tcp", "OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO", "WANDB_MODE": "offline"}
    told = job | here | made | others | {"PMIX_DSTORE_21_BASE_PATH": "/d", "PMIX_GDS_MODULE": "ds21,hash"}
    assert inside(shell, told) == OWN | told


# As Apptainer's own shell sources %environment: without the host's variables, which it keeps in a variable, in lines. Those
# that are unset afterwards are set again, and those that are empty are unset. test_apptainer.py has Apptainer itself.
APPTAINER = r"""
declare -r __exported_env__=$(env -0 | sed -z 's/\n/\\u000A/g' | tr '\0' '\n')
names=$(compgen -e | grep -v '^PATH$')
unset $names
. "$0"
for name in $names; do
    if ! test -v "$name"; then
        line=$(grep "^$name=" <<<"$__exported_env__")
        export "${line//\\u000A/$'\n'}"
    elif test -z "${!name}"; then
        unset "$name"
    fi
done
exec env -0
"""


def test_apptainer_does_not_bring_it_back(tmp_path):
    others = {"LINES_OF": "a\nb * '", "QUOTED": "'$HOME' \"", "STARS": "* ?", "OMPI_MCA_btl": "self,tcp"}
    told = OF_THE_HOST | others | {"TMPDIR": str(tmp_path), "PATH": os.environ["PATH"]}
    command = ["bash", "-c", APPTAINER, str(ROOT / "containers" / "environment.sh")]
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    found = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    for name in ("PATH", "PWD", "SHLVL", "_", "OLDPWD"):
        found.pop(name, None)
    libraries = {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64:/.singularity.d/libs"}
    assert found == OWN | others | libraries | {"TMPDIR": str(tmp_path), "PMIX_GDS_MODULE": "hash"}


SUM = """
import os
from mpi4py.MPI import COMM_WORLD as all
all.Bcast(bytearray(1 << 20))
os.write(1, b'%d ranks\\n' % all.allreduce(1))
"""


def test_mpirun_in_an_image_starts_whatever_the_host_has():
    """The CPU image has Open MPI from its wheel, as this environment."""
    words = ["sh", "-c", f'{SOURCED}; exec mpirun -np 2 "$@"', "sh", *shlex.split(PYTHON), "-c", SUM]
    done = launch(shlex.join(words), timeout=60, **OF_THE_HOST)
    assert (done.code, done.stdout, done.stderr) == (0, "2 ranks\n" * 2, ""), done


@pytest.mark.skipif(os.geteuid() != 0, reason="a directory is hidden by a mount, which needs root")
def test_mpirun_of_the_host_around_images_that_do_not_have_its_directory(tmp_path):
    """As where TMPDIR=/scratch/job1 is not bound. Each rank is in a user namespace of its own, too."""
    hidden = f"mount -t tmpfs -o ro none '{tmp_path}'; {SOURCED}; exec \"$@\""
    words = ["mpirun", "-np", "2", "unshare", "--mount", "--user", "--map-root-user", "sh", "-c", hidden, "sh"]
    told = {"TMPDIR": str(tmp_path), "PYTHONPATH": "/nowhere"}
    done = launch(shlex.join([*words, *shlex.split(PYTHON), "-c", SUM]), timeout=60, **told)
    assert (done.code, done.stdout, done.stderr) == (0, "2 ranks\n" * 2, ""), done


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
        below = map(Requirement, importlib.metadata.requires(name) or [])
        needed_here = [other.name for other in below if other.marker is None or other.marker.evaluate({"extra": ""})]
        whole = [name, *needed_here]
        missing = [] if name in of_the_image else {other.lower() for other in whole} - of_the_image - set(words)
        assert not missing, f"{name} needs {missing}"


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_what_the_recipes_test_runs_here(path, tmp_path):
    """All but the proof of Horovod, which `make setup` runs: it writes a checkpoint, and goes on from it."""
    lines = [
        line for line in sections(path)["test"].splitlines() if "prove.py" not in line and "environment.sh" not in line
    ]
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
