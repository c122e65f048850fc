"""Write docs/reference/flags.md and api.md from the source: python docs/site/reference.py. A test compares them."""

import argparse
import importlib
import re
import sys
from pathlib import Path

from hvdtrain import cli
from hvdtrain.__main__ import parser_of

PAGES = Path(__file__).resolve().parents[1] / "reference"
COMMANDS = ("mnist", "imagenet", "lm", "benchmark", "reduce", "report", "doctor", "export")
COMMANDS += ("starter", "tuned", "audit", "unpack", "datasets.make_shards", "checkpoint.verify")
SAME = "`--help` prints the same. A number after `=` is the default. Paths may begin with `~`.\n"
MADE = "Made from the source by `python docs/site/reference.py`.\n"


def flags_of(parser: argparse.ArgumentParser, recipes: cli.Recipes | None = None) -> dict[str, tuple[str, str]]:
    """Return the default and the help text of each flag, by how it is written. recipes: give some of the defaults."""
    flags = {}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        name = ", ".join(action.option_strings) or action.metavar or action.dest
        if action.choices:
            name += f"={{{','.join(map(str, action.choices))}}}"
        elif action.option_strings and action.nargs != 0:
            name += f"{'=' if action.nargs is None else ' '}{action.metavar or action.dest.upper()}"
        text = (action.help or "").replace("%%", "%")
        said = re.search(r" ?\(?default: ([^()]*(?:\([^()]*\))?[^()]*)\)?", text)
        text = text.replace(said[0], "") if said else text
        default = "" if action.default in (None, False, argparse.SUPPRESS) else str(action.default)
        chosen = {
            recipe: str(values[action.dest])
            for recipe, values in (recipes or {}).items()
            if values.get(action.dest) is not None
        }
        by_recipe = [f"{recipe}: {value}" for recipe, value in chosen.items()]
        if chosen.keys() == (recipes or {}).keys() and len(set(chosen.values())) == 1:
            by_recipe = [*set(chosen.values())]
        default = said[1].strip() if said else default or "; ".join(by_recipe)
        flags[str(name)] = (default, text.strip().removesuffix(";"))
    return flags


def listed(flags: dict[str, tuple[str, str]]) -> str:
    """Return a line for each flag. A number that is the default stands in place of the value's name."""
    rows = []
    for name, (default, text) in flags.items():
        flag, _, value = name.rpartition("=")
        if re.fullmatch(r"[\d.e-]+", default) and value.isidentifier() and value not in text.split():
            rows.append(f"- `{flag}={default}`: {text}\n")
        else:
            rows.append(f"- `{name}`: {text}{f' (default: {default})' if default else ''}\n")
    return "".join(rows)


def flags_page() -> str:
    common = flags_of(cli.training_parser("program", None))
    parts = [
        "# Flags\n",
        MADE,
        SAME,
        "## Every training run\n",
    ]
    parts += ["Of `mnist`, `imagenet`, `lm` and of programs with `training.parser`.\n", listed(common)]
    for command in COMMANDS:
        flags = flags_of(parser_of(command), getattr(importlib.import_module(f"hvdtrain.{command}"), "RECIPES", None))
        parts.append(f"## hvdtrain.{command}\n")
        own = {name: said for name, said in flags.items() if common.get(name) != said}
        if "--accumulate" in " ".join(flags):
            parts.append("Beside those of [every training run](#every-training-run):\n")
        elif shared := [f"`{re.split('[=,]', name)[0]}`" for name in flags if name not in own]:
            parts.append(f"As for [every training run](#every-training-run): {', '.join(shared)}. Also:\n")
        parts.append(listed(own))
    return "\n".join(parts)


def main() -> int:
    import api  # beside this file

    (PAGES / "flags.md").write_text(flags_page())
    (PAGES / "api.md").write_text(api.page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
