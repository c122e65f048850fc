"""launch/slurm.sbatch under a real Slurm of two nodes, edited as a user would. Another Slurm: tests/e2e/roots/slurm.sh."""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import slurm
from tests.e2e.cluster import Cluster, needs_hosts
from tests.e2e.launchers import BIN, ROOT, events, summary

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(400)]
AS_ROOT = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
SITE = {
    r"--partition=gpu\b": "--partition=test",
    r"--ntasks-per-node=2\b": "--ntasks-per-node=1",
    r"#SBATCH --gres=.*\n": "",
    r"--cpus-per-task=8\b": "--cpus-per-task=1",
    r"#SBATCH --mem=.*\n": "",
    r"^checkout=\S+": f"checkout='{ROOT}'",
    r"source \.venv/bin/activate": f"source '{BIN}/activate'; export {AS_ROOT}",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = slurm.why_not()
    if reason:
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("nodes"), ["a", "b"]) as cluster:
        yield slurm.Slurm(cluster, cluster.directory)


def has_or_skip(cluster, kind: str) -> None:
    """Slurm may lack a plugin, or the library that srun opens for --mpi=pmix, and then ends the job by itself."""
    known = cluster("a", "srun", "--mpi=list")
    if kind not in (known.stdout + known.stderr).split():
        pytest.skip(f"this Slurm has no --mpi={kind}")
    if kind == "pmix" and (missing := slurm.lacks_pmix()):
        pytest.skip(f"no {', '.join(missing)}: {slurm.WANTED}")


def edited(tmp_path: Path, edits: dict[str, str]) -> Path:
    """Return launch/slurm.sbatch with each pattern replaced exactly once; every one of them must be on an EDIT line."""
    text = (ROOT / "launch" / "slurm.sbatch").read_text()
    for pattern, value in (SITE | {r"--output=\S+": f"--output={tmp_path}/hvdtrain-%j.log"} | edits).items():
        line = next((line for line in text.splitlines(keepends=True) if re.search(pattern, line, re.M)), "")
        assert "EDIT" in line or "--signal" in line, f"{pattern} is on no line marked EDIT: {line!r}"
        text, count = re.subn(pattern, lambda _, value=value: value, text, flags=re.M)
        assert count == 1, pattern
    script = tmp_path / "edited.sbatch"
    script.write_text(text)
    return script


def train(tmp_path: Path) -> str:
    program = "python -m hvdtrain.mnist --dataset digits --threads 1 --no-progress --output-dir $output"
    return f"output={tmp_path}/out; program=({program})"


PROGRAM, HOW = r"^program=\(.*\)(?= # EDIT)", r"^how=starter"


@pytest.mark.parametrize(
    ("how", "engine"),
    [
        ("starter", "horovod over Gloo"), ("forked", "horovod over Gloo"), ("torchrun", "ddp"),
        ("mpirun", "horovod over MPI"), ("pmix", "horovod over MPI"),
    ],
)  # fmt: skip
def test_trains_on_two_nodes(cluster, how, engine, tmp_path):
    if how == "pmix":
        has_or_skip(cluster, "pmix")
    edits = {HOW: f"how={how}", PROGRAM: train(tmp_path), r"^interface=''": "interface=eth0"}
    state, log = cluster.batch(edited(tmp_path, edits), 120, CANARY_TOKEN="s3cret")
    assert state == "COMPLETED", log
    assert f"2 ranks on 2 hosts, {engine}" in log
    assert [rank["host"] for rank in events(tmp_path / "out", "start")[0]["ranks"]] == ["a", "b"]
    assert summary(tmp_path / "out")["world_size"] == 2


@pytest.mark.parametrize("kind", ["none", "pmi2", "cray_shasta"])
def test_srun_without_pmix_and_without_the_starter_trains_nothing(cluster, kind):
    """Else it would be two jobs of one rank that train side by side and say nothing."""
    has_or_skip(cluster, kind)
    command = ["srun", f"--mpi={kind}", "-N2", sys.executable, "-m", "hvdtrain.mnist", "--dataset", "digits"]
    done = cluster("a", *command)
    assert done.code != 0, done
    assert "accuracy" not in done.stdout, done


MNIST = "-m hvdtrain.mnist --dataset digits --epochs 1 --threads 1 --no-progress --output-dir OUT"
SUMS = """
import horovod.torch as hvd, torch
hvd.init()
total = int(hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum))
print(f"rank {hvd.rank()} of {hvd.size()}: sum {total}, {'Gloo' if hvd.gloo_enabled() else 'MPI'}", flush=True)
"""


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        (f"-m hvdtrain.starter {MNIST}", ["2 ranks on 2 hosts, horovod over Gloo"]),
        (f"{MNIST} --engine ddp", ["2 ranks on 2 hosts, ddp"]),
        ("-m hvdtrain.starter SUMS", [f"rank {rank} of 2: sum 3, Gloo" for rank in (0, 1)]),
        ("-m hvdtrain.starter -m hvdtrain.tuned SUMS",
            [f"rank {rank} of 2: sum 3, Gloo" for rank in (0, 1)] + ["hvdtrain.tuned: 2 ranks, on this host 1 x"]),
    ],
    ids=["Horovod", "ddp", "a script", "a script, tuned"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["pmi2", "cray_shasta"])
def test_srun_with_another_pmi(cluster, kind, program, lines, tmp_path):
    """pmi2 also sets PMI_RANK and PMI_SIZE, as mpirun of MPICH does, and the default of Cray EX those of PALS. Neither of
    these names a host to meet at."""
    has_or_skip(cluster, kind)
    (tmp_path / "sums.py").write_text(SUMS)
    words = program.replace("OUT", f"{tmp_path}/out").replace("SUMS", f"{tmp_path}/sums.py").split()
    done = cluster("a", "srun", f"--mpi={kind}", "-N2", sys.executable, *words, timeout=120)
    assert done.code == 0, done
    for line in lines:
        assert line in done.stdout + done.stderr, done


@pytest.mark.parametrize("program", [MNIST, "-m hvdtrain.starter SUMS"], ids=["Horovod", "a script"])
def test_one_task(cluster, program, tmp_path):
    """As in a shell of `srun --pty bash`. MPI ends a single process there that has no PMI."""
    (tmp_path / "sums.py").write_text(SUMS)
    words = program.replace("OUT", f"{tmp_path}/out").replace("SUMS", f"{tmp_path}/sums.py").split()
    done = cluster("a", "srun", "-n1", sys.executable, *words, timeout=120)
    assert done.code == 0, done
    assert "horovod over Gloo" in done.stdout or "rank 0 of 1: sum 1, Gloo" in done.stdout, done


@pytest.mark.parametrize("kind", ["none", "cray_shasta"])
def test_torchs_variables_set_from_slurms(cluster, kind, tmp_path):
    """As centres document it for torch (CSCS; NERSC with WORLD_RANK): neither the starter nor --engine ddp is needed."""
    has_or_skip(cluster, kind)
    told = "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS WORLD_RANK=$SLURM_PROCID"
    told += " MASTER_ADDR=a MASTER_PORT=29500"
    rank = f"export {told}; exec '{sys.executable}' {MNIST.replace('OUT', str(tmp_path / 'out'))}"
    done = cluster("a", "srun", f"--mpi={kind}", "-N2", "-n3", "bash", "-c", rank, timeout=120)
    assert done.code == 0, done
    assert "3 ranks on 2 hosts, ddp" in done.stdout, done


def test_torchrun_on_each_node(cluster, tmp_path):
    """As TAMU starts it on ACES."""
    torchrun = (
        f"'{BIN}/torchrun' --nproc_per_node=2 --nnodes=2 --node_rank=$SLURM_NODEID --rdzv_id=$SLURM_JOB_ID "
        f"--rdzv_backend=c10d --rdzv_endpoint=a:29500 {MNIST.replace('OUT', str(tmp_path / 'out'))}"
    )
    done = cluster("a", "srun", "-N2", "--ntasks-per-node=1", "bash", "-c", torchrun, timeout=150)
    assert done.code == 0, done
    assert "4 ranks on 2 hosts, ddp" in done.stdout, done


def test_signal_before_the_limit_requeues_until_done(cluster, tmp_path):
    """The first run ends at the signal, each rank with exit code 75; Slurm starts the job again, and that one ends it."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, time\n"
        "run = os.environ.get('SLURM_RESTART_COUNT', '0')\n"
        "def stop(number, frame):\n"
        "    print('rank', os.environ['RANK'], 'got', signal.Signals(number).name, 'in run', run, flush=True)\n"
        "    time.sleep(int(os.environ['RANK']))\n"  # not all at once: the first to go must not end the others
        "    sys.exit(75)\n"
        "os.environ['RANK'] = os.environ['HOROVOD_RANK']\n"
        "signal.signal(signal.SIGUSR1, stop)\n"
        "print('rank', os.environ['RANK'], 'runs', run, flush=True)\n"
        "if run == '0':\n"
        "    time.sleep(100)\n"
    )
    # Slurm looks every 30 s, and signals up to 30 s early: both runs get 10 s before it, in which the second one ends.
    edits = {PROGRAM: f"program=(python {program})", r"--time=\S+": "--time=00:01:00", r"USR1@120": "USR1@20"}
    state, log = cluster.batch(edited(tmp_path, edits), 240)
    assert state == "COMPLETED", log
    for rank in "01":
        assert f"rank {rank} got SIGUSR1 in run 0" in log
        assert f"rank {rank} runs 1" in log


def test_a_task_of_an_array_is_requeued_alone(cluster, tmp_path):
    """The last task has the number of the whole array."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "task, run = os.environ['SLURM_ARRAY_TASK_ID'], os.environ.get('SLURM_RESTART_COUNT', '0')\n"
        f"open(f'{tmp_path}/{{task}}-{{run}}', 'w').close()\n"
        f"while task == '0' and not os.path.exists('{tmp_path}/1-1'):\n"
        "    time.sleep(0.1)\n"
        "sys.exit(75 if task + run == '10' else 0)\n"
    )
    edits = {PROGRAM: f"program=(python {program})", r"--nodes=2\b": "--nodes=1\n#SBATCH --array=0-1"}
    job = cluster("a", "sbatch", "--parsable", str(edited(tmp_path, edits))).stdout.strip()
    cluster.wait_for_end(job, 120)
    assert sorted(path.name for path in tmp_path.glob("?-?")) == ["0-0", "1-0", "1-1"]


@pytest.mark.parametrize("how", ["starter", "forked"])
def test_several_ranks_and_cores_on_each_node(cluster, how, tmp_path):
    """Since Slurm 24.05 the job has its cores per task in SLURM_TRES_PER_TASK too, from which `forked` differs."""
    per_node = {r"--ntasks-per-node=2\b": "--ntasks-per-node=2", r"--cpus-per-task=8\b": "--cpus-per-task=2"}
    edits = {HOW: f"how={how}", PROGRAM: train(tmp_path), r"^interface=''": "interface=eth0", **per_node}
    state, log = cluster.batch(edited(tmp_path, edits), 120)
    assert state == "COMPLETED", log
    assert "4 ranks on 2 hosts" in log
    assert "fatal" not in log


@pytest.mark.parametrize("program", [f"-m hvdtrain.starter {MNIST}", f"{MNIST} --engine ddp"], ids=["Horovod", "ddp"])
def test_a_step_of_unequal_parts(cluster, program, tmp_path):
    words = [sys.executable, *program.replace("OUT", f"{tmp_path}/out").split()]
    done = cluster("a", "srun", "--mpi=none", "-n1", *words, ":", "-n2", *words, timeout=120)
    assert done.code == 0, done
    assert "3 ranks on 2 hosts" in done.stdout, done


def test_a_job_of_unequal_parts_is_refused(cluster, tmp_path):
    """Its srun would start ranks in the first part only."""
    script = edited(tmp_path, {r"--nodes=2\b": "--nodes=1"})
    job = cluster("a", "sbatch", "--parsable", "-N1", ":", "-N1", str(script)).stdout.strip()
    cluster.wait_for_end(job, 60)
    log = (tmp_path / f"hvdtrain-{job}.log").read_text()
    assert "a heterogeneous job" in log
    assert log.count("\n") == 1


@pytest.fixture
def training(cluster, tmp_path):
    """Submit a training without an end; return its number and a function that waits for an event of its record."""
    jobs = []

    def start(how: str = "starter", partition: str = "test") -> tuple[str, Callable[[str], dict]]:
        program = train(tmp_path).replace(")", " --epochs 100000)")
        edits = {
            HOW: f"how={how}",
            PROGRAM: program,
            r"^interface=''": "interface=eth0",
            r"--partition=gpu\b": f"--partition={partition}",
        }
        jobs.append(cluster("a", "sbatch", "--parsable", str(edited(tmp_path, edits))).stdout.strip())
        log, until = tmp_path / f"hvdtrain-{jobs[0]}.log", time.monotonic() + 150

        def wait_for(name: str) -> dict:
            while not (tmp_path / "out" / "metrics.jsonl").exists() or not events(tmp_path / "out", name):
                assert time.monotonic() < until, log.read_text() if log.exists() else cluster.logs()
                time.sleep(0.5)
            return events(tmp_path / "out", name)[0]

        wait_for("train")
        return jobs[0], wait_for

    yield start
    for job in jobs:
        cluster("a", "scancel", job)
        cluster.wait_for_end(job, 60)


@pytest.mark.parametrize("how", ["starter", "torchrun"])
def test_training_goes_on_where_the_signal_stopped_it(cluster, training, how):
    """hvdtrain.mnist: checkpoint at the signal (sent here at once, not at a limit), requeued, resumed."""
    job, wait_for = training(how)
    cluster("a", "scancel", "--signal=USR1", "--batch", job)
    assert wait_for("resume")["step"] == wait_for("stop")["step"] > 0


@pytest.mark.parametrize(
    ("how", "partition"),
    [("starter", partition) for partition in ("requeue", "cancel", "requeue_at_once", "cancel_at_once")]
    + [("torchrun", "requeue"), ("torchrun", "cancel_at_once")],
)
def test_preempted_and_resumed(cluster, training, how, partition):
    """The partitions are in tests/e2e/slurm.py: by PreemptMode, with a GraceTime of 60 s or none."""
    _, wait_for = training(how, partition)
    urgent = cluster("a", "srun", "--partition=urgent", "-N2", "--exclusive", "true", timeout=100)
    assert urgent.code == 0, urgent
    assert urgent.seconds < 40, "the job was killed at the end of its GraceTime"
    assert wait_for("resume")["step"] == wait_for("stop")["step"] > 0


@pytest.mark.parametrize("how", ["starter", "torchrun"])
def test_scancel_is_the_end(cluster, training, how, tmp_path):
    """Slurm sends SIGTERM as for preemption: the run saves, and is not started again."""
    job, wait_for = training(how)
    cluster("a", "scancel", job)
    cluster.wait_for_end(job, 60)
    assert wait_for("stop")["step"] > 0
    assert cluster.state(job) == "CANCELLED"
    assert "cancelled, and not started again" in (tmp_path / f"hvdtrain-{job}.log").read_text()


@pytest.mark.parametrize("added", ["", '{"event": "start"}'], ids=["nothing new", "a new start"])
def test_a_stop_of_an_earlier_job_does_not_requeue_one_that_fails_under_torchrun(cluster, added, tmp_path):
    """torchrun turns every exit code into 1. Only what this job has added to the record says that it has saved."""
    record = tmp_path / "out" / "metrics.jsonl"
    record.parent.mkdir()
    record.write_text('{"event": "stop"}\n')
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        f"if os.environ['RANK'] == '0' and {added!r}:\n"
        f"    print({added!r}, file=open({str(record)!r}, 'a'))\n"
        "sys.exit(75)\n"
    )
    edits = {HOW: "how=torchrun", PROGRAM: f"output={tmp_path}/out; program=(python {program})"}
    state, log = cluster.batch(edited(tmp_path, edits), 120)
    assert state == "FAILED", log
    assert "exit code 1: not started again" in log, log


def test_an_existing_horovod_script_runs_tuned_by_the_line_of_the_page(cluster, tmp_path):
    (line,) = re.findall(r"`(program=\(python -m hvdtrain\.tuned .*?\))`", (ROOT / "docs" / "slurm.md").read_text())
    (tmp_path / "sums.py").write_text(SUMS)
    words = re.sub(r"/scratch/me/train\.py.*\)$", f"{tmp_path}/sums.py)", line)
    state, log = cluster.batch(edited(tmp_path, {PROGRAM: words, r"^interface=''": "interface=eth0"}), 120)
    assert state == "COMPLETED", log
    for said in ("hvdtrain.tuned: 2 ranks", "rank 0 of 2: sum 3, Gloo", "rank 1 of 2: sum 3, Gloo"):
        assert said in log, log
