"""One script, four engines: the same global batch, seed and order give the same loss curve, step by step."""

import socket

import pytest
import torch

from hvdtrain.models.convnet import ConvNet

from .launchers import LAUNCHERS, PYTHON, TORCHRUN, events, launch, summary, train

STARTS = {
    ("serial", 1): f"{PYTHON} -m",
    ("dataparallel", 1): f"{PYTHON} -m",
    ("horovod", 1): f"{PYTHON} -m",
    ("horovod", 2): f"{LAUNCHERS['mpirun'].format(ranks=2)} {PYTHON} -m",
    ("ddp", 2): f"{TORCHRUN.format(ranks=2)} -m",
    ("ddp over mpirun", 2): f"{LAUNCHERS['mpirun'].format(ranks=2)} {PYTHON} -m",
}


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """The losses of every step, by engine; without batch norm, which sees each rank's own samples."""
    found = {}
    for (name, ranks), start in STARTS.items():
        directory = tmp_path_factory.mktemp(f"{name.split()[0]}{ranks}")
        flags = f"--engine {name.split()[0]} --batch-size {64 // ranks} --epochs 2 --log-steps 1 --model convnet-nonorm"
        flags += f" --dataset digits --optimizer sgd --lr 0.05 --momentum 0.9 --no-progress --output-dir {directory}"
        done = launch(f"{start} hvdtrain.mnist {flags}")
        assert done.code == 0, done
        assert summary(directory)["world_size"] == ranks
        found[name, ranks] = [line["loss"] for line in events(directory, "train")]
    return found


@pytest.mark.parametrize("engine", [key for key in STARTS if key != ("serial", 1)], ids=str)
def test_engines_draw_one_loss_curve(engine, curves):
    assert len(curves["serial", 1]) == 2 * 23  # ceil(1415 / 64) steps an epoch
    assert curves[engine] == pytest.approx(curves["serial", 1], rel=2e-4)


def test_serial_under_a_launcher_is_refused():
    done = train("mpirun", 2, "--engine serial")
    assert done.code == 2, done
    assert "announced 2 ranks, but serial sees 1: it is one process" in done.stderr


def test_adasum_wants_a_power_of_two():
    done = train("mpirun", 3, "--reduction adasum")
    assert done.code == 2, done
    assert "3 ranks are not a power of two" in done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        "--amp bf16",
        "--amp fp16 --train-samples 512 --epochs 3",
        "--accumulate 2 --batch-size 16 --epochs 2",
        "--compression auto",
        "--reduction adasum",
    ],
)
def test_mathematics_runs_under_horovod(flags, tmp_path):
    done = train("mpirun", 2, f"{flags} --output-dir {tmp_path}")
    assert done.code == 0, done
    assert summary(tmp_path)["test_accuracy"] > 0.3
    assert ("compression none: all ranks are on one host" in done.stdout) == ("auto" in flags), done


def test_target_accuracy_stops_early_or_fails_with_three(tmp_path):
    done = train("alone", 1, f"--epochs 50 --target-accuracy 0.5 --output-dir {tmp_path}")
    assert done.code == 0, done
    assert summary(tmp_path)["epochs"] < 50
    done = train("alone", 1, "--target-accuracy 1")
    assert done.code == 3, done
    assert "target accuracy 100.00% not reached" in done.stdout


def test_starting_weights_come_from_rank_zeros_file(tmp_path):
    torch.manual_seed(123)
    start = ConvNet()
    torch.save(start.state_dict(), tmp_path / "start.pt")
    for name, flags in {"given": f"--weights {tmp_path}/start.pt", "seeded": ""}.items():
        done = train("mpirun", 2, f"{flags} --lr 1e-9 --log-steps 1 --output-dir {tmp_path / name}")
        assert done.code == 0, done
    first = {name: events(tmp_path / name, "train")[0]["loss"] for name in ("given", "seeded")}
    assert first["given"] != pytest.approx(first["seeded"], rel=1e-3)


def test_weights_that_rank_zero_cannot_read_end_every_rank(tmp_path):
    done = train("mpirun", 2, f"--weights {tmp_path}/absent.pt", timeout=60)
    assert done.code == 2, done
    ours = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain.mnist: error: ")]
    assert len(ours) == 1, done
    assert f"rank 0 on {socket.gethostname()}: --weights {tmp_path}/absent.pt: No such file" in ours[0]
