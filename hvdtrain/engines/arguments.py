"""Command-line parsing shared by all commands: one-line errors and validated number types. Does not import torch."""

import argparse
import re
from collections.abc import Callable, Collection
from typing import NoReturn

from hvdtrain.engines.errors import UserError

LARGEST = 1e38  # upper limit of floating-point flags: they are combined with float32 weights, whose maximum is 3.4e38


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError on invalid input: one line instead of the usage text from every rank."""

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
    """Return an argparse type for a comma-separated list of names from `able`. Duplicates are removed.

    The returned function raises ArgumentTypeError for a name that is not in `able`.
    """

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in able:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(able)}")
        return list(dict.fromkeys(names))

    return parse


def positive_int(text: str) -> int:
    """Return `text` as an int of at least 1. Raises ArgumentTypeError."""
    return _whole(text, 1, 2**31 - 1)


def count(text: str) -> int:
    """Return `text` as an int of at least 0. Raises ArgumentTypeError."""
    return _whole(text, 0, 2**31 - 1)


def byte_count(text: str) -> int:
    """Return `text` as a number of bytes from 1 to 2**50. Raises ArgumentTypeError."""
    return _whole(text, 1, 2**50)


def seed(text: str) -> int:
    """Return `text` as a random seed from 0 to 2**63 - 1. Raises ArgumentTypeError."""
    return _whole(text, 0, 2**63 - 1)


def threads(text: str) -> int:
    """Return `text` as a number of threads from 1 to 1024. Raises ArgumentTypeError."""
    return _whole(text, 1, 1024)  # torch itself has no limit


def non_negative(text: str) -> float:
    """Return `text` as a float of at least 0. Raises ArgumentTypeError."""
    return _number(text, least=0.0, open_end=False)


def positive(text: str) -> float:
    """Return `text` as a float greater than 0. Raises ArgumentTypeError."""
    return _number(text, least=0.0, open_end=True)


def accuracy(text: str) -> float:
    """Return `text` as a float greater than 0 and at most 1. Raises ArgumentTypeError."""
    value = _number(text, least=0.0, open_end=True)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 1 (99 % is 0.99)")
    return value


def fraction(text: str) -> float:
    """Return `text` as a float of at least 0 and less than 1. Raises ArgumentTypeError."""
    value = _number(text, least=0.0, open_end=False)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0 and below 1")
    return value


def _whole(text: str, least: int, most: int) -> int:
    # int() also accepts 1_000, and raises a different error for more than 4,300 digits.
    value = int(text) if re.fullmatch("[+-]?[0-9]{1,4000}", text) else least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number of at least {least}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is more than {most}, the largest value allowed")
    return value


def _number(text: str, *, least: float, open_end: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (least < value if open_end else least <= value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {'above' if open_end else 'of at least'} {least:g}")
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {LARGEST:g}, the largest value allowed")
    return value
