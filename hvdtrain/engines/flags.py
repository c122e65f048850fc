"""Flags shared by all commands that train. The number types are in arguments.py."""

import argparse
from collections.abc import Mapping, Sequence

import torch

from hvdtrain.engines import arguments
from hvdtrain.engines.arguments import (  # noqa: F401 - re-exported for the commands
    accuracy,
    byte_count,
    count,
    fraction,
    non_negative,
    positive,
    positive_int,
    seed,
    some_of,
    threads,
)
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.start import ENGINES, refuse_unsupported

AMP_DTYPES = {"off": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
AMP = (*AMP_DTYPES, "auto")  # Engine.choose_amp resolves "auto"


class Parser(arguments.Parser):
    """The parser of a command that trains. It checks the flags against the engine that they choose."""

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse `argv` (default: sys.argv). Raises UserError for options that the chosen engine does not support."""
        flags = self.parse_args(argv)
        if hasattr(flags, "engine"):
            refuse_unsupported(flags.engine, vars(flags))
        return flags


def add_engine(group: argparse.ArgumentParser) -> None:
    """Add the flags for the arguments of `start`: engine, device, threads, tuning."""
    group.add_argument(
        "--engine", choices=ENGINES, default="horovod", help="what reduces the gradients (default: horovod)"
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    group.add_argument(
        "--threads", type=threads, help="torch threads per rank (default: this rank's share of the cores)"
    )
    group.add_argument(
        "--tuning",
        choices=("auto", "off"),
        default="auto",
        help="auto: settings that make Horovod, MPI and malloc fast, unless you set them; off: keep all defaults",
    )


def add_compression(group: argparse.ArgumentParser) -> None:
    """Add the flags for gradient compression."""
    group.add_argument(
        "--compression",
        choices=("none", "fp16", "auto"),
        default="none",
        help="of gradients on the network; auto: fp16 between hosts, none within a host",
    )
    group.add_argument(
        "--fp16-allreduce", dest="compression", action="store_const", const="fp16", help="--compression fp16"
    )


def require_equal(engine: Engine, flags: Mapping[str, object]) -> None:
    """Raise UserError on every rank if flags differ between ranks. --data-dir may differ between hosts. A collective."""
    mine = {name: str(value) for name, value in flags.items() if name != "data_dir"}
    everyone = engine.all_gather_object(mine, "flags")
    for rank, theirs in enumerate(everyone):
        if unlike := [name for name in mine if theirs.get(name) != everyone[0].get(name)]:
            pairs = (f"--{name.replace('_', '-')} {everyone[0].get(name)} and {theirs.get(name)}" for name in unlike)
            said = (
                f"ranks 0 and {rank} have different flags ({'; '.join(pairs)}): start every rank with the same command"
            )
            raise UserError(said, everywhere=True)
