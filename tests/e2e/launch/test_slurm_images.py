"""An Apptainer image under a real Slurm of two nodes, and between two hosts, as an ordinary user. Needs both in one root:

tests/e2e/roots/apptainer.sh DIR
HVDTRAIN_TEST_APPTAINER=DIR python -m pytest -m slow tests/e2e/launch/test_apptainer.py      builds the image
tests/e2e/roots/slurm.sh DIR/host trixie                                                     runs these, and those of Slurm

Each rank has a container of its own, without setuid. TMPDIR names a directory that no container sees.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e import slurm
from tests.e2e.cluster import Cluster, needs_hosts
from tests.e2e.launch.test_slurm import HOW, PROGRAM, edited, has_or_skip
from tests.e2e.launchers import BIN, ROOT, Done, events, summary
from tests.waiting import wait_for

IMAGE, HOME = Path("/scratch/hvdtrain.sif"), Path("/home/someone")
AS = "setpriv --reuid=1234 --regid=1234 --init-groups env"
USER = [*AS.split(), f"HOME={HOME}", "USER=someone", "TMPDIR=/scratch/job1"]
EXEC = ["apptainer", "--silent", "exec", str(IMAGE)]
TRAIN = "-m hvdtrain.mnist --dataset digits --epochs 2 --threads 1 --log-steps 1 --no-progress"
LONG = TRAIN.replace("--epochs 2", "--epochs 200") + " --checkpoint-steps 10"
missing = " and ".join(str(path) for path in (Path("/usr/bin/apptainer"), IMAGE) if not path.exists())
pytestmark = [
    needs_hosts,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing), reason=f"no {missing}: see the head of this file"),
]


@pytest.fixture(scope="module")
def cluster():
    reason = slurm.why_not()
    if reason:
        pytest.skip(reason)
    directory = HOME / "nodes"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    with Cluster(directory, ["a", "b"]) as cluster:
        yield slurm.Slurm(cluster, cluster.directory)


def as_user(cluster, *command: str, timeout: float = 300) -> Done:
    return cluster("a", *USER, *command, timeout=timeout)


@pytest.fixture
def out(request) -> Path:
    """A directory of the user that containers see, with nothing in it."""
    return new_directory(request.node.name)


def new_directory(name: str) -> Path:
    directory = HOME / "out" / "".join(letter if letter.isalnum() else "-" for letter in name)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for path in (directory.parent, directory):
        os.chown(path, 1234, 1234)
    return directory


@pytest.fixture(scope="module")
def expected(cluster) -> str:
    """The final parameters of two ranks in one container."""
    directory = new_directory("expected")
    done = as_user(cluster, *EXEC, "mpirun", "-np", "2", "python", *TRAIN.split(), "--output-dir", str(directory))
    assert done.code == 0, done
    return summary(directory)["parameters_sha256"]


def ranks(directory: Path) -> list[int]:
    """Return the processes of the ranks, as this host counts them: those that Python runs inside containers."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
            inside = (path / "ns" / "user").readlink() != Path("/proc/self/ns/user").readlink()
        except OSError:
            continue
        if Path(words[0]).name.startswith("python") and str(directory) in words and inside:
            found.append(int(path.name))
    return sorted(found)


def kill_one(directory: Path, timeout: float = 200) -> None:
    """Wait for 30 steps, then kill a rank."""
    record = directory / "metrics.jsonl"
    wait_for(lambda: record.exists() and len(events(directory, "train")) >= 30, "30 steps were not reached", timeout)
    subprocess.run(["kill", "-KILL", str(ranks(directory)[-1])], check=True)


STARTER = "-m hvdtrain.starter --interface eth0"
AROUND = {
    "none": ("none", "-N2", STARTER, "2 ranks on 2 hosts, horovod over Gloo"),
    "pmi2": ("pmi2", "-N2", STARTER, "2 ranks on 2 hosts, horovod over Gloo"),
    "pmix": ("pmix", "-N2", "", "2 ranks on 2 hosts, horovod over MPI"),
    "pmix on one node": ("pmix", "-N1 -n2", "", "2 ranks on 1 host, horovod over MPI"),
}


def srun(case: str, program: str, directory: Path) -> list[str]:
    kind, where, starter, _ = AROUND[case]
    return [
        "srun", f"--mpi={kind}", *where.split(), "--kill-on-bad-exit=1", *EXEC,
        "python", *starter.split(), *program.split(), "--output-dir", str(directory),
    ]  # fmt: skip


@pytest.mark.parametrize("case", AROUND)
def test_srun_around_containers(cluster, case, expected, out):
    has_or_skip(cluster, AROUND[case][0])
    done = as_user(cluster, *srun(case, TRAIN, out))
    assert done.code == 0, done
    assert AROUND[case][3] in done.stdout, done
    assert summary(out)["parameters_sha256"] == expected


@pytest.mark.parametrize("case", ["pmi2", "pmix"])
def test_a_rank_killed_under_srun(cluster, case, out):
    has_or_skip(cluster, AROUND[case][0])
    command = srun(case, LONG, out)
    process = cluster.start("a", *USER, *command)
    kill_one(out)
    assert process.wait(timeout=120) not in (0, 75)
    done = as_user(cluster, *command)
    assert done.code == 0, done
    assert "resumed after step" in done.stdout, done


def batch(out: Path, how: str, program: str) -> Path:
    script = edited(
        out,
        {
            HOW: f"how={how}",
            r"^image=''": f"image={IMAGE}",
            r"^bind=\S+": f"bind={HOME}",
            r"^interface=''": "interface=eth0",
            r"^output=\S+": f"output={out}",
            r"^checkout=\S+": f"checkout='{ROOT}'; PATH='{BIN}':$PATH",  # what a module of Open MPI 4 does
            PROGRAM: f"program=(python {program} --output-dir {out})",
        },
    )
    os.chown(script, 1234, 1234)
    return script


@pytest.mark.parametrize("how", ["starter", "forked", "pmix", "mpirun"])
def test_the_batch_script_with_an_image(cluster, how, expected, out):
    if how == "pmix":
        has_or_skip(cluster, "pmix")
    job = as_user(cluster, "sbatch", "--parsable", str(batch(out, how, TRAIN))).stdout.strip()
    cluster.wait_for_end(job, 300)
    log = (out / f"hvdtrain-{job}.log").read_text()
    assert cluster.state(job) == "COMPLETED", log
    assert "2 ranks on 2 hosts" in log
    assert summary(out)["parameters_sha256"] == expected


def test_a_rank_killed_in_a_batch_job_that_goes_on(cluster, out):
    job = as_user(cluster, "sbatch", "--parsable", str(batch(out, "starter", LONG))).stdout.strip()
    kill_one(out)
    cluster.wait_for_end(job, 400)
    log = (out / f"hvdtrain-{job}.log").read_text()
    assert cluster.state(job) == "COMPLETED", log
    assert "resumed after step" in log


def test_starter_between_two_hosts_with_an_image_on_a_read_only_mount(cluster, expected, out):
    hosts = cluster.cluster
    for host in hosts.names:
        hosts.sh(host, "mkdir -p /images && mount --bind /scratch /images && mount -o remount,bind,ro /images")
    image = [*EXEC[:-1], f"/images/{IMAGE.name}", "python", *STARTER.split()]

    def both(program: str, directory: Path) -> dict[str, subprocess.Popen]:
        words = [*USER, *image, *program.split(), "--output-dir", str(directory)]
        told = {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "9000"}
        return {host: hosts.start(host, words, RANK=str(rank), **told) for rank, host in enumerate(hosts.names)}

    running = both(LONG, out / "killed")
    kill_one(out / "killed")
    assert all(done.code not in (0, 75) for done in hosts.finish(running, 120).values())
    for program, directory in ((LONG, out / "killed"), (TRAIN, out / "whole")):
        for done in hosts.finish(both(program, directory), 300).values():
            assert done.code == 0, done
    assert events(out / "killed", "resume")[0]["step"] > 0
    assert [rank["host"] for rank in events(out / "whole", "start")[0]["ranks"]] == ["a", "b"]
    assert summary(out / "whole")["parameters_sha256"] == expected
