"""What the rows of `make bench` measure. Each function runs its configurations once, in a random order; a ratio per row."""

import gzip
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hvdtrain.analysis.launching import command, program, run_job
from tests.e2e.cluster import Cluster, why_not
from tests.e2e.launchers import environment
from tests.hidden_gpus import seeing

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900.0  # that any run may take
# What a test sets for its launchers and a user does not: with it, idle OpenMP threads would not spin.
TESTS_ONLY = ("OMP_WAIT_POLICY", "PYTHONUNBUFFERED")


@dataclass(frozen=True)
class Setting:
    scratch: Path
    data_dir: Path | None  # of MNIST
    peers: Path | None
    repeat: int  # from 1


class Left(Exception):
    """A row that cannot be measured here, and why."""


Measure = Callable[[Setting], dict[str, float]]
Side = TypeVar("Side", bound=Hashable)
Result = TypeVar("Result")


def once(sides: Iterable[Side], measure: Callable[[Side], Result]) -> dict[Side, Result]:
    """Measure every side once, in a random order: a slow minute touches all sides."""
    given = list(sides)
    return {side: measure(side) for side in random.sample(given, len(given))}


def users_environment() -> dict[str, str]:
    """Return the environment of a user's run, who also sees the GPUs."""
    return {name: value for name, value in seeing(environment()).items() if name not in TESTS_ONLY}


def job(arguments: list[str], log: Path, seconds: float = SECONDS) -> float:
    """Run a command line; return its wall seconds. Raises Left where it fails."""
    os.environ.update(users_environment())
    began = time.monotonic()
    code = run_job(arguments, seconds, log)
    if code != 0:
        tail = " ".join(log.read_text(errors="replace").split())[-300:]
        raise Left(f"{' '.join(arguments[:6])} ... ended with {code}: {tail}")
    return time.monotonic() - began


def mpirun(ranks: int, *arguments: str) -> list[str]:
    return [program("mpirun"), "--oversubscribe", "-np", str(ranks), sys.executable, *arguments]


# ----------------------------------------------------------------------------------------------- throughput of training

ONE_THREAD = "--channels-last --threads 1"
CONVNET = f"--model convnet --batch-size 64 {ONE_THREAD}"
# Sides by name: a variant of launching.VARIANTS, and flags of the benchmark. Horovod over Gloo is asked for untuned, too.
SIDES = {
    "ours": ("horovod", ""), "mpi": ("horovod-untuned", ""), "gloo": ("horovod-gloo", "--tuning off"),
    "ddp": ("ddp", ""), "bound": ("ddp", "--no-communication"),
}  # fmt: skip


def benchmark(setting: Setting, start: Callable[[list[str]], list[str]], flags: str) -> dict:
    """Run hvdtrain.benchmark by the command that `start` makes of its flags; return the JSON that it writes."""
    out = Path(tempfile.mkdtemp(dir=setting.scratch))
    job(start([*flags.split(), "--output-dir", str(out)]), out / "log")
    return json.loads((out / "benchmark.json").read_text())


def rates(setting: Setting, ranks: int, sides: str, repeats: int = 5, base: str = CONVNET) -> dict[str, float]:
    """Return samples per second over all ranks, by side."""

    def measure(side: str) -> float:
        variant, flags = SIDES[side]
        found = benchmark(
            setting,
            lambda words: command(variant, ranks, "hvdtrain.benchmark", words),
            f"{base} --repeats {repeats} {flags}",
        )
        return found["samples_per_second"]["mean"]

    return once(sides.split(), measure)


def throughput(ranks: int) -> Measure:
    def measure(setting: Setting) -> dict[str, float]:
        found = rates(setting, ranks, "ours bound ddp mpi gloo")
        named = {"bound": "bound", "ddp": "ddp", "mpi": "horovod-untuned", "gloo": "horovod-gloo"}
        return {f"{name}-{ranks}": found["ours"] / found[side] for side, name in named.items()}

    return measure


SHARES = ((2, 128), (8, 32), (8, 128))  # ranks, and samples of each


def no_communication(setting: Setting) -> dict[str, float]:
    """The default network over ranks that never communicate, as `throughput` has it for convnet."""
    found = {}
    for ranks, each in SHARES:
        both = rates(setting, ranks, "ours bound", base=f"--model cosinenet --batch-size {each} {ONE_THREAD}")
        found[f"no-communication-{ranks}x{each}"] = both["ours"] / both["bound"]
    return found


STEPS = {
    "resnet18": "hvdtrain.imagenet --dataset synthetic --model resnet18 --image-size 64 --batch-size 16 "
    "--train-samples 640 --epochs 1",
    "lm": "hvdtrain.lm --text LICENSE --recipe shakespeare-cpu --steps 60 --batch-size 3",
}


def of_steps(key: str, name: str, processes: int, ours: str, other: str) -> Measure:
    """Seconds of a sample with the flags `ours`, over those with `other`, in steps of one of STEPS, in float32."""

    def seconds(setting: Setting, flags: str) -> float:
        out = Path(tempfile.mkdtemp(dir=setting.scratch))
        words = f"{STEPS[name]} --amp off {flags} --threads 1 --no-progress --log-steps 2".split()
        job(mpirun(processes, "-m", *words, "--checkpoint-steps", "0", "--output-dir", str(out)), out / "log")
        events = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        rates = [event["samples_per_second"] for event in events if event["event"] == "train"]
        return 1 / statistics.median(rates[1:])  # without the first step

    def measure(setting: Setting) -> dict[str, float]:
        found = once((ours, other), lambda flags: seconds(setting, flags))
        return {key: found[ours] / found[other]}

    return measure


# -------------------------------------------------------------------------------------------------------------- start-up


def start_up(ranks: int) -> Measure:
    def bare(setting: Setting) -> float:
        return job(mpirun(ranks, "-c", "import torch, horovod.torch"), setting.scratch / "bare.log")

    def ours(setting: Setting) -> float:
        """Until the first step is over, evaluation, checkpoint and end left out."""
        out, began = setting.scratch / "out", time.time()
        flags = ["--dataset", "digits", "--epochs", "1", "--no-progress", "--output-dir", str(out), "--resume", "never"]
        job(mpirun(ranks, "-m", "hvdtrain.mnist", *flags), setting.scratch / "ours.log")
        events = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return next(event["time"] for event in events if event["event"] == "train") - began

    def measure(setting: Setting) -> dict[str, float]:
        seconds = once((bare, ours), lambda side: side(setting))
        return {f"start-{ranks}": seconds[ours] / seconds[bare]}

    return measure


def mnist_data(setting: Setting) -> list[str]:
    if setting.data_dir is None:
        raise Left("needs MNIST: name its directory with --data-dir")
    return ["--dataset", "mnist", "--data-dir", str(setting.data_dir)]


def for_torchvision(setting: Setting, root: Path) -> None:
    """Put MNIST's files where torchvision looks for them under `root`."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for path in Path(str(setting.data_dir)).iterdir():
        if path.name.endswith(("ubyte", "ubyte.gz")):
            content = path.read_bytes()
            unpacked = gzip.decompress(content) if path.suffix == ".gz" else content
            (raw / path.name.removesuffix(".gz")).write_bytes(unpacked)


# ------------------------------------------------------------------------------------------------------------------ input


def mnist_input(setting: Setting) -> dict[str, float]:
    """Seconds per sample of an epoch's input, in one thread of one process; torchvision's as PyTorch's example has it."""
    mnist_data(setting)
    script = """
import sys, time, torch
torch.set_num_threads(1)
data_dir, root = sys.argv[1:]
from hvdtrain.datasets import mnist_data
from hvdtrain.mnist import scaled_digits
from hvdtrain.inputs.sharding import epoch_order, steps
data = mnist_data.load_dataset("mnist_data", data_dir)
def ours(epoch):
    for step in steps(epoch_order(60_000, 1, epoch), 0, 1, 64):
        for batch in step.batches:
            scaled_digits(data.train_images.index_select(0, batch.indices)), data.train_labels.index_select(0, batch.indices)
from torchvision import datasets, transforms
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
theirs = torch.utils.data.DataLoader(datasets.MNIST(root, train=True, transform=transform), batch_size=64, shuffle=True)
ours(0)
began = time.perf_counter()
for epoch in range(5):
    ours(epoch)
middle = time.perf_counter()
for batch in theirs:
    pass
print((time.perf_counter() - middle) / ((middle - began) / 5))
"""
    for_torchvision(setting, setting.scratch / "root")
    return {"input": in_process(script, str(setting.data_dir), str(setting.scratch / "root"), log=setting.scratch)}


def in_process(script: str, *arguments: str, log: Path) -> float:
    """Run a script in a process of its own; return the number in the last line that it prints."""
    path = log / "script.log"
    job([sys.executable, "-c", script, *arguments], path)
    return float(path.read_text().splitlines()[-1])


# ------------------------------------------------------------------------------------------------------ larger model, cost


def resnet(setting: Setting) -> dict[str, float]:
    """ResNet-50 on the CPU: bf16 over float32."""
    base = "--model resnet50 --batch-size 8 --threads 1 --warmup-steps 1 --repeats 3 --steps 1"
    kinds = {"float32": "", "bf16": "--amp bf16 --channels-last"}

    def measure(kind: str) -> dict:
        return benchmark(setting, lambda words: mpirun(2, "-m", "hvdtrain.benchmark", *words), f"{base} {kinds[kind]}")

    found = once(kinds, measure)
    rate = {kind: result["samples_per_second"]["mean"] for kind, result in found.items()}
    print("    images/s: " + "  ".join(f"{kind} {value:.3g}" for kind, value in rate.items()), flush=True)
    return {"resnet": rate["bf16"] / rate["float32"]}


def split(setting: Setting, start: list[str], flags: str) -> dict[str, float]:
    """Return what tests/bench/split.py prints: milliseconds of each part of a step of hvdtrain.mnist on 2 ranks."""
    log = setting.scratch / "split.log"
    job([*start, str(ROOT / "tests/bench/split.py"), *mnist_data(setting), "--no-progress", *flags.split()], log)
    found = [line[line.index("{") :] for line in log.read_text().splitlines() if '{"steps"' in line]
    if not found:
        raise Left(f"split.py printed no split: see {log}")
    parts = json.loads(found[-1])
    print("    ms per step: " + "  ".join(f"{name} {value}" for name, value in parts.items()), flush=True)
    return parts


def fixed_cost(setting: Setting) -> dict[str, float]:
    """Milliseconds of a step of the default network, less forward, backward and the gathering of its samples."""
    parts = split(setting, [program("horovodrun"), "-np", "2", sys.executable], f"--seed {setting.repeat}")
    computed = ("forward", "backward", "gather", "step", "steps")
    return {"fixed-cost": sum(value for name, value in parts.items() if name not in computed)}


def guards(setting: Setting) -> dict[str, float]:
    """Shares of training's time, counted around the calls: too small to be seen as a difference of two runs."""
    flags = f"--model convnet --checkpoint-steps 50 --train-samples 30000 --output-dir {setting.scratch}/out"
    parts = split(setting, mpirun(2), flags)
    return {name: parts[name] / parts["step"] for name in ("checkpoints", "guards")}


def writing(setting: Setting) -> dict[str, float]:
    """400 MB of tensors are written in a thread, by ours and by the library: time, memory, pauses of the main thread."""
    script = """
import json, os, resource, sys, threading, time
import torch
from safetensors.torch import save
from hvdtrain.models.weights import write_tensors
side, path = sys.argv[1:]
tensors = {f"{number}": torch.ones(6_250_000) for number in range(16)}
before, done, pause = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, [], 0.0
def write():
    began = time.perf_counter()
    with open(path, "wb") as file:
        write_tensors(file, tensors) if side == "ours" else file.write(save(tensors))
        os.fsync(file.fileno())
    done.append(time.perf_counter() - began)
thread = threading.Thread(target=write)
thread.start()
last = time.perf_counter()
while not done:
    time.sleep(0.001)
    pause, last = max(pause, time.perf_counter() - last), time.perf_counter()
print(json.dumps([done[0], (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 400e3, pause]))
"""

    def measure(side: str) -> list[float]:
        log = setting.scratch / f"{side}.log"
        job([sys.executable, "-c", script, side, str(setting.scratch / side)], log)
        seconds: list[float] = json.loads(log.read_text().splitlines()[-1])
        return seconds

    found = once(("ours", "library"), measure)
    print(f"    seconds, share of memory, pause: {found}", flush=True)
    (time_ours, memory, pause), (time_theirs, *_) = found["ours"], found["library"]
    return {"write-time": time_ours / time_theirs, "write-memory": memory, "write-pause": 1000 * pause}


# ------------------------------------------------------------------------------------------------------ between two hosts


def on_two_hosts(setting: Setting, rate: str, module: str, flags: list[str]) -> dict:
    """Run `module` on one rank of each of two namespaced hosts that the wrapper starts; return the JSON that it wrote."""
    if reason := why_not():
        raise Left(reason)
    out = Path(tempfile.mkdtemp(dir=setting.scratch))
    wrapper = [
        str(ROOT / "launch/mpirun.sh"), *["-H", "a:1,b:1", "--interface", "eth0", "--"], sys.executable, "-m", module,
    ]  # fmt: skip
    with Cluster(out, ["a", "b"], rate=rate, ssh=True) as cluster:
        done = cluster.run("a", [*wrapper, *flags, "--threads", "1", "--output-dir", str(out)], timeout=SECONDS)
    if done.code:
        raise Left(f"{module} on two hosts ended with {done.code}: {done.stderr[-300:]}")
    return json.loads((out / f"{module.rpartition('.')[2]}.json").read_text())


BOTH_WAYS = """
import socket, sys, threading, time
if sys.argv[1] == "a":
    connection, _ = socket.create_server(("", 9999)).accept()
else:
    time.sleep(1)
    connection = socket.create_connection(("a", 9999))
began, given, taken, buffer = time.perf_counter(), bytes(2**20), 0, bytearray(2**20)
def give():
    while time.perf_counter() - began < 4:
        connection.sendall(given)
    connection.shutdown(socket.SHUT_WR)
threading.Thread(target=give).start()
while some := connection.recv_into(buffer):
    taken += some
print(taken / (time.perf_counter() - began))
"""


def plain_tcp(setting: Setting, rate: str) -> float:
    """Return the bytes per second that one TCP connection between two such hosts carries each way, both ways at once."""
    with Cluster(Path(tempfile.mkdtemp(dir=setting.scratch)), ["a", "b"], rate=rate) as cluster:
        both = {host: cluster.start(host, [sys.executable, "-c", BOTH_WAYS, host]) for host in ("a", "b")}
        return statistics.mean(float(done.stdout) for done in cluster.finish(both, 60).values())


def wire(megabits: int) -> Measure:
    """16 MiB all-reduced between two hosts: how much of what one TCP connection carries both ways at once."""

    def measure(setting: Setting) -> dict[str, float]:
        size = ["--min-bytes", str(2**24), "--max-bytes", str(2**24), "--seconds-per-size", "4"]
        result = on_two_hosts(
            setting, f"{megabits}mbit", "hvdtrain.benchmark", ["--collectives", "--dtype", "float32", *size]
        )
        return {f"wire-{megabits}": result["rows"][0]["bus_bytes_per_second"] / plain_tcp(setting, f"{megabits}mbit")}

    return measure


RESNET18_BYTES = 11_689_512 * 4  # of gradients


def step_seconds(setting: Setting, megabits: int, batch_size: int, sides: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds of a step of ResNet-18 on such hosts, by side: its flags."""
    base = f"--model resnet18 --batch-size {batch_size} --warmup-steps 1 --repeats 2"

    def measure(side: str) -> float:
        result = on_two_hosts(setting, f"{megabits}mbit", "hvdtrain.benchmark", f"{base} {sides[side]}".split())
        return 2 * batch_size / result["samples_per_second"]["mean"]

    return once(sides, measure)


def compressed(setting: Setting) -> dict[str, float]:
    """Steps per second with fp16 on a wire that takes nearly all of a step, over float32's."""
    flags = "--image-size 32 --steps 1 --compression"
    seconds = step_seconds(setting, 100, 2, {kind: f"{flags} {kind}" for kind in ("none", "fp16")})
    return {"wire-fp16": seconds["none"] / seconds["fp16"]}


def overlap(megabits: int, batch_size: int) -> Measure:
    """A step's time over the longer of its two parts: computing, measured without communication, and what the wire takes."""

    def measure(setting: Setting) -> dict[str, float]:
        flags = "--image-size 224 --steps 2"
        sides = {"both": flags, "compute": f"{flags} --no-communication"}
        seconds = step_seconds(setting, megabits, batch_size, sides)
        bound = max(seconds["compute"], RESNET18_BYTES / plain_tcp(setting, f"{megabits}mbit"))
        return {f"overlap-{megabits}-{batch_size}": seconds["both"] / bound}

    return measure
