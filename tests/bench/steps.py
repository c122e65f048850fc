"""What one step costs beside its mathematics, and what Horovod gives a user who sets nothing at all."""

import json
import random
import sys

from hvdtrain.analysis.launching import program
from hvdtrain.mnist import shared_batch
from tests.bench.measurements import CONVNET, ROOT, Left, Setting, job, mnist_data, rate

# Ranks, and samples of each: what `hvdtrain.mnist` chooses; on 8 ranks also as many as on 2.
APART = ((2, shared_batch(2)), (8, shared_batch(8)), (8, shared_batch(2)))
COMPUTED = ("forward", "backward", "gather", "step", "steps")


def fixed_cost(setting: Setting) -> dict[str, float]:
    """Milliseconds of a step of the default network on 2 ranks, less forward, backward and the gathering of its samples."""
    log = setting.scratch / "split.log"
    script = str(ROOT / "tests/bench/split.py")
    flags = ["--no-progress", "--seed", str(setting.repeat)]
    job([program("horovodrun"), "-np", "2", sys.executable, script, *mnist_data(setting), *flags], log)
    found = [line[line.index("{") :] for line in log.read_text().splitlines() if '{"steps"' in line]
    if not found:
        raise Left(f"{script} printed no split: see {log}")
    split = json.loads(found[-1])
    print("    ms per step: " + "  ".join(f"{name} {value}" for name, value in split.items()), flush=True)
    return {"fixed-cost": sum(value for name, value in split.items() if name not in COMPUTED)}


def apart_default(setting: Setting) -> dict[str, float]:
    """The default network over ranks that never communicate, as `throughput` has it for convnet."""
    ratios = {}
    for ranks, each in APART:
        cosinenet = ["--model", "cosinenet", "--batch-size", str(each), "--channels-last", "--threads", "1"]
        sides: dict[str, list[str]] = {"horovod": [], "ddp": ["--no-communication"]}
        rates = {}
        for side in random.sample(list(sides), len(sides)):
            rates[side] = rate(setting, side, ranks, "--repeats", "5", *sides[side], base=cosinenet)
        ratios[f"apart-default-{ranks}x{each}"] = rates["horovod"] / rates["ddp"]
    return ratios


def as_it_comes(setting: Setting) -> dict[str, float]:
    """Ours over Horovod without our tuning and without --threads: each rank has as many OpenMP threads as there are cores.

    The rows of `throughput` give each rank one thread on both sides.
    """
    unset = [word for word in CONVNET if word not in ("--threads", "1")]
    ratios = {}
    for ranks in (2, 8):
        sides = {"ours": "horovod", "mpi": "horovod-untuned", "gloo": "horovod-gloo"}  # the last one with --tuning off
        rates = {}
        for side in random.sample(list(sides), len(sides)):
            rates[side] = rate(setting, sides[side], ranks, "--repeats", "2", base=unset)
        ratios |= {f"as-it-comes-{side}-{ranks}": rates["ours"] / rates[side] for side in ("mpi", "gloo")}
    return ratios
