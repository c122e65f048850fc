"""Measure one configuration: samples per second, and the time per sample by phase.

python -m hvdtrain.benchmark --engine serial                          ResNet-50, batch 32, synthetic images
horovodrun -np 2 python -m hvdtrain.benchmark --amp bf16 --channels-last
mpirun -np 2 python -m hvdtrain.benchmark --model convnet --batch-size 64 --output-dir OUT
torchrun --nproc-per-node 2 -m hvdtrain.benchmark --no-communication

The input is random: uint8 images on the device, gathered and scaled for each batch as in mnist.py; for --model gpt-small,
windows of 256 tokens. What training costs with your data, its own record says (metrics.jsonl).

Samples per second: the samples of all ranks over the time of the slowest rank.
docs/evidence/measuring.md describes the method.
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

import copy
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain import cli
from hvdtrain.analysis import measuring
from hvdtrain.data.text import windows
from hvdtrain.engines import lines, precision
from hvdtrain.engines.base import AMP_DTYPES, Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.single import SerialEngine
from hvdtrain.engines.start import start
from hvdtrain.launching.exit_codes import run
from hvdtrain.models import convnet, gpt
from hvdtrain.models.classifiers import build_model, require_torchvision
from hvdtrain.models.compiling import compiled, require_compiler
from hvdtrain.output.clock import PHASES, Clock, peak_memory
from hvdtrain.output.run_output import versions
from hvdtrain.training import optim

POOL_BATCHES = 4  # size of the pool of random samples, in batches
# Images float32 [b, channels, side, side] and labels int64 [b]; or tokens and next tokens, int64 [b, t]. On the device.
Batches = Iterator[tuple[Tensor, Tensor]]


class Repeat(NamedTuple):
    """Measurements of one rank in one repeat. `loading`, `compute` and `communication`: seconds per sample of this rank."""

    seconds: float
    cpu_seconds: float  # of all threads
    samples: int
    loading: float
    compute: float
    communication: float


def parse(argv: Sequence[str] | None = None) -> cli.Flags:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.benchmark", __doc__)
    add = parser.add_argument
    models = f"convnet, {', '.join(gpt.SIZES)}, or any torchvision classifier (default: resnet50)"
    add("--model", default="resnet50", help=models)
    add("--batch-size", type=cli.positive_int, help="per rank (default: convnet 64, gpt 12, others 32)")
    add("--image-size", type=cli.positive_int, help="pixels (default: 224; inception_v3 299; convnet 28)")
    add("--amp", choices=cli.AMP, default="off", help="compute in this type where it is safe")
    add("--channels-last", action="store_true", help="store images as height, width, channel")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--no-communication", action="store_true", help="each rank trains on its own: the upper bound")
    add("--warmup-steps", type=cli.positive_int, default=5, help="not counted (default: 5)")
    add("--repeats", type=cli.positive_int, default=10, help="the result is their mean (default: 10)")
    add("--steps", type=cli.positive_int, help="steps per repeat (default: as many as take a second)")
    add("--seed", type=cli.seed, default=1, help="of weights and data (default: 1)")
    add("--output-dir", type=Path, help="write benchmark.json to this directory")
    cli.add_compression(parser)
    cli.add_engine(parser)
    flags = parser.parse(argv)
    small = flags.model in convnet.MODELS
    if small and flags.image_size not in (None, 28):
        raise UserError(f"--model {flags.model} takes images of 28 pixels: leave out --image-size", everywhere=True)
    if flags.model in gpt.SIZES:
        for name in ("image_size", "channels_last"):
            if getattr(flags, name):
                said = f"--model {flags.model} takes no images: leave out --{name.replace('_', '-')}"
                raise UserError(said, everywhere=True)
        flags.batch_size = flags.batch_size or 12
        return flags
    flags.image_size = flags.image_size or (28 if small else 299 if flags.model == "inception_v3" else 224)
    flags.batch_size = flags.batch_size or (64 if small else 32)
    return flags


def count_flops(model: nn.Module, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int | None:
    """Return the floating-point operations of forward and backward for one sample, or None if they cannot be counted.

    shape: (channels, side, side) of an image, or (context,) of int64 tokens. A multiplication and an addition count as two.
    torch.utils.flop_counter counts convolutions, matrix products and attention only, on meta tensors.
    """
    from torch.utils.flop_counter import FlopCounterMode

    try:
        model = copy.deepcopy(model).to("meta")
        with FlopCounterMode(display=False) as counter:
            samples = torch.empty(2, *shape, dtype=dtype, device="meta")
            model(samples).sum().backward()  # two samples: batch norm needs more than one value per channel
    except (RuntimeError, NotImplementedError):
        return None
    return counter.get_total_flops() // 2 or None


def random_batches(flags: cli.Flags, engine: Engine, classes: int, shape: Sequence[int]) -> Batches:
    """Yield random batches without end, different on each rank. shape: of an image, or (context,) for tokens."""
    generator, size = torch.Generator().manual_seed(flags.seed + engine.rank), flags.batch_size
    pool = size * POOL_BATCHES
    if len(shape) == 1:
        tokens = torch.randint(0, classes, (pool * shape[0] + 1,), generator=generator)
        while True:
            for indices in torch.arange(pool).split(size):
                inputs, targets = windows(tokens, indices, shape[0])
                yield inputs.to(engine.device), targets.to(engine.device)
    layout = torch.channels_last if flags.channels_last else torch.contiguous_format
    images = torch.randint(0, 256, (pool, *shape), dtype=torch.uint8, generator=generator).to(engine.device)
    labels = torch.randint(0, classes, (pool,), generator=generator).to(engine.device)
    while True:
        for indices in torch.randperm(pool, generator=generator).to(engine.device).split(size):
            scaled = images.index_select(0, indices).to(torch.float32, memory_format=layout).div_(255)
            yield scaled, labels.index_select(0, indices)


class Trainer:
    """Trains the steps to measure. Creating it is a collective."""

    def __init__(self, flags: cli.Flags, engine: Engine, model: nn.Module, batches: Batches):
        self.flags, self.engine, self.batches = flags, engine, batches
        self.others: Engine = engine  # whose gradients are averaged
        if flags.no_communication:
            self.others = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
            self.others.device = engine.device
        optimizer = optim.build("sgd", model.parameters(), 0.01, momentum=0.9, weight_decay=0.0)
        predivide = precision.default_predivision(flags.compression, engine.size)
        how = dict(compression=flags.compression, predivide=predivide)
        self.replica, self.optimizer = self.others.distribute(model, optimizer, **how)
        self.others.broadcast(model, self.optimizer)
        self.forward = compiled(self.replica, engine.device) if flags.compile else self.replica
        self.autocast = torch.autocast(engine.device.type, AMP_DTYPES[flags.amp], enabled=flags.amp != "off")
        self.scaler = torch.amp.GradScaler(engine.device.type, enabled=flags.amp == "fp16")

    def repeat(self, steps: int, apart: bool = False) -> Repeat:
        """Train `steps` steps. A collective.

        apart: synchronize with the device after each phase, to attribute its work to that phase.
        """
        engine, others, flags = self.engine, self.others, self.flags
        engine.barrier()
        measuring.synchronize(engine.device)
        clock = Clock()

        def mark(phase: str, at: float | None = None) -> None:
            if apart:
                measuring.synchronize(engine.device)
            clock.mark(phase, at)

        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(steps):
            inputs, targets = next(self.batches)
            mark("loading")
            self.optimizer.zero_grad()
            with others.micro_batch([self.replica], [self.optimizer], 0, 1):
                with self.autocast:
                    logits = self.forward(inputs)
                    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())  # of images, or of each token
                self.scaler.scale(loss).backward()
            mark("compute", others.gradients_ready_at)
            with others.synchronized(self.optimizer):
                mark("communication")
                self.scaler.step(self.optimizer)
            self.scaler.update()
            mark("compute")
            clock.end_step(flags.batch_size * engine.size, flags.batch_size)
        measuring.synchronize(engine.device)
        clock.mark("compute")
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        rates = clock.rates()
        samples = steps * flags.batch_size
        return Repeat(seconds, cpu_seconds, samples, *(rates[f"{phase}_seconds"] for phase in PHASES))


class Measured(NamedTuple):
    """What was measured, over all ranks."""

    repeats: list[list[Repeat]]  # by repeat and rank
    steps: int  # per repeat
    warmup_seconds: float  # of --warmup-steps, compilation included, on the slowest rank


def measure(trainer: Trainer) -> Measured:
    """Train and measure. A collective."""
    flags, engine = trainer.flags, trainer.engine

    def of_slowest(seconds: float, name: str) -> float:
        slowest: float = max(engine.all_gather_object(seconds, name))
        return slowest

    warmup_seconds = of_slowest(trainer.repeat(flags.warmup_steps).seconds, "warm-up")
    steps = flags.steps or max(1, round(2 / of_slowest(trainer.repeat(2).seconds, "trial")))  # the same on all ranks
    timed = [trainer.repeat(steps) for _ in range(flags.repeats)]
    if engine.device.type == "cuda":
        # A GPU runs asynchronously: its phases are measured in separate repeats, which do not count for the throughput.
        slow = [trainer.repeat(steps, apart=True) for _ in timed]
        timed = [
            fast._replace(**{phase: getattr(each, phase) for phase in PHASES})
            for fast, each in zip(timed, slow, strict=True)
        ]
    by_rank = engine.all_gather_object(timed, "repeats")
    repeats = [[Repeat(*rank[number]) for rank in by_rank] for number in range(flags.repeats)]
    return Measured(repeats, steps, warmup_seconds)


def throughput(repeat: Sequence[Repeat]) -> float:
    """Return samples per second: the samples of all ranks divided by the time of the slowest rank."""
    return sum(rank.samples for rank in repeat) / max(rank.seconds for rank in repeat)


def phases(repeats: Sequence[Repeat]) -> dict[str, float]:
    """Return seconds per sample by phase, over the samples of all `repeats` (of one rank, or of all)."""
    samples = sum(repeat.samples for repeat in repeats)
    return {phase: sum(getattr(repeat, phase) * repeat.samples for repeat in repeats) / samples for phase in PHASES}


def cpu_seconds(repeats: Sequence[Repeat]) -> float:
    """Return CPU seconds per sample, over all threads."""
    return sum(repeat.cpu_seconds for repeat in repeats) / sum(repeat.samples for repeat in repeats)


def summarize(
    flags: cli.Flags, engine: Engine, found: Measured, flops: int | None, gradient_bytes: int
) -> dict[str, Any]:
    """Return the content of benchmark.json. A collective."""
    facts = dict(rank=engine.rank, host=socket.gethostname(), device=str(engine.device))
    facts |= dict(threads=torch.get_num_threads(), peak=peak_memory(engine.device), hardware=measuring.hardware())
    ranks = engine.all_gather_object(facts, "facts")
    for rank in ranks:
        mine = [repeat[rank["rank"]] for repeat in found.repeats]
        rank["seconds_per_sample"] = phases(mine)
        rank["cpu_seconds_per_sample"] = cpu_seconds(mine)
        rank["samples_per_second"] = sum(one.samples for one in mine) / sum(one.seconds for one in mine)
    everything = [one for repeat in found.repeats for one in repeat]
    rates = [throughput(repeat) for repeat in found.repeats]
    rate = dict(mean=statistics.fmean(rates), least=min(rates), most=max(rates), n=len(rates))
    resident, cuda = (max(rank["peak"][kind] for rank in ranks) for kind in (0, 1))
    return dict(
        model=flags.model, batch_size_per_rank=flags.batch_size, engine=engine.name, description=engine.description,
        communicates=not flags.no_communication, world_size=engine.size, hosts=len({rank["host"] for rank in ranks}),
        amp=flags.amp, channels_last=flags.channels_last, compile=flags.compile, steps=found.steps,
        warmup_seconds=found.warmup_seconds, samples_per_second=rate, samples_per_second_repeats=rates,
        tokens_per_sample=gpt.SIZES[flags.model].context if flags.model in gpt.SIZES else None,
        seconds_per_sample=phases(everything), cpu_seconds_per_sample=cpu_seconds(everything),
        gradient_bytes=gradient_bytes,  # per step, in the parameters' dtype, before any compression
        flops_per_sample=flops, flops_per_second=flops and flops * rate["mean"],
        peak=dict(resident_bytes=resident) | (dict(cuda_allocated_bytes=cuda) if engine.device.type == "cuda" else {}),
        ranks=ranks, automatic=engine.notes, config=flags.given(), versions=versions(),
    )  # fmt: skip


def block(result: dict[str, Any]) -> list[str]:
    """Return the result as lines for the terminal."""
    size, rate, peak = result["world_size"], result["samples_per_second"], result["peak"]
    how = [result["amp"] if result["amp"] != "off" else "float32"]
    how += [name for name in ("channels_last", "compile") if result[name]]
    how += ["no communication"] * (not result["communicates"])
    spread = f"{rate['least']:,.1f} to {rate['most']:,.1f}, " if rate["n"] > 1 else ""
    threads = result["ranks"][0]["threads"]
    lines = [
        f"{result['model']}, batch {result['batch_size_per_rank']} per rank, {', '.join(how)}",
        f"{size} rank{'s'[: size > 1]} on {result['hosts']} host{'s'[: result['hosts'] > 1]}, {result['description']}, "
        f"{result['ranks'][0]['device'].split(':')[0]}, {threads} torch thread{'s'[: threads > 1]} per rank",
        f"  throughput       {rate['mean']:,.1f} samples/s ({spread}n = {rate['n']} of {result['steps']} steps)",
        f"  us per sample    {_phases(result['seconds_per_sample'])}",
    ]
    if result["compile"]:
        lines.append(f"  warm-up          {result['warmup_seconds']:.1f} s, compilation included")
    if tokens := result.get("tokens_per_sample"):
        lines.insert(3, f"  tokens/s         {tokens * rate['mean']:,.0f} (a sample is a window of {tokens})")
    if size > 1:
        lines += [
            f"  rank {rank['rank']:<11} {_phases(rank['seconds_per_sample'])}  {rank['samples_per_second']:,.1f} samples/s"
            for rank in result["ranks"]
        ]
    lines.append(
        f"  CPU time         {result['cpu_seconds_per_sample'] * 1e6:,.1f} us per sample, over all threads of a rank"
    )
    memory = f"{peak['resident_bytes'] / 2**20:,.0f} MiB resident"
    if "cuda_allocated_bytes" in peak:
        memory += f", {peak['cuda_allocated_bytes'] / 2**20:,.0f} MiB on the GPU"
    lines.append(f"  peak memory      {memory}, on the rank with the most")
    if result["flops_per_sample"]:
        each, all_ = result["flops_per_sample"] / 1e9, result["flops_per_second"] / 1e9
        lines.append(
            f"  GFLOP/s          {all_:,.1f} over all ranks ({each:.4g} GFLOP per sample, forward and backward)"
        )
    return lines


def _phases(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    return "  ".join(f"{phase} {value * 1e6:,.1f} ({value / total:.0%})" for phase, value in seconds.items())


def main() -> int:
    flags = parse()
    with start(flags.engine, tuning=flags.tuning == "auto", device=flags.device, threads=flags.threads) as engine:
        flags.compression = precision.choose_compression(engine, flags.compression)
        flags.amp = precision.choose_amp(engine, flags.amp)
        small, sizes = flags.model in convnet.MODELS, gpt.SIZES.get(flags.model)
        channels, classes = (1, 10) if small else (3, 1000)
        shape: tuple[int, ...] = (channels, flags.image_size, flags.image_size)
        if sizes is not None:
            classes, shape = gpt.VOCABULARIES[flags.model], (sizes.context,)
        with engine.raising_together("start"):
            if flags.compile:
                require_compiler(engine.device)
            if engine.rank == 0 and flags.output_dir is not None:
                measuring.make_directory(flags.output_dir)
            if not small and sizes is None:
                require_torchvision()
            torch.manual_seed(flags.seed)
            model: torch.nn.Module
            if sizes is not None:
                model = gpt.GPT(sizes, classes)
            else:
                model = convnet.MODELS[flags.model]() if small else build_model(flags.model, classes, flags.image_size)
            flops = count_flops(model, shape, torch.float32 if sizes is None else torch.int64)
            model = model.to(engine.device)
            if flags.channels_last and engine.device.type != "cpu":  # as hvdtrain.imagenet has its weights
                model = model.to(memory_format=torch.channels_last)
        batches = random_batches(flags, engine, classes, shape)
        found = measure(Trainer(flags, engine, model, batches))
        gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        result = summarize(flags, engine, found, flops, gradient_bytes)
        if engine.rank == 0:
            try:
                lines.result("\n".join(block(result)))
            finally:  # it has taken long: whatever becomes of the one, try the other
                if flags.output_dir is not None:
                    measuring.write_json(flags.output_dir / "benchmark.json", result)
    return 0


if __name__ == "__main__":
    run(main)
