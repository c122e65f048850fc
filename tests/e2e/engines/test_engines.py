"""One script, four engines: the same global batch, seed and order give the same loss curve, step by step."""

import socket
from pathlib import Path

import pytest
import torch

from hvdtrain.models.convnet import ConvNet
from tests.e2e.launchers import TORCHRUN, Done, events, launch, several, summary

CURVE = "--dataset digits --no-progress --epochs 1 --log-steps 1 --model convnet-nonorm"
CURVE += " --optimizer sgd --lr 0.05 --momentum 0.9"
ONE, TWO = "--engine {} --batch-size 64 " + CURVE, "--engine {} --batch-size 32 " + CURVE
QUICK = "--dataset digits --epochs 1 --no-progress --model convnet"
# By name: flags, and how near the losses of the first steps are to those without them; None: the very same bits.
# tests/parallel and tests/single look at types, bytes and rates.
MATHEMATICS = {
    "bf16": ("--amp bf16", 0.05),
    "fp16": ("--amp fp16", 0.05),
    "accumulate": ("--accumulate 2 --batch-size 16", 1e-5),
    "compression": ("--compression auto", None),
    "adasum": ("--reduction adasum", 0.5),
}
FIRST = 3  # steps
SHORT = "--dataset digits --epochs 1 --no-progress --model convnet-nonorm --batch-size 32 --log-steps 1 --lr 0.001"


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, dict[str, Done]]:
    """One process, one engine after the other."""
    root = tmp_path_factory.mktemp("alone")
    runs = {
        engine: f"{ONE.format(engine)} --output-dir {root / engine}" for engine in ("serial", "dataparallel", "horovod")
    }
    runs["reached"] = f"{QUICK} --epochs 50 --target-accuracy 0.5 --output-dir {root / 'reached'}"
    runs["missed"] = f"{QUICK} --target-accuracy 1"
    return root, several("alone", 1, root, runs)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, dict[str, Done]]:
    """Two ranks under mpirun. ddp under it is in tests/e2e/engines/test_parallel.py."""
    root = tmp_path_factory.mktemp("two")
    return root, several("mpirun", 2, root, {"horovod": f"{TWO.format('horovod')} --output-dir {root / 'horovod'}"})


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> tuple[Path, dict[str, Done]]:
    """Two ranks under mpirun, one run after the other."""
    root = tmp_path_factory.mktemp("options")
    torch.manual_seed(123)
    torch.save(ConvNet().state_dict(), root / "start.pt")
    runs = {name: f"{SHORT} {flags}" for name, (flags, _) in {"plain": ("", None), **MATHEMATICS}.items()}
    runs |= {"given": f"{QUICK} --weights {root}/start.pt --lr 1e-9 --log-steps 1"}
    runs |= {"seeded": f"{QUICK} --lr 1e-9 --log-steps 1"}
    runs = {name: f"{flags} --output-dir {root / name}" for name, flags in runs.items()}
    runs |= {"serial": f"{QUICK} --engine serial", "absent": f"{QUICK} --weights {root}/absent.pt"}
    return root, several("mpirun", 2, root, runs)


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory) -> tuple[Path, dict[str, Done]]:
    root = tmp_path_factory.mktemp("torchrun")
    done = launch(f"{TORCHRUN.format(ranks=2)} -m hvdtrain.mnist {TWO.format('ddp')} --output-dir {root / 'ddp'}")
    return root, {"ddp": done}


@pytest.mark.parametrize(
    ("how", "engine"),
    [
        ("alone", "dataparallel"),
        ("alone", "horovod"),
        pytest.param("two", "horovod", marks=pytest.mark.slow),
        ("torchrun", "ddp"),
    ],
)
def test_engines_draw_one_loss_curve(how, engine, alone, request):
    """Without batch norm, which sees each rank's own samples."""
    curves = []
    for (root, done), name in ((alone, "serial"), (request.getfixturevalue(how), engine)):
        assert done[name].code == 0, done[name]
        assert summary(root / name)["world_size"] == (2 if how != "alone" and name == engine else 1)
        curves.append([line["loss"] for line in events(root / name, "train")])
    assert len(curves[0]) == 23  # ceil(1415 / 64)
    assert curves[1] == pytest.approx(curves[0], rel=2e-4)


@pytest.mark.slow
def test_serial_under_a_launcher_is_refused(options):
    done = options[1]["serial"]
    assert done.code == 2, done
    assert "announced 2 ranks, but serial sees 1: this engine runs in one process" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", MATHEMATICS)
def test_mathematics_runs_under_horovod(name, options):
    root, done = options[0], options[1][name]
    assert done.code == 0, done
    curves = [[line["loss"] for line in events(root / run, "train")][:FIRST] for run in ("plain", name)]
    bits = [summary(root / run)["parameters_sha256"] for run in ("plain", name)]
    near = MATHEMATICS[name][1]
    assert (bits[0] == bits[1]) == (near is None)
    assert curves[1] == pytest.approx(curves[0], rel=near or 0.0, abs=0.0)
    assert ("compression none: all ranks are on one host" in done.stdout) == (name == "compression"), done


def test_target_accuracy_stops_early_or_fails_with_three(alone):
    root, done = alone
    assert done["reached"].code == 0, done
    assert summary(root / "reached")["epochs"] < 50
    assert done["missed"].code == 3, done
    assert "target accuracy 100.00% not reached" in done["missed"].stdout


@pytest.mark.slow
def test_starting_weights_come_from_rank_zeros_file(options):
    root, done = options
    assert done["given"].code == done["seeded"].code == 0, done
    first = {name: events(root / name, "train")[0]["loss"] for name in ("given", "seeded")}
    assert first["given"] != pytest.approx(first["seeded"], rel=1e-3)


@pytest.mark.slow
def test_weights_that_rank_zero_cannot_read_end_every_rank(options):
    root, done = options[0], options[1]["absent"]
    assert done.code == 2, done
    ours = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain.mnist: error: ")]
    assert len(ours) == 1, done
    assert f"rank 0 on {socket.gethostname()}: --weights {root}/absent.pt: No such file" in ours[0]
