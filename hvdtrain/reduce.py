"""The all-reduce alone: the value on each rank before and after, or, with --sweep, its speed by message size.

mpirun -np 4 python -m hvdtrain.reduce                                each rank starts with its rank + 1: 4 ranks get 10
horovodrun -np 4 python -m hvdtrain.reduce --reduction average --dtype float16
torchrun --nproc-per-node 4 -m hvdtrain.reduce
mpirun -np 4 python -m hvdtrain.reduce --sweep --output-dir OUT       table, also in reduce.json

Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md). The algorithm bandwidth of S bytes reduced in t seconds is S/t.
The bus bandwidth is 2(n-1)/n times that, and can be compared with the network or the memory for any n. GB: 10^9 bytes.
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hvdtrain import cli
from hvdtrain.analysis import measuring
from hvdtrain.engines import lines
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.start import start
from hvdtrain.launching.exit_codes import run
from hvdtrain.output.run_output import versions

Row = dict[str, Any]  # of the table
REDUCTIONS = ("sum", "average", "min", "max", "product")
DTYPES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int8", "int16", "int32", "int64", "uint8", "bool", "complex64", "complex128",
)  # fmt: skip
SWEPT = ("float32", "float16")
BLOCKS = 5  # timed blocks per size: their median is the result, their range the noise
MOST_IN_BLOCK = 1000


def parse(argv: Sequence[str] | None = None) -> cli.Flags:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.reduce", __doc__)
    add = parser.add_argument
    # dest: `refuse_unsupported` has other rules for a `reduction` of gradients.
    add("--reduction", dest="op", choices=REDUCTIONS, default="sum", help="how values are combined (default: sum)")
    add("--dtype", choices=DTYPES, help="type of the values (default: float32; with --sweep float32 and float16)")
    add("--sweep", action="store_true", help="measure its speed by size, in powers of two")
    add("--min-bytes", type=cli.byte_count, default=4, help="smallest size of --sweep (default: 4)")
    add("--max-bytes", type=cli.byte_count, default=2**28, help="largest size of --sweep (default: 268435456)")
    add("--seconds-per-size", type=cli.positive, default=0.5, help="about (default: 0.5)")
    add("--output-dir", type=Path, help="write reduce.json to this directory")
    cli.add_engine(parser)
    flags = parser.parse(argv)
    if flags.min_bytes > flags.max_bytes:
        said = f"--min-bytes {flags.min_bytes} is more than --max-bytes {flags.max_bytes}: swap them"
        raise UserError(said, everywhere=True)
    return flags


def refusal(engine: Engine, op: str, dtype: str) -> str | None:
    """Try to reduce one number, and return why the engine cannot, or None if it can. A collective."""
    try:
        number = torch.ones(1, device=engine.device).to(getattr(torch, dtype))
        engine.all_reduce_(number, op, f"trial.{op}.{dtype}")
    except UserError:
        raise
    except Exception as error:  # each engine, and each library below it, raises its own types
        return str(error).splitlines()[0]
    return None


def refuse_dtype(engine: Engine, op: str, dtype: str) -> None:
    """Raise UserError on every rank if the engine cannot reduce `dtype`; it names those that it can. A collective."""
    why = refusal(engine, op, dtype)
    if why is not None:
        able = ", ".join(other for other in DTYPES if refusal(engine, op, other) is None)
        said = f"--dtype {dtype} with --reduction {op} is not for {engine.description} ({why}): use {able}"
        raise UserError(said, everywhere=True)


def text(number: torch.Tensor) -> str:
    """Return the one element of `number` as text: 10, not 10.0."""
    value = number.item()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def demonstrate(engine: Engine, op: str, dtype: str) -> list[Row]:
    """Reduce rank + 1 over all ranks. Print and return the value on each rank before and after, in rank order. A
    collective."""
    refuse_dtype(engine, op, dtype)
    number = torch.tensor([engine.rank + 1], device=engine.device).to(getattr(torch, dtype))
    before = text(number)
    engine.all_reduce_(number, op, "data")
    held = engine.all_gather_object([before, text(number)], "held")  # only rank 0 prints: lines of several would mix
    if engine.rank == 0:
        said = [f"before {rank} data {before}" for rank, (before, _) in enumerate(held)]
        said += [f"after {rank} data {after}" for rank, (_, after) in enumerate(held)]
        lines.say("\n".join(said))
    return [dict(rank=rank, before=before, after=after) for rank, (before, after) in enumerate(held)]


def block_seconds(engine: Engine, tensor: torch.Tensor, op: str, name: str, times: int) -> float:
    """Run `times` all-reduces, and return the seconds per all-reduce on the slowest rank. A collective."""
    engine.barrier()
    measuring.synchronize(engine.device)
    began = time.perf_counter()
    for _ in range(times):
        engine.all_reduce_(tensor, op, name)
    measuring.synchronize(engine.device)
    mine = torch.tensor((time.perf_counter() - began) / times, dtype=torch.float64)
    engine.all_reduce_(mine, "max", "block")
    return mine.item()


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in a dtype that supports comparison."""
    return tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no comparison


def measure(engine: Engine, op: str, dtype: str, count: int, seconds: float) -> Row:
    """Time all-reduces of `count` elements for about `seconds`, and return one row of the table. A collective.

    Raises RuntimeError if a result is wrong.
    """
    kind = getattr(torch, dtype)
    name = f"sweep.{dtype}.{count}"
    tensor = torch.full((count,), engine.rank + 1, device=engine.device, dtype=kind)
    one = tensor[:1].clone()
    engine.all_reduce_(one, op, name + ".one")
    engine.all_reduce_(tensor, op, name)  # also the first warm-up
    if not torch.isclose(comparable(tensor), comparable(one), rtol=0.01).all():
        raise RuntimeError(f"{engine.description}: wrong {op} of {count} {dtype}")
    tensor.zero_()  # so that repeated sums stay finite

    first = max(block_seconds(engine, tensor, op, name, 1), 1e-9)
    first = max(block_seconds(engine, tensor, op, name, min(10, max(1, int(0.1 * seconds / first)))), 1e-9)
    times = min(MOST_IN_BLOCK, max(1, round(seconds / BLOCKS / first)))  # the same on all ranks: `first` is
    blocks = [block_seconds(engine, tensor, op, name, times) for _ in range(BLOCKS)]
    taken, size = max(statistics.median(blocks), 1e-12), count * tensor.element_size()
    algorithm = size / taken
    return dict(
        bytes=size, count=count, dtype=dtype, reduction=op, seconds=taken, seconds_least=min(blocks),
        seconds_most=max(blocks), repeats=times * BLOCKS, algorithm_bytes_per_second=algorithm,
        bus_bytes_per_second=algorithm * 2 * (engine.size - 1) / engine.size,
    )  # fmt: skip


HEADER = (
    f"{'bytes':>11} {'count':>11} {'dtype':>9} {'time us':>11} {'least':>11} {'most':>11} {'repeats':>8} "
    f"{'algbw GB/s':>11} {'busbw GB/s':>11}"
)


def line(row: Row) -> str:
    """Return one row of the table as text."""
    times = " ".join(f"{row[name] * 1e6:11.2f}" for name in ("seconds", "seconds_least", "seconds_most"))
    speeds = " ".join(f"{row[f'{kind}_bytes_per_second'] / 1e9:11.4g}" for kind in ("algorithm", "bus"))
    return f"{row['bytes']:11d} {row['count']:11d} {row['dtype']:>9} {times} {row['repeats']:8d} {speeds}"


def sweep(engine: Engine, flags: cli.Flags, about: str) -> list[Row]:
    """Measure every size and dtype. Print the table below `about`, and return its rows. A collective."""
    dtypes = [flags.dtype] if flags.dtype else SWEPT
    for dtype in dtypes:
        refuse_dtype(engine, flags.op, dtype)
    if engine.rank == 0:
        lines.say(f"{about}\n{HEADER}")
    rows = []
    for dtype in dtypes:
        element = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        size = flags.min_bytes
        while size <= flags.max_bytes:
            rows.append(measure(engine, flags.op, dtype, max(1, size // element), flags.seconds_per_size))
            if engine.rank == 0:
                lines.say(line(rows[-1]))
            size *= 2
    return rows


def main() -> int:
    flags = parse()
    with start(flags.engine, tuning=flags.tuning == "auto", device=flags.device, threads=flags.threads) as engine:
        with engine.raising_together("output"):
            if engine.rank == 0 and flags.output_dir is not None:
                measuring.make_directory(flags.output_dir)
        hosts = len(set(engine.all_gather_object(socket.gethostname(), "hosts")))
        about = f"{engine.size} rank{'s'[: engine.size > 1]} on {hosts} host{'s'[: hosts > 1]}, {engine.description}"
        about += f", {engine.device.type}, {flags.op}"
        rows = sweep(engine, flags, about) if flags.sweep else demonstrate(engine, flags.op, flags.dtype or "float32")
        if engine.rank == 0 and flags.output_dir is not None:
            result = dict(
                title=about, engine=engine.name, description=engine.description, world_size=engine.size, hosts=hosts,
                device=str(engine.device), config=flags.given(), automatic=engine.notes, hardware=measuring.hardware(),
                versions=versions(), rows=rows,
            )  # fmt: skip
            measuring.write_json(flags.output_dir / "reduce.json", result)
    return 0


if __name__ == "__main__":
    run(main)
