"""The rows of a first day on GPUs: which command, what it must show, which page claims it.

A row is a function of the day. It returns whether the claim held, what was seen, and figures; it raises `Failed` if a
command did something else, and `NotRun` if it cannot be run here.
"""

import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.analysis import nvidia_smi
from hvdtrain.analysis.gpu_day.day import Day, Done, Failed, NotRun, SignalRank, left_on_gpus, on_gpus
from hvdtrain.analysis.gpu_day.results import Row, Showed
from hvdtrain.analysis.launching import members

MNIST = ["--dataset", "digits", "--model", "convnet", "--no-progress"]
CLOSE = 1e-3  # absolute difference of two losses
OFTEN = 0.5  # times per step
SCALES, OF_NCCL_TESTS = 0.95, 0.8  # shares of ranks that never communicate, and of nccl-tests' bus bandwidth


# ---- the machine and the build


def device(day: Day) -> Showed:
    try:
        found = nvidia_smi.gpus()
    except OSError as error:
        raise NotRun(str(error)) from error
    cuda = day.probe("facts", "facts")["cuda"] or ""
    wrong = [f"driver older than {old}" for gpu in found[:1] if (old := nvidia_smi.too_old(gpu.driver_version, cuda))]
    wrong += ["MIG is on"] * any(gpu.mig_mode_current == "Enabled" for gpu in found)
    wrong += ["compute mode is not Default"] * any(gpu.compute_mode != "Default" for gpu in found)
    kinds = list(dict.fromkeys(map(str, found)))
    return Showed(not wrong, "; ".join([f"{len(found)} x", *kinds, *wrong]), {"gpus": [g._asdict() for g in found]})


def build(day: Day) -> Showed:
    facts = day.probe("facts", "facts")
    text = f"torch {facts['torch']}, CUDA {facts['cuda']}, NCCL {facts.get('nccl', 'not asked')}, "
    text += f"Horovod {facts['horovod']} with {', '.join(facts.get('built', [])) or facts.get('horovod_error')}, "
    text += f"torch's architectures {' '.join(facts['architectures']) or 'not asked'}"
    majors = set(re.findall(r"_(\d+)\d", " ".join(facts["architectures"])))  # sm_90 is version 9.0, sm_120 is 12.0
    fits = all(str(gpu["capability"][0]) in majors for gpu in facts["gpus"])
    return Showed(fits and (day.device == "cpu" or "NCCL" in facts.get("built", [])), text, facts)


def doctor(day: Day) -> Showed:
    lines = []
    for count in dict.fromkeys((1, *day.counts[:1], day.gpus or 1)):
        day.ranks(f"{count}", count, "hvdtrain.doctor")
        lines.append(f"{count} rank{'s'[: count > 1]}: no problem")
    return Showed(True, "; ".join(lines))


# ---- training


def trained(day: Day, name: str, ranks: int, *flags: object, **options: Any) -> tuple[Done, dict[str, Any]]:
    """Train the ConvNet on the embedded digits; return the run and its summary."""
    out = day.directory / "runs" / day.row / name
    small = ["--epochs", "1", "--train-samples", "256"] if day.quick else ["--epochs", "10"]
    done = day.ranks(name, ranks, "hvdtrain.mnist", *MNIST, *small, *flags, "--output-dir", out, **options)
    return done, done.json("summary.json")


def learned(day: Day, runs: dict[str, tuple[Done, dict[str, Any]]], carried: str = "") -> Showed:
    """Judge runs that must have learned, with what must be said to have carried their gradients."""
    accuracies = {name: end["test_accuracy"] for name, (_, end) in runs.items()}
    text = ", ".join(f"{name}: accuracy {value:.1%}" for name, value in accuracies.items())
    if day.device == "cuda" and (silent := [name for name, (done, _) in runs.items() if carried not in done.log]):
        return Showed(False, f"{text}; but not {carried!r}: {', '.join(silent)}")
    return Showed(min(accuracies.values()) > (0.0 if day.quick else 0.9), text, accuracies)


def one_rank(day: Day) -> Showed:
    return learned(day, {"1 rank": trained(day, "1", 1)}, "over NCCL")


def sums(day: Day) -> Showed:
    text = []
    for count in day.counts:
        for dtype in ("float32",) if day.quick else ("float32", "float16", "bfloat16", "float64", "int64", "uint8"):
            done = day.ranks(f"{count}-{dtype}", count, "hvdtrain.reduce", "--dtype", dtype)
            got = re.findall(r"after \d+ data (\S+)", done.log)
            if got != [str(count * (count + 1) // 2)] * count:
                return Showed(False, f"{dtype} on {count} ranks: {', '.join(got)}")
        text.append(f"{count} ranks: {count * (count + 1) // 2} on each")
    return Showed(True, "; ".join(text))


def ranks(day: Day) -> Showed:
    return learned(
        day,
        {f"{count} ranks": trained(day, str(count), count, "--check-steps", 5, "--batch-size", 32) for count in day.counts},
        "over NCCL",
    )  # fmt: skip


def ddp(day: Day) -> Showed:
    return learned(day, {"2 ranks": trained(day, "2", 2, "--batch-size", 32, variant="ddp")}, "ddp over NCCL")


def data_parallel(day: Day) -> Showed:
    return learned(day, {"one process": trained(day, "1", 1, variant="dataparallel")}, "dataparallel over")


def mixed(day: Day) -> Showed:
    return learned(day, {amp: trained(day, amp, day.counts[0], "--amp", amp) for amp in ("bf16", "fp16")})


# ---- exactness

BITS = "parameters_sha256"


def same_bits(day: Day, *flags: str) -> tuple[bool, float]:
    """Train twice with the same flags on the most ranks; return whether the bits are the same, and how the losses differ."""
    ends = [trained(day, str(number), day.counts[-1], "--batch-size", 32, *flags)[1] for number in (1, 2)]
    return ends[0][BITS] == ends[1][BITS], abs(ends[0]["test_loss"] - ends[1]["test_loss"])


def bits(day: Day) -> Showed:
    same, apart = same_bits(day)
    return Showed(apart < 0.1, f"{'the same bits' if same else 'other bits'}; test losses differ by {apart:.2g}")


def deterministic(day: Day) -> Showed:
    same, apart = same_bits(day, "--deterministic")
    return Showed(same, f"{'the same bits' if same else 'other bits'}; test losses differ by {apart:.2g}")


def cpu_loss(day: Day) -> Showed:
    plain = ["--optimizer", "sgd", "--lr", "0.01", "--momentum", "0", "--lr-schedule", "constant", "--amp", "off"]
    out = [day.directory / "runs" / day.row / name for name in ("here", "cpu")]
    losses = []
    for directory, where in zip(out, (day.device, "cpu"), strict=True):
        words = [sys.executable, "-m", "hvdtrain.mnist", "--engine", "serial", *MNIST, "--epochs", "1", *plain]
        words += ["--batch-size", "32", "--device", where, "--output-dir", str(directory)]
        # float32 as it is on the processor, whatever else asks for TF32.
        losses.append(day.run(directory.name, words, NVIDIA_TF32_OVERRIDE="0").json("summary.json")["test_loss"])
    apart = abs(losses[0] - losses[1])
    return Showed(apart < CLOSE, f"{losses[0]:.6f} here, {losses[1]:.6f} on the CPU: {apart:.1g} apart")


def host_reads(day: Day) -> Showed:
    """Runs of two lengths: what the longer one reads more often is read by its steps, whatever start and end read."""
    quiet = [
        "--device",
        day.device,
        *["--engine", "serial", "--no-progress", "--log-steps", "100000", "--check-steps", "0"],
    ]
    batch = 2 if day.quick else 16
    image = ["--model", "resnet18", "--image-size", "32", "--dataset", "synthetic", "--classes", "10"]
    lm = ["--layers", "2", "--width", "64", "--context", "32", "--batch-size", str(batch), "--sample-tokens", "0"]
    text = day.directory / "runs" / day.row / "text"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text("One text is as good as another here, as long as it is short. " * 300)
    scripts: dict[str, Callable[[int], list[str]]] = {
        "mnist": lambda n: [*MNIST[:4], "--epochs", "1", "--batch-size", str(batch), "--train-samples", str(n * batch)],
        "imagenet": lambda n: [*image, "--epochs", "1", "--batch-size", str(batch), "--train-samples", str(n * batch)],
        "lm": lambda n: [*lm, "--text", str(text), "--steps", str(n)],
    }
    each: dict[str, float] = {}
    short, long = (2, 4) if day.quick else (20, 40)
    for script, flags in scripts.items():
        lines = [
            day.probe(f"{script}-{steps}", "reads", f"hvdtrain.{script}", *quiet, *flags(steps))
            for steps in (short, long)
        ]
        for line in lines[1]:
            if (more := lines[1][line] - lines[0].get(line, 0)) > 0:
                each[f"{script}: {line}"] = more / (long - short)
    if day.device == "cpu":
        return Showed(True, "the three scripts ran under the counter, which counts nothing on a processor")
    seen = "; ".join(f"{count:.2g} per step at {line}" for line, count in each.items())
    return Showed(max(each.values(), default=0) < OFTEN, seen or "none on a quiet step of mnist, imagenet and lm", each)


# ---- ranks that end


def ended_by_signal(day: Day, number: signal.Signals, code: int | None, *flags: str) -> Done:
    """Train on two ranks, send rank 1 a signal after the first checkpoint, and return how the job ended: with `code`."""
    out = day.directory / "runs" / day.row / "ended"
    send = SignalRank(1, number, "hvdtrain.mnist", lambda: any((out / "checkpoints").glob("*.safetensors")))
    done = day.ranks("ended", 2, "hvdtrain.mnist", *MNIST, *flags, "--output-dir", out, meanwhile=send, code=code)
    if not send.sent:
        raise Failed(f"the run was over before rank 1 could be sent {number.name}")
    return done


def end_and_resume(day: Day, number: signal.Signals, code: int | None) -> Showed:
    """Train; train again and send a signal to rank 1; continue, and compare."""
    before = on_gpus()
    flags = ["--epochs", "20" if day.quick else "60", "--train-samples", "1600", "--batch-size", "32"]
    flags += ["--check-steps", "50", "--checkpoint-steps", "20", "--deterministic"]
    whole = trained(day, "whole", 2, *flags)[1]
    done = ended_by_signal(day, number, code, *flags)
    after = on_gpus()
    again = trained(day, "ended", 2, *flags)[1]
    same = again[BITS] == whole[BITS]
    losses = f"test loss {again['test_loss']:.4f} instead of {whole['test_loss']:.4f}"
    text = f"the job ended after {done.seconds:.0f} s, {done.left} processes left; continued, it has "
    text += "the same bits" if same else f"other bits, {losses}"
    nothing, said = left_on_gpus(before, after)
    return Showed(same and not done.left and nothing, text + said)


def killed(day: Day) -> Showed:
    return end_and_resume(day, signal.SIGKILL, None)


def terminated(day: Day) -> Showed:
    return end_and_resume(day, signal.SIGTERM, 75)


def stopped(day: Day) -> Showed:
    before = on_gpus()
    flags = ["--epochs", "1000", "--batch-size", "32", "--checkpoint-steps", "20", "--step-timeout", "5"]
    done = ended_by_signal(day, signal.SIGSTOP, None, *flags)
    after = on_gpus()
    named = re.search(r"^.*\brank 1\b.*$", done.log, re.M)
    text = f"{named[0].strip() if named else 'rank 1 is not named'}; {done.left} processes left"
    nothing, said = left_on_gpus(before, after)
    return Showed(bool(named) and not done.left and nothing, text + said)


def input_workers(day: Day) -> Showed:
    """CUDA opens /dev/nvidia-uvm in each process that it starts in."""
    folder = day.directory / "runs" / day.row / "images"
    make_images(folder, 32)
    most = {"processes": 0, "with CUDA": 0}

    def watch(job: str) -> None:
        pids = members(job)
        most["processes"] = max(most["processes"], len(pids))
        most["with CUDA"] = max(most["with CUDA"], sum(map(has_cuda, pids)))

    flags = ["--data-dir", folder, "--model", "resnet18", "--image-size", "32", "--batch-size", "4", "--workers", "2"]
    flags += ["--epochs", "1" if day.quick else "20", "--no-progress"]
    day.ranks("run", 1, "hvdtrain.imagenet", *flags, variant="serial", meanwhile=watch)
    wanted = int(day.device == "cuda")
    text = f"{most['with CUDA']} of up to {most['processes']} processes had CUDA"
    return Showed(most["with CUDA"] == wanted and most["processes"] > 2, text)


def has_cuda(pid: int) -> bool:
    """Return whether CUDA has started in a process."""
    try:
        return any(path.readlink().name == "nvidia-uvm" for path in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended
        return False


def make_images(folder: Path, count: int) -> None:
    """Write `count` images of two classes as folders for training and for evaluation."""
    try:
        from PIL import Image
    except ImportError as error:
        raise NotRun("the images need Pillow: pip install 'hvdtrain[vision]'") from error
    for part in ("train", "val"):
        for number in range(count):
            path = folder / part / f"class{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (48, 48), (number * 7 % 256, 60, 200 * (number % 2))).save(path)


# ---- speed


def benchmark(day: Day, *flags: str) -> Showed:
    """Measure one configuration on one rank."""
    small = ["--batch-size", "2", "--repeats", "1", "--steps", "1", "--warmup-steps", "1"] if day.quick else []
    out = day.directory / "runs" / day.row / "run"
    result = day.ranks("run", 1, "hvdtrain.benchmark", *flags, *small, "--output-dir", out).json("benchmark.json")
    rate, tokens = result["samples_per_second"], result["tokens_per_sample"]
    each = f"{rate['mean'] * (tokens or 1):,.0f} {'tokens' if tokens else 'images'}/s"
    spread = (
        f" (95 %: {rate['low'] * (tokens or 1):,.0f} to {rate['high'] * (tokens or 1):,.0f})" if rate["low"] else ""
    )
    memory = result["peak"].get("cuda_allocated_bytes")
    text = each + spread + (f", {memory / 2**30:.1f} GiB" if memory else "")
    return Showed(rate["mean"] > 0, text, {"per_second": rate["mean"] * (tokens or 1)})


def resnet(*flags: str) -> Callable[[Day], Showed]:
    def run(day: Day) -> Showed:
        if not day.quick:
            return benchmark(day, "--model", "resnet50", *flags)
        if "--compile" in flags:  # the compiler takes a minute for a ResNet on a processor
            return benchmark(day, "--model", "convnet", *flags)
        return benchmark(day, "--model", "resnet18", "--image-size", "32", *flags)

    return run


def language(*flags: str) -> Callable[[Day], Showed]:
    return lambda day: benchmark(day, "--model", "shakespeare-cpu" if day.quick else "gpt2", *flags)


def all_reduce(day: Day) -> Showed:
    count = max(2, day.gpus)
    out = day.directory / "runs" / day.row / "ours"
    sizes = ["--min-bytes", "4096", "--max-bytes", "8192"] if day.quick else ["--min-bytes", str(2**20)]
    flags = ["--sweep", "--dtype", "float32", *sizes, "--seconds-per-size", "0.05" if day.quick else "0.5"]
    done = day.ranks("ours", count, "hvdtrain.reduce", *flags, "--output-dir", out)
    ours = {row["bytes"]: row["bus_bytes_per_second"] / 1e9 for row in swept(done)}
    size = max(ours)
    text = f"{count} ranks: bus bandwidth {ours[size]:.3g} GB/s at {size / 2**20:.3g} MiB"
    program = day.nccl_tests or shutil.which("all_reduce_perf")
    if program is None or day.gpus < 2:
        why = "no all_reduce_perf (--nccl-tests)" if program is None else "one GPU"
        return Showed(True, f"{text}; not compared with nccl-tests: {why}", {"ours": ours})
    theirs = bus_bandwidth(
        day.run("theirs", [str(program), "-b", "1M", "-e", "256M", "-f", "2", "-g", str(day.gpus)]).log
    )
    if size not in theirs:
        raise Failed("all_reduce_perf printed no row of that size")
    share, figures = ours[size] / theirs[size], {"ours": ours, "theirs": theirs}
    return Showed(share >= OF_NCCL_TESTS, f"{text}, {share:.2f} of nccl-tests' {theirs[size]:.3g}", figures)


def swept(done: Done) -> list[dict[str, Any]]:
    """Return the rows of a sweep of hvdtrain.reduce."""
    rows: list[dict[str, Any]] = done.json("reduce.json")["rows"]
    return rows


def bus_bandwidth(log: str) -> dict[int, float]:
    """Return GB/s by bytes from the table of nccl-tests: size, count, type, redop, root, time, algbw, busbw, ..."""
    rows = (line.split() for line in log.splitlines())
    return {int(row[0]): float(row[7]) for row in rows if len(row) > 7 and row[0].isdecimal() and row[2] == "float"}


def scaling(day: Day) -> Showed:
    most = max(2, day.gpus)
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    out = day.directory / "runs" / day.row / "run"
    flags = ["--engines", "horovod", "--ranks", ",".join(map(str, counts)), "--output-dir", str(out)]
    large = ["--model", "resnet50", "--amp", "bf16", "--channels-last", "--batch-size", "128", "--repeats", "5"]
    small = ["--model", "convnet", "--batch-size", "2", "--repeats", "1", "--steps", "1", "--warmup-steps", "1"]
    flags += ["--rounds", "1" if day.quick else "2", "--", *(small if day.quick else large), "--device", day.device]
    done = day.run("run", [sys.executable, "-m", "hvdtrain.scaling", *flags], seconds=1200)
    shares = {
        row["ranks"]: row["efficiency_apart"]["median"]
        for row in done.json("scaling.json")["rows"]
        if row["name"] == "horovod" and row["efficiency_apart"]
    }
    text = ", ".join(f"{share:.2f} on {count}" for count, share in shares.items())
    enough = bool(shares) and (day.quick or min(shares.values()) >= SCALES)
    return Showed(enough, f"of ranks that never communicate: {text}", {"efficiency": shares})


LIMITS, SURVIVING, SPEED = "docs/reference/limits.md", "docs/restarts.md", "docs/evidence/speed.md"
AMP = ("--amp", "bf16", "--channels-last")
LARGE = (*AMP, "--batch-size", "256")


# Of every row: claim, what it must show, what was predicted.
ROWS = (
    Row("device", device, "docs/install.md: only the driver is needed",
        "a driver for this CUDA; no MIG; compute mode Default"),
    Row("build", build, "docs/install.md: a build with NCCL", "Horovod with NCCL; torch has kernels for this GPU"),
    Row("doctor", doctor, "docs/run.md: the doctor", "no problem, on one rank and on several"),
    Row("one-rank", one_rank, f"{LIMITS}: training over NCCL", "learns the digits, over NCCL"),
    Row("sums", sums, "docs/how-it-works.md: the all-reduce", "1 + ... + N on each of N ranks, in six types"),
    Row("ranks", ranks, f"{LIMITS}: training over NCCL", "2 to 8 ranks learn the digits; replicas stay equal"),
    Row("ddp", ddp, "docs/migrate.md: both engines use NCCL", "two ranks learn the digits with --engine ddp"),
    Row("dataparallel", data_parallel, f"{LIMITS}: dataparallel over several GPUs", "learns the digits", gpus=2),
    Row("amp", mixed, f"{LIMITS}: fp16 with a loss scaler on a GPU", "bf16 and fp16 learn the digits"),
    Row("bits", bits, f"{LIMITS}: on GPUs, do not expect the same bits", "two runs differ by less than 0.1 in loss"),
    Row("deterministic", deterministic, "docs/choosing.md: the same bits on GPUs", "two runs have the same bits"),
    Row("cpu-loss", cpu_loss, "docs/evidence/accuracy.md: one loss curve",
        f"the CPU's test loss within {CLOSE:g}, in float32"),
    Row("host-reads", host_reads, "docs/gpus.md: what the host waits for",
        "no line waits for the GPU at each step"),
    Row("input-workers", input_workers, "docs/examples.md: DataLoader workers", "CUDA starts in the rank only"),
    Row("killed", killed, f"{SURVIVING}: a rank that is killed",
        "the job ends, nothing is left; continued, the same bits (with --deterministic)"),
    Row("terminated", terminated, f"{SURVIVING}: SIGTERM to any rank",
        "exit code 75, nothing is left; continued, the same bits (with --deterministic)"),
    Row("stopped", stopped, f"{SURVIVING}: a rank that hangs", "rank 1 is named, the job ends, nothing is left"),
    Row("resnet50", resnet(), f"{SPEED}: ResNet-50 on one GPU", predicted="1,000 to 1,300 images/s"),
    Row("resnet50-amp", resnet(*AMP), f"{SPEED}: ResNet-50 on one GPU", predicted="2,100 to 2,400 images/s"),
    Row("resnet50-batch", resnet(*LARGE), f"{SPEED}: ResNet-50 on one GPU", predicted="2,400 to 2,600 images/s"),
    Row("resnet50-compile", resnet(*LARGE, "--compile"), f"{SPEED}: ResNet-50 on one GPU",
        predicted="2,700 to 3,000 images/s"),
    Row("gpt2", language(), "docs/examples.md: GPT-2", predicted="55,000 tokens/s"),
    Row("gpt2-compile", language("--amp", "bf16", "--compile"), "docs/examples.md: GPT-2",
        predicted="220,000 to 275,000 tokens/s"),
    Row("all-reduce", all_reduce, f"{SPEED}: the all-reduce",
        f"{OF_NCCL_TESTS} of nccl-tests' bus bandwidth, if it is there"),
    Row("scaling", scaling, "README: a share of ranks that never communicate", f"at least {SCALES}, on 2 to 8 GPUs", gpus=2),
)  # fmt: skip
