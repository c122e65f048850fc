"""--engine auto: which engine under which launcher, with and without Horovod."""

import sys

import pytest

from hvdtrain import mnist, training
from hvdtrain.engines import launchers

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
        chosen = launchers.choose_engine(environment, installed=lambda there=there: there)
        assert chosen.engine == engine
        assert chosen.reason


def test_who_has_no_horovod_is_told_how_to_get_it():
    assert "make setup" in launchers.choose_engine(MPIRUN, installed=lambda: False).reason
    assert "make setup" not in launchers.choose_engine(TORCHRUN, installed=lambda: False).reason
    assert (
        launchers.choose_engine(SBATCH).reason
        == "one process, not the 4 tasks of this Slurm job: srun or mpirun starts them"
    )


@pytest.mark.parametrize(
    "flags", ["--compression fp16", "--reduction sum", "--sync-every 2", "--gradient-predivide-factor 2"]
)
def test_flags_that_one_process_refuses_choose_an_engine_that_takes_them(flags, monkeypatch):
    for there, engine in ((True, "horovod"), (False, "ddp")):
        monkeypatch.setattr(launchers, "horovod_is_installed", lambda there=there: there)
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
    assert launchers.horovod_is_installed() == extension
    monkeypatch.setattr(sys, "path", [])
    assert not launchers.horovod_is_installed()
