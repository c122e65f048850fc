"""From Horovod to ddp in one word (docs/migrate.md), also where Horovod cannot be imported."""

import os

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, TORCHRUN, Done, events, launch, summary

# Without batch norm, which sees each rank's own samples, and rounds otherwise in each engine.
FLAGS = "--dataset digits --model convnet-nonorm --batch-size 32 --epochs 2 --threads 1 --no-progress"
NO_HOROVOD = """
import sys
class NoHorovod:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError("No module named 'horovod'", name="horovod")
sys.meta_path.insert(0, NoHorovod())
"""


@pytest.fixture
def without_horovod(tmp_path) -> str:
    """Return a PYTHONPATH with which no Python process can import Horovod."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "sitecustomize.py").write_text(NO_HOROVOD)
    return os.pathsep.join(filter(None, [str(tmp_path / "none"), os.environ.get("PYTHONPATH")]))


def train(launcher: str, flags: str, **variables: str) -> Done:
    start = {**LAUNCHERS, "torchrun": TORCHRUN}[launcher].format(ranks=2)
    python = "" if launcher == "torchrun" else PYTHON
    return launch(f"{start} {python} -m hvdtrain.mnist {FLAGS} {flags}", timeout=120, **variables)


def test_what_horovod_began_ddp_continues_with_the_same_numbers(tmp_path, without_horovod):
    directory = tmp_path / "out"
    samples = "--train-samples 320"  # five steps an epoch
    began = train("starter", f"{samples} --output-dir {directory}")
    assert began.code == 0, began
    *_, last = sorted((directory / "checkpoints").glob("step-*.safetensors"))
    last.unlink()
    done = train("starter", f"{samples} --engine ddp --output-dir {directory}", PYTHONPATH=without_horovod)
    assert done.code == 0, done
    assert [event["epoch"] for event in events(directory, "resume")] == [2]
    assert [event["engine"] for event in events(directory, "start")] == ["horovod", "ddp"]
    _, with_horovod, with_ddp = (event["loss"] for event in events(directory, "evaluate"))
    assert with_ddp == pytest.approx(with_horovod, rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [*LAUNCHERS, "torchrun"])
def test_ddp_under_every_launcher(launcher, tmp_path, without_horovod):
    """horovodrun is Horovod's, so there it is importable."""
    path = {} if launcher in ("horovodrun", "gloo") else {"PYTHONPATH": without_horovod}
    done = train(launcher, f"--engine ddp --output-dir {tmp_path / 'out'}", **path)
    assert done.code == 0, done
    result = summary(tmp_path / "out")
    assert (result["engine"], result["world_size"], result["samples"]) == ("ddp", 2, 2 * 1415)
