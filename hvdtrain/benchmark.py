"""Measure the speed of training on random data: samples per second, and the time per sample by phase.

python -m hvdtrain.benchmark --engine serial                          ResNet-50, batch 32, synthetic images
horovodrun -np 2 python -m hvdtrain.benchmark --amp bf16 --channels-last
torchrun --nproc-per-node 2 -m hvdtrain.benchmark --no-communication
python -m hvdtrain.benchmark --np 1,2,4                               starts itself on 1, 2 and 4 ranks, against the bound
mpirun -np 4 python -m hvdtrain.benchmark --collectives               the all-reduce alone, by message size

The input is random: uint8 images on the device, gathered and scaled for each batch as in mnist.py; for --model gpt-small,
windows of 256 tokens. What training costs with your data, its own record says (metrics.jsonl).

Samples per second: the samples of all ranks over the time of the slowest rank. --output-dir gets benchmark.json, with --np
scaling.json and the log of each run. docs/evidence/measuring.md describes the method.
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

import socket
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain import cli
from hvdtrain.analysis import measuring, scaling
from hvdtrain.datasets.text import windows
from hvdtrain.engines import choice, lines
from hvdtrain.engines.base import AMP_DTYPES, Engine
from hvdtrain.engines.choice import start_engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.single import SerialEngine
from hvdtrain.flags import Flags
from hvdtrain.launching.exit_codes import run_command
from hvdtrain.loop import optim
from hvdtrain.models import convnet, gpt
from hvdtrain.models.classifiers import build_model, require_torchvision
from hvdtrain.models.compiling import compiled, require_compiler
from hvdtrain.output.clock import Clock, RankTimes
from hvdtrain.output.metric_names import PHASES
from hvdtrain.output.run_output import versions

ON_LARGE_GPUS = {"gpt2": 32, "resnet50": 256}  # batch sizes, as hvdtrain.lm and hvdtrain.imagenet have them there
POOL_BATCHES = 4  # size of the pool of random samples, in batches
# Images float32 [b, channels, side, side] and labels int64 [b]; or tokens and next tokens, int64 [b, t]. On the device.
Batches = Iterator[tuple[Tensor, Tensor]]
Result = dict[str, Any]  # the content of benchmark.json


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.benchmark", __doc__)
    add = parser.add_argument
    models = (
        f"convnet, {', '.join(gpt.GPT_SIZES)}, or any torchvision classifier (default: resnet50; with --np convnet)"
    )
    add("--model", help=models)
    add(
        "--batch-size",
        type=cli.positive_int,
        help="per rank (default: 32, convnet 64, gpt 12; on GPUs of 70 GiB gpt2 32, resnet50 256)",
    )
    add("--image-size", type=cli.positive_int, help="pixels (default: 224; inception_v3 299; convnet 28)")
    add("--amp", choices=cli.AMP, default="off", help="compute in this type where it is safe")
    add("--channels-last", action="store_true", help="store images as height, width, channel")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--no-communication", action="store_true", help="each rank trains on its own: the upper bound")
    add("--warmup-steps", type=cli.positive_int, default=5, help="not counted (default: 5)")
    add("--repeats", type=cli.positive_int, help="the result is their mean (default: 10; with --np 5)")
    add("--steps", type=cli.positive_int, help="steps per repeat (default: as many as take a second)")
    add("--seed", type=cli.seed, default=1, help="of weights and data; with --np also of the order (default: 1)")
    add(
        "--output-dir",
        type=cli.path,
        help="for results and, with --np, logs (default: none; with --np runs/scaling)",
    )
    cli.add_compression(parser)
    cli.add_engine(parser)
    scaling.add_scaling_flags(parser)
    measuring.add_message_flags(parser)
    flags = parser.parse(argv)
    flags.model = flags.model or ("convnet" if flags.np else "resnet50")
    flags.repeats = flags.repeats or (5 if flags.np else 10)
    if flags.batch_size is None and flags.model in ON_LARGE_GPUS:
        flags.on_large_gpus(batch_size=ON_LARGE_GPUS[flags.model])
    measuring.check_messages(flags)
    if flags.model in gpt.GPT_SIZES:
        for name in ("image_size", "channels_last"):
            if getattr(flags, name):
                message = f"--model {flags.model} takes no images: leave out --{name.replace('_', '-')}"
                raise UserError(message, everywhere=True)
        flags.batch_size = flags.batch_size or 12
    else:
        small = flags.model in convnet.MODELS
        if small and flags.image_size not in (None, 28):
            raise UserError(f"--model {flags.model} takes images of 28 pixels: leave out --image-size", everywhere=True)
        flags.image_size = flags.image_size or (28 if small else 299 if flags.model == "inception_v3" else 224)
        flags.batch_size = flags.batch_size or (64 if small else 32)
    if flags.np:
        scaling.settle_passed(flags, sys.argv[1:] if argv is None else argv)
    return flags


def random_batches(flags: Flags, engine: Engine, classes: int, shape: Sequence[int]) -> Batches:
    """Yield random batches without end, different on each rank. shape: of an image, or (context,) for tokens."""
    generator, size = torch.Generator().manual_seed(flags.seed + engine.rank), flags.batch_size
    pool = size * POOL_BATCHES
    if len(shape) == 1:
        tokens = torch.randint(0, classes, (pool * shape[0] + 1,), generator=generator)
        texts = [windows(tokens, indices, shape[0]) for indices in torch.arange(pool).split(size)]
        placed = [(inputs.to(engine.device), targets.to(engine.device)) for inputs, targets in texts]
        while True:
            yield from placed
    layout = torch.channels_last if flags.channels_last else torch.contiguous_format
    images = torch.randint(0, 256, (pool, *shape), dtype=torch.uint8, generator=generator).to(engine.device)
    labels = torch.randint(0, classes, (pool,), generator=generator).to(engine.device)
    while True:
        for indices in torch.randperm(pool, generator=generator).to(engine.device).split(size):
            scaled = images.index_select(0, indices).to(torch.float32, memory_format=layout).div_(255)
            yield scaled, labels.index_select(0, indices)


class Trainer:
    """Trains the steps to measure. Creating it is a collective."""

    def __init__(self, flags: Flags, engine: Engine, model: nn.Module, batches: Batches):
        self.flags, self.engine, self.batches = flags, engine, batches
        self.others: Engine = engine  # whose gradients are averaged
        if flags.no_communication:
            self.others = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
            self.others.device = engine.device
        optimizer = optim.build_optimizer("sgd", model.parameters(), 0.01, momentum=0.9, weight_decay=0.0)
        predivide = choice.default_predivision(flags.compression, engine.size)
        settings = dict(compression=flags.compression, predivide=predivide)
        self.replica, self.optimizer = self.others.distribute(model, optimizer, **settings)
        self.others.broadcast(model, self.optimizer)
        self.forward = compiled(self.replica, engine.device) if flags.compile else self.replica
        self.autocast = torch.autocast(engine.device.type, AMP_DTYPES[flags.amp], enabled=flags.amp != "off")
        self.scaler = torch.amp.GradScaler(engine.device.type, enabled=flags.amp == "fp16")

    def repeat(self, steps: int) -> list[RankTimes]:
        """Train `steps` steps, and return the times of each rank. A collective."""
        engine, others = self.engine, self.others
        engine.barrier()
        # Kernels that are still queued would count in this repeat.
        measuring.wait_for_device(engine.device)
        clock = Clock(engine.device)
        for _ in range(steps):
            inputs, targets = next(self.batches)
            clock.mark("loading")
            self.optimizer.zero_grad()
            with others.micro_batch([self.replica], [self.optimizer], 0, 1):
                with self.autocast:
                    of_tokens = targets.ndim > 1
                    loss = (
                        self.forward(inputs, targets) if of_tokens else F.cross_entropy(self.forward(inputs), targets)
                    )
                self.scaler.scale(loss).backward()
            clock.mark("compute", others.gradients_ready_at)
            others.synchronize(self.optimizer)
            with others.stepping(self.optimizer):
                clock.mark("communication")
                self.scaler.step(self.optimizer)
            self.scaler.update()
            clock.mark("compute")
        measuring.wait_for_device(engine.device)
        clock.mark("compute")
        return clock.measure(engine).ranks


def slowest_seconds(ranks: Sequence[RankTimes]) -> float:
    """Return the seconds of the slowest rank."""
    return max(rank.elapsed for rank in ranks)


def measure_training(trainer: Trainer) -> Result:
    """Train, and return what was measured over all ranks. A collective."""
    flags, engine = trainer.flags, trainer.engine
    warmup_seconds = slowest_seconds(trainer.repeat(flags.warmup_steps))
    # Two steps took that long: as many are measured as take a second.
    steps = flags.steps or max(1, round(2 / slowest_seconds(trainer.repeat(2))))  # the same on all ranks
    repeats = [trainer.repeat(steps) for _ in range(flags.repeats)]
    facts = dict(rank=engine.rank, host=socket.gethostname(), device=str(engine.device))
    ranks = engine.all_gather_object(facts | dict(threads=torch.get_num_threads()), "facts")
    each = steps * flags.batch_size  # samples of a rank in a repeat
    for rank in ranks:
        mine = [repeat[rank["rank"]] for repeat in repeats]
        rank["seconds_per_sample"] = {p: sum(getattr(one, p) for one in mine) / each / len(mine) for p in PHASES}
        rank["samples_per_second"] = len(mine) * each / sum(one.elapsed for one in mine)
    rates = [each * engine.size / slowest_seconds(repeat) for repeat in repeats]
    peak = dict(resident_bytes=max(rank.resident_bytes for rank in repeats[-1]))
    if engine.device.type == "cuda":
        peak["cuda_allocated_bytes"] = max(rank.cuda_bytes for rank in repeats[-1])
    return dict(
        steps=steps, warmup_seconds=warmup_seconds, samples_per_second_repeats=rates,
        samples_per_second=dict(mean=statistics.fmean(rates), least=min(rates), most=max(rates), n=len(rates)),
        seconds_per_sample={p: statistics.fmean(rank["seconds_per_sample"][p] for rank in ranks) for p in PHASES},
        peak=peak, hosts=len({rank["host"] for rank in ranks}), ranks=ranks,
    )  # fmt: skip


def summarize_training(flags: Flags, engine: Engine, measured: Result) -> Result:
    """Return the content of benchmark.json."""
    return measured | dict(
        model=flags.model, batch_size_per_rank=flags.batch_size, engine=engine.name, description=engine.description,
        communicates=not flags.no_communication, world_size=engine.size, amp=flags.amp, compile=flags.compile,
        channels_last=flags.channels_last, automatic=engine.notes, config=flags.given(), versions=versions(),
        tokens_per_sample=gpt.GPT_SIZES[flags.model].context if flags.model in gpt.GPT_SIZES else None,
        hardware=measuring.hardware(),
    )  # fmt: skip


def block(result: Result) -> list[str]:
    """Return the result as lines for the terminal."""
    size, rate, peak = result["world_size"], result["samples_per_second"], result["peak"]
    settings = [result["amp"] if result["amp"] != "off" else "float32"]
    settings += [name for name in ("channels_last", "compile") if result[name]]
    settings += ["no communication"] * (not result["communicates"])
    spread = f"{rate['least']:,.1f} to {rate['most']:,.1f}, " if rate["n"] > 1 else ""
    threads = result["ranks"][0]["threads"]
    shown = [
        f"{result['model']}, batch {result['batch_size_per_rank']} per rank, {', '.join(settings)}",
        f"{size} rank{'s'[: size > 1]} on {result['hosts']} host{'s'[: result['hosts'] > 1]}, {result['description']}, "
        f"{result['ranks'][0]['device'].split(':')[0]}, {threads} torch thread{'s'[: threads > 1]} per rank",
        f"  throughput       {rate['mean']:,.1f} samples/s ({spread}n = {rate['n']} of {result['steps']} steps)",
    ]
    if tokens := result["tokens_per_sample"]:
        shown.append(f"  tokens/s         {tokens * rate['mean']:,.0f} (a sample is a window of {tokens})")
    shown.append(f"  us per sample    {_phases(result['seconds_per_sample'])}")
    if result["compile"]:
        shown.append(f"  warm-up          {result['warmup_seconds']:.1f} s, compilation included")
    for rank in result["ranks"] * (size > 1):
        phases = _phases(rank["seconds_per_sample"])
        shown.append(f"  rank {rank['rank']:<11} {phases}  {rank['samples_per_second']:,.1f} samples/s")
    memory = f"{peak['resident_bytes'] / 2**20:,.0f} MiB resident"
    if "cuda_allocated_bytes" in peak:
        memory += f", {peak['cuda_allocated_bytes'] / 2**20:,.0f} MiB on the GPU"
    return [*shown, f"  peak memory      {memory}, on the rank with the most"]


def _phases(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    return "  ".join(f"{phase} {value * 1e6:,.1f} ({value / total:.0%})" for phase, value in seconds.items())


def built(flags: Flags, engine: Engine) -> tuple[nn.Module, Batches]:
    """Return the model on the device, and its random input."""
    if flags.compile:
        require_compiler(engine.device)
    torch.manual_seed(flags.seed)
    shape: tuple[int, ...]
    model: nn.Module
    if flags.model in gpt.GPT_SIZES:
        classes, shape = gpt.VOCABULARIES[flags.model], (gpt.GPT_SIZES[flags.model].context,)
        rows = gpt.padded(classes) if flags.model == "gpt2" else classes
        model = gpt.GPT(gpt.GPT_SIZES[flags.model], classes, rows=rows)
    elif flags.model in convnet.MODELS:
        classes, shape = 10, (1, 28, 28)
        model = convnet.MODELS[flags.model]()
    else:
        require_torchvision()
        classes, shape = 1000, (3, flags.image_size, flags.image_size)
        model = build_model(flags.model, classes, flags.image_size)
    model = model.to(engine.device)
    if flags.channels_last and engine.device.type != "cpu":  # as hvdtrain.imagenet has its weights
        model = model.to(memory_format=torch.channels_last)
    return model, random_batches(flags, engine, classes, shape)


def main() -> int:
    flags = parse()
    if flags.np:
        return scaling.run_configurations(flags)
    with start_engine(
        flags.engine, tuning=flags.tuning == "auto", device=flags.device, threads=flags.threads
    ) as engine:
        flags.settle(engine.gpu_bytes)
        flags.compression = choice.choose_compression(engine, flags.compression)
        flags.amp = choice.choose_amp(engine, flags.amp)
        with engine.raising_together("start"):
            if engine.rank == 0 and flags.output_dir is not None:
                measuring.make_writable(flags.output_dir)
            if not flags.collectives:
                model, batches = built(flags, engine)
        if flags.collectives:
            result: Result = dict(
                rows=measuring.sweep_messages(engine, flags), config=flags.given(), versions=versions()
            )
        else:
            result = summarize_training(flags, engine, measure_training(Trainer(flags, engine, model, batches)))
        if engine.rank == 0:
            try:
                if not flags.collectives:
                    lines.result("\n".join(block(result)))
            finally:  # it has taken long: whatever becomes of the one, try the other
                if flags.output_dir is not None:
                    measuring.write_json(flags.output_dir / "benchmark.json", result)
    return 0


if __name__ == "__main__":
    run_command(main)
