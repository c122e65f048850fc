"""One script, four engines: the same global batch, seed and order give the same loss curve, step by step.

From Horovod to ddp it is one word (docs/migrate.md), also where Horovod cannot be imported.
"""

import os
from pathlib import Path

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, TORCHRUN, Done, events, launch, several, summary

# Two epochs of five steps, without batch norm, which sees each rank's own samples.
CURVE = "--dataset digits --no-progress --epochs 2 --train-samples 320 --log-steps 1 --model convnet-nonorm"
CURVE += " --optimizer sgd --lr 0.05 --momentum 0.9"
QUICK = "--dataset digits --epochs 1 --no-progress --model convnet"
NO_HOROVOD = """
import sys
class NoHorovod:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError("No module named 'horovod'", name="horovod")
sys.meta_path.insert(0, NoHorovod())
"""

MANY = """
import torch
from torch import nn
from hvdtrain import training

def main():
    flags = training.parser("many", None, epochs=1, batch_size=4).parse()
    with training.start(flags) as run:
        parameters = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3000)])
        model, optimizer = run.prepare(parameters, torch.optim.SGD(parameters.parameters(), 0.001))
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(torch.arange(48.0)):
                for (batch,) in step.batches():
                    step.backward(torch.cat(list(parameters)).sum() * batch.mean())
                step.update()
    assert parameters[0].tolist() == parameters[2999].tolist() != [1, 1]
    return run.exit_code

if __name__ == "__main__":
    training.main(main)
"""


@pytest.fixture
def without_horovod(tmp_path) -> str:
    """Return a PYTHONPATH with which no Python process can import Horovod."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "sitecustomize.py").write_text(NO_HOROVOD)
    return os.pathsep.join(filter(None, [str(tmp_path / "none"), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, dict[str, Done]]:
    """One process, one engine after the other."""
    root = tmp_path_factory.mktemp("alone")
    engines = ("serial", "dataparallel", "horovod")
    runs = {engine: f"--engine {engine} --batch-size 64 {CURVE} --output-dir {root / engine}" for engine in engines}
    return root, several("alone", 1, root, runs)


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in events(directory, "train")]


def test_engines_draw_one_loss_curve(alone, without_horovod):
    """ddp, on two ranks, continues what Horovod began. Horovod on several ranks: tests/parallel."""
    root, done = alone
    for name in ("serial", "dataparallel", "horovod"):
        assert done[name].code == 0, done[name]
        assert summary(root / name)["world_size"] == 1
        assert len(losses(root / name)) == 10
        assert losses(root / name) == pytest.approx(losses(root / "serial"), rel=2e-4)
    *_, last = sorted((root / "horovod" / "checkpoints").glob("step-*.safetensors"))
    last.unlink()
    flags = f"--batch-size 32 {CURVE} --output-dir {root / 'horovod'}"
    ddp = launch(f"{TORCHRUN.format(ranks=2)} -m hvdtrain.mnist {flags}", PYTHONPATH=without_horovod)
    assert ddp.code == 0, ddp
    assert (
        "ddp over Gloo, cpu, 1 torch thread per rank (--engine auto: torchrun started" in ddp.stdout.splitlines()[0]
    ), ddp
    assert summary(root / "horovod")["world_size"] == 2
    assert [event["engine"] for event in events(root / "horovod", "start")] == ["horovod", "ddp"]
    assert [event["epoch"] for event in events(root / "horovod", "resume")] == [2]
    assert losses(root / "horovod")[10:] == pytest.approx(losses(root / "serial")[5:], rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [*LAUNCHERS, "torchrun"])
def test_ddp_under_every_launcher(launcher, tmp_path, without_horovod):
    """Without Horovod, and without a word of the engine (one process: tests/single/engines/test_launchers.py). horovodrun is
    Horovod's, so there it is importable."""
    start = {**LAUNCHERS, "torchrun": TORCHRUN}[launcher].format(ranks=2)
    python = "" if launcher == "torchrun" else PYTHON
    named = launcher in ("horovodrun", "gloo")
    path = {} if named else {"PYTHONPATH": without_horovod}
    flags = f"{QUICK} {'--engine ddp' if named else ''} --threads 1 --output-dir {tmp_path / 'out'}"
    done = launch(f"{start} {python} -m hvdtrain.mnist {flags}", timeout=120, **path)
    assert done.code == 0, done
    result = summary(tmp_path / "out")
    assert (result["engine"], result["world_size"], result["samples"]) == ("ddp", 2, 1415)
    if launcher in ("mpirun", "starter"):
        assert "Horovod is not installed here; `make setup` builds it" in done.stdout.splitlines()[0], done


SLOWLY = [pytest.param(*case, marks=pytest.mark.slow) for case in (("mpirun", 2), ("mpirun", 3), ("starter", 3))]


@pytest.mark.parametrize(("launcher", "ranks"), [("starter", 2), *SLOWLY])
def test_more_gradients_than_horovod_remembers(launcher, ranks, tmp_path):
    """They were one bucket, and the ranks hung or crashed in the second step."""
    (tmp_path / "many.py").write_text(MANY)
    start = f"{LAUNCHERS[launcher].format(ranks=ranks)} {PYTHON} many.py --no-progress --output-dir"
    done = launch(f"{start} {tmp_path / 'out'}", cwd=tmp_path)
    assert done.code == 0, done
    assert summary(tmp_path / "out")["steps"] == 12 // ranks
    if (launcher, ranks) != ("starter", 3):
        return
    small = launch(f"{start} {tmp_path / 'small'}", cwd=tmp_path, HOROVOD_CACHE_CAPACITY="2000")
    refused = "HOROVOD_CACHE_CAPACITY is 2000, too small for 3000 gradients: set it to 3256 or more, or to 0"
    assert (small.code, small.stderr) == (2, f"many: error: {refused}\n"), small
