"""Time to a loss between namespaced hosts: the gradients of every step in fp16 against --sync-every.

python -m tests.bench.slow_network --rate 100mbit --text FILE every:steps=1800 h20:steps=2000,sync-every=20
python -m tests.bench.slow_network --rate 100mbit every:epochs=9 h10:epochs=10,sync-every=10

With --text, hvdtrain.lm trains its recipe for CPUs; without, hvdtrain.imagenet trains ResNet-18 on the tests' image set. A
side is NAME:FLAG=VALUE,...; flags of the program, beside --compression fp16. Needs root, as all hosts for tests.
One JSON line for each seed and side: loss on the validation or test set, seconds in steps, steps.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from hvdtrain.launching.processes import command_line
from tests import image_set
from tests.e2e.cluster import Cluster
from tests.e2e.launchers import members

COMMON = "--compression fp16 --threads 1 --no-progress --checkpoint-steps 0"
LM = "-m hvdtrain.lm --recipe shakespeare-cpu --sample-tokens 0 --log-steps 100"
RESNET = (
    "-m hvdtrain.imagenet --model resnet18 --batch-size 4 --workers 0 --log-steps 5 --lr-scaling none --warmup-epochs 1"
)
SLICE = 0.03  # seconds: how often the slow rank is stopped


def slow_down(job: str, begin: float, seconds: float, seed: int, ended: threading.Event) -> None:
    """Make one rank three times slower for a time, `begin` seconds from now: it runs for a third of each slice."""
    if ended.wait(begin):
        return
    ranks = [pid for pid in members(job) if "python" in "".join(command_line(pid)[:1])]  # the others are nsenter
    rank = random.Random(seed).choice(ranks)
    until = time.monotonic() + seconds
    while time.monotonic() < until and not ended.is_set():
        for sent, rest in ((signal.SIGSTOP, SLICE * 2 / 3), (signal.SIGCONT, SLICE / 3)):
            os.kill(rank, sent)
            time.sleep(rest)
    for pid in members(job):  # Trap: nsenter stops itself when its child is stopped, and stays so.
        os.kill(pid, signal.SIGCONT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="", help="of tc; empty: no limit")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds from host to host")
    parser.add_argument("--hosts", type=int, default=2, help="(default: 2)")
    parser.add_argument("--ranks", type=int, default=1, help="on each host (default: 1)")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds in which one rank is three times slower")
    parser.add_argument("--text", type=lambda given: Path(given).resolve(), metavar="FILE")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--engine", default="horovod")
    parser.add_argument("--keep", type=lambda given: Path(given).resolve(), metavar="DIR", help="for the runs' output")
    parser.add_argument("sides", nargs="+", metavar="NAME:FLAG=VALUE,...")
    flags = parser.parse_args()
    for seed in flags.seeds.split(","):
        for side in flags.sides:
            print(json.dumps(measured(flags, int(seed), side)), flush=True)


def measured(flags: argparse.Namespace, seed: int, side: str) -> dict[str, object]:
    """Run one side, and return what its summary says."""
    name, _, given = side.partition(":")
    names = [chr(ord("a") + number) for number in range(flags.hosts)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), names, rate=flags.rate, delay=flags.delay) as cluster,
    ):
        out = flags.keep / f"{name}-{seed}" if flags.keep else Path(folder, "out")
        data = (
            ["--text", str(flags.text)] if flags.text else ["--data-dir", str(image_set.write(Path(folder, "images")))]
        )
        command = [sys.executable, *(["-m", "hvdtrain.starter"] if flags.engine == "horovod" else [])]
        command += [*(LM if flags.text else RESNET).split(), *COMMON.split(), "--engine", flags.engine, *data]
        command += [f"--{one}" for one in given.split(",") if one]
        command += ["--seed", str(seed), "--output-dir", str(out)]
        size = flags.hosts * flags.ranks
        place = dict(WORLD_SIZE=str(size), MASTER_ADDR="a", MASTER_PORT="9000")
        ranks = {
            f"rank {rank}": cluster.start(names[rank // flags.ranks], command, RANK=str(rank), **place)
            for rank in range(size)
        }
        ended = threading.Event()
        brake = threading.Thread(target=slow_down, args=(cluster.job, 15.0, flags.slow, seed, ended))
        if flags.slow:
            brake.start()
        done = cluster.finish(ranks, 3000)
        ended.set()
        if flags.slow:
            brake.join()
        assert all(one.code == 0 for one in done.values()), done
        summary = json.loads((out / "summary.json").read_text())
    loss = summary["validation_loss" if flags.text else "test_loss"]
    per_step = summary["train_seconds"] / summary["steps"] * 1000
    kept = {key: summary[key] for key in ("train_seconds", "steps", "parameters_sha256")}
    return {"side": name, "seed": seed, "rate": flags.rate, "loss": loss, "ms_per_step": round(per_step, 1), **kept}


if __name__ == "__main__":
    main()
