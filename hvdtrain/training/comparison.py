"""Compares a run with the checkpoint that it continues from: flags, data and the number of ranks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from hvdtrain.cli import Flags
from hvdtrain.training.contents import plain
from hvdtrain.training.state import Initial

MOST_NAMED = 3  # differences listed in one message
LENGTHS = ("epochs", "steps")  # flags for the length of training, which may change


class Difference(NamedTuple):
    """A value that differs. name: as the user knows it."""

    name: str
    there: object  # in the checkpoint
    here: object


def differences(
    facts: Mapping[str, Any], flags: Flags, config: Mapping[str, object], data: Mapping[str, object], ranks: int
) -> list[Difference]:
    """Return what differs between the checkpoint's facts and this run, and would change the result.

    config, data: of this run, as `contents.plain` gives them.
    """
    theirs, began = facts["config"], Initial(**facts["initial"])
    now = Initial(ranks, flags.batch_size, flags.accumulate)
    unlike = []
    for name, mine in config.items():
        if name in flags.may_change or name in LENGTHS or theirs.get(name, mine) == mine:
            continue
        # The same global batch, divided differently: the user has adapted --batch-size to the new number of ranks.
        if now.global_batch == began.global_batch and name in ("batch_size", "accumulate"):
            continue
        if name in flags.derived and began.ranks != ranks:
            continue
        if name in flags.typed and facts.get("typed", {}).get(name) == plain(flags.typed[name]):
            continue
        unlike.append(Difference(f"--{name.replace('_', '-')}", theirs[name], mine))
    unlike.sort(key=lambda one: one.name != "--model")  # --model first: it may be the cause of the other differences
    unlike += [
        Difference(name, there, data.get(name)) for name, there in facts["data"].items() if there != data.get(name)
    ]
    if flags.reduction != "average" and began.ranks != ranks:
        unlike.append(Difference("the number of ranks, on which this --reduction depends", began.ranks, ranks))
    return unlike


def other_lengths(facts: Mapping[str, Any], config: Mapping[str, object]) -> list[Difference]:
    """Return the flags for the length of training that differ from the checkpoint's."""
    theirs = facts["config"]
    return [
        Difference(f"--{name}", theirs[name], config[name])
        for name in LENGTHS
        if name in theirs and name in config and theirs[name] != config[name]
    ]


def in_words(unlike: list[Difference]) -> str:
    """Return the first differences as a clause, and the number of the others: there may be a thousand shards."""
    said = "; ".join(f"{name}: {there} in the checkpoint, {here} now" for name, there, here in unlike[:MOST_NAMED])
    return said + (f"; and {len(unlike) - MOST_NAMED:,} more" if len(unlike) > MOST_NAMED else "")
