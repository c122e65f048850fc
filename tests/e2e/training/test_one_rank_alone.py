"""A rank that works while the others wait, and one that does not end after training: one program, real launchers."""

import os
import re

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, TORCHRUN, launch

pytestmark = pytest.mark.slow  # each waits for limits; tests/single has the parts

SCRIPT = """
import atexit, os, time
import torch
from hvdtrain import training


def busy(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def main():
    parser = training.parser("own", "A program in which the last rank does something else.")
    parser.add_argument("--does")
    flags = parser.parse()
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    with training.start(flags) as run:
        model = torch.nn.Linear(4, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        does = flags.does if run.rank == run.size - 1 else None
        for epoch in run.epochs(2):
            for step in run.steps(x):
                for (inputs,) in step.batches():
                    loss = model(inputs).square().mean()
                    step.backward(torch.zeros((), requires_grad=True) if does == "has a constant" else loss)
                step.update()
                if does == "is killed once" and run.state.step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    os.kill(os.getpid(), 9)
                if does == "works after an update" and run.state.step == 0:
                    busy(14)
                if does == "evaluates in a step" and epoch == 1:
                    with run.evaluating(len(x)) as mine:
                        run.record(loss=model(x[mine]).sum())
                if does == "sleeps after an update" and epoch == 1:
                    time.sleep(1000)
                if does == "reads the loss" and epoch == 1:
                    print(step.loss)
                if does == "is alone" and epoch == 1:
                    with run.alone():
                        time.sleep(14)
            if does == "exports":
                run.export("weights.safetensors")
            if does == "sleeps between epochs" and epoch == 0:
                time.sleep(14)
    if does == "sleeps after training":
        time.sleep(1000)
    if does == "hangs at exit":
        atexit.register(time.sleep, 1000)
    return run.exit_code


training.main(main)
"""


def run(does: str, start: str, tmp_path, limit: str = "--step-timeout 2"):
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    engine = "ddp" if start.startswith("torchrun") else "horovod"
    return launch(f"{start} {script} --engine {engine} --no-progress {limit} --does '{does}'", timeout=600)


@pytest.mark.parametrize("does", ["works after an update", "is alone", "sleeps between epochs"])
def test_work_of_one_rank_is_no_hang(does, tmp_path):
    done = run(does, LAUNCHERS["starter"].format(ranks=2), tmp_path)
    assert done.code == 0, done
    assert done.seconds > 14


def test_a_rank_asleep_after_an_update_is_named_with_its_line_and_the_remedy(tmp_path):
    done = run("sleeps after an update", LAUNCHERS["starter"].format(ranks=2), tmp_path)
    assert done.code == 1, done
    (said,) = [line for line in done.stderr.splitlines() if "keeps the others waiting" in line]
    assert f"rank 1 on {os.uname().nodename} keeps the others waiting, at own.py:" in said
    assert said.endswith(" (if it was at work: announce that by `with run.alone():`)")


@pytest.mark.parametrize("start", [LAUNCHERS["starter"].format(ranks=2), TORCHRUN.format(ranks=2)])
@pytest.mark.parametrize("does", ["evaluates in a step", "exports", "reads the loss"])
def test_a_collective_of_one_rank_alone_is_told_long_before_the_limit(does, start, tmp_path):
    """Over Gloo, the other rank aborted: what an export exchanges met gradients, of another size."""
    done = run(does, start, tmp_path, f"--step-timeout 300 --output-dir {tmp_path / 'out'}")
    assert done.code == 1, done
    assert "gloo::" not in done.stderr, done
    (said,) = [line for line in done.stderr.splitlines() if "ranks wait in different collectives" in line]
    assert said.count(" at own.py:") == 2
    waited = re.search(r"; no \w+ for (\d+) s", said)  # by the watch; nobody, where both exchange objects over Gloo
    assert waited is None or int(waited[1]) < 300


@pytest.mark.parametrize("start", [LAUNCHERS["starter"].format(ranks=2), TORCHRUN.format(ranks=2)])
def test_a_mistake_of_one_rank_is_the_only_thing_that_is_told(start, tmp_path):
    """Under DDP, the other rank ended with a traceback of Gloo, from within its backward pass."""
    done = run("has a constant", start, tmp_path)
    assert done.code != 0, done
    assert "weight got no gradient in this step" in done.stderr, done
    assert "gloo" not in done.stderr, done


def test_a_restart_by_torchrun_meets_anew_and_resumes(tmp_path):
    """The ranks looked for each other at the ports of those before, and hung."""
    start = TORCHRUN.format(ranks=2).replace("torchrun ", "torchrun --max-restarts 1 ", 1)
    done = run(
        "is killed once",
        start,
        tmp_path,
        f"--step-timeout 20 --batch-size 4 --checkpoint-steps 2 --output-dir {tmp_path / 'out'}",
    )
    assert done.code == 0, done
    assert re.search("resumed after step [24] ", done.stdout), done


@pytest.mark.parametrize(
    ("does", "start", "said"),
    [
        ("sleeps after training", LAUNCHERS["mpirun"].format(ranks=2) + f" {PYTHON}", "it is at own.py:"),
        ("hangs at exit", TORCHRUN.format(ranks=2), "it runs its exit handlers, for "),
    ],
)
def test_a_rank_that_does_not_end_is_named(does, start, said, tmp_path):
    done = run(does, start, tmp_path)
    assert done.code != 0, done
    assert f" on {os.uname().nodename} does not end after training: {said}" in done.stderr, done
