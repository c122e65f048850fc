"""What the flags of every command that trains share; arguments.py has the checked number types."""

import argparse
from collections.abc import Mapping, Sequence

import torch

from hvdtrain.engines import arguments
from hvdtrain.engines.arguments import (  # noqa: F401 - for the commands: these are number types of their flags, too
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
AMP = (*AMP_DTYPES, "auto")  # Engine.choose_amp makes one of the former of the last


class Parser(arguments.Parser):
    """The parser of a command that trains: its flags may name an engine."""

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse `argv` (default: the command line), and refuse what the chosen engine cannot do."""
        flags = self.parse_args(argv)
        if hasattr(flags, "engine"):
            refuse_unsupported(flags.engine, vars(flags))
        return flags


def add_engine(group: argparse.ArgumentParser) -> None:
    """Flags that `start` takes: ranks, devices, threads."""
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
    """Flags about how gradients travel."""
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
    """Raise UserError on every rank where the ranks were given different flags. --data-dir may differ from host to host."""
    mine = {name: str(value) for name, value in flags.items() if name != "data_dir"}
    everyone = engine.all_gather_object(mine, "flags")
    for rank, theirs in enumerate(everyone):
        if unlike := [name for name in mine if theirs.get(name) != everyone[0].get(name)]:
            pairs = (f"--{name.replace('_', '-')} {everyone[0].get(name)} and {theirs.get(name)}" for name in unlike)
            said = (
                f"ranks 0 and {rank} have different flags ({'; '.join(pairs)}): start every rank with the same command"
            )
            raise UserError(said, everywhere=True)
