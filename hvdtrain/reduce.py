"""The all-reduce alone: each rank starts with its rank + 1, and ends with the sum over all ranks. 4 ranks get 10.

mpirun -np 4 python -m hvdtrain.reduce
horovodrun -np 4 python -m hvdtrain.reduce --reduction average --dtype float16
torchrun --nproc-per-node 4 -m hvdtrain.reduce

Its speed by message size: python -m hvdtrain.benchmark --collectives
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

from collections.abc import Sequence

import torch

from hvdtrain import cli
from hvdtrain.engines import lines
from hvdtrain.engines.choice import start_engine
from hvdtrain.engines.errors import UserError
from hvdtrain.flags import Flags
from hvdtrain.launching.exit_codes import run_command

REDUCTIONS = ("sum", "average", "min", "max", "product")
DTYPE_NAMES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int8", "int16", "int32", "int64", "uint8", "bool", "complex64", "complex128",
)  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.reduce", __doc__)
    # dest: `refuse_unsupported` has other rules for a `reduction` of gradients.
    parser.add_argument("--reduction", dest="op", choices=REDUCTIONS, default="sum", help="how values are combined")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="float32", help="type of the values (default: float32)")
    cli.add_engine(parser)
    return parser.parse(argv)


def number_text(number: torch.Tensor) -> str:
    """Return the one element of `number` as text: 10, not 10.0."""
    value = number.item()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def main() -> int:
    flags = parse()
    with start_engine(
        flags.engine, tuning=flags.tuning == "auto", device=flags.device, threads=flags.threads
    ) as engine:
        number = torch.tensor([engine.rank + 1], device=engine.device).to(getattr(torch, flags.dtype))
        before = number_text(number)
        try:
            engine.all_reduce_(number, flags.op, "data")
        except UserError:
            raise
        except Exception as error:  # each engine, and each library below it, raises its own types
            lacking = f"{engine.description} has no {flags.op} of {flags.dtype} ({str(error).splitlines()[0]})"
            raise UserError(f"{lacking}: use float32", everywhere=True) from error
        held = engine.all_gather_object([before, number_text(number)], "held")
        if engine.rank == 0:  # alone: lines of several would mix
            for place, name in enumerate(("before", "after")):
                lines.say("\n".join(f"{name} {rank} data {both[place]}" for rank, both in enumerate(held)))
    return 0


if __name__ == "__main__":
    run_command(main)
