"""The rows of a first day on GPUs: which commands, what they must show, which page claims it.

A row is a function of the day. It returns whether the claim held and what was seen. It raises `Failed` if a command did
something else, and `NotRun` if it cannot be run here.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.analysis import nvidia_smi
from hvdtrain.analysis.launching import command, complaint, run_job

LEAST_SECONDS = 20.0  # a command that may take less is not started
LEAST_CONTEXT = 100  # MiB; a process with CUDA holds several times as much
SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL 2.30 and newer: several ranks on one GPU
CLOSE = 1e-3  # absolute difference of two losses
OFTEN = 0.5  # times per step
SCALES = 0.95  # share of ranks that never communicate

BITS = "parameters_sha256"
DIGITS = "--dataset digits --model convnet --no-progress"
SMALL_BENCHMARK = "--batch-size 2 --repeats 1 --steps 1 --warmup-steps 1"


class Failed(Exception):
    """A command did something else than it must, in one line."""


class NotRun(Exception):
    """A row cannot be run here, and why."""


class Showed(NamedTuple):
    """What a row saw."""

    ok: bool
    text: str


class Done(NamedTuple):
    """A command that ended as it must. log: what it printed. left: processes that its launcher left behind."""

    directory: Path
    log: str
    seconds: float
    left: int

    def json(self, name: str) -> Any:
        """Return the content of a file that the command wrote. Raises Failed."""
        try:
            return json.loads((self.directory / name).read_text())
        except (OSError, ValueError) as error:
            raise Failed(f"{self.directory / name} cannot be read: {error}") from error


@dataclass
class Day:
    """Where, on what, and until when the rows run."""

    directory: Path
    device: str  # "cuda", or "cpu" for a rehearsal
    quick: bool  # as small as possible
    gpus: int
    until: float  # time.monotonic()
    row: str = ""
    commands: list[str] = field(default_factory=list)

    def begin(self, row: str) -> None:
        """Begin a row, without what an earlier start left of it."""
        self.row, self.commands = row, []
        shutil.rmtree(self.directory / "runs" / row, ignore_errors=True)

    def out(self, name: str) -> Path:
        """Return the directory of the command `name` of this row."""
        return self.directory / "runs" / self.row / name

    @property
    def counts(self) -> list[int]:
        """The numbers of ranks to try: all that one GPU shares, or those that have one each."""
        most = 2 if self.quick else 8 if self.gpus <= 1 else self.gpus
        return [count for count in (2, 4, 8) if count <= most]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The builds and the GPUs: see gpu_probes.py."""
        found: dict[str, Any] = self.probe("facts", "facts")
        return found

    def probe(self, name: str, *words: str) -> Any:
        """Run a probe, and return what it wrote."""
        program = [sys.executable, "-m", "hvdtrain.analysis.gpu_probes", words[0], str(self.out(name) / "probe.json")]
        return self.run(name, [*program, *words[1:]]).json("probe.json")

    def ranks(self, name: str, count: int, module: str, flags: str, variant: str = "horovod", **options: Any) -> Done:
        """Run `count` ranks of a module, as `run` does. Several ranks share a GPU where there are too few."""
        if self.device == "cuda" and count > max(1, self.gpus):
            options[SHARED] = "1"
        words = [*flags.split(), "--device", self.device, "--output-dir", str(self.out(name))]
        return self.run(name, command(variant, count, module, words), **options)

    def train(self, name: str, count: int, flags: str = "", **options: Any) -> tuple[Done, dict[str, Any]]:
        """Train the ConvNet on the embedded digits; return the run and its summary."""
        small = "--epochs 1 --train-samples 256" if self.quick else "--epochs 10"
        done = self.ranks(name, count, "hvdtrain.mnist", f"{DIGITS} {small} {flags}", **options)
        return done, done.json("summary.json") if options.get("code", 0) == 0 else {}

    def run(
        self,
        name: str,
        words: Sequence[str],
        *,
        seconds: float = 240.0,
        code: int | None = 0,
        meanwhile: Callable[[str], None] | None = None,
        **variables: str,
    ) -> Done:
        """Run a command line in this row's directory `name`, which must end with exit code `code`; None: with an error.

        Raises Failed, and NotRun if the day has no time left for it.
        """
        directory = self.out(name)
        directory.mkdir(parents=True, exist_ok=True)
        shown = ["python" if word == sys.executable else word for word in words]
        self.commands.append(" ".join([f"{key}={value}" for key, value in variables.items()] + [shlex.join(shown)]))
        left = self.until - time.monotonic()
        if left < LEAST_SECONDS:
            raise NotRun("no time left: the same command goes on here")
        log = directory / "log"
        ended = run_job(words, min(seconds, left), log, meanwhile, **variables)
        if ended.code is None:
            if seconds > left:
                raise NotRun("no time left: the same command goes on here")
            raise Failed(f"not over after {seconds:.0f} s, killed; see {log}")
        if ended.code != code if code is not None else ended.code == 0:
            wanted = "" if code == 0 else f" instead of {'an error' if code is None else code}"
            raise Failed(f"exit code {ended.code}{wanted}: {complaint(log) or 'no line says why'}; see {log}")
        return Done(directory, log.read_text(errors="replace"), ended.seconds, ended.left)


class Row(NamedTuple):
    """What stands in the page about a row, whatever it showed, and how to run it. gpus: the fewest that it needs."""

    name: str
    run: Callable[[Day], Showed]
    claim: str  # of which page, and in which words
    must: str = "a rate"
    predicted: str = ""
    gpus: int = 1


# ---- the build and the machine


def build(day: Day) -> Showed:
    facts = day.facts
    text = f"torch {facts['torch']}, CUDA {facts['cuda']}, NCCL {facts.get('nccl', 'not asked')}, "
    text += f"Horovod {facts['horovod']} with {', '.join(facts.get('built', [])) or facts.get('horovod_error')}, "
    text += f"torch's architectures {' '.join(facts['architectures']) or 'not asked'}"
    majors = set(re.findall(r"_(\d+)\d", " ".join(facts["architectures"])))  # sm_90 is version 9.0, sm_120 is 12.0
    fits = all(str(gpu["capability"][0]) in majors for gpu in facts["gpus"])
    return Showed(fits and (day.device == "cpu" or "NCCL" in facts.get("built", [])), text)


def doctor(day: Day) -> Showed:
    said: dict[str, None] = {}
    for count in dict.fromkeys((1, *day.counts[:1], day.gpus or 1)):
        log = day.ranks(f"{count}", count, "hvdtrain.doctor", "").log
        said |= dict.fromkeys(re.findall(r"\bok +(\d+ x .+)|\b(warning .+)", log))
    return Showed(True, "; ".join(["no problem", *("".join(either) for either in said)]))


# ---- training


def learns(*flags: str, ranks: int | None = 1, carried: str = "", variant: str = "horovod") -> Callable[[Day], Showed]:
    """Return a row whose trainings, one with each of `flags`, must learn. ranks: None for all numbers that fit here.

    carried: what must be said to have carried the gradients on a GPU.
    """

    def run(day: Day) -> Showed:
        accuracies, silent = {}, []
        for count in day.counts if ranks is None else [ranks]:
            for more in flags or ("",):
                name = f"{count} rank{'s'[: count > 1]} {more}".strip()
                done, summary = day.train(name.replace(" ", ""), count, f"--batch-size 32 {more}", variant=variant)
                accuracies[name] = summary["test_accuracy"]
                silent += [name] * (day.device == "cuda" and carried not in done.log)
        text = ", ".join(f"{name}: accuracy {value:.1%}" for name, value in accuracies.items())
        if silent:
            return Showed(False, f"{text}; but not {carried!r}: {', '.join(silent)}")
        return Showed(min(accuracies.values()) > (0.0 if day.quick else 0.9), text)

    return run


def sums(day: Day) -> Showed:
    text = []
    for count in day.counts:
        for dtype in ("float32",) if day.quick else ("float32", "float16", "bfloat16", "float64", "int64", "uint8"):
            log = day.ranks(f"{count}-{dtype}", count, "hvdtrain.reduce", f"--dtype {dtype}").log
            got = re.findall(r"after \d+ data (\S+)", log)
            if got != [str(count * (count + 1) // 2)] * count:
                return Showed(False, f"{dtype} on {count} ranks: {', '.join(got)}")
        text.append(f"{count} ranks: {count * (count + 1) // 2} on each")
    return Showed(True, "; ".join(text))


def deterministic(day: Day) -> Showed:
    one, other = (day.train(str(n), day.counts[-1], "--batch-size 32 --deterministic")[1] for n in (1, 2))
    same = one[BITS] == other[BITS]
    apart = abs(one["test_loss"] - other["test_loss"])
    return Showed(same, f"{'the same bits' if same else 'other bits'}; test losses differ by {apart:.2g}")


def cpu_loss(day: Day) -> Showed:
    flags = (
        f"{DIGITS} --epochs 1 --batch-size 32 --optimizer sgd --lr 0.01 --momentum 0 --lr-schedule constant --amp off"
    )
    losses: list[float] = []
    for device in (day.device, "cpu"):
        name = f"on-{device}-{len(losses)}"
        words = [sys.executable, "-m", "hvdtrain.mnist", "--engine", "serial", *flags.split(), "--device", device]
        # float32 as it is on the processor, whatever else asks for TF32.
        done = day.run(name, [*words, "--output-dir", str(day.out(name))], NVIDIA_TF32_OVERRIDE="0")
        losses.append(done.json("summary.json")["test_loss"])
    apart = abs(losses[0] - losses[1])
    return Showed(apart < CLOSE, f"{losses[0]:.6f} here, {losses[1]:.6f} on the CPU: {apart:.1g} apart")


def host_reads(day: Day) -> Showed:
    """Runs of two lengths: what the longer one reads more often is read by its steps, whatever start and end read."""
    batch = 2 if day.quick else 16
    lengths = (2, 4) if day.quick else (20, 40)  # steps
    text = day.out("text")
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text("One text is as good as another here, as long as it is short. " * 300)
    scripts = {
        "mnist": "--dataset digits --model convnet --epochs 1 --train-samples {samples}",
        "imagenet": "--model resnet18 --image-size 32 --dataset synthetic --classes 10 --epochs 1 --train-samples {samples}",
        "lm": f"--layers 2 --width 64 --context 32 --sample-tokens 0 --text {text} --steps {{steps}}",
    }
    quiet = (
        f"--engine serial --no-progress --log-steps 100000 --check-steps 0 --batch-size {batch} --device {day.device}"
    )
    each: dict[str, float] = {}
    for script, flags in scripts.items():
        short, long = (
            day.probe(
                f"{script}-{steps}", "reads", f"hvdtrain.{script}",
                *f"{quiet} {flags.format(steps=steps, samples=steps * batch)}".split(),
            )
            for steps in lengths
        )  # fmt: skip
        for line in long:
            if (more := long[line] - short.get(line, 0)) > 0:
                each[f"{script}: {line}"] = more / (lengths[1] - lengths[0])
    if day.device == "cpu":
        return Showed(True, "the three scripts ran under the counter, which counts nothing on a processor")
    seen = "; ".join(f"{count:.2g} per step at {line}" for line, count in each.items())
    return Showed(max(each.values(), default=0) < OFTEN, seen or "none on a quiet step of mnist, imagenet and lm")


# ---- ranks that end


def on_gpus() -> int | None:
    """Return the MiB that are used on this host's GPUs, by whatever process; None if nvidia-smi cannot tell."""
    try:
        return sum(gpu.memory_used for gpu in nvidia_smi.gpus())
    except OSError:
        return None


def struck(day: Day, number: signal.Signals, code: int | None, flags: str) -> tuple[Done, bool, str]:
    """Train on two ranks, and send rank 1 a signal after the first checkpoint; the job must end with `code`.

    Return how it ended, whether nothing was left behind on this host and its GPUs, and the end of a sentence about it.
    """
    before, out, sent = on_gpus(), day.out("ended"), list[int]()

    def strike(job: str) -> None:
        if not sent and any((out / "checkpoints").glob("*.safetensors")):
            start = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
            sent.extend(rank["pid"] for rank in start["ranks"] if rank["rank"] == 1)
            with contextlib.suppress(ProcessLookupError):
                os.kill(sent[0], number)

    done = day.train("ended", 2, flags, meanwhile=strike, code=code)[0]
    if not sent:
        raise Failed(f"the run was over before rank 1 could be sent {number.name}")
    after = on_gpus()
    more = 0 if before is None or after is None else after - before
    said = "no nvidia-smi to ask" if after is None else f"{max(0, more)} MiB more on the GPUs than before"
    return done, not done.left and more < LEAST_CONTEXT, f"{done.left} processes left; {said}"


def continues(number: signal.Signals, code: int | None) -> Callable[[Day], Showed]:
    """Return a row that trains; trains again and sends a signal to rank 1; continues, and compares."""

    def run(day: Day) -> Showed:
        flags = (
            f"--epochs {8 if day.quick else 60} --train-samples 1600 --batch-size 32 --check-steps 50 --deterministic"
        )
        flags += " --checkpoint-steps 20"
        whole = day.train("whole", 2, flags)[1]
        done, nothing, left = struck(day, number, code, flags)
        again = day.train("ended", 2, flags)[1]
        same = again[BITS] == whole[BITS]
        losses = f"other bits, test loss {again['test_loss']:.4f} instead of {whole['test_loss']:.4f}"
        text = (
            f"the job ended after {done.seconds:.0f} s, {left}; continued, it has {'the same bits' if same else losses}"
        )
        return Showed(same and nothing, text)

    return run


def stopped(day: Day) -> Showed:
    flags = "--epochs 1000 --batch-size 32 --checkpoint-steps 20 --step-timeout 5"
    done, nothing, left = struck(day, signal.SIGSTOP, None, flags)
    named = re.search(r"^.*\brank 1\b.*$", done.log, re.M)
    return Showed(bool(named) and nothing, f"{named[0].strip() if named else 'rank 1 is not named'}; {left}")


# ---- speed


def speed(model: str, small_model: str, flags: str = "") -> Callable[[Day], Showed]:
    """Return a row that measures one configuration on one rank. small_model: of a rehearsal."""

    def run(day: Day) -> Showed:
        words = f"--model {small_model} {flags} {SMALL_BENCHMARK}" if day.quick else f"--model {model} {flags}"
        result = day.ranks("run", 1, "hvdtrain.benchmark", words).json("benchmark.json")
        rate, tokens = result["samples_per_second"], result["tokens_per_sample"]
        text = f"{rate['mean'] * (tokens or 1):,.0f} {'tokens' if tokens else 'images'}/s"
        memory = result["peak"].get("cuda_allocated_bytes")
        return Showed(rate["mean"] > 0, text + (f", {memory / 2**30:.1f} GiB" if memory else ""))

    return run


def all_reduce(day: Day) -> Showed:
    count = max(2, day.gpus)
    sizes = "--min-bytes 4096 --max-bytes 8192 --seconds-per-size 0.05" if day.quick else f"--min-bytes {2**20}"
    done = day.ranks("run", count, "hvdtrain.benchmark", f"--collectives --dtype float32 {sizes}")
    row = max(done.json("benchmark.json")["rows"], key=lambda row: row["bytes"])
    rate = row["bus_bytes_per_second"] / 1e9
    return Showed(rate > 0, f"{count} ranks: bus bandwidth {rate:.3g} GB/s at {row['bytes'] / 2**20:.3g} MiB")


def scaling(day: Day) -> Showed:
    counts = ",".join(str(count) for count in (1, 2, 4, 8) if count <= max(2, day.gpus))
    small = f"--rounds 1 --model convnet {SMALL_BENCHMARK}"
    large = "--rounds 2 --model resnet50 --amp bf16 --channels-last --batch-size 128 --repeats 5"
    flags = f"--engines horovod --np {counts} --output-dir {day.out('run')} {small if day.quick else large}"
    words = [sys.executable, "-m", "hvdtrain.benchmark", *flags.split(), "--device", day.device]
    done = day.run("run", words, seconds=1200)
    shares = {
        row["ranks"]: row["efficiency_apart"]["median"]
        for row in done.json("scaling.json")["rows"]
        if row["name"] == "horovod" and row["efficiency_apart"]
    }
    text = ", ".join(f"{share:.2f} on {count}" for count, share in shares.items())
    enough = bool(shares) and (day.quick or min(shares.values()) >= SCALES)
    return Showed(enough, f"of ranks that never communicate: {text}")


LIMITS, SURVIVING, RESNET = "docs/reference/limits.md", "docs/restarts.md", ("resnet50", "resnet18 --image-size 32")
GPT2, RATES = ("gpt2", "shakespeare-cpu"), "docs/evidence/gpus.md: predictions"
AMP = "--amp bf16 --channels-last"

# Of every row: claim, what it must show, what was predicted.
ROWS = (
    Row("build", build, "docs/install.md: a build with NCCL", "Horovod with NCCL; torch has kernels for this GPU"),
    Row("doctor", doctor, "docs/run.md: the doctor", "no problem, on one rank and on several"),
    Row("one-rank", learns(carried="over NCCL"), f"{LIMITS}: training over NCCL", "learns the digits, over NCCL"),
    Row("sums", sums, "docs/how-it-works.md: the all-reduce", "1 + ... + N on each of N ranks, in six types"),
    Row("ranks", learns("--check-steps 5", ranks=None, carried="over NCCL"), f"{LIMITS}: training over NCCL",
        "2 to 8 ranks learn the digits; replicas stay equal"),
    Row("ddp", learns(ranks=2, carried="ddp over NCCL", variant="ddp"), "docs/migrate.md: both engines use NCCL",
        "two ranks learn the digits with --engine ddp"),
    Row("dataparallel", learns(carried="dataparallel over", variant="dataparallel"),
        f"{LIMITS}: dataparallel over several GPUs", "learns the digits", gpus=2),
    Row("amp", learns("--amp bf16", "--amp fp16", ranks=2), f"{LIMITS}: fp16 with a loss scaler on a GPU",
        "bf16 and fp16 learn the digits"),
    Row("deterministic", deterministic, "docs/choosing.md: the same bits on GPUs", "two runs have the same bits"),
    Row("cpu-loss", cpu_loss, "docs/evidence/accuracy.md: one loss curve",
        f"the CPU's test loss within {CLOSE:g}, in float32"),
    Row("host-reads", host_reads, "docs/gpus.md: what the host waits for", "no line waits for the GPU at each step"),
    Row("killed", continues(signal.SIGKILL, None), f"{SURVIVING}: a rank that is killed",
        "the job ends, nothing is left; continued, the same bits (with --deterministic)"),
    Row("terminated", continues(signal.SIGTERM, 75), f"{SURVIVING}: SIGTERM to any rank",
        "exit code 75, nothing is left; continued, the same bits (with --deterministic)"),
    Row("stopped", stopped, f"{SURVIVING}: a rank that hangs", "rank 1 is named, the job ends, nothing is left"),
    Row("resnet50", speed(*RESNET), RATES, predicted="1,000 to 1,300 images/s"),
    Row("resnet50-amp", speed(*RESNET, AMP), RATES, predicted="2,100 to 2,400 images/s"),
    Row("resnet50-batch", speed(*RESNET, f"{AMP} --batch-size 256"), RATES, predicted="2,400 to 2,600 images/s"),
    Row("resnet50-compile", speed("resnet50", "convnet", f"{AMP} --batch-size 256 --compile"), RATES,
        predicted="2,700 to 3,000 images/s"),
    Row("gpt2", speed(*GPT2), RATES, predicted="55,000 tokens/s"),
    Row("gpt2-compile", speed(*GPT2, "--amp bf16 --compile"), RATES, predicted="220,000 to 275,000 tokens/s"),
    Row("all-reduce", all_reduce, "docs/evidence/measuring.md: the all-reduce"),
    Row("scaling", scaling, "README: a share of ranks that never communicate", f"at least {SCALES}, on 2 to 8 GPUs", gpus=2),
)  # fmt: skip
