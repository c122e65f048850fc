"""The text of docs/reference/api.md: names, signatures and docstrings of what a program imports. reference.py writes it."""

import importlib
import inspect
import re
import textwrap
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from typing import Any

HEAD = """# API

What a training program of your own imports: `from hvdtrain import training`. [Training](../training.md) shows them in use.
"A collective" is a call that every rank must make. Made from the docstrings by `python docs/site/reference.py`.
"""
SHORT = "Types of flags"  # a line for each
FLAGS = "For `parser.add_argument(..., type=training.positive)`: each refuses what does not fit, in one line."
# What a script uses of a run, in the order in which it does. Features and evaluations use more.
RUN = (
    "output_dir", "say", "event", "heartbeat", "alone", "raising_together", "to_device", "autocast", "describe_data",
    "prepare", "register", "progress", "epochs_done", "best", "epochs", "total_steps", "gather", "steps", "evaluating",
    "predict", "evaluation", "record", "end_epoch", "stop", "load_best", "export", "summary",
)  # fmt: skip
# Collectives for a program's own values. Those who write an engine read hvdtrain/engines/base.py.
ENGINE = (
    "all_reduce_", "all_gather", "broadcast_", "sum", "barrier", "all_gather_object", "broadcast_object", "require_equal",
)  # fmt: skip
CREATED = {"Metric", "exact_loader"}  # the classes that programs create themselves: of others, how to is not shown
# Section -> (what it says first, name of each function or class -> members).
SECTIONS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "Starting": ("", {
        "hvdtrain.training.parser": (), "hvdtrain.cli.Parser": ("may_change_on_resume", "parse"),
        "hvdtrain.training.start": (), "hvdtrain.training.main": (),
    }),
    "The run": ("", {"hvdtrain.training.Run": RUN}),
    "A step": ("", {
        "hvdtrain.loop.step.Step": ("lr", "batch", "batches", "backward", "per_sample", "loss", "update", "record"),
        "hvdtrain.inputs.inputs.Batch": (),
    }),
    "State and metrics": ("", {
        "hvdtrain.training.Metric": (), "hvdtrain.loop.state.TrainState": (),
        "hvdtrain.loop.state.Initial": ("global_batch",),
    }),
    "Learning rates": ("", {"hvdtrain.loop.optim.schedule_factor": ()}),
    SHORT: (FLAGS, {
        f"hvdtrain.training.{name}": () for name in ("count", "fraction", "non_negative", "positive", "positive_int")
    }),
    "A loop of your own": ("With [any trainer](../loader.md).", {
        "hvdtrain.loader.exact_loader": ("state_dict", "load_state_dict", "set_epoch", "seed_generators"),
    }),
    "Errors": ("", {"hvdtrain.training.UserError": (), "hvdtrain.training.Failure": ()}),
    "Collectives of your own": ("An `Engine` is `run.engine`.", {"hvdtrain.engines.base.Engine": ENGINE}),
}  # fmt: skip


def resolve(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def signature(name: str, what: Any) -> str:
    """Return `what` as it is called, without `self` and the modules of types."""
    if isinstance(what, property) or not callable(what):
        return name
    try:
        said = str(inspect.signature(what))
    except ValueError:
        return name
    said = said.removesuffix(" -> None")
    said = re.sub(r"\((?:self|cls)(?:, )?", "(", said, count=1)
    return name + re.sub(r"\b(?:\w+\.)+(?=[A-Z]\w*)", "", said.replace("'", ""))


def entry(name: str, shown: str, what: Any) -> str:
    text = inspect.cleandoc(getattr(what, "__doc__", None) or "")
    created = not inspect.isclass(what) or shown in CREATED  # of other classes, the heading has the name
    fields = [] if created or not is_dataclass(what) else [field.name for field in dataclass_fields(what)]
    fields = fields or list(getattr(what, "_fields", ()))  # of a NamedTuple
    attributes = f"Attributes: {', '.join(fields)}." if fields else ""
    inside = "\n\n".join(part for part in (signature(shown, what) if created else "", text, attributes) if part)
    return f'<a id="{name}"></a>\n\n{textwrap.indent(inside, "    ")}\n'


def line(name: str, last: str, what: Any) -> str:
    text = " ".join(inspect.cleandoc(what.__doc__).split()).removesuffix(" Raises ArgumentTypeError.")
    return f'- <a id="{name}"></a>`{last}`: {text.removeprefix("Return `text` as ")}'


def page() -> str:
    parts = [HEAD]
    for section, (said, names) in SECTIONS.items():
        parts += [f"## {section}\n", *([f"{said}\n"] if said else [])]
        if section == SHORT:
            parts.append("\n".join(line(name, name.rpartition(".")[2], resolve(name)) for name in names) + "\n")
            continue
        for name, members in names.items():
            what, last = resolve(name), name.rpartition(".")[2]
            parts.append(f"### {name.removeprefix('hvdtrain.')}\n")
            parts.append(entry(name, last, what))
            for member in members:
                held = inspect.getattr_static(what, member)
                held = held if isinstance(held, property) else getattr(what, member)
                parts.append(entry(f"{name}.{member}", f"{last}.{member}", held))
    return "\n".join(parts)
