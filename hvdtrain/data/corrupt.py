"""Images and shards that cannot be read: named, counted over all ranks, and allowed up to a limit."""

from typing import NamedTuple, Protocol

import torch

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError

SAID_AT_ONCE = 10  # lines


class Telemetry(Protocol):
    """What is asked of the run's telemetry here."""

    def event(self, name: str, **fields: object) -> None:
        """Record an event."""

    def say(self, line: str) -> None:
        """Print a line on rank 0."""


class CorruptSample(NamedTuple):
    """An image or a shard that was skipped."""

    name: str
    why: str
    lost: int = 1  # samples


def why(error: Exception) -> str:
    """Return what an error says, in one line and without addresses of objects, so that every rank says the same."""
    said = getattr(error, "strerror", None) or str(error.args[0] if error.args else "")
    return said.partition("\n")[0].partition(" @ ")[0].partition(" <")[0] or type(error).__name__


class CorruptSamples:
    """What was skipped so far, over all ranks, by name: an image met in each of ten epochs is one corrupt image."""

    def __init__(self, limit: float, samples: int):
        """limit: below 1 a share of `samples`, else how many samples may be lost."""
        self.limit = int(limit * samples) if limit < 1 else int(limit)
        self._known: dict[str, int] = {}  # samples lost, by name
        self._new: dict[str, CorruptSample] = {}

    def note(self, corrupt: list[CorruptSample]) -> None:
        """Remember what this rank met."""
        self._new |= {each.name: each for each in corrupt if self._known.get(each.name, 0) < each.lost}

    def total(self) -> int:
        """Return how many samples are lost, as of the last `settle`."""
        return sum(self._known.values())

    def settle(self, engine: Engine, telemetry: Telemetry) -> None:
        """Tell what ranks met since the last call. A collective. Raises UserError, on all ranks, over the limit."""
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
            telemetry.event("corrupt", file=each.name, why=each.why, samples=each.lost)
            if number < SAID_AT_ONCE:
                telemetry.say(f"skipped: {each.name}: {each.why}")
        if len(found) > SAID_AT_ONCE:
            telemetry.say(f"skipped: {len(found) - SAID_AT_ONCE:,} more, each named in metrics.jsonl")
        if self.total() > self.limit:
            first = next(iter(found.values()))
            said = f"{self.total():,} samples cannot be read, such as {first.name} ({first.why})"
            how = f"--max-corrupt allows {self.limit:,}: fix the data, or raise it"
            raise UserError(f"{said}: {how}", everywhere=True)
