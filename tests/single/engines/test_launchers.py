"""What each launcher says of a process: its rank, the job's size, its host's share, and where the ranks meet.

ENVIRONMENTS has, for each launcher, the variables of one rank that matter here. "run": hvdtrain runs under this launcher in
its tests. "read": from the launcher's documentation or source, which is named; nothing of it has been run.
"""

import sys

import pytest

from hvdtrain import mnist, training
from hvdtrain.engines import launchers
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import (
    LAUNCHERS,
    Announced,
    announced,
    cores_of_job,
    ranks_on_host,
    remedy,
    tasks_per_node,
    without_launcher,
)
from hvdtrain.launching.rendezvous import meeting_point

SLURM = (
    "SLURM_JOB_ID=31 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=8 SLURM_NNODES=2 "
    "SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_STEP_NODELIST=a,b"
)
# (launcher and its start, source, variables, expected: launcher, rank, size, ranks on this host)
ENVIRONMENTS = [
    ("none", "run", "", "none 0 1 1"),
    ("salloc without a step", "run", "SLURM_NTASKS=8", "none 0 1 1"),
    ("the shell of an sbatch script", "read: slurm/src/slurmd/slurmstepd",
        "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NODELIST=a",
        "none 0 1 1"),
    ("horovodrun", "run", "HOROVOD_RANK=3 HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2",
        "horovodrun 3 4 2"),
    ("mpirun of Open MPI 4", "run",
        "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_SIZE=3 PMIX_RANK=2",
        "mpirun (Open MPI) 2 3 3"),
    ("mpirun of Open MPI 5", "run",
        "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=1 PRTE_LAUNCHED=1",
        "mpirun (Open MPI) 1 2 2"),
    ("mpirun of Open MPI in an sbatch script: the inner launcher counts", "run",
        "SLURM_PROCID=0 SLURM_NTASKS=8 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1",
        "mpirun (Open MPI) 1 2 1"),
    ("mpiexec of MPICH (Hydra)", "run", "PMI_RANK=1 PMI_SIZE=2 PMI_FD=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
        "mpirun (MPICH or Intel MPI) 1 2 2"),
    ("Hydra in an sbatch script, rank 0: Slurm's variables are those of the script", "read: mpich/src/pm/hydra",
        "PMI_RANK=0 PMI_SIZE=8 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=4 SLURM_PROCID=0 SLURM_NTASKS=8",
        "mpirun (MPICH or Intel MPI) 0 8 4"),
    ("PMI, and no more", "read: Slurm's PMI 1", "PMI_RANK=1 PMI_SIZE=2", "mpirun (MPICH or Intel MPI) 1 2 ?"),
    ("mpirun of MVAPICH2", "read: its user guide",
        "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2",
        "mpirun (MVAPICH) 1 4 2"),
    ("mpiexec of PALS, 64 ranks, 4 on each host (Polaris, Aurora)", "read: ALCF's user guides, alcf-nccl-tests",
        "PALS_RANKID=9 PALS_LOCAL_RANKID=1 PMI_RANK=9 PMI_SIZE=64 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4",
        "mpiexec (PALS) 9 64 4"),
    ("jsrun (LSF)", "read: Lightning's LSFEnvironment",
        "JSM_NAMESPACE_RANK=7 JSM_NAMESPACE_SIZE=12 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=6",
        "jsrun 7 12 6"),
    ("flux run on one host", "read: flux-core", "FLUX_TASK_RANK=1 FLUX_JOB_SIZE=4 FLUX_JOB_NNODES=1", "Flux 1 4 4"),
    ("flux run on two hosts, whose shell speaks PMI", "read: flux-core",
        "FLUX_TASK_RANK=5 FLUX_JOB_SIZE=8 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=2 PMI_RANK=5 PMI_SIZE=8 PMI_FD=9",
        "Flux 5 8 ?"),
    ("srun --mpi=none", "run", SLURM, "Slurm 5 8 4"),
    ("srun --mpi=pmix", "run", SLURM + " PMIX_RANK=5 PMIX_NAMESPACE=slurm.pmix.31.0", "Slurm 5 8 4"),
    (
        "srun --mpi=cray_shasta, the default on Cray EX (Perlmutter, Frontier, Alps)", "run",
        SLURM + " PALS_APID=31.0 PALS_RANKID=5 PALS_LOCAL_RANKID=1 PALS_NODEID=1 PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 "
        "PMI_LOCAL_SIZE=4 PMI_UNIVERSE_SIZE=8 PMI_JOBID=31",
        "Slurm 5 8 4",
    ),
    ("the same of Slurm 20.11, which left PMI's to Cray's library", "read: mpi_cray_shasta.c of Slurm 20.11",
        SLURM + " PALS_APID=31.0 PALS_RANKID=5 PALS_NODEID=1", "Slurm 5 8 4"),
    ("mpiexec of PALS in a Slurm job", "read: ALCF's user guides",
        SLURM + " PALS_APID=5a1c-7b PALS_RANKID=5 PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2",
        "mpiexec (PALS) 5 8 2"),
    ("ibrun over Intel MPI (Frontera, Stampede3): it starts the mpirun of the loaded module",
        "read: TACC's user guides",
        "SLURM_PROCID=0 SLURM_NTASKS=8 PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4",
        "mpirun (MPICH or Intel MPI) 5 8 4"),
    (
        "ibrun over MVAPICH2 (Frontera)", "read: TACC's user guides",
        "SLURM_PROCID=0 SLURM_NTASKS=8 MPIRUN_RANK=5 MPIRUN_NPROCS=8 MV2_COMM_WORLD_RANK=5 MV2_COMM_WORLD_SIZE=8 "
        "MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=4",
        "mpirun (MVAPICH) 5 8 4",
    ),
    ("ibrun over Open MPI (Vista)", "read: TACC's user guides",
        "SLURM_PROCID=0 SLURM_NTASKS=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1",
        "mpirun (Open MPI) 1 2 1"),
    ("srun --mpi=pmi2", "run", SLURM + " PMI_RANK=5 PMI_SIZE=8 PMI_FD=10 PMI_JOBID=31.0", "Slurm 5 8 4"),
    ("torchrun", "run", "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none", "torchrun 1 4 2"),
    ("torchrun in a rank of another job, or in a shell with the variables of one", "run",
        "HOROVOD_RANK=3 HOROVOD_SIZE=4 RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x", "torchrun 1 2 2"),
    ("srun --mpi=cray_shasta, with torch's variables set from Slurm's around each rank (docs.cscs.ch/software/ml)",
        "run",
        SLURM + " PALS_APID=31.0 PALS_RANKID=5 PMI_RANK=5 PMI_SIZE=8 RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 MASTER_ADDR=a",
        "torchrun 5 8 ?"),
    (
        "the same with WORLD_RANK (Perlmutter: github.com/NERSC/nersc-dl-multigpu, export_DDP_vars.sh)", "run",
        SLURM + " PALS_APID=31.0 PALS_RANKID=5 PMI_RANK=5 PMI_SIZE=8 RANK=5 WORLD_RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 "
        "MASTER_ADDR=a MASTER_PORT=29500",
        "torchrun 5 8 ?",
    ),
    ("srun --mpi=cray_shasta with MASTER_ADDR alone, as OLCF documents it (Frontier)",
        "read: docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html",
        SLURM + " PALS_APID=31.0 PALS_RANKID=5 PMI_RANK=5 PMI_SIZE=8 MASTER_ADDR=10.0.0.1 MASTER_PORT=3442",
        "Slurm 5 8 4"),
    (
        "torchrun on each node, started by srun, as TAMU does (ACES): "
        "github.com/tamu-edu/dor-hprc-drona-environments, AdvancedHuggingFaceDrona/additional_files/run_slurm.sh", "run",
        "SLURM_JOB_ID=31 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) "
        "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=31 MASTER_ADDR=a MASTER_PORT=29500",
        "torchrun 3 4 2",
    ),
    (
        "mpirun of the Open MPI module around singularity exec, as TAMU does for Horovod (ACES)",
        "read: github.com/tamu-edu/dor-hprc-benchmarks-AI-ML-ACES, Guidance to run Horovod TensorFlow ResNet50",
        "SLURM_PROCID=0 SLURM_NTASKS=8 OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_SIZE=1 "
        "PMIX_RANK=5 SINGULARITY_CONTAINER=x.sif",
        "mpirun (Open MPI) 5 8 1",
    ),
    (
        "torchrun on each node, started by mpirun, as TACC documents it (Vista)",
        "read: docs.tacc.utexas.edu/hpc/vista",
        "SLURM_PROCID=0 SLURM_NTASKS=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1 "
        "RANK=1 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 TORCHELASTIC_RUN_ID=none",
        "torchrun 1 2 1",
    ),
    ("torch's variables set around each rank of srun --mpi=none", "run",
        SLURM + " RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 MASTER_ADDR=a MASTER_PORT=29500", "torchrun 5 8 ?"),
    ("a pod of Kubeflow's TrainJob, without torchrun", "read: kubeflow/trainer",
        "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29400",
        "Kubeflow 1 2 ?"),
]  # fmt: skip


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


@pytest.mark.parametrize(
    ("environment", "expected"), [row[2:] for row in ENVIRONMENTS], ids=[row[0] for row in ENVIRONMENTS]
)
def test_place_in_the_job(environment, expected):
    launcher, rank, size, here = expected.rsplit(" ", 3)
    told = announced(variables(environment))
    assert told == Announced(launcher, int(rank), int(size))
    assert ranks_on_host(variables(environment), told) == (None if here == "?" else int(here))


@pytest.mark.parametrize("rank", ["0", "3"])
@pytest.mark.parametrize(
    "name", ["PMIX_RANK", "PMI_RANK", "ALPS_APP_PE", "MPIRUN_RANK", "PALS_RANKID", "FLUX_TASK_RANK"]
)
def test_processes_of_an_unknown_launcher_do_not_each_train_alone(name, rank):
    with pytest.raises(UserError, match=rf"{name}='{rank}'.*RANK and WORLD_SIZE; for a single process, unset {name}"):
        announced({name: rank})


def test_nonsense_from_a_launcher_is_named():
    with pytest.raises(UserError, match=r"RANK='x', WORLD_SIZE='2': not whole numbers"):
        announced({"RANK": "x", "WORLD_SIZE": "2"})


def test_a_number_of_processes_without_a_rank_is_refused():
    """Each process trained alone."""
    with pytest.raises(
        UserError, match="WORLD_SIZE='2' without RANK: set RANK, too, from 0; for a single process, unset"
    ):
        announced({"WORLD_SIZE": "2"})
    with pytest.raises(
        UserError, match="RANK='0' without WORLD_SIZE: set WORLD_SIZE, too; for a single process, unset RANK"
    ):
        announced({"RANK": "0"})
    assert [announced({"WORLD_SIZE": size}).size for size in ("1", "")] == [1, 1]


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=[launcher.name for launcher in LAUNCHERS])
def test_a_program_that_a_rank_starts_is_no_rank(launcher):
    mark = {launcher.mark: "1"} if launcher.mark else {}
    around = {launcher.rank: "1", launcher.size: "2", "HOME": "here", **mark}
    assert announced(around).launcher == launcher.name
    assert without_launcher(around) == {"HOME": "here"}


@pytest.mark.parametrize(
    ("launcher", "engine", "words"),
    [
        ("Slurm", "horovod", "--mpi=pmix"),
        ("torchrun", "horovod", "leave --engine horovod out"),
        ("torchrun", "serial", "without a launcher"),
        ("Flux", "horovod", "MASTER_ADDR"),
        ("Kubeflow", "horovod", "--local-ranks"),
        ("mpirun (Open MPI)", "horovod", "make setup"),
        ("mpirun (Open MPI)", "ddp", "this mpi4py was built for another MPI"),
    ],
)
def test_remedy_names_what_to_type(launcher, engine, words):
    assert words in remedy(launcher, engine)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "5(x2)", "SLURM_NODEID": "0"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "5,3", "SLURM_NODEID": "1"}, 3),
        ({"SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "99", "SLURM_NNODES": "1"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "nonsense", "SLURM_NODEID": "1"}, None),
        ({}, None),
    ],
)
def test_slurms_ranks_of_a_host(environment, expected):
    assert ranks_on_host(environment, Announced("Slurm", 0, 8)) == expected


def test_slurms_counts_and_cores():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("") == tasks_per_node("4(x") == tasks_per_node("9" * 30) == []
    assert cores_of_job({"SLURM_CPUS_ON_NODE": "4"}, Announced("Slurm", 0, 2)) == 4
    assert cores_of_job({"SLURM_CPUS_ON_NODE": "4"}, Announced("mpirun (Open MPI)", 0, 2)) == float("inf")
    assert cores_of_job({"SLURM_CPUS_ON_NODE": "x"}, Announced("Slurm", 0, 2)) == float("inf")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("MASTER_ADDR=a MASTER_PORT=9000", ("a", 9000)),
        ("PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29400", ("job-node-0-0.job", 29400)),
        ("MASTER_ADDR=a MASTER_PORT=9000 PET_MASTER_ADDR=b PET_MASTER_PORT=29400", ("a", 9000)),
    ],
)
def test_where_the_ranks_meet(environment, expected):
    assert meeting_point(variables(environment), "Kubeflow") == expected


# ---- --engine auto

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
KUBEFLOW = {"PET_NODE_RANK": "0", "PET_NNODES": "2"}
HOROVODRUN = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
SRUN = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
SBATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}  # its script's shell, without srun
ALONE_IN_SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}


@pytest.mark.parametrize(
    ("environment", "with_horovod", "without"),
    [
        ({}, "serial", "serial"),
        (TORCHRUN, "ddp", "ddp"),
        (TORCHRUN | MPIRUN, "ddp", "ddp"),  # torchrun inside mpirun
        (KUBEFLOW, "ddp", "ddp"),
        (HOROVODRUN, "horovod", "ddp"),
        (MPIRUN, "horovod", "ddp"),
        (SRUN, "horovod", "ddp"),
        (SBATCH, "serial", "serial"),
        (ALONE_IN_SLURM, "horovod", "serial"),
    ],
)
def test_the_launcher_decides(environment, with_horovod, without):
    for there, engine in ((True, with_horovod), (False, without)):
        chosen = launchers.choose_engine(environment, lack=lambda there=there: "" if there else "none")
        assert chosen.engine == engine
        assert chosen.reason


def test_who_has_no_horovod_is_told_how_to_get_it():
    assert "make setup" in launchers.choose_engine(MPIRUN, lack=lambda: launchers.NO_HOROVOD).reason
    assert "make setup" not in launchers.choose_engine(TORCHRUN, lack=lambda: launchers.NO_HOROVOD).reason
    assert (
        launchers.choose_engine(SBATCH).reason
        == "one process, not the 4 tasks of this Slurm job: srun or mpirun starts them"
    )


@pytest.mark.parametrize(
    "flags", ["--compression fp16", "--reduction sum", "--sync-every 2", "--gradient-predivide-factor 2"]
)
def test_flags_that_one_process_refuses_choose_an_engine_that_takes_them(flags, monkeypatch):
    for there, engine in ((True, "horovod"), (False, "ddp")):
        monkeypatch.setattr(launchers, "lack_of_horovod", lambda there=there: "" if there else "none")
        assert mnist.parse(flags.split()).engine == engine


def test_an_engine_that_is_named_is_taken(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    flags = training.parser("own", None).parse(["--engine", "horovod"])
    assert (flags.engine, flags.engine_reason) == ("horovod", "")
    flags = training.parser("own", None).parse([])
    assert (flags.engine, flags.engine_reason) == ("ddp", "torchrun started the ranks")
    assert flags.given()["engine"] == "ddp"  # what records and checkpoints have


@pytest.mark.parametrize("extension", [True, False])
def test_a_horovod_without_its_extension_is_none(extension, tmp_path, monkeypatch):
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").write_text("raise RuntimeError('imported')")
    if extension:
        (tmp_path / "horovod" / "torch" / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    # Also where it lies in the working directory, before the built one.
    said = f"{tmp_path}/horovod has no PyTorch extension; build it, or start elsewhere"
    assert launchers.lack_of_horovod() == said * (not extension)
    monkeypatch.setattr(sys, "path", [])
    assert launchers.choose_engine(MPIRUN).reason == launchers.NO_HOROVOD
