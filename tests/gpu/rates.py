"""How fast training is on this host's GPUs, each row beside its base in the same minutes.

python -m tests.gpu.rates --out OUT                        all rows: OUT/rates.jsonl, a line for each
python -m tests.gpu.rates --out OUT --seconds 300          begins no row after that; started again, it goes on
python -m tests.gpu.rates --out OUT --device cpu --quick   a rehearsal: every command runs, nothing is measured
"""

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
    """Where the rows run. patched: variables that put another Horovod first, for a comparison."""

    out: Path
    device: str
    quick: bool
    warm: bool
    patched: dict[str, str]
    jpegs: Path  # made by tests.gpu.jpegs
    name: str = ""

    def fresh(self) -> Path:
        """Return the row's directory, without what an earlier start left there: it would be resumed."""
        out = self.out / "runs" / self.name
        shutil.rmtree(out, ignore_errors=True)
        return out

    def run(self, command: str, ranks: int = 1, seconds: float = 75.0, **more: str) -> Any:
        """Run a command to its end. Raises AssertionError where it fails or takes longer."""
        done = launch(
            command, timeout=max(300.0, seconds) if self.quick else seconds, **machine.variables(ranks), **more
        )
        (self.out / "logs").mkdir(exist_ok=True)
        with (self.out / "logs" / f"{self.name}.log").open("a") as log:
            log.write(f"{command}\n{done}\n")
        assert done.code == 0, f"exit code {done.code}: {[*done.stderr.strip().splitlines(), ''][-2:]}"
        return done


Row = Callable[[Day], dict[str, Any]]


def loop(
    engine: str,
    ranks: int,
    batch: int,
    steps: int,
    flags: str = "",
    *,
    jpeg: bool = False,
    **more: str,
) -> Row:
    """Return a row: images/s of the training loop itself, with checks and metrics; the median of its logged windows."""

    def run(day: Day) -> dict[str, Any]:
        number, size = (2, 8) if day.quick else (batch, 3 if day.warm else steps)
        log = max(1, size // 8)
        small = "--model resnet18 --image-size 32" if day.quick else ""
        # The workers have batches ready before the first step: the first of four epochs is left out.
        data, epochs, skip = (
            (f"folder --data-dir {day.jpegs}", 2 if day.quick else 4, 9) if jpeg else ("synthetic", 1, 2)
        )
        out = day.fresh()
        words = f"--dataset {data} --batch-size {number} --train-samples {number * size * ranks} --epochs {epochs}"
        command = machine.command(
            engine,
            ranks,
            "hvdtrain.imagenet",
            f"{words} --log-steps {log} --no-progress {small} {flags}",
            day.device,
            out,
        )
        day.run(command, ranks, 120.0 if "--compile" in flags else 75.0, **more)
        record = (out / "metrics.jsonl").read_text()
        (day.out / "logs" / f"{day.name}.metrics").write_text(record)
        lines = [json.loads(line) for line in record.splitlines()]
        windows = [line for line in lines if line["event"] == "train"][0 if day.quick or day.warm else skip :]
        shares = {key: statistics.median(line[key] for line in windows) for key in windows[0] if key.endswith("_share")}
        return {"images/s": statistics.median(line["samples_per_second"] for line in windows)} | shares

    return run


def plain(*variants: str) -> Row:
    """Return a row: plain PyTorch (plain.py)."""

    def run(day: Day) -> dict[str, Any]:
        found = day.out / f"{day.name}.json"
        day.run(
            f"{PYTHON} -m tests.gpu.plain {found} {' '.join(variants)} {'--cpu' if day.device == 'cpu' else ''}",
            1,
            150.0,
        )
        return json.loads(found.read_text())

    return run


def benchmark(flags: str, quick: str) -> Row:
    """Return a row: hvdtrain.benchmark on one rank."""

    def run(day: Day) -> dict[str, Any]:
        words = f"{quick} --repeats 1 --steps 1 --warmup-steps 1" if day.quick or day.warm else f"{flags} --repeats 3"
        words = f"{flags} --repeats 1 --steps 1 --warmup-steps 2" if day.warm and not day.quick else words
        out = day.fresh()
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


def patched(row: Row) -> Row:
    """Return the row with another Horovod first on the path."""

    def run(day: Day) -> dict[str, Any]:
        assert day.patched, "no --patched: nothing to compare with"
        before = dict(os.environ)
        os.environ |= {name: f"{path}{os.pathsep}{before.get(name, '')}" for name, path in day.patched.items()}
        try:
            return row(day)
        finally:
            os.environ.clear()
            os.environ |= before

    return run


GPT2 = "--model gpt2 --amp bf16 --warmup-steps 8"
SMALL = "--model gpt-small --batch-size 2 --amp bf16"


def rows() -> dict[str, Row]:
    """Return the rows, the most telling first; those that are compared follow each other."""
    several = machine.gpus() if machine.gpus() > 1 else 0
    of_all = {f"{engine}-{several}x256": loop(engine, several, 256, 64) for engine in ("horovod", "ddp") if several}
    return {
        **of_all,
        "serial-256": loop("serial", 1, 256, 48),
        "horovod-256": loop("horovod", 1, 256, 48),
        "ddp-256": loop("ddp", 1, 256, 48),
        "horovod-2x128": loop("horovod", 2, 128, 48),
        "horovod-2x128-patched": patched(loop("horovod", 2, 128, 48)),
        "ddp-2x128": loop("ddp", 2, 128, 48),
        "all-reduce": all_reduce,
        "serial-64": loop("serial", 1, 64, 160),
        "horovod-64": loop("horovod", 1, 64, 160),
        "ddp-64": loop("ddp", 1, 64, 160),
        "plain": plain("clock", "eager-256", "eager-64", "graph-64"),
        "jpeg-256": loop("serial", 1, 256, 48, jpeg=True),
        "compile-256": loop("serial", 1, 256, 48, "--compile"),
        "horovod-2x128-fp16": loop("horovod", 2, 128, 48, "--compression fp16"),
        "wire": plain("wire-fp16", "wire-bf16"),
        "gpt2-compile": benchmark(f"{GPT2} --compile", SMALL),
        "gpt2": benchmark(GPT2, SMALL),
        "serial-256-fp32": loop("serial", 1, 256, 24, "--amp off"),
        "plain-compiled": plain("compile-64", "compile-256"),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--only", default="", help="these rows, joined by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--warm", action="store_true", help="compile what the rows named by --only will need, and measure nothing"
    )
    parser.add_argument("--jpegs", type=Path, help="from tests.gpu.jpegs (default: made in OUT, where they are not)")
    parser.add_argument("--results", type=Path, help="default: OUT/rates.jsonl")
    parser.add_argument("--patched", type=Path, help="a folder with another Horovod")
    parser.add_argument("--libraries", default="", help="where that one finds torch, NCCL and MPI")
    flags = parser.parse_args()
    until, known = time.monotonic() + flags.seconds, rows()
    flags.out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    patched = dict(PYTHONPATH=str(flags.patched.resolve()), LD_LIBRARY_PATH=flags.libraries) if flags.patched else {}
    jpegs = (flags.jpegs or flags.out / "jpegs").resolve()
    day = Day(flags.out.resolve(), flags.device, flags.quick, flags.warm, patched, jpegs)
    results, done = flags.results or day.out / "rates.jsonl", set()
    with contextlib.suppress(FileNotFoundError):
        done = {json.loads(line)["row"] for line in results.read_text().splitlines()}
    if not day.jpegs.exists() and not flags.warm:
        day.run(f"{PYTHON} -m tests.gpu.jpegs {day.jpegs} {'64 16' if flags.quick else '12288 256'}", seconds=600.0)
    wanted = flags.only.split(",") if flags.only else [name for name in known if name not in done]
    failed = 0
    for name in wanted:
        if time.monotonic() > until:
            print(f"no time left for {name} and what follows", flush=True)
            break
        began, day.name = time.monotonic(), name
        try:
            said: dict[str, Any] = known[name](day)
        except Exception as error:  # no row ends the others
            said, failed = dict(error=" ".join(f"{type(error).__name__}: {error}".split())[:400]), failed + 1
        taken = time.monotonic() - began
        print(f"{name}  {json.dumps(said)}  ({taken:.0f} s)", flush=True)
        if not flags.warm:
            with results.open("a") as file:
                file.write(json.dumps(dict(row=name, seconds=round(taken, 1), at=time.strftime("%T"), **said)) + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
