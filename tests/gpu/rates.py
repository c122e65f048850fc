"""How fast training is on this host's GPUs, each row beside its base in the same minutes: a line each in OUT/rates.jsonl.

Started again, it measures what has no result there, and what failed after that.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.launchers import PYTHON, ROOT, launch
from tests.gpu import machine


@dataclass
class Day:
    """Where the rows run. quick: a rehearsal. warm: what is compiled is kept, and nothing is measured."""

    out: Path
    device: str
    quick: bool
    warm: bool
    jpegs: Path  # made by tests.gpu.jpegs
    patched: Path  # a Horovod with caller-waits.patch
    name: str = ""  # of the current row

    def fresh(self) -> Path:
        """Return the row's directory, without what an earlier start left there: it would be resumed."""
        out = self.out / "runs" / self.name
        shutil.rmtree(out, ignore_errors=True)
        return out

    def run(self, command: str, ranks: int = 1, seconds: float = 75.0, **more: str) -> Any:
        """Run a command to its end. Raises AssertionError where it fails or takes longer."""
        done = launch(command, timeout=300.0 if self.quick else seconds, **machine.variables(ranks), **more)
        (self.out / "logs").mkdir(exist_ok=True)
        with (self.out / "logs" / f"{self.name}.log").open("a") as log:
            log.write(f"{command}\n{done}\n")
        assert done.code == 0, f"exit code {done.code}: {[*done.stderr.strip().splitlines(), ''][-2:]}"
        return done

    def windows(self, out: Path, skip: int) -> list[dict[str, Any]]:
        """Return what was logged of the steps of a run, without the first `skip` lines."""
        record = (out / "metrics.jsonl").read_text()
        (self.out / "logs" / f"{self.name}.metrics").write_text(record)
        lines = [json.loads(line) for line in record.splitlines()]
        return [line for line in lines if line["event"] == "train"][0 if self.warm or self.quick else skip :]

    def with_patch(self) -> dict[str, str]:
        """Return the variables that show ranks the patched Horovod, which does not lie beside torch, NCCL and MPI."""
        site = Path(sysconfig.get_path("purelib"))
        libraries = [site.parents[1], site / "torch" / "lib", *site.glob("nvidia/*/lib")]
        paths = {"PYTHONPATH": [self.patched, os.environ["PYTHONPATH"]], "LD_LIBRARY_PATH": libraries}
        return {name: os.pathsep.join(map(str, folders)) for name, folders in paths.items()}


Row = Callable[[Day], dict[str, Any]]
ASYNCHRONOUS = "HOROVOD_ENABLE_ASYNC_COMPLETION"


def loop(
    engine: str, ranks: int, batch: int, steps: int, flags: str = "", *, jpeg: bool = False, sums: str = ""
) -> Row:
    """Return a row: images/s of the training loop itself, with checks and metrics; the median of its logged windows.

    sums: "early": Horovod's complete on the GPU, although its build does not have the patch; "patched": it has.
    """

    def run(day: Day) -> dict[str, Any]:
        number, size, small = batch or 256, 3 if day.warm else steps, ""  # 256: the default on large GPUs
        # The workers have batches ready before the first step: the first of four epochs is left out.
        data, epochs, skip = (f"folder --data-dir {day.jpegs}", 4, 9) if jpeg else ("synthetic", 1, 2)
        if day.quick:
            number, size, small, epochs = 2, 8, "--model resnet18 --image-size 32", min(epochs, 2)
        out = day.fresh()
        given = f"--batch-size {number}" if batch or day.quick else ""
        words = f"--dataset {data} {given} --train-samples {number * size * ranks} --epochs {epochs}"
        words += f" --log-steps {max(1, size // 8)} --no-progress {small} {flags}"
        command = machine.command(engine, ranks, "hvdtrain.imagenet", words, day.device, out)
        more = {"early": {ASYNCHRONOUS: "1"}, "patched": day.with_patch()}.get(sums, {})
        day.run(command, ranks, 120.0 if "--compile" in flags else 75.0, **more)
        windows = day.windows(out, skip)
        if sums == "patched" and not day.quick:
            assert ASYNCHRONOUS in (out / "metrics.jsonl").read_text(), "this Horovod lacks the patch"
        shares = {key: statistics.median(line[key] for line in windows) for key in windows[0] if key.endswith("_share")}
        return {"images/s": statistics.median(line["samples_per_second"] for line in windows)} | shares

    return run


def plain(*variants: str) -> Row:
    """Return a row: plain PyTorch (plain.py)."""

    def run(day: Day) -> dict[str, Any]:
        found, cpu = day.out / f"{day.name}.json", "--cpu" if day.device == "cpu" else ""
        day.run(f"{PYTHON} -m tests.gpu.plain {found} {' '.join(variants)} {cpu}", seconds=150.0)
        return json.loads(found.read_text())

    return run


def gpt2(more: str = "") -> Row:
    """Return a row: hvdtrain.benchmark on one rank."""

    def run(day: Day) -> dict[str, Any]:
        model = f"gpt-small {more} --batch-size 1" if day.quick else f"gpt2 {more}"
        few = "--repeats 1 --steps 1 --warmup-steps 1" if day.quick or day.warm else "--repeats 3 --warmup-steps 8"
        out = day.fresh()
        words = f"--model {model} --amp bf16 {few}"
        day.run(machine.command("serial", 1, "hvdtrain.benchmark", words, day.device, out), 1, 120.0)
        result = json.loads((out / "benchmark.json").read_text())
        return {"tokens/s": result["samples_per_second"]["mean"] * (result["tokens_per_sample"] or 1)}

    return run


def lm(day: Day) -> dict[str, Any]:
    """Tokens/s of hvdtrain.lm's GPT-2: its loop, with 480 sequences a step, on the sources of the standard library."""
    out, context = day.fresh(), 32 if day.quick else 1024
    small = "--tokens characters --layers 1 --heads 2 --width 32 --context 32 --batch-size 2 --accumulate 1 --text {}"
    size = small.format(__file__) if day.quick else ""
    words = f"--recipe gpt2 --amp bf16 --compile --steps {4 if day.quick else 24} --log-steps 2 --sample-tokens 0"
    words += f" --no-progress {size}"
    day.run(machine.command("serial", 1, "hvdtrain.lm", words, day.device, out), 1, 150.0)
    rates = [line["samples_per_second"] for line in day.windows(out, 2)]
    return {"tokens/s": statistics.median(rates) * context}


def all_reduce(day: Day) -> dict[str, Any]:
    """Bus bandwidth by size, in GB/s."""
    ranks, out = max(2, machine.gpus()), day.fresh()
    sizes = "--max-bytes 8192 --seconds-per-size 0.05" if day.quick else "--max-bytes 67108864 --seconds-per-size 0.2"
    flags = f"--collectives --dtype float32 --min-bytes 4096 {sizes}"
    day.run(machine.command("horovod", ranks, "hvdtrain.benchmark", flags, day.device, out), ranks)
    rows = json.loads((out / "benchmark.json").read_text())["rows"]
    return {str(row["bytes"]): row["bus_bytes_per_second"] / 1e9 for row in rows} | {"ranks": ranks}


def rows() -> dict[str, Row]:
    """Return the rows: first what has not been measured on any GPU; those that are compared follow each other."""
    count = machine.gpus()
    of_all = {f"{one}-{count}x256": loop(one, count, 256, 64) for one in ("horovod", "ddp") if count > 1}
    return {
        **of_all,
        "gpt2-compile": gpt2("--compile"),
        "lm": lm,
        "gpt2-compile-12": gpt2("--compile --batch-size 12"),
        "plain-gpt2": plain("gpt2-32"),
        "compile": loop("serial", 1, 0, 48, "--compile"),
        "jpeg-compile": loop("serial", 1, 0, 48, "--compile", jpeg=True),
        "horovod-2x128": loop("horovod", 2, 128, 48),
        "horovod-2x128-early": loop("horovod", 2, 128, 48, sums="early"),
        "horovod-2x128-patched": loop("horovod", 2, 128, 48, sums="patched"),
        "ddp-2x128": loop("ddp", 2, 128, 48),
        "serial-256": loop("serial", 1, 256, 48),
        "horovod-256": loop("horovod", 1, 256, 48),
        "ddp-256": loop("ddp", 1, 256, 48),
        "plain": plain("clock", "eager-256", "eager-64", "compile-256"),
        "all-reduce": all_reduce,
        "serial-64": loop("serial", 1, 64, 160),
        "horovod-2x128-fp16": loop("horovod", 2, 128, 48, "--compression fp16"),
        # Known (docs/evidence/gpus.md).
        "jpeg-256": loop("serial", 1, 256, 48, jpeg=True),
        "gpt2": gpt2(),
        "serial-256-fp32": loop("serial", 1, 256, 24, "--amp off"),
    }  # fmt: skip


def main() -> int:
    known = rows()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--seconds", type=float, default=3600.0)
    add("--only", nargs="+", choices=known, metavar="ROW", help="these rows, also where they have a result")
    add("--device", default="cuda")
    add("--quick", action="store_true")
    add("--warm", action="store_true", help="compile what the rows named by --only will need, and measure nothing")
    add("--jpegs", type=Path, help="from tests.gpu.jpegs (default: made in OUT, where they are not)")
    add("--patched", type=Path, default=Path(), help="where a Horovod with caller-waits.patch is installed")
    add("--copy", type=Path, help="another file that gets each result")
    flags = parser.parse_args()
    until = time.monotonic() + flags.seconds
    flags.out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    if flags.quick:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling for a CPU takes minutes, and says nothing about a GPU
    jpegs = (flags.jpegs or flags.out / "jpegs").resolve()
    day = Day(flags.out.resolve(), flags.device, flags.quick, flags.warm, jpegs, flags.patched.resolve())
    results, tried = day.out / "rates.jsonl", dict[str, bool]()  # row -> whether it was measured
    with contextlib.suppress(FileNotFoundError):
        tried = {line["row"]: "error" not in line for line in map(json.loads, results.read_text().splitlines())}
    if not day.jpegs.exists() and not flags.warm:
        day.run(f"{PYTHON} -m tests.gpu.jpegs {day.jpegs} {'64 16' if flags.quick else '12288 256'}", seconds=600.0)
    failed = 0
    for name in flags.only or sorted((name for name in known if not tried.get(name)), key=lambda name: name in tried):
        if time.monotonic() > until:
            print(f"no time left for {name} and what follows", flush=True)
            break
        began, day.name = time.monotonic(), name
        try:
            said: dict[str, Any] = known[name](day)
        except Exception as error:  # no row ends the others
            said, failed = dict(error=" ".join(f"{type(error).__name__}: {error}".split())[:400]), 1
        taken = time.monotonic() - began
        print(f"{name}  {json.dumps(said)}  ({taken:.0f} s)", flush=True)
        for path in filter(None, (results, flags.copy)) if not flags.warm else ():
            with path.open("a") as file:
                file.write(json.dumps(dict(row=name, seconds=round(taken, 1), at=time.strftime("%T"), **said)) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
