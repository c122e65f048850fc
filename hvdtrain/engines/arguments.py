"""What every command line shares: errors in one line, and checked number types. Imports no torch."""

import argparse
import re
from collections.abc import Callable, Collection
from typing import NoReturn

from hvdtrain.engines.errors import UserError

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


def some_of(able: Collection[str]) -> Callable[[str], list[str]]:
    """Return the type of a flag that takes some of `able`, with commas in between; each is kept once."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in able:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(able)}")
        return list(dict.fromkeys(names))

    return parse


def positive_int(text: str) -> int:
    """Return `text` as a whole number from 1. Raises ArgumentTypeError."""
    return _whole(text, 1, 2**31 - 1)


def count(text: str) -> int:
    """Return `text` as a whole number from 0. Raises ArgumentTypeError."""
    return _whole(text, 0, 2**31 - 1)


def byte_count(text: str) -> int:
    return _whole(text, 1, 2**50)


def seed(text: str) -> int:
    return _whole(text, 0, 2**63 - 1)


def threads(text: str) -> int:
    return _whole(text, 1, 1024)  # torch would start as many as are asked for


def non_negative(text: str) -> float:
    """Return `text` as a number from 0. Raises ArgumentTypeError."""
    return _number(text, least=0.0, open_end=False)


def positive(text: str) -> float:
    """Return `text` as a number above 0. Raises ArgumentTypeError."""
    return _number(text, least=0.0, open_end=True)


def accuracy(text: str) -> float:
    value = _number(text, least=0.0, open_end=True)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from above 0 to 1 (99 % is 0.99)")
    return value


def fraction(text: str) -> float:
    """Return `text` as a number from 0 to below 1. Raises ArgumentTypeError."""
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
