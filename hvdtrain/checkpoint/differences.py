"""What differs between a run and the checkpoint that it continues from: flags, data, and what the program has chosen."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hvdtrain.checkpoint.contents import IMPLEMENTATION
from hvdtrain.flags import Flags, alike, plain
from hvdtrain.loop.optim import LENGTH_NAMES
from hvdtrain.loop.state import Initial

MOST_NAMED_DIFFERENCES = 3  # differences listed in one message
# In a scheduler's state, these change while it trains, and so do names that begin with _, except for CONSTANT.
POSITION, CONSTANT = {"base_lrs", "last_epoch"}, {"_schedulers", "_milestones"}
NAMES_OF_DATA = {"sha256": "the content of the data, or the order of its files, as SHA-256"}
LAYERS, MOST_SETTINGS = "layers", 20  # in `chosen_for`; values of one setting
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

    config, data: of this run, as `flags.plain` gives them.
    """
    began = Initial(**facts["initial"])
    unlike = other_flags(facts, flags, config, ranks)
    unlike.sort(key=lambda one: one.name != "--model")  # --model first: it may be the cause of the other differences
    unlike += [
        # Where nothing is said of the data, they have the program's name.
        Difference(
            "the program" if data.get(name) == flags.program else NAMES_OF_DATA.get(name, name), there, data.get(name)
        )
        for name, there in facts["data"].items()
        if not alike(there, data.get(name))
    ]
    if flags.reduction != "average" and began.ranks != ranks:
        unlike.append(Difference("the number of ranks, on which this --reduction depends", began.ranks, ranks))
    return unlike


def other_flags(facts: Mapping[str, Any], flags: Flags, config: Mapping[str, object], ranks: int) -> list[Difference]:
    """Return the flags that differ, and should not."""
    theirs, began = facts["config"], Initial(**facts["initial"])
    allowed = {*flags.may_change, *LENGTHS}
    # The same global batch, divided differently: the user has adapted --batch-size to the new number of ranks.
    if Initial(ranks, flags.batch_size, flags.accumulate).global_batch == began.global_batch:
        allowed |= {"batch_size", "accumulate"}
    if began.ranks != ranks:
        allowed |= flags.derived
    typed = facts.get("typed", {})
    # The same words name the same files, wherever the run and its program were moved.
    allowed |= {name for name, here in flags.typed.items() if typed.get(name) == plain(here)}
    return [
        Difference(f"--{name.replace('_', '-')}", theirs[name], mine)
        for name, mine in config.items()
        if name not in allowed and not alike(theirs.get(name, mine), mine)
    ]


def other_lengths(facts: Mapping[str, Any], config: Mapping[str, object]) -> list[Difference]:
    """Return the flags for the length of training that differ from the checkpoint's."""
    theirs = facts["config"]
    return [
        Difference(f"--{name}", theirs[name], config[name])
        for name in LENGTHS
        if name in theirs and name in config and theirs[name] != config[name]
    ]


def chosen_for(
    optimizers: Sequence[torch.optim.Optimizer], registered: Mapping[str, Any], models: Sequence[nn.Module] = ()
) -> dict[str, Any]:
    """Return what the program has chosen for optimizers, schedulers and layers, such as rates, as JSON. Call it before a
    checkpoint or a step changes them."""
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    chosen: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        name = kinds[number] if kinds.count(kinds[number]) == 1 else f"{kinds[number]} {number}"
        left_out = {"params", "param_names", *IMPLEMENTATION}
        groups = [
            {key: setting_as_json(value) for key, value in group.items() if key not in left_out}
            for group in optimizer.param_groups
        ]
        chosen[name] = groups[0] if len(groups) == 1 else groups
    for name, what in registered.items():
        if isinstance(what, lr_scheduler.LRScheduler):
            chosen[name] = setting_as_json(what.state_dict())
    return chosen | ({LAYERS: settings_of_layers(models)} if models else {})


def settings_of_layers(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the settings of torch's own layers, such as `Dropout.p`: all values that layers of a kind have."""
    found = dict[str, list[Any]]()
    for layer in (
        layer for model in models for layer in model.modules() if type(layer).__module__.startswith("torch.nn.")
    ):
        for name, value in vars(layer).items():
            # Shapes are compared when weights are loaded. A mode is no setting.
            if name != "training" and not name.startswith("_") and isinstance(value, (bool, int, float, str, tuple)):
                values = found.setdefault(f"{type(layer).__name__}.{name}", [])
                if (held := setting_as_json(value)) not in values and len(values) < MOST_SETTINGS:
                    values.append(held)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def setting_as_json(value: Any) -> Any:
    """Return a setting as JSON; of other objects, the name of the class. Without what depends on the position."""
    if isinstance(value, dict):
        chosen = {str(k): v for k, v in value.items() if k in CONSTANT or not (k in POSITION or str(k).startswith("_"))}
        return {key: setting_as_json(item) for key, item in chosen.items()}
    if isinstance(value, (list, tuple)):
        return [setting_as_json(item) for item in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def other_choices(there: Any, here: Any, name: str = "") -> Iterator[Difference]:
    """Yield where two values of `chosen_for` differ. Numbers are equal that float32 does not tell apart."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in (key for key in there if key in here):  # another version of torch may have more
            yield from other_choices(there[key], here[key], f"{name} {key}".strip())
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, pair in enumerate(zip(there, here, strict=True)):
            yield from other_choices(*pair, f"{name} {number}")
    else:
        numbers = isinstance(there, (int, float)) and isinstance(here, (int, float))
        # Settings that went through float32 tensors come back with 7 digits.
        if not (alike(there, here) or (numbers and math.isclose(there, here, rel_tol=1e-6))):
            yield Difference(name, there, here)


def differences_in_words(unlike: list[Difference]) -> str:
    """Return the first differences as a clause, and the number of the others: there may be a thousand shards."""
    message = "; ".join(
        f"{name}: {there} in the checkpoint, {here} now" for name, there, here in unlike[:MOST_NAMED_DIFFERENCES]
    )
    return message + (
        f"; and {len(unlike) - MOST_NAMED_DIFFERENCES:,} more" if len(unlike) > MOST_NAMED_DIFFERENCES else ""
    )


def has_real(value: object) -> bool:
    """Return whether a flag's value is a real number, or has one: it may be a setting of an optimizer, and is no shape."""
    return any(map(has_real, value)) if isinstance(value, list) else isinstance(value, float)


def is_of(flag: Difference, setting: Difference) -> bool:
    """Return whether the program has made the setting of an optimizer or scheduler from the flag."""
    return flag[1:] == setting[1:] or flag.name.strip("-").replace("-", "_") in setting.name.split()


def is_length(one: Difference) -> bool:
    """Return whether schedulers differ in their length."""
    return any(word in LENGTH_NAMES for word in one.name.split())
