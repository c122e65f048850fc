"""Command-line flags that mean the same in every script, and the types that check them."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.start import ENGINES, refuse_foreign
from hvdtrain.training import optim

AMP_DTYPES = {"off": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
AMP = (*AMP_DTYPES, "auto")  # Engine.choose_amp makes one of the former of the last
LARGEST = 1e38  # of flags with a fraction: they meet weights in float32, which ends at 3.4e38


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UserErrors: one line, not a usage page from every rank."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists every flag)", everywhere=True)

    def parse(
        self, argv: Sequence[str] | None, recipes: dict[str, dict[str, object]] | None = None
    ) -> argparse.Namespace:
        """Parse, then fill every flag left at None from the chosen recipe."""
        flags = self.parse_args(argv)
        for name, value in (recipes or {}).get(getattr(flags, "recipe", ""), {}).items():
            if getattr(flags, name) is None:
                setattr(flags, name, value)
        refuse_foreign(flags.engine, vars(flags))
        if (getattr(flags, "amp", "off"), getattr(flags, "reduction", "")) == ("fp16", "adasum"):
            # It steps inside backward(), on gradients that are still scaled and that each rank judges for itself.
            raise UserError("--amp fp16 cannot go with --reduction adasum: use --amp bf16", everywhere=True)
        for name in ("profile", "tensorboard"):
            if getattr(flags, name, None) and flags.output_dir is None:
                raise UserError(f"--{name} needs --output-dir, to write there", everywhere=True)
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


def parser(name: str, description: str) -> Parser:
    return Parser(
        prog=f"hvdtrain.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_world(group: Parser) -> None:
    """Flags that `engine.start` takes: ranks, devices, threads."""
    group.add_argument(
        "--engine", choices=ENGINES, default="horovod", help="what reduces the gradients (default: horovod)"
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where there is one"
    )
    group.add_argument(
        "--threads", type=threads, help="torch threads per rank (default: this rank's share of the cores)"
    )
    group.add_argument(
        "--tuning",
        choices=("auto", "off"),
        default="auto",
        help="auto sets what makes Horovod, MPI and malloc fast where you have not set it; off leaves every default",
    )


def add_run(group: Parser) -> None:
    """Flags about a training run: ranks, devices, seed, output."""
    add_world(group)
    group.add_argument(
        "--seed", type=seed, default=1, help="seeds the weights and the order of the samples (default: 1)"
    )
    group.add_argument("--output-dir", type=Path, help="write metrics.jsonl and summary.json there (default: nowhere)")
    group.add_argument(
        "--log-steps", type=positive_int, default=50, help="steps between two train events (default: 50)"
    )
    group.add_argument("--no-progress", action="store_true", help="no progress bar, no progress lines")


def add_watching(group: Parser) -> None:
    """Flags about looking closer at a run (docs/watching.md)."""
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write scalars and the model's graph to --output-dir/tensorboard",
    )
    group.add_argument(
        "--profile",
        type=positive_int,
        metavar="STEPS",
        help="record so many steps of every rank, after a few, into --output-dir/profile.json.gz (for ui.perfetto.dev)",
    )


def add_wire(group: Parser) -> None:
    """Flags about how gradients travel."""
    group.add_argument(
        "--compression",
        choices=("none", "fp16", "auto"),
        default="none",
        help="of the gradients on the wire; auto: fp16 between hosts, none within one",
    )
    group.add_argument(
        "--fp16-allreduce", dest="compression", action="store_const", const="fp16", help="--compression fp16"
    )


def add_surviving(group: Parser) -> None:
    """Flags about checkpoints, restarts and what ends a run (docs/surviving.md)."""
    group.add_argument(
        "--checkpoint-steps",
        type=positive_int,
        help="steps between two checkpoints in --output-dir (default: one at the end of each epoch, which there is anyway)",
    )
    group.add_argument("--keep", type=positive_int, default=3, help="newest checkpoints kept; the best stays too")
    group.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto: go on with the run in --output-dir, if there is one; PATH: with that checkpoint (default: auto)",
    )
    group.add_argument(
        "--check-steps",
        type=count,
        default=100,
        help="steps between two comparisons of the ranks' weights, which must be the same bits (default: 100; 0: never)",
    )
    group.add_argument(
        "--max-skipped",
        type=count,
        help="steps in a row to leave out because their gradients are not finite (default: 0; 20 with --amp fp16)",
    )
    group.add_argument(
        "--step-timeout",
        type=non_negative,
        metavar="SECONDS",
        help="without a step for so long, the rank that hangs is named and all end (default: 30, or 20 times the longest "
        "step so far; one that is given: at least 3 times that; the first may take 10 minutes, or 10 times as long; time "
        "without a free core does not count; 0: wait for ever)",
    )


def add_training(group: Parser) -> None:
    """Flags about the mathematics; those left out come from the recipe."""
    group.add_argument("--epochs", type=positive_int)
    group.add_argument("--batch-size", type=positive_int, help="samples per rank and step")
    group.add_argument("--lr", type=positive, help="learning rate at its peak, before scaling")
    group.add_argument("--lr-scaling", choices=("none", "linear"), help="linear: times the number of ranks")
    group.add_argument("--lr-schedule", choices=optim.SCHEDULES)
    group.add_argument("--warmup-epochs", type=non_negative, help="linear warm-up, in epochs (fractions allowed)")
    group.add_argument("--optimizer", choices=optim.OPTIMIZERS)
    group.add_argument("--momentum", type=fraction, help="sgd: momentum; adam, adamw: beta 1")
    group.add_argument("--weight-decay", type=non_negative)
    group.add_argument("--label-smoothing", type=fraction)
    add_wire(group)
    group.add_argument(
        "--gradient-predivide-factor",
        type=positive,
        help="divide gradients by this before they are summed over ranks (default: 1; with fp16 the number of ranks)",
    )
    group.add_argument(
        "--reduction", choices=("average", "sum", "adasum"), default="average", help="of the gradients, over ranks"
    )
    group.add_argument(
        "--amp",
        choices=AMP,
        default="off",
        help="compute in this type where it is safe; fp16 scales the loss; auto: bf16 where the device has it",
    )
    group.add_argument("--weights", type=Path, help="start from the state_dict in this file (.pt or .safetensors)")
    group.add_argument(
        "--target-accuracy",
        type=accuracy,
        help="stop once the test accuracy (0 to 1) is reached; exit code 3 if it never is",
    )
    group.add_argument(
        "--accumulate", type=positive_int, default=1, help="backward passes per step; their gradients are averaged"
    )


def require_equal(engine: Engine, flags: argparse.Namespace) -> None:
    """Raise UserError on every rank where the ranks were given different flags. --data-dir may differ from host to host."""
    mine = {name: str(value) for name, value in vars(flags).items() if name != "data_dir"}
    everyone = engine.all_gather_object(mine, "flags")
    for rank, theirs in enumerate(everyone):
        if unlike := [name for name in mine if theirs.get(name) != everyone[0].get(name)]:
            pairs = (f"--{name.replace('_', '-')} {everyone[0].get(name)} and {theirs.get(name)}" for name in unlike)
            said = (
                f"ranks 0 and {rank} have different flags ({'; '.join(pairs)}): start every rank with the same command"
            )
            raise UserError(said, everywhere=True)
