"""`pip install .` alone: hvdtrain and what it depends on, without Horovod, MPI and the tests' packages."""

import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.e2e.launch.test_wheel import source, wheel
from tests.e2e.launchers import ROOT, Done, launch, summary

pytestmark = pytest.mark.slow
__all__ = ["source", "wheel"]  # fixtures
QUICK = "--epochs 1 --no-progress --threads 1"
IMAGES = "--dataset synthetic --train-samples 16 --image-size 32"
COMMANDS = {
    "mnist": f"-m hvdtrain.mnist --dataset digits --batch-size 64 {QUICK}",
    "imagenet": f"-m hvdtrain.imagenet {IMAGES} --batch-size 4 --model shufflenet_v2_x0_5 {QUICK}",
    "lm": f"-m hvdtrain.lm --text {ROOT}/LICENSE --steps 4 --no-progress --threads 1",
    "augment": f"{ROOT}/docs/programs/augment.py --workers 1 {QUICK}",
    "gan": f"{ROOT}/docs/programs/gan.py {QUICK}",
}


def dependencies() -> set[str]:
    """Return the names of the distributions that `pip install hvdtrain` brings, without extras."""
    found: set[str] = set()
    waiting = ["hvdtrain"]
    while waiting:
        for text in metadata.requires(waiting.pop()) or []:
            needed = Requirement(text)
            wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if wanted and needed.name not in found and installed(needed.name):
                found.add(needed.name)
                waiting.append(needed.name)
    return found


def installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:  # torch names more than this kind of machine needs
        return False
    return True


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """A virtual environment's bin: hvdtrain as pip installs it, and links to what it depends on."""
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    for name in dependencies():
        for file in metadata.distribution(name).files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(file.locate().parents[len(file.parts) - 1] / top)
    pip = f"{sys.executable} -m pip --disable-pip-version-check -q --python {directory}/bin/python"
    done = launch(f"{pip} install --no-deps --no-index {wheel}", cwd=directory)
    assert done.code == 0, done
    (directory / "wheel").write_text(wheel.name)
    for absent in ("horovod", "mpi4py", "pytest"):
        assert launch(f"{directory}/bin/python -c 'import {absent}'", cwd=directory).code == 1
    return directory / "bin"


def run(bare: Path, start: str, words: str, directory: Path) -> Done:
    return launch(f"{bare}/python {start} {words} --output-dir {directory / 'out'}", cwd=directory)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_trains_alone_and_under_torchrun(name, bare, tmp_path):
    for ranks, start in ((1, ""), (2, "-m torch.distributed.run --standalone --nproc-per-node 2")):
        where = tmp_path / str(ranks)
        where.mkdir()
        done = run(bare, start, COMMANDS[name], where)
        assert done.code == 0, done
        found = summary(where / "out")
        assert (found["world_size"], found["engine"]) == (ranks, "serial" if ranks == 1 else "ddp"), done
        assert "Traceback" not in done.stderr, done


def test_the_command_trains(bare, tmp_path):
    done = launch(f"{bare}/hvdtrain mnist --dataset digits {QUICK} --output-dir {tmp_path / 'out'}", cwd=tmp_path)
    assert done.code == 0, done
    assert summary(tmp_path / "out")["test_count"] == 382
    assert (
        launch(f"{bare}/hvdtrain --version", cwd=tmp_path).stdout.strip() in bare.parent.joinpath("wheel").read_text()
    )


def test_the_starter_and_the_doctor_need_no_more(bare, tmp_path):
    done = run(bare, "-m hvdtrain.starter --local-ranks 2 --oversubscribe", COMMANDS["mnist"], tmp_path)
    assert done.code == 0, done
    assert summary(tmp_path / "out")["engine"] == "ddp"
    done = launch(f"{bare}/python -m hvdtrain.doctor", cwd=tmp_path)
    assert "ModuleNotFoundError" not in done.stdout + done.stderr, done
    assert "interface" in done.stdout, done
