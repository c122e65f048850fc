"""Handles unreadable images and shards: they are reported, counted over all ranks, and allowed up to a limit."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError, one_line

if TYPE_CHECKING:
    from hvdtrain.output.run_output import RunOutput

SAID_AT_ONCE = 10  # maximum number of lines printed at a time


class CorruptSample(NamedTuple):
    """An image or a shard that was skipped."""

    name: str
    why: str
    lost: int = 1  # samples


def why(error: Exception) -> str:
    """Return the message of an error as one line, without object addresses, so that it is the same on every rank."""
    message = getattr(error, "strerror", None) or str(error.args[0] if error.args else "")
    return message.partition("\n")[0].partition(" @ ")[0].partition(" <")[0] or type(error).__name__


class CorruptSamples:
    """The samples skipped so far, over all ranks. Each name counts once, even if it is skipped in several epochs."""

    def __init__(self, limit: float, samples: int):
        """limit: the number of samples that may be lost; if below 1, a fraction of `samples`."""
        self.limit = int(limit * samples) if limit < 1 else int(limit)
        self._known: dict[str, int] = {}  # samples lost, by name
        self._new: dict[str, CorruptSample] = {}

    def note(self, corrupt: list[CorruptSample]) -> None:
        """Note samples that this rank has skipped."""
        self._new |= {each.name: each for each in corrupt if self._known.get(each.name, 0) < each.lost}

    def total(self) -> int:
        """Return the number of lost samples, as of the last `settle`."""
        return sum(self._known.values())

    def settle(self, engine: Engine, output: "RunOutput") -> None:
        """Exchange and report new corrupt samples. A collective. Raises UserError on all ranks if the limit is exceeded."""
        if not engine.sum(torch.tensor([len(self._new)]), "corrupt.count").item():
            return
        met = [
            CorruptSample(*each)
            for mine in engine.all_gather_object(list(self._new.values()), "corrupt")
            for each in mine
        ]
        self._new.clear()
        found = {each.name: each for each in sorted(met, key=lambda each: each.lost)}  # of two reports the worse
        self._known |= {name: each.lost for name, each in found.items()}
        for number, each in enumerate(found.values()):
            output.event("corrupt", file=each.name, why=each.why, samples=each.lost)
            if number < SAID_AT_ONCE:
                output.say(one_line(f"skipped: {each.name}: {each.why}"))
        if len(found) > SAID_AT_ONCE:
            output.say(f"skipped: {len(found) - SAID_AT_ONCE:,} more, each named in metrics.jsonl")
        if self.total() > self.limit:
            first = next(iter(found.values()))
            message = f"{self.total():,} samples cannot be read, such as {first.name} ({first.why})"
            remedy = f"--max-corrupt allows {self.limit:,}: fix the data, or raise it"
            raise UserError(f"{message}: {remedy}", everywhere=True)
