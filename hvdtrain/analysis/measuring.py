"""What all measurements need, and the speed of the all-reduce alone, by message size (`--collectives`).

Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md). The algorithm bandwidth of S bytes reduced in t seconds is S/t.
The bus bandwidth is 2(n-1)/n times that, and can be compared with the network or the memory for any n. GB: 10^9 bytes.
"""

import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from hvdtrain import cli
from hvdtrain.engines import atomic, files, lines
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.flags import Flags

MessageRow = dict[str, Any]  # of the table
MESSAGE_DTYPES = {"float32": torch.float32, "float16": torch.float16}
BLOCKS = 5  # timed blocks per size: their median is the result, their range the noise
MOST_IN_BLOCK = 1000
MOST_IN_FLOAT16 = 256  # ranks whose numbers are summed: 362 have a sum beyond its largest number, 65,504
TABLE_COLUMNS = ("bytes", "count", "dtype", "time us", "least", "most", "repeats", "algbw GB/s", "busbw GB/s")


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hardware() -> dict[str, object]:
    """Return the hardware of this process: processor, cores it may use, memory in bytes, GPU, load average."""
    try:
        about = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        about = []
    names = (each.partition(":")[2].strip() for each in about if each.startswith("model name"))
    found: dict[str, object] = dict(
        processor=next(names, platform.processor()),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_average=os.getloadavg()[0],  # of the last minute: runnable processes
    )
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def make_writable(directory: Path) -> None:
    """Create `directory`. Raises UserError if it is not writable, so that this is known before measuring."""
    with files.output_to(directory):
        directory.mkdir(parents=True, exist_ok=True)
        trial = directory / f".trial.{os.getpid()}"
        atomic.write_atomically(trial, "", sync=False)
        trial.unlink(missing_ok=True)


def write_json(path: Path, result: dict[str, object]) -> None:
    """Write `result` to `path` atomically. Values that JSON does not support are written as text. Raises UserError."""
    with files.output_to(path.parent):
        atomic.write_atomically(path, json.dumps(result, indent=2, default=str) + "\n", sync=False)


def add_message_flags(parser: cli.Parser) -> None:
    add = parser.add_argument
    add("--collectives", action="store_true", help="measure the all-reduce alone, by message size in powers of two")
    add("--dtype", choices=MESSAGE_DTYPES, help="of the values of --collectives (default: both)")
    add("--min-bytes", type=cli.byte_count, default=4, help="smallest size of --collectives (default: 4)")
    add("--max-bytes", type=cli.byte_count, default=2**28, help="largest size of --collectives (default: 268435456)")
    add("--seconds-per-size", type=cli.positive, default=0.5, help="of --collectives, about (default: 0.5)")


def check_messages(flags: Flags) -> None:
    """Raise UserError for sizes that do not go together."""
    if flags.min_bytes > flags.max_bytes:
        message = f"--min-bytes {flags.min_bytes} is more than --max-bytes {flags.max_bytes}: swap them"
        raise UserError(message, everywhere=True)


def sweep_messages(engine: Engine, flags: Flags) -> list[MessageRow]:
    """Measure every size and dtype. Rank 0 prints the table, and all return its rows. A collective."""
    rows: list[MessageRow] = []
    if engine.rank == 0:
        about = f"{engine.size} rank{'s'[: engine.size > 1]}, {engine.description}, {engine.device.type}, sum"
        lines.say(f"{about}\n{' '.join(f'{name:>11}' for name in TABLE_COLUMNS)}")
    for dtype in [flags.dtype] if flags.dtype else MESSAGE_DTYPES:
        size = max(flags.min_bytes, MESSAGE_DTYPES[dtype].itemsize)  # once, what is no more than one number
        while size <= flags.max_bytes:
            count = max(1, size // MESSAGE_DTYPES[dtype].itemsize)
            rows.append(measure_messages(engine, dtype, count, flags.seconds_per_size))
            if engine.rank == 0:
                lines.say(line(rows[-1]))
            size *= 2
    return rows


def measure_messages(engine: Engine, dtype: str, count: int, seconds: float) -> MessageRow:
    """Time all-reduces of `count` elements for about `seconds`, and return one row of the table. A collective.

    Raises Failure if a result is wrong.
    """
    name = f"sweep.{dtype}.{count}"
    # More would be too much for float16: their ranks add nothing.
    summed = min(engine.size, MOST_IN_FLOAT16) if dtype == "float16" else engine.size
    number = engine.rank + 1 if engine.rank < summed else 0
    tensor = torch.full((count,), number, device=engine.device, dtype=MESSAGE_DTYPES[dtype])
    engine.all_reduce_(tensor, "sum", name)  # also the first warm-up
    expected = torch.full_like(tensor, summed * (summed + 1) / 2)
    # float16 has 11 bits: sums over many ranks are rounded.
    if not torch.isclose(tensor, expected, rtol=0.01).all():
        raise Failure(f"{engine.description}: wrong sum of {count} {dtype}")
    tensor.zero_()  # so that repeated sums stay finite

    first = max(block_seconds(engine, tensor, name, 1), 1e-9)
    first = max(block_seconds(engine, tensor, name, min(10, max(1, int(0.1 * seconds / first)))), 1e-9)
    times = min(MOST_IN_BLOCK, max(1, round(seconds / BLOCKS / first)))  # the same on all ranks: `first` is
    blocks = [block_seconds(engine, tensor, name, times) for _ in range(BLOCKS)]
    taken, size = max(statistics.median(blocks), 1e-12), count * tensor.element_size()
    return dict(
        bytes=size, count=count, dtype=dtype, seconds=taken, seconds_least=min(blocks), seconds_most=max(blocks),
        repeats=times * BLOCKS, algorithm_bytes_per_second=size / taken,
        bus_bytes_per_second=size / taken * 2 * (engine.size - 1) / engine.size,
    )  # fmt: skip


def block_seconds(engine: Engine, tensor: torch.Tensor, name: str, times: int) -> float:
    """Run `times` all-reduces, and return the seconds per all-reduce on the slowest rank. A collective."""
    # All begin together: a rank that comes late would count as a slow reduction.
    engine.barrier()
    wait_for_device(engine.device)
    began = time.perf_counter()
    for _ in range(times):
        engine.all_reduce_(tensor, "sum", name)
    wait_for_device(engine.device)
    mine = torch.tensor((time.perf_counter() - began) / times, dtype=torch.float64)
    engine.all_reduce_(mine, "max", "block")
    return mine.item()


def line(row: MessageRow) -> str:
    """Return one row of the table as text."""
    cells = [str(row[name]) for name in ("bytes", "count", "dtype")]
    cells += [f"{row[name] * 1e6:.2f}" for name in ("seconds", "seconds_least", "seconds_most")]
    cells += [str(row["repeats"]), *(f"{row[f'{kind}_bytes_per_second'] / 1e9:.4g}" for kind in ("algorithm", "bus"))]
    return " ".join(f"{cell:>11}" for cell in cells)
