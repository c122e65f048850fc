"""Several hosts, for real: each a set of namespaces with its own name and network (cluster.py)."""

import json
import shlex
import sys

import pytest

from tests.e2e.cluster import Cluster, needs_hosts, needs_ssh
from tests.e2e.launch.test_wrappers import HOSTILE
from tests.e2e.launchers import ROOT, events, launch, summary, wait_for_training

pytestmark = [needs_hosts, pytest.mark.slow]
FLAGS = "-m hvdtrain.mnist --dataset digits --model convnet --no-progress --log-steps 1 --threads 1"
TRAIN = [sys.executable, *FLAGS.split()]
SMALL = "--batch-size 32 --train-samples 512"
WRAPPERS = {
    "horovodrun": ("horovodrun.sh", "horovod over Gloo"),
    "mpirun": ("mpirun.sh", "horovod over Gloo"),
    "mpirun over MPI": ("mpirun.sh --transport mpi", "horovod over MPI"),
}


def losses(directory) -> list[float]:
    return [event["loss"] for event in events(directory, "train")]


@pytest.fixture
def four(tmp_path):
    with Cluster(tmp_path, ["a", "b", "c", "d"]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("two"), ["a", "b"]) as cluster:
        yield cluster


def meeting(cluster: Cluster, rank: int, size: int | None = None) -> dict[str, str]:
    return dict(
        RANK=str(rank), WORLD_SIZE=str(size or len(cluster.names)), MASTER_ADDR=cluster.names[0], MASTER_PORT="9000"
    )


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory) -> list[float]:
    """The loss curve of two ranks on this host. A sum of two has one order: over any transport it is the same to the bit."""
    out = tmp_path_factory.mktemp("one")
    done = launch(f"mpirun --oversubscribe -np 2 {shlex.join(TRAIN)} --output-dir {out}")
    assert done.code == 0, done
    return losses(out)


@needs_ssh
@pytest.mark.parametrize("case", WRAPPERS)
def test_wrappers_train_on_two_hosts_as_on_one(case, on_one_host, tmp_path):
    wrapper, transport = WRAPPERS[case]
    script, *options = wrapper.split()
    command = [f"{ROOT}/launch/{script}", "-H", "a:1,b:1", "--interface", "eth0", *options, "--", *TRAIN]
    here = tmp_path / HOSTILE
    here.mkdir()
    with Cluster(tmp_path, ["a", "b"], ssh=True) as cluster:
        change = ["sh", "-c", 'cd "$0" && exec "$@"', str(here)]
        done = cluster.run("a", [*change, *command, "--output-dir", str(tmp_path / "out")])
        assert done.code == 0, done
        assert f"2 ranks on 2 hosts, {transport}" in done.stdout, done
        assert [rank["host"] for rank in events(tmp_path / "out", "start")[0]["ranks"]] == ["a", "b"]
        assert cluster.processes() == []
    assert losses(tmp_path / "out") == on_one_host
    assert list(here.iterdir()) == []


def test_starter_and_ddp_train_on_four_hosts_as_on_one(four, tmp_path):
    """No ssh, no MPI: one process per host, told who it is, as Kubernetes or srun would."""
    engines = {"starter": ["-m", "hvdtrain.starter", *TRAIN[1:]], "ddp": [*TRAIN[1:], "--engine", "ddp"]}
    for name, program in engines.items():
        for where in ("four", "one"):
            out = tmp_path / f"{name}-{where}"
            command = [sys.executable, *program, *SMALL.split(), "--output-dir", str(out)]
            hosts = four.names if where == "four" else ["a"] * 4
            ranks = {
                f"{host}{rank}": four.start(host, command, **meeting(four, rank)) for rank, host in enumerate(hosts)
            }
            for done in four.finish(ranks, 60).values():
                assert done.code == 0, done
            assert len({rank["host"] for rank in events(out, "start")[0]["ranks"]}) == (4 if where == "four" else 1)
        assert losses(tmp_path / f"{name}-four") == losses(tmp_path / f"{name}-one")
        assert (
            summary(tmp_path / f"{name}-four")["parameters_sha256"]
            == summary(tmp_path / f"{name}-one")["parameters_sha256"]
        )
    # The same four ranks, two of each host from one process.
    out = tmp_path / "local-ranks"
    command = [sys.executable, "-m", "hvdtrain.starter", "--oversubscribe", "--local-ranks", "2", *TRAIN[1:]]
    command += [*SMALL.split(), "--output-dir", str(out)]
    both = {host: four.start(host, command, **meeting(four, number, 2)) for number, host in enumerate("ab")}
    for done in four.finish(both, 60).values():
        assert done.code == 0, done
    assert [rank["host"] for rank in events(out, "start")[0]["ranks"]] == ["a", "a", "b", "b"]
    assert summary(out)["parameters_sha256"] == summary(tmp_path / "starter-four")["parameters_sha256"]
    assert four.processes() == []


@pytest.mark.leaves("sem.hvdtrain-", "hvdtrain-")  # of the workers of a killed rank; the next start removes them
def test_hosts_that_train_alone_between_exchanges_are_killed_and_resumed_with_the_same_bits(two_hosts, tmp_path):
    """Two ranks on each host average gradients in every step, the hosts exchange weights in every fourth."""
    attacked = [str(ROOT / "tests" / "chaos" / "attacked.py"), *SMALL.split(), *FLAGS.split()[2:], "--epochs", "2"]
    attacked += ["--sync-every", "4", "--sync-within", "host", "--checkpoint-steps", "4"]
    starter = [sys.executable, "-m", "hvdtrain.starter", "--oversubscribe", "--local-ranks", "2", *attacked]
    attack = json.dumps(dict(rank=3, point="update", count=6, kind="kill", saved=True))
    codes = []
    for name, extra in (("whole", {}), ("killed", {"ATTACK": attack}), ("killed", {})):
        command = [*starter, "--output-dir", str(tmp_path / name)]
        place = {host: meeting(two_hosts, number, 2) for number, host in enumerate("ab")}
        both = {host: two_hosts.start(host, command, **place[host], **extra) for host in "ab"}
        done = two_hosts.finish(both, 120)
        codes.append(done["a"].code)
        assert "gradients are averaged within each of 2 hosts" in done["a"].stdout, done
    assert [codes[0], codes[2]] == [0, 0] != codes[1], done
    assert events(tmp_path / "killed", "resume")[0]["step"] in range(4, 32, 4)  # after an exchange
    one, other = (summary(tmp_path / name) for name in ("whole", "killed"))
    assert (one["parameters_sha256"], one["samples"]) == (other["parameters_sha256"], other["samples"])


@pytest.mark.parametrize("how", ["cut", "vanish"])
def test_a_host_that_is_gone_ends_the_job(how, tmp_path):
    """Horovod over Gloo waits HOROVOD_GLOO_TIMEOUT_SECONDS (30 if not set) for a rank that is silent, then gives up."""
    with Cluster(tmp_path, ["a", "b"]) as cluster:
        command = [sys.executable, "-m", "hvdtrain.starter", *TRAIN[1:], "--epochs", "100000", "--output-dir"]
        command += [str(tmp_path / "out")]
        ranks = [
            cluster.start(host, command, HOROVOD_GLOO_TIMEOUT_SECONDS="3", **meeting(cluster, rank))
            for rank, host in enumerate("ab")
        ]
        wait_for_training(tmp_path / "out")
        cluster.cut("b") if how == "cut" else cluster.vanish("b")
        done = cluster.finish({"a": ranks[0]}, 30)["a"]
        assert done.code not in (0, 2), done
        assert done.stderr != "", done


@pytest.mark.parametrize(
    ("variables", "options", "complaint"),
    [
        ({"MASTER_ADDR": "nowhere"}, "", "nowhere, where rank 0 should be, has no address"),
        ({"MASTER_ADDR": "b"}, "", "10.77.0.2 is not an address of a, where rank 0 runs: set MASTER_ADDR to this host"),
        ({}, "--interface eth9", "--interface eth9: not on this host"),
        ({}, "", "rank 1, 2 did not connect to 10.77.0.1:9000: were all 3 started?"),
        ({"MASTER_PORT": "0x7"}, "", "MASTER_PORT='0x7' is not a port"),
        ({"MASTER_PORT": ""}, "", "torchrun does not tell the ranks where to meet: set MASTER_ADDR and MASTER_PORT"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "3"}, "", "horovodrun has started Horovod already"),
    ],
    ids=["no such host", "not rank 0's host", "no such interface", "nobody else", "no port", "no place", "horovodrun"],
)
def test_the_starter_refuses_in_one_line(two_hosts, variables, options, complaint):
    starter = [sys.executable, "-m", "hvdtrain.starter", "--wait", "1", *options.split(), *TRAIN[1:]]
    done = two_hosts.run("a", starter, **meeting(two_hosts, 0, 3) | variables)
    assert done.code == 2, done
    assert done.stderr.startswith("hvdtrain.starter: error: "), done
    assert complaint in done.stderr, done
    assert done.stderr.count("\n") == 1, done


def test_the_starter_listens_on_the_jobs_interface_only_and_passes_exit_codes_on(two_hosts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys, horovod.torch as hvd\n"
        "hvd.init()\n"
        "hvd.barrier()\n"
        "print(subprocess.run(['ss', '-Hltun'], capture_output=True, text=True).stdout)\n"
        "hvd.barrier()\n"
        "sys.exit(40 + hvd.rank() if sys.argv[1:] == ['a', '-m', ''] else 1)\n"
    )
    starter = [sys.executable, "-m", "hvdtrain.starter", str(program), "a", "-m", ""]
    ranks = {host: two_hosts.start(host, starter, **meeting(two_hosts, rank)) for rank, host in enumerate("ab")}
    done = two_hosts.finish(ranks, 60)
    assert (done["a"].code, done["b"].code) == (40, 41), done
    local = [line.split()[4].rpartition(":")[0] for rank in done.values() for line in rank.stdout.splitlines() if line]
    assert "10.77.0.1" in local, done
    assert set(local) <= {"10.77.0.1", "10.77.0.2"}, done
    assert two_hosts.processes() == []
