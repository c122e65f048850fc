"""The rows of the table that `make bench` makes: what each compares, what was to be reached, and what limits it."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.bench.images import dali, jpeg
from tests.bench.measurements import (
    APART,
    Measure,
    Setting,
    apart_default,
    as_it_comes,
    compressed,
    ddp_as_it_comes,
    every_count,
    fixed_cost,
    guards,
    memory,
    mnist_input,
    one_host,
    overlap,
    resnet,
    start_up,
    throughput,
    wire,
)  # fmt: skip
from tests.bench.peers import one_gpu, whole


@dataclass(frozen=True)
class Row:
    key: str
    what: str
    reach: str  # as asked for
    before: str  # as measured before hvdtrain was written, where it was
    limit: str  # what holds it back; "" where nothing is known to


@dataclass(frozen=True)
class Group:
    """Rows that are measured by the same runs."""

    name: str
    commands: str  # what a reader types to see one side or the other
    measure: Measure
    rows: tuple[Row, ...]


def groups() -> tuple[Group, ...]:
    bench = "python -m hvdtrain.benchmark --model convnet --batch-size 64 --channels-last --threads 1"
    found = []
    for ranks, apart, over_ddp in ((2, "0.91", "1.5"), (8, "0.80", "1.4")):
        reach = "at least 0.97" if ranks == 2 else "at least 0.92"
        found.append(
            Group(
                f"throughput-{ranks}",
                f"horovodrun -np {ranks} {bench}",
                throughput(ranks),
                (
                    Row(f"apart-{ranks}", f"MNIST ConvNet, {ranks} ranks on 2 cores: over {ranks} ranks that never "
                        "communicate", reach, apart, "1: the other side does strictly less"),
                    Row(f"ddp-{ranks}", f"over DDP with Gloo, {ranks} ranks; input, format and malloc as ours", "at least 2",
                        over_ddp, "what DDP leaves of the row above: both compute the same"),
                    Row(f"horovod-untuned-{ranks}", f"over Horovod and MPI untuned, one thread per rank, {ranks} ranks",
                        "at least 1", "1.8 to 8", ""),
                    Row(f"horovod-gloo-{ranks}", f"over Horovod and Gloo untuned, one thread per rank, {ranks} ranks",
                        "at least 1", "1.8 to 3.2", ""),
                ),
            )
        )  # fmt: skip
        found.append(
            Group(
                f"start-{ranks}",
                f"mpirun -np {ranks} python -m hvdtrain.mnist --dataset digits",
                start_up(ranks),
                (Row(f"start-{ranks}", f'start-up, first step included, over `mpirun -np {ranks} python -c "import torch, '
                     'horovod.torch"`', "at most 1.15", "2.4" if ranks == 2 else "", "1, and the first step"),),
            )
        )  # fmt: skip
    return (
        *found,
        Group("ddp-untuned", f"torchrun --nproc-per-node 2 -m {bench.removeprefix('python -m ')} --engine ddp --tuning off",
              ddp_as_it_comes,
              (Row("ddp-untuned-2", "over DDP with Gloo as it comes, 2 ranks", "at least 2", "1.5", "both compute the same"),
               Row("ddp-untuned-8", "the same, 8 ranks", "at least 2", "1.4", "as above"))),
        Group("every-count", "python -m tests.bench --rows every-count", every_count,
              (Row("every-count", "over the faster of the two untuned: the least of 1, 3, 4, 5, 6 and 7 ranks",
                   "at least 1", "", "one rank: nothing there to be tuned"),)),
        Group("one-host", f"horovodrun -np 2 {bench} --compression auto", one_host,
              (Row("fp16-one-host", "`--compression auto` over none, 2 ranks on one host", "at least 1", "0.2 to 1 (fp16)",
                   "1: it chooses none there"),)),
        Group("memory", "mpirun -np 3 python -m hvdtrain.mnist", memory,
              (Row("memory", "memory of one more rank on a host, over that of bare imports", "at most 1.1",
                   "", "1, and the memory of a step"),)),
        Group("input", "python -m tests.bench --rows input", mnist_input,
              (Row("input", "MNIST input, per sample, over torchvision's dataset with a DataLoader", "at least 100", "39",
                   "memory: 784 bytes gathered and scaled, 3,136 written"),)),
        Group("jpeg", "python -m tests.bench --rows jpeg", jpeg,
              (Row("jpeg", "image folder, JPEG, images/s per core over torchvision's tutorial, 500 x 375 pixels",
                   "at least 2", "",
                   "decoding: both sides have libjpeg-turbo"),
               Row("jpeg-2000", "the same, 2,000 x 1,500 pixels", "at least 1", "", "as above"),
               Row("jpeg-reduced", "with `--reduced-decode`, 500 x 375 pixels", "at least 2", "", "too small to be reduced"),
               Row("jpeg-reduced-2000", "with `--reduced-decode`, 2,000 x 1,500 pixels", "at least 2", "",
                   "Huffman decoding, which is of the whole image"))),
        Group("dali", "python -m tests.bench --rows dali", dali,
              (Row("dali", "images/s per core over NVIDIA DALI's CPU pipeline, 500 x 375 pixels", "at least 1", "",
                   "decoding: DALI leaves out the rows outside of the crop"),
               Row("dali-reduced-2000", "with `--reduced-decode` over DALI's, 2,000 x 1,500 pixels", "at least 1", "",
                   "as above"))),
        Group("resnet", "mpirun -np 2 python -m hvdtrain.benchmark --batch-size 8 --amp bf16 --channels-last", resnet,
              (Row("resnet", "ResNet-50 on CPU, bf16 channels_last over float32 NCHW", "at least 1.6", "", ""),
               Row("resnet-compile", "the same in bf16, `--compile` over eager", "at least 1", "", ""),
               Row("resnet-compile-seconds", "seconds that compiling it takes, on both ranks at once", "", "", ""))),
        Group("wire-100", "launch/mpirun.sh -H a:1,b:1 --interface eth0 -- python -m hvdtrain.reduce --sweep", wire(100),
              (Row("wire-100", "all-reduce between hosts at 100 Mbit/s, of what TCP carries both ways", "at least 0.95",
                   "0.92 (Gloo), 0.70 (MPI)", "1"),)),
        Group("wire-1000", "the same", wire(1000),
              (Row("wire-1000", "the same at 1 Gbit/s", "at least 0.95", "", "as above"),)),
        Group("compressed", "launch/mpirun.sh -H a:1,b:1 --interface eth0 -- python -m hvdtrain.benchmark --model resnet18 "
              "--compression fp16", compressed,
              (Row("wire-fp16", "fp16 on that wire over float32, ResNet-18", "at least 1.95", "2.0",
                   "2, less the compute"),)),
        *(Group(f"overlap-{megabits}-{batch_size}", "launch/mpirun.sh -H a:1,b:1 --interface eth0 -- python -m "
                f"hvdtrain.benchmark --model resnet18 --batch-size {batch_size}; and --no-communication",
                overlap(megabits, batch_size),
                (Row(f"overlap-{megabits}-{batch_size}", f"overlap: a step over max(compute, communication), ResNet-18, "
                     f"{megabits} Mbit/s, {batch_size} images per rank: {which}", "at most 1.1", "", limit),))
          for megabits, batch_size, which, limit in (
              (100, 4, "the wire takes longer", "1, and what is computed before the first bucket is full"),
              (1000, 4, "both take about as long", "the forward pass cannot overlap, nor the last bucket"),
              (1000, 16, "computing takes longer", "1, and the cores that communication takes"),
          )),
        Group("as-it-comes", "horovodrun --gloo -np 2 python -m hvdtrain.benchmark --model convnet --batch-size 64 "
              "--channels-last --tuning off", as_it_comes,
              tuple(Row(f"as-it-comes-{kind}-{ranks}", f"over Horovod and {name} as a user gets it, no OMP_NUM_THREADS, "
                        f"{ranks} ranks on 2 cores", "at least 1", "",
                        "OpenMP: untuned, each rank has a thread per core, and those that wait spin")
                    for ranks in (2, 8) for kind, name in (("mpi", "MPI"), ("gloo", "Gloo")))),
        Group("apart-default", "horovodrun -np 2 python -m hvdtrain.benchmark --model cosinenet --batch-size 128 "
              "--channels-last --threads 1", apart_default,
              tuple(Row(f"apart-default-{ranks}x{each}", f"cosinenet, {ranks} ranks on 2 cores, {each} samples each: over "
                        f"{ranks} ranks that never communicate", "at least 0.92", "", "1: the other side does strictly "
                        "less; 8 ranks: [network.md](network.md)") for ranks, each in APART)),
        Group("fixed-cost", "horovodrun -np 2 python tests/bench/split.py --data-dir DIR --no-progress", fixed_cost,
              (Row("fixed-cost", "a step of cosinenet on 2 ranks, less forward, backward and reading its samples: ms",
                   "at most 1", "", "the optimizer, and waiting for the other rank"),)),
        Group("guards", "mpirun -np 2 python tests/bench/split.py --model convnet --checkpoint-steps 50", guards,
              (Row("checkpoints", "a checkpoint every 50 steps, share of training's time", "at most 0.01", "", "0"),
               Row("guards", "all guards, share of training's time", "at most 0.01", "",
                   "0.009: a sum of each gradient, each step"))),
        Group("whole", "horovodrun -np 2 python -m hvdtrain.mnist --seed 1", whole,
              (Row("whole-seconds", "the whole command, one epoch of MNIST, 2 ranks, a seed per repeat: seconds", "",
                   "11.3", ""),
               Row("whole-accuracy", "the test accuracy that it reaches", "at least 0.99", "0.991", ""),
               Row("whole-horovod", "Horovod's own example, 2 ranks: its time to 99.0 %, or to its end, over ours",
                   "at least 25", "", ""),
               Row("whole-pytorch", "PyTorch's own example: the same", "at least 45", "", ""))),
        Group("gpu", "horovodrun -np 1 python -m hvdtrain.benchmark --batch-size 256 --amp bf16 --channels-last --compile",
              one_gpu,
              (Row("gpu", "ResNet-50 on one GPU over Horovod's shipped benchmark as it comes", "at least 6", "", ""),
               Row("gpu-images", "its images/s", "at least 3500", "", ""))),
    )  # fmt: skip


def measure_once(group: Group, data_dir: Path | None, peers: Path | None, repeat: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        return group.measure(Setting(Path(scratch), data_dir, peers, repeat))
