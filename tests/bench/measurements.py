"""What the rows of `make bench` measure. Each function runs its configurations once, in a random order; a ratio per row."""

import gzip
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def users_environment() -> dict[str, str]:
    """Return the environment of a user's run, who also sees the GPUs."""
    return {name: value for name, value in seeing(environment()).items() if name not in TESTS_ONLY}


def job(arguments: list[str], log: Path, seconds: float = SECONDS) -> float:
    """Run a command line; return its wall seconds. Raises Left where it fails."""
    os.environ.update(users_environment())
    ended = run_job(arguments, seconds, log)
    if ended.code != 0:
        tail = " ".join(log.read_text(errors="replace").split())[-300:]
        raise Left(f"{' '.join(arguments[:6])} ... ended with {ended.code}: {tail}")
    return ended.seconds


def mpirun(ranks: int, *arguments: str) -> list[str]:
    return [program("mpirun"), "--oversubscribe", "-np", str(ranks), sys.executable, *arguments]


# ----------------------------------------------------------------------------------------------- throughput of training

CONVNET = ["--model", "convnet", "--batch-size", "64", "--channels-last", "--threads", "1"]


def rate(setting: Setting, variant: str, ranks: int, *flags: str, base: Sequence[str] = CONVNET) -> float:
    """Return the ConvNet's samples per second over all ranks. base: flags of the benchmark, before all others."""
    out = Path(tempfile.mkdtemp(dir=setting.scratch))
    # As it comes: Horovod over Gloo is asked for without our tuning, too.
    untuned = ["--tuning", "off"] if variant == "horovod-gloo" else []
    flags = (*base, "--output-dir", str(out), *untuned, *flags)
    job(command(variant, ranks, "hvdtrain.benchmark", flags), out / "log")
    return json.loads((out / "benchmark.json").read_text())["samples_per_second"]["mean"]


def throughput(ranks: int) -> Callable[[Setting], dict[str, float]]:
    def measure(setting: Setting) -> dict[str, float]:
        runs = dict.fromkeys(("apart", "horovod", "ddp", "horovod-untuned", "horovod-gloo"), 0.0)
        for name in random.sample(list(runs), len(runs)):
            variant, alone = ("ddp", ["--no-communication"]) if name == "apart" else (name, [])
            runs[name] = rate(setting, variant, ranks, "--repeats", "5", *alone)
        ours = runs.pop("horovod")
        return {f"{name}-{ranks}": ours / theirs for name, theirs in runs.items()}

    return measure


def every_count(setting: Setting) -> dict[str, float]:
    """Over the faster of Horovod untuned over MPI and over Gloo, at the number of ranks where that is least.

    2 and 8 ranks have rows of their own.
    """
    ratios = {}
    for ranks in (1, 3, 4, 5, 6, 7):
        kinds = ("horovod", "horovod-untuned", "horovod-gloo")
        rates = {kind: rate(setting, kind, ranks, "--repeats", "2") for kind in random.sample(kinds, len(kinds))}
        ratios[ranks] = rates.pop("horovod") / max(rates.values())
    print("    by ranks: " + "  ".join(f"{ranks}: {ratio:.2f}" for ranks, ratio in ratios.items()), flush=True)
    return {"every-count": min(ratios.values()), **{f"count-{ranks}": ratio for ranks, ratio in ratios.items()}}


def ddp_as_it_comes(setting: Setting) -> dict[str, float]:
    """DDP without what hvdtrain sets for it, malloc above all: as a script of one's own has it."""
    ratios = {}
    for ranks in (2, 8):
        kinds = random.sample(("horovod", "ddp-untuned"), 2)
        rates = {kind: rate(setting, kind, ranks, "--repeats", "5") for kind in kinds}
        ratios[f"ddp-untuned-{ranks}"] = rates["horovod"] / rates["ddp-untuned"]
    return ratios


def one_host(setting: Setting) -> dict[str, float]:
    """What `--compression auto` chooses where all ranks are on one host, over none."""
    rates = {kind: rate(setting, "horovod", 2, "--compression", kind) for kind in random.sample(("auto", "none"), 2)}
    return {"fp16-one-host": rates["auto"] / rates["none"]}


# --------------------------------------------------------------------------------------------------- start-up and memory

BARE = "import torch, horovod.torch as hvd; hvd.init(); "


def start_up(ranks: int) -> Callable[[Setting], dict[str, float]]:
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
        seconds = {run.__name__: run(setting) for run in random.sample([bare, ours], 2)}
        return {f"start-{ranks}": seconds["ours"] / seconds["bare"]}

    return measure


def own_bytes(arguments: list[str], log: Path) -> int:
    """Return the most bytes that a rank has for itself at any time, of the rank that has least: rank 0 also reports."""
    most: Counter[Path] = Counter()
    with log.open("w") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, env=users_environment())
        while process.poll() is None:
            for path in Path("/proc").glob("[0-9]*"):
                if parent_of(path) == process.pid:
                    most[path] = max(most[path], anonymous(path))
            time.sleep(0.05)
    if process.returncode:
        raise Left(f"{' '.join(arguments[:6])} ... ended with {process.returncode}; see {log}")
    return min(most.values())


def parent_of(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def anonymous(path: Path) -> int:
    """Return the bytes of a process that are no file's. Files' pages (libraries, the data) are one copy for all ranks."""
    try:
        found = re.search(r"^Anonymous:\s+(\d+) kB", (path / "smaps_rollup").read_text(), re.M)
    except OSError:  # it ended meanwhile
        return 0
    return int(found[1]) * 1024 if found else 0


def memory(setting: Setting) -> dict[str, float]:
    train = ["-m", "hvdtrain.mnist", *mnist_data(setting), "--train-samples", "2000", "--no-progress", "--threads", "1"]
    bare = ["-c", f"{BARE}import time; time.sleep(3)"]
    sides = random.sample([("ours", train), ("bare", bare)], 2)
    own = {name: own_bytes(mpirun(3, *arguments), setting.scratch / f"{name}.log") for name, arguments in sides}
    return {"memory": own["ours"] / own["bare"]}


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
from hvdtrain.data import idx
from hvdtrain.mnist import scaled
from hvdtrain.data.sharding import epoch_order, steps
data = idx.load("mnist", data_dir)
def ours(epoch):
    for step in steps(epoch_order(60_000, 1, epoch), 0, 1, 64):
        for batch in step.batches:
            scaled(data.train_images.index_select(0, batch.indices)), data.train_labels.index_select(0, batch.indices)
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
    """ResNet-50 on the CPU: bf16 over float32, and compiled, with nothing in the compiler's cache, over eager."""
    flags = "--model resnet50 --batch-size 8 --threads 1 --warmup-steps 1 --repeats 3 --steps 1"
    bf16 = ["--amp", "bf16", "--channels-last"]
    kinds = {"float32": [], "bf16": bf16, "compiled": [*bf16, "--compile"]}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(setting.scratch / "cache")
    found = {}
    for kind in random.sample(list(kinds), len(kinds)):
        out = setting.scratch / kind
        job(
            mpirun(2, "-m", "hvdtrain.benchmark", *flags.split(), *kinds[kind], "--output-dir", str(out)),
            out.with_suffix(".log"),
        )
        found[kind] = json.loads((out / "benchmark.json").read_text())
    rates = {kind: result["samples_per_second"]["mean"] for kind, result in found.items()}
    print("    images/s: " + "  ".join(f"{kind} {rate:.3g}" for kind, rate in rates.items()), flush=True)
    return {
        "resnet": rates["bf16"] / rates["float32"],
        "resnet-compile": rates["compiled"] / rates["bf16"],
        "resnet-compile-seconds": found["compiled"]["warmup_seconds"] - found["bf16"]["warmup_seconds"],
    }


def guards(setting: Setting) -> dict[str, float]:
    """Shares of training's time, counted around the calls: too small to be seen as a difference of two runs."""
    out, log = setting.scratch / "out", setting.scratch / "guarded.log"
    flags = [
        "--model",
        "convnet",
        "--checkpoint-steps",
        "50",
        "--train-samples",
        "30000",
        "--no-progress",
        "--output-dir",
        str(out),
    ]
    job(mpirun(2, str(ROOT / "tests/bench/guarded.py"), *mnist_data(setting), *flags), log)
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    seconds, whole = json.loads(lines[-1]), json.loads((out / "summary.json").read_text())["train_seconds"]
    return {"checkpoints": seconds["checkpoints"] / whole, "guards": seconds["guards"] / whole}


# ------------------------------------------------------------------------------------------------------ between two hosts


def on_two_hosts(setting: Setting, rate: str, module: str, flags: list[str]) -> dict:
    """Run `module` on one rank of each of two namespaced hosts that the wrapper starts; return the JSON that it wrote."""
    if reason := why_not():
        raise Left(reason)
    out = Path(tempfile.mkdtemp(dir=setting.scratch))
    wrapper = [
        str(ROOT / "launch/mpirun.sh"),
        "-H",
        "a:1,b:1",
        "--interface",
        "eth0",
        "--",
        sys.executable,
        "-m",
        module,
    ]
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


def wire(megabits: int) -> Callable[[Setting], dict[str, float]]:
    """16 MiB all-reduced between two hosts: how much of what one TCP connection carries both ways at once."""

    def measure(setting: Setting) -> dict[str, float]:
        size = ["--min-bytes", str(2**24), "--max-bytes", str(2**24), "--seconds-per-size", "4"]
        result = on_two_hosts(setting, f"{megabits}mbit", "hvdtrain.reduce", ["--sweep", "--dtype", "float32", *size])
        return {f"wire-{megabits}": result["rows"][0]["bus_bytes_per_second"] / plain_tcp(setting, f"{megabits}mbit")}

    return measure


RESNET18_BYTES = 11_689_512 * 4  # of gradients


def compressed(setting: Setting) -> dict[str, float]:
    """Steps per second with fp16 on a wire that takes nearly all of a step, over float32's."""
    flags = "--model resnet18 --image-size 32 --batch-size 2 --warmup-steps 1 --repeats 2 --steps 1"
    rates = {}
    for kind in random.sample(["none", "fp16"], 2):
        result = on_two_hosts(setting, "100mbit", "hvdtrain.benchmark", [*flags.split(), "--compression", kind])
        rates[kind] = result["samples_per_second"]["mean"]
    return {"wire-fp16": rates["fp16"] / rates["none"]}


def overlap(megabits: int, batch_size: int) -> Callable[[Setting], dict[str, float]]:
    """A step's time over the longer of its two parts: computing, measured without communication, and what the wire takes."""

    def measure(setting: Setting) -> dict[str, float]:
        flags = f"--model resnet18 --image-size 224 --batch-size {batch_size} --warmup-steps 1 --repeats 2 --steps 2"
        seconds = {}
        for kind in random.sample(["both", "compute"], 2):
            alone = ["--no-communication"] if kind == "compute" else []
            result = on_two_hosts(setting, f"{megabits}mbit", "hvdtrain.benchmark", [*flags.split(), *alone])
            seconds[kind] = 2 * batch_size / result["samples_per_second"]["mean"]
        bound = max(seconds["compute"], RESNET18_BYTES / plain_tcp(setting, f"{megabits}mbit"))
        return {f"overlap-{megabits}-{batch_size}": seconds["both"] / bound}

    return measure
