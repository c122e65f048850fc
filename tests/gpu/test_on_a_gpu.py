"""Training on a GPU: what it computes, that it repeats, and what is left when it ends."""

import json
import os
import re
import signal
import time
from typing import NamedTuple

import pytest

from tests.e2e.launchers import PYTHON, launch, remaining, running
from tests.gpu import machine

DEVICE = os.environ.get("HVDTRAIN_GPU_TESTS", "cuda")
QUICK = DEVICE == "cpu"  # a rehearsal
DIGITS = "--dataset digits --model convnet --no-progress --batch-size 32"
LIMIT = 150  # seconds of a launch
CLOSE = 1e-3  # absolute difference of two losses
OFTEN = 0.5  # reads of a line in each step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not QUICK and not machine.gpus(), reason="torch sees no GPU here"),
]
both_engines = pytest.mark.parametrize("engine", ["horovod", "ddp"])


@pytest.fixture
def saw(request):
    """A function that notes what a test saw, whether it passes or not."""

    def note(text):
        print(text)
        machine.note(f"{request.node.name}: {text}")

    return note


def run(engine, ranks, module, flags, out=None, device=DEVICE, **more):
    """Run to the end, which must be exit code 0."""
    words = machine.command(engine, ranks, module, flags, device, out)
    done = launch(words, timeout=LIMIT, **machine.variables(ranks), **more)
    assert done.code == 0, done
    return done


def train(out, ranks=2, flags="", engine="horovod", **how):
    """Train on the embedded digits. Return the summary, and what was said."""
    size = "--epochs 1 --train-samples 256" if QUICK else "--epochs 10"
    done = run(engine, ranks, "hvdtrain.mnist", f"{DIGITS} {size} {flags}", out, **how)
    return json.loads((out / "summary.json").read_text()), done


# ---- ranks that end


class Ended(NamedTuple):
    """How a job of two ranks ended. left: of its processes, on this host or on a GPU."""

    code: int
    said: str
    seconds: float
    left: list[str]
    on_gpus: int  # processes that nvidia-smi listed before

    def __str__(self):
        return (
            f"exit code {self.code} after {self.seconds:.1f} s, {self.on_gpus} were on a GPU; left: {self.left or None}"
        )


def strike(out, number, flags, engine="horovod"):
    """Train on two ranks, and send rank 1 a signal after a new checkpoint."""
    log, saved = out.with_suffix(f".{number.name}"), lambda: len(list((out / "checkpoints").glob("*.safetensors")))
    before, words = saved(), machine.command(engine, 2, "hvdtrain.mnist", f"{DIGITS} {flags}", DEVICE, out)
    with log.open("w") as said, running(words, env=machine.variables(2), stdout=said, stderr=said) as (process, job):
        until = time.monotonic() + LIMIT
        while saved() == before and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        assert process.poll() is None, f"over before rank 1 could be sent {number.name}\n{log.read_text()}"
        starts = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if '"ranks"' in line]
        ranks = next(line["ranks"] for line in reversed(starts) if isinstance(line.get("ranks"), list))
        pids = {rank["pid"] for rank in ranks}
        listed, began = len(pids & machine.processes()), time.monotonic()
        os.kill(next(rank["pid"] for rank in ranks if rank["rank"] == 1), number)
        code = process.wait(LIMIT)
        seconds, held = time.monotonic() - began, machine.left_on_gpus(pids)
        left = [*remaining(job), *(f"process {pid} on a GPU" for pid in held)]
        return Ended(code, log.read_text(), seconds, left, listed)


def test_killed_then_terminated_then_it_continues_with_the_same_bits(tmp_path, saw):
    flags = f"--epochs {8 if QUICK else 16} --train-samples 1600 --check-steps 50 --deterministic --checkpoint-steps 20"
    whole, _ = train(tmp_path / "whole", 2, flags)
    for number, codes in ((signal.SIGKILL, range(1, 256)), (signal.SIGTERM, [75])):
        ended = strike(tmp_path / "ended", number, f"{flags} --keep 1000")
        saw(f"{number.name}: {ended}")
        assert ended.code in codes, ended.said
        assert ended.left == []
    again, done = train(tmp_path / "ended", 2, f"{flags} --keep 1000")
    assert "resumed after step" in done.stdout + done.stderr
    assert again["parameters_sha256"] == whole["parameters_sha256"], (again["test_loss"], whole["test_loss"])


@both_engines
def test_a_stopped_rank_is_named_and_the_job_ends(engine, tmp_path, saw):
    flags = "--epochs 300 --train-samples 1600 --checkpoint-steps 20 --step-timeout 5"
    ended = strike(tmp_path / "ended", signal.SIGSTOP, flags, engine)
    named = re.search(r"^.*\brank 1\b.*$", ended.said, re.M)
    saw(f"{ended}: {named and named[0].strip()}")
    assert (ended.code, bool(named)) == (1, True), ended.said
    assert ended.left == []
    if engine == "ddp" and not QUICK:
        assert (tmp_path / "ended" / "collectives" / "rank_0").stat().st_size > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_doctor_finds_no_problem(ranks, saw):
    done = run("horovod", ranks, "hvdtrain.doctor", "")
    saw("; ".join(line.strip() for line in done.stdout.splitlines() if "warning" in line) or "nothing to warn of")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@both_engines
def test_the_sum_of_two_ranks(engine, dtype, saw):
    done = run(engine, 2, "hvdtrain.reduce", f"--dtype {dtype}")
    got = re.findall(r"after \d+ data (\S+)", done.stdout)
    saw(", ".join(got))
    assert got == ["3", "3"], done


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, ""), (2, "--check-steps 5"), (2, "--amp fp16"), (2, "--compression fp16"), ("all", "--check-steps 5")],
)
@both_engines
def test_it_learns_the_digits(engine, ranks, flags, tmp_path, saw):
    if ranks == "all" and (ranks := machine.gpus()) < 3:
        pytest.skip(f"needs three GPUs: torch sees {ranks}")
    summary, done = train(tmp_path / "run", ranks, flags, engine)
    saw(f"accuracy {summary['test_accuracy']:.1%}")
    assert QUICK or (summary["test_accuracy"] > 0.9 and (f"{engine} over NCCL" in done.stdout)), done


@both_engines
def test_deterministic_twice(engine, tmp_path, saw):
    one, other = (train(tmp_path / name, 2, "--deterministic", engine)[0] for name in ("one", "other"))
    saw(f"test losses {one['test_loss']} and {other['test_loss']}")
    assert one["parameters_sha256"] == other["parameters_sha256"]


@both_engines
def test_virtual_ranks_on_one_process_and_on_two(engine, tmp_path, saw):
    flags = "--virtual-ranks 2 --deterministic"
    one = train(tmp_path / "one", 1, flags, "serial")[0]
    two = train(tmp_path / "two", 2, flags, engine)[0]
    plain = train(tmp_path / "plain", 2, "--deterministic", engine)[0]
    seconds = [f"{summary['train_seconds']:.2f}" for summary in (one, two, plain)]
    saw(f"seconds of training: 1 process {seconds[0]}, 2 processes {seconds[1]}, without virtual ranks {seconds[2]}")
    assert one["parameters_sha256"] == two["parameters_sha256"]
    assert (one["test_loss"], one["test_accuracy"]) == (two["test_loss"], two["test_accuracy"])


def test_the_loss_of_a_cpu(tmp_path, saw):
    flags = "--epochs 1 --optimizer sgd --lr 0.01 --momentum 0 --lr-schedule constant --amp off"
    here = train(tmp_path / "here", 1, flags, "serial", NVIDIA_TF32_OVERRIDE="0")[0]["test_loss"]
    there = train(tmp_path / "there", 1, flags, "serial", device="cpu")[0]["test_loss"]
    saw(f"{here:.6f} here, {there:.6f} on the CPU")
    assert abs(here - there) < CLOSE


# ---- what the host waits for

SCRIPTS = {
    "mnist": "--dataset digits --model convnet --epochs 1 --train-samples {samples}",
    "imagenet": "--model resnet18 --image-size 32 --dataset synthetic --classes 10 --epochs 1 --train-samples {samples}",
    "lm": "--layers 2 --width 64 --context 32 --sample-tokens 0 --text {text} --steps {steps}",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_line_waits_for_the_gpu_in_each_quiet_step(script, tmp_path, saw):
    """Runs of two lengths: what the longer one reads more often is read by its steps, whatever start and end read."""
    batch, lengths = (2, (2, 4)) if QUICK else (16, (20, 40))
    text = tmp_path / "text"
    text.write_text("One text is as good as another here, as long as it is short. " * 300)
    quiet = f"--engine serial --no-progress --log-steps 100000 --check-steps 0 --batch-size {batch} --device {DEVICE}"
    counts = []
    for steps in lengths:
        flags = SCRIPTS[script].format(steps=steps, samples=steps * batch, text=text)
        found, out = tmp_path / f"{steps}.json", tmp_path / f"run-{steps}"
        words = f"{PYTHON} -m tests.gpu.reads {found} hvdtrain.{script} {quiet} {flags} --output-dir {out}"
        done = launch(words, timeout=LIMIT, **machine.variables())
        assert done.code == 0, done
        counts.append(json.loads(found.read_text()))
    short, long = counts
    each = {line: (count - short.get(line, 0)) / (lengths[1] - lengths[0]) for line, count in long.items()}
    saw("; ".join(f"{count:.2g} a step at {line}" for line, count in each.items() if count > 0) or "none")
    assert max(each.values(), default=0) < OFTEN, each
