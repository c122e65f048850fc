"""How fast training is on this host's GPUs, each row beside its base in the same minutes: a line each in OUT/rates.jsonl."""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
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
    name: str = ""  # of the current row

    def fresh(self) -> Path:
        """Return the row's directory, without what an earlier start left there: it would be resumed."""
        out = self.out / "runs" / self.name
        shutil.rmtree(out, ignore_errors=True)
        return out

    def run(self, command: str, ranks: int = 1, seconds: float = 75.0) -> Any:
        """Run a command to its end. Raises AssertionError where it fails or takes longer."""
        done = launch(command, timeout=300.0 if self.quick else seconds, **machine.variables(ranks))
        (self.out / "logs").mkdir(exist_ok=True)
        with (self.out / "logs" / f"{self.name}.log").open("a") as log:
            log.write(f"{command}\n{done}\n")
        assert done.code == 0, f"exit code {done.code}: {[*done.stderr.strip().splitlines(), ''][-2:]}"
        return done


Row = Callable[[Day], dict[str, Any]]


def loop(engine: str, ranks: int, batch: int, steps: int, flags: str = "", *, jpeg: bool = False) -> Row:
    """Return a row: images/s of the training loop itself, with checks and metrics; the median of its logged windows."""

    def run(day: Day) -> dict[str, Any]:
        number, size, small = batch, 3 if day.warm else steps, ""
        # The workers have batches ready before the first step: the first of four epochs is left out.
        data, epochs, skip = (f"folder --data-dir {day.jpegs}", 4, 9) if jpeg else ("synthetic", 1, 2)
        if day.quick:
            number, size, small, epochs, skip = 2, 8, "--model resnet18 --image-size 32", min(epochs, 2), 0
        out = day.fresh()
        words = f"--dataset {data} --batch-size {number} --train-samples {number * size * ranks} --epochs {epochs}"
        words += f" --log-steps {max(1, size // 8)} --no-progress {small} {flags}"
        command = machine.command(engine, ranks, "hvdtrain.imagenet", words, day.device, out)
        day.run(command, ranks, 120.0 if "--compile" in flags else 75.0)
        record = (out / "metrics.jsonl").read_text()
        (day.out / "logs" / f"{day.name}.metrics").write_text(record)
        lines = [json.loads(line) for line in record.splitlines()]
        windows = [line for line in lines if line["event"] == "train"][0 if day.warm else skip :]
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
        model = "gpt-small --batch-size 2" if day.quick else "gpt2"
        few = "--repeats 1 --steps 1 --warmup-steps 1" if day.quick or day.warm else "--repeats 3 --warmup-steps 8"
        out = day.fresh()
        words = f"--model {model} --amp bf16 {few} {more}"
        day.run(machine.command("serial", 1, "hvdtrain.benchmark", words, day.device, out), 1, 120.0)
        result = json.loads((out / "benchmark.json").read_text())
        return {"tokens/s": result["samples_per_second"]["mean"] * (result["tokens_per_sample"] or 1)}

    return run


def all_reduce(day: Day) -> dict[str, Any]:
    """Bus bandwidth by size, in GB/s."""
    ranks, out = max(2, machine.gpus()), day.fresh()
    sizes = "--max-bytes 8192 --seconds-per-size 0.05" if day.quick else "--max-bytes 67108864 --seconds-per-size 0.2"
    flags = f"--collectives --dtype float32 --min-bytes 4096 {sizes}"
    day.run(machine.command("horovod", ranks, "hvdtrain.benchmark", flags, day.device, out), ranks)
    rows = json.loads((out / "benchmark.json").read_text())["rows"]
    return {str(row["bytes"]): row["bus_bytes_per_second"] / 1e9 for row in rows} | {"ranks": ranks}


def rows() -> dict[str, Row]:
    """Return the rows, the most telling first; those that are compared follow each other."""
    count = machine.gpus()
    of_all = {f"{one}-{count}x256": loop(one, count, 256, 64) for one in ("horovod", "ddp") if count > 1}
    return {
        **of_all,
        "serial-256": loop("serial", 1, 256, 48),
        "horovod-256": loop("horovod", 1, 256, 48),
        "ddp-256": loop("ddp", 1, 256, 48),
        "horovod-2x128": loop("horovod", 2, 128, 48),
        "ddp-2x128": loop("ddp", 2, 128, 48),
        "all-reduce": all_reduce,
        "serial-64": loop("serial", 1, 64, 160),
        "plain": plain("clock", "eager-256", "eager-64"),
        "jpeg-256": loop("serial", 1, 256, 48, jpeg=True),
        "compile-256": loop("serial", 1, 256, 48, "--compile"),
        "horovod-2x128-fp16": loop("horovod", 2, 128, 48, "--compression fp16"),
        "gpt2-compile": gpt2("--compile"),
        "gpt2": gpt2(),
        "serial-256-fp32": loop("serial", 1, 256, 24, "--amp off"),
        "plain-compiled": plain("compile-64", "compile-256"),
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
    add("--results", type=Path, help="default: OUT/rates.jsonl")
    flags = parser.parse_args()
    until = time.monotonic() + flags.seconds
    flags.out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    if flags.quick:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling for a CPU takes minutes, and says nothing about a GPU
    jpegs = (flags.jpegs or flags.out / "jpegs").resolve()
    day = Day(flags.out.resolve(), flags.device, flags.quick, flags.warm, jpegs)
    results, done = flags.results or day.out / "rates.jsonl", set()
    with contextlib.suppress(FileNotFoundError):
        done = {json.loads(line)["row"] for line in results.read_text().splitlines()}
    if not day.jpegs.exists() and not flags.warm:
        day.run(f"{PYTHON} -m tests.gpu.jpegs {day.jpegs} {'64 16' if flags.quick else '12288 256'}", seconds=600.0)
    failed = 0
    for name in flags.only or [name for name in known if name not in done]:
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
        if not flags.warm:
            with results.open("a") as file:
                file.write(json.dumps(dict(row=name, seconds=round(taken, 1), at=time.strftime("%T"), **said)) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
