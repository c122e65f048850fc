"""What every command's flags share: one-line errors, checked number types, and the flags that choose the engine."""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.start import ENGINES, refuse_unsupported

AMP_DTYPES = {"off": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
AMP = (*AMP_DTYPES, "auto")  # Engine.choose_amp makes one of the former of the last
LARGEST = 1e38  # of flags with a fraction: they meet weights in float32, which ends at 3.4e38


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UserErrors: one line, not a usage page from every rank."""

    def __init__(self, name: str, description: str | None):
        super().__init__(
            prog=name,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists every flag)", everywhere=True)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse `argv` (default: the command line), and refuse what the chosen engine cannot do."""
        flags = self.parse_args(argv)
        if hasattr(flags, "engine"):
            refuse_unsupported(flags.engine, vars(flags))
        return flags


def positive_int(text: str) -> int:
    return _whole(text, 1, 2**31 - 1)


def count(text: str) -> int:
    return _whole(text, 0, 2**31 - 1)


def byte_count(text: str) -> int:
    return _whole(text, 1, 2**50)


def seed(text: str) -> int:
    return _whole(text, 0, 2**63 - 1)


def threads(text: str) -> int:
    return _whole(text, 1, 1024)  # torch would start as many as are asked for


def non_negative(text: str) -> float:
    return _number(text, least=0.0, open_end=False)


def positive(text: str) -> float:
    return _number(text, least=0.0, open_end=True)


def accuracy(text: str) -> float:
    value = _number(text, least=0.0, open_end=True)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from above 0 to 1 (99 % is 0.99)")
    return value


def fraction(text: str) -> float:
    value = _number(text, least=0.0, open_end=False)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value


def _whole(text: str, least: int, most: int) -> int:
    # int() alone takes 1_000 too, and says in words of its own that it takes no more than 4,300 digits.
    value = int(text) if re.fullmatch("[+-]?[0-9]{1,4000}", text) else least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number of at least {least}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is more than {most}, the most that it may be")
    return value


def _number(text: str, *, least: float, open_end: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (least < value if open_end else least <= value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {'above' if open_end else 'of at least'} {least:g}")
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {LARGEST:g}, the most that it may be")
    return value


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
