"""One script, four engines: the same global batch, seed and order give the same loss curve, step by step."""

from pathlib import Path

import pytest

from tests.e2e.launchers import TORCHRUN, Done, events, launch, several, summary

CURVE = "--dataset digits --no-progress --epochs 1 --log-steps 1 --model convnet-nonorm"
CURVE += " --optimizer sgd --lr 0.05 --momentum 0.9"
QUICK = "--dataset digits --epochs 1 --no-progress --model convnet"


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, dict[str, Done]]:
    """One process, one engine after the other."""
    root = tmp_path_factory.mktemp("alone")
    engines = ("serial", "dataparallel", "horovod")
    runs = {engine: f"--engine {engine} --batch-size 64 {CURVE} --output-dir {root / engine}" for engine in engines}
    runs["reached"] = f"{QUICK} --epochs 50 --target-accuracy 0.5 --output-dir {root / 'reached'}"
    runs["missed"] = f"{QUICK} --target-accuracy 1"
    return root, several("alone", 1, root, runs)


def test_engines_draw_one_loss_curve(alone):
    """Without batch norm, which sees each rank's own samples. Horovod on several ranks: tests/parallel."""
    root, done = alone
    flags = f"--engine ddp --batch-size 32 {CURVE} --output-dir {root / 'ddp'}"
    done["ddp"] = launch(f"{TORCHRUN.format(ranks=2)} -m hvdtrain.mnist {flags}")
    curves = {}
    for name, ranks in {"serial": 1, "dataparallel": 1, "horovod": 1, "ddp": 2}.items():
        assert done[name].code == 0, done[name]
        assert summary(root / name)["world_size"] == ranks
        curves[name] = [line["loss"] for line in events(root / name, "train")]
    assert len(curves["serial"]) == 23  # ceil(1415 / 64)
    for curve in curves.values():
        assert curve == pytest.approx(curves["serial"], rel=2e-4)


def test_target_accuracy_stops_early_or_fails_with_three(alone):
    root, done = alone
    assert done["reached"].code == 0, done
    assert summary(root / "reached")["epochs"] < 50
    assert done["missed"].code == 3, done
    assert "target accuracy 100.00% not reached" in done["missed"].stdout
