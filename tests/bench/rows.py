"""The rows of the table that `make bench` makes: what each compares, its target, and what limits it."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.bench.images import OF_WORKERS, image_workers, jpeg
from tests.bench.measurements import (
    SHARES,
    Measure,
    Setting,
    compressed,
    fixed_cost,
    guards,
    mnist_input,
    no_communication,
    of_steps,
    overlap,
    resnet,
    start_up,
    throughput,
    wire,
    writing,
)
from tests.bench.peers import whole
from tests.bench.waits import command, waits


@dataclass(frozen=True)
class Row:
    key: str
    what: str
    target: str  # "≥ 2", "≤ 1"
    limit: str  # what holds it back; "" where nothing is known to


@dataclass(frozen=True)
class Group:
    """Rows that are measured by the same runs."""

    name: str
    measure: Measure
    rows: tuple[Row, ...]


LESS = "the other side does less"
IMPORTS = '`mpirun -np {} python -c "import torch, horovod.torch"`'
# Megabits per second, images per rank, which part is longer, what limits it.
OVERLAPS = (
    (100, 4, "communication", "what is computed before the first bucket is full"),
    (1000, 4, "longer part", "the forward pass cannot overlap, nor the last bucket"),
    (1000, 16, "computation", "the cores that communication takes"),
)
# What a user waits for, and with what.
WAITS = {
    "first-line": "from Enter to the first line",
    "first-step": "from Enter to the end of the first step",
    "ctrl-c": "from Ctrl-C to the prompt",
}
DECODING = "[decoding](tuning.md#reading-images)"
LAUNCHERS = {"alone": "one process", "mpirun": "2 ranks", "horovodrun": "2 ranks", "torchrun": "2 ranks"}


def groups() -> tuple[Group, ...]:
    return (
        *of_convnet(2, "≥ 0.97"), *of_convnet(8, "≥ 0.92"), *of_one_host(), *of_two_hosts(), *of_training(),
    )  # fmt: skip


def of_convnet(ranks: int, target: str) -> tuple[Group, ...]:
    what = f"`convnet`, {ranks} ranks, over"
    return (
        Group(f"throughput-{ranks}", throughput(ranks), (
            Row(f"bound-{ranks}", f"{what} {ranks} ranks that never communicate", target, LESS),
            Row(f"ddp-{ranks}", f"{what} DDP (Gloo)", "≥ 2", "both compute the same"),
            Row(f"horovod-untuned-{ranks}", f"{what} untuned Horovod (MPI)", "≥ 1", ""),
            Row(f"horovod-gloo-{ranks}", f"{what} untuned Horovod (Gloo)", "≥ 1", ""),
        )),
        Group(f"start-{ranks}", start_up(ranks), (
            Row(f"start-{ranks}", f"{ranks} ranks: time of a first step, over {IMPORTS.format(ranks)}",
                "≤ 1.15", "the first step"),
        )),
    )  # fmt: skip


def of_one_host() -> tuple[Group, ...]:
    small, large = "JPEGs of 500 x 375 pixels", "JPEGs of 2,000 x 1,500 pixels"
    torchvision, both = "over torchvision's tutorial", "decoding: both have libjpeg-turbo"
    resnet_50 = "ResNet-50, 2 ranks,"
    return (
        Group("input", mnist_input, (
            Row("input", "input of MNIST, over torchvision's", "≥ 100",
                "memory"),
        )),
        Group("jpeg", jpeg, (
            Row("jpeg", f"{small}, {torchvision}", "≥ 2", both),
            Row("jpeg-2000", f"{large}, {torchvision}", "≥ 1", both),
            Row("jpeg-reduced", f"{small}, with `--reduced-decode`, {torchvision}", "≥ 2",
                "too small to be reduced"),
            Row("jpeg-reduced-2000", f"{large}, with `--reduced-decode`, {torchvision}", "≥ 2",
                "Huffman decoding of the whole image"),
        )),
        Group("image-workers", image_workers, tuple(
            row
            for size in OF_WORKERS for key in (f"folder-torchvision-{size}",)
            for row in (
                Row(key, f"folder of JPEGs of {size} pixels, over torchvision", "≥ 1.5", DECODING),
                Row(f"{key}-cpu", "its CPU seconds per image, over ours", "≥ 1", DECODING),
            )
        )),
        Group("resnet", resnet, (
            Row("resnet", f"{resnet_50} in bf16 and channels_last over float32 and NCHW", "≥ 1.6",
                "`--compile` gains nothing on CPUs"),
        )),
    )  # fmt: skip


def of_two_hosts() -> tuple[Group, ...]:
    over_tcp = "all-reduce, over TCP in both directions"
    return (
        Group("wire-100", wire(100), (
            Row("wire-100", f"2 hosts, 100 Mbit/s: {over_tcp}", "≥ 0.95", ""),
        )),
        Group("wire-1000", wire(1000), (
            Row("wire-1000", f"2 hosts, 1,000 Mbit/s: {over_tcp}", "≥ 0.95", ""),
        )),
        Group("compressed", compressed, (
            Row("wire-fp16", "ResNet-18, 2 hosts, 100 Mbit/s: `--compression fp16` over none",
                "≥ 1.95", "2, less the computation"),
        )),
        *(
            Group(f"overlap-{megabits}-{images}", overlap(megabits, images), (
                Row(f"overlap-{megabits}-{images}",
                    f"ResNet-18, 2 hosts, {megabits:,} Mbit/s, {images} images per rank: time of a step, over its {which}",
                    "≤ 1.1", limit),
            ))
            for megabits, images, which, limit in OVERLAPS
        ),
    )  # fmt: skip


def of_training() -> tuple[Group, ...]:
    default, share = "`cosinenet`", "`convnet`, 2 ranks: share of the time for"
    epoch = "one epoch of MNIST, 2 ranks"
    return (
        Group("no-communication", no_communication, tuple(
            Row(f"no-communication-{ranks}x{samples}",
                f"{default}, {ranks} ranks of {samples} samples, over {ranks} ranks that never communicate",
                "≥ 0.85" if samples == 32 else "≥ 0.92",  # 0.85: what waiting does not cost
                LESS if ranks == 2 else "[turns on a core](tuning.md#eight-ranks-on-two-cores)")
            for ranks, samples in SHARES
        )),
        *(
            Group(key, of_steps(key, name, processes, "--virtual-ranks 4", f"--accumulate {4 // processes}"), (
                Row(key,
                    f"`{name}`, {processes} of 4 ranks: `--virtual-ranks 4`, time of a step over accumulated micro-batches",
                    "≤ 1.1", "four processes on two cores" if processes > 2 else ""),
            ))
            for name in ("resnet18", "lm") for processes in (1, 2, 4) for key in (f"virtual-{name}-{processes}",)
        ),
        *(
            Group(key, of_steps(key, name, 2, batch, f"{batch} --amp bf16"), (
                Row(key, f"`{name}`, 2 ranks, in bf16 over float32", "≥ 1.2", "whether the processor multiplies bf16"),
            ))
            for name, batch in (("resnet18", "--batch-size 16"), ("lm", "--batch-size 6")) for key in (f"amp-{name}",)
        ),
        Group("fixed-cost", fixed_cost, (
            Row("fixed-cost", f"{default}, 2 ranks: milliseconds of a step without forward, backward and loading",
                "≤ 1", "waiting for the other rank"),
        )),
        Group("guards", guards, (
            Row("checkpoints", f"{share} a checkpoint every 50 steps", "≤ 0.01", ""),
            Row("guards", f"{share} all guards", "≤ 0.01", "a sum of each gradient"),
        )),
        Group("writing", writing, (
            Row("write-time", "400 MB of tensors are written: time over that of safetensors' `save`", "≤ 1", "the disk"),
            Row("write-memory", "the same: memory that it takes, as a share of the tensors", "≤ 0.05", ""),
            Row("write-pause", "the same: the longest pause of another thread, in ms", "≤ 50", "who else has the cores"),
        )),
        *(
            Group(f"waits-{launcher}", waits(launcher), tuple(
                Row(f"{key}-{launcher}", f"{ranks}: {what}, over a bare script", "≤ 1.1", "")
                for key, what in WAITS.items()
            ))
            for launcher, ranks in LAUNCHERS.items()
        ),
        Group("command", command, (
            Row("command", "one process: from Enter to the first line, `hvdtrain mnist` over `python -m hvdtrain.mnist`",
                "≤ 1.05", ""),
        )),
        Group("whole", whole, (
            Row("whole-seconds", f"{epoch}: seconds of the whole command", "", ""),
            Row("whole-accuracy", f"{epoch}: test accuracy", "≥ 0.99", ""),
            Row("whole-horovod", "Horovod's MNIST example, 2 ranks: its time to 99.0 %, or to its end, over ours",
                "≥ 25", ""),
            Row("whole-pytorch", "PyTorch's MNIST example: its time to 99.0 % over ours", "≥ 45", ""),
        )),
    )  # fmt: skip


# What users ask about: row -> what, and against what. Where less is better, the first word is "time" or "share".
SHOWN = {
    "ddp-2": ("training of a small network, 2 ranks", "DDP"),
    "ddp-8": ("the same, 8 ranks on 2 cores", "DDP"),
    "horovod-untuned-2": ("training of a small network, 2 ranks", "untuned Horovod over MPI"),
    "horovod-gloo-2": ("the same", "untuned Horovod over Gloo"),
    "whole-pytorch": ("MNIST to 99 %, the whole command, 2 ranks", "PyTorch's example"),
    "whole-horovod": ("the same", "Horovod's example"),
    "resnet": ("ResNet-50 in bf16 and channels_last", "float32"),
    "folder-torchvision-500": ("reading a folder of JPEGs", "torchvision"),
    "wire-fp16": ("100 Mbit/s between hosts, `--compression fp16`", "no compression"),
    "first-step-torchrun": ("time from Enter to the end of the first step", "a bare script of DDP"),
    "ctrl-c-torchrun": ("time from Ctrl-C to the prompt, with a checkpoint", "a bare script, without"),
    "command": ("time to the first line of `hvdtrain mnist`", "`python -m hvdtrain.mnist`"),
    "checkpoints": ("share of a checkpoint every 50 steps", "all of the time"),
    "guards": ("share of all that notices faults", "all of the time"),
    "write-time": ("time to write a checkpoint", "safetensors' `save`"),
}


def measure_once(group: Group, data_dir: Path | None, peers: Path | None, repeat: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        return group.measure(Setting(Path(scratch), data_dir, peers, repeat))
