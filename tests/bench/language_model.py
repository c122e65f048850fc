"""`hvdtrain.lm` on 2 ranks beside nanoGPT's train.py, as one process with both cores: milliseconds per step of 768 tokens.

python -m tests.bench.language_model --nanogpt DIR --text tinyshakespeare.txt --rounds 5

DIR is a checkout of karpathy/nanoGPT. Both train its CPU configuration (README, "I only have a macbook"), without
evaluation. Each round runs every side once, in a random order: nanoGPT, ours in float32 and in bf16, and ours on one rank
with that rank's half of the batch beside another such rank, which is 2 ranks that never communicate. Printed: the median
over rounds, with the range. nanoGPT's DDP needs CUDA, so it cannot use two ranks of a CPU.
"""

import argparse
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from hvdtrain.data import text
from tests.bench.paired import rounds, spread
from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, environment, launch

SKIPPED = 50  # steps at the beginning that do not count
CONFIGURATION = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=1 --eval_interval=100000 --log_interval=1 "
    "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --lr_decay_iters=2000 --dropout=0.0"
)
OURS = "-m hvdtrain.lm --recipe shakespeare-cpu --threads 1 --no-progress --sample-tokens 0"


def checkout(nanogpt: Path, book: Path, directory: Path) -> None:
    """Copy nanoGPT to `directory`, with the text's characters where its own preparation would put them."""
    shutil.copytree(nanogpt, directory, ignore=shutil.ignore_patterns(".git"))
    data = text.load([book], "characters")
    place = directory / "data" / "shakespeare_char"
    place.mkdir(parents=True, exist_ok=True)
    for name, tokens in (("train", data.train), ("val", data.validation)):
        (place / f"{name}.bin").write_bytes(tokens.to(torch.int16).numpy().tobytes())
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": data.vocabulary.size}))


def theirs(directory: Path, steps: int) -> float:
    """Return nanoGPT's milliseconds per step: the median of those that it prints."""
    variables = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    done = launch(f"{PYTHON} train.py {CONFIGURATION} --max_iters={steps}", cwd=directory, timeout=600, **variables)
    assert done.code == 0, done
    times = [float(found) for found in re.findall(r"time ([0-9.]+)ms", done.stdout)]
    return statistics.median(times[SKIPPED:])


def ours(book: Path, out: Path, steps: int, amp: str) -> float:
    """Return our milliseconds per step on 2 ranks: from the record, between step SKIPPED and the last."""
    flags = f"{OURS} --text {book} --steps {steps} --log-steps {SKIPPED} --amp {amp} --output-dir {out}"
    done = launch(f"{LAUNCHERS['mpirun'].format(ranks=2)} {PYTHON} {flags}", timeout=600)
    assert done.code == 0, done
    return recorded(out)


def apart(book: Path, out: Path, steps: int, amp: str) -> float:
    """Return the milliseconds per step of the slower of two processes that train on 6 windows each, and know nothing of each
    other."""
    places = [out / str(number) for number in range(2)]
    command = f"{OURS} --engine serial --batch-size 6 --text {book} --steps {steps} --log-steps {SKIPPED} --amp {amp}"
    started = [
        subprocess.Popen(
            [sys.executable, *command.split(), "--output-dir", str(place)],
            cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL,
        )
        for place in places
    ]  # fmt: skip
    assert [process.wait(timeout=600) for process in started] == [0, 0]
    return max(map(recorded, places))


def recorded(out: Path) -> float:
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    at = {event["step"]: event["elapsed"] for event in events if event["event"] == "train"}
    return 1000 * (at[max(at)] - at[SKIPPED]) / (max(at) - SKIPPED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, metavar="DIR")
    parser.add_argument("--text", type=lambda given: Path(given).resolve(), required=True, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        checkout(flags.nanogpt, flags.text, scratch / "nanogpt")

        def new() -> Path:
            return Path(tempfile.mkdtemp(dir=scratch), "out")

        sides: dict[str, Callable[[], float]] = {
            "nanoGPT, 1 process": lambda: theirs(scratch / "nanogpt", flags.steps),
            "ours, float32": lambda: ours(flags.text, new(), flags.steps, "off"),
            "ours, bf16": lambda: ours(flags.text, new(), flags.steps, "bf16"),
            "no communication, float32": lambda: apart(flags.text, new(), flags.steps, "off"),
        }
        found = rounds(flags.rounds, sides, lambda side: sides[side]())
    print(f"\nload average: {os.getloadavg()[0]:.1f}\n\n| | ms per step | nanoGPT's time over it |\n|---|---:|---:|")
    for side, times in found.items():
        ratios = [there / here for there, here in zip(found["nanoGPT, 1 process"], times, strict=True)]
        print(f"| {side} | {spread(times, '.1f')} | {spread(ratios, '.2f')} |")


if __name__ == "__main__":
    main()
