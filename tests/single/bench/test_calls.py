"""The route of a quiet step is short: few calls of ours, in few files. A training imports no more than it needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain import training
from tests.bench.calls import Call, calls_of_step
from tests.bench.simulated import RankZero, measure, simulated

MOST_CALLS, MOST_FILES = 45, 10
UNUSED = {"torch._dynamo", "torch.utils.tensorboard", "tensorboard", "hvdtrain.output.tensorboard"}
UNUSED |= {"mlflow", "hvdtrain.output.tracking"}
PROGRAM = """
import json, sys
from tests.bench.calls import quiet_step
print(json.dumps([quiet_step(), list(sys.modules)]))
"""


@pytest.fixture(scope="module")
def found() -> tuple[list[Call], set[str]]:
    """What a training of hvdtrain.mnist has called in a quiet step, and all that it has imported."""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=300, check=True
    )
    calls, modules = json.loads(done.stdout.splitlines()[-1])
    return [Call(*call) for call in calls], set(modules)


def test_a_quiet_step_of_mnist_keeps_to_the_budget(found):
    calls, _ = found
    route = "\n".join(f"{call.file}: {call.function}" for call in calls)
    assert calls[0] == Call("loop/run.py", "Run._steps")
    assert Call("loop/step.py", "Step.backward") in calls
    assert len(calls) <= MOST_CALLS, route
    assert len({call.file for call in calls}) <= MOST_FILES, route


def test_training_does_not_import_what_it_does_not_use(found):
    """The compiler's import is 1.6 s on every rank: more than importing torch."""
    assert "hvdtrain.mnist" in found[1]
    assert not UNUSED & found[1]


def test_calls_of_other_packages_and_other_steps_are_not_counted():
    from hvdtrain.inputs.sharding import passes_per_step

    def steps() -> None:
        for _ in range(3):
            json.dumps(passes_per_step(64, 2, 8))

    assert calls_of_step(steps, 0) == [Call("inputs/sharding.py", "passes_per_step")] * 3
    assert calls_of_step(steps, 1) == []
    assert sys.getprofile() is None


def test_what_attacks_and_the_split_of_a_step_replace_is_there():
    """They replace functions of ours by name, and no other quick test starts both."""
    root = Path(__file__).resolve().parents[3]
    program = "import sys, tests.chaos.attacked; sys.argv = ['split', '--help']; import tests.bench.split"
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.startswith("usage: ")) == (0, True), done


# ---- what rank 0 of many receives


def started(ranks: int) -> RankZero:
    """Return the engine, which has counted, after `training.start` and `run.prepare`."""
    net = nn.Linear(10, 10)
    flags = training.parser("gathers", None).parse(["--engine", "serial", "--no-progress"])
    with simulated(ranks), training.start(flags) as run:
        run.prepare(net, torch.optim.Adam(net.parameters()))
    return run.engine


def test_start_up_takes_a_fixed_number_of_collectives_and_bytes_in_proportion_to_the_ranks():
    few, many = started(9), started(64)
    assert few.calls == many.calls <= 33
    assert (len(few.others), len(many.others)) == (8, 63)  # the watchdog's
    for name, size in few.received.items():
        assert name == "barrier" or many.received[name] / size < 1.3 * 63 / 8, name


def test_what_a_save_of_more_than_64_ranks_receives_does_not_grow_with_them(tmp_path):
    sizes = []
    for ranks in (65, 130):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
        sizes.append(measure(ranks, net, tmp_path / str(ranks))["saving step"][1])
    assert sizes[0] == sizes[1] < 2000
