"""`hvdtrain NAME` is the same as `python -m hvdtrain.NAME`, for each of the commands below.

Before the command, it imports nothing but what `python -m` imports, too: it starts as fast as the module.
"""

import contextlib
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

# By purpose; the first line of each module's docstring says what it does.
COMMANDS = {
    "Train": ("mnist", "imagenet", "lm"),
    "Start": ("starter", "tuned"),
    "Look at a machine or a run": ("doctor", "audit", "report", "benchmark", "reduce", "checkpoint.verify"),
    "Use the result, prepare the data": ("export", "datasets.make_shards", "unpack"),
}
BASH = """_hvdtrain() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    case "${{COMP_WORDS[1]}} $before" in
{choices}
    esac
    [[ -z $words && $current == -* ]] && case "${{COMP_WORDS[1]}}" in
{flags}
    esac
    [[ $COMP_CWORD == 1 ]] && words="{names}"
    COMPREPLY=($(compgen ${{words:+-W}} "${{words:--f}}" -- "$current"))
}}
complete -o filenames -F _hvdtrain hvdtrain
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def source_of(name: str) -> Path:
    """Return the file that says what a command does."""
    path = Path(__file__).parent.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")


def by_purpose() -> dict[str, list[str]]:
    """Return the names of the commands that there are."""
    return {purpose: [name for name in names if source_of(name).exists()] for purpose, names in COMMANDS.items()}


def help_text() -> str:
    """Return what --help prints."""
    parts = ["hvdtrain NAME [FLAGS]: the same as python -m hvdtrain.NAME. hvdtrain NAME --help lists its flags."]
    for purpose, names in by_purpose().items():
        parts.append(f"\n{purpose}:")
        for name in names:
            with source_of(name).open(encoding="utf-8") as file:
                parts.append(f"  {name:<21} {file.readline().strip().strip(chr(34))}")
    parts.append("\n--version: which one this is. --completion bash, or zsh: what the shell needs, for eval or a file.")
    return "\n".join(parts)


def parser_of(name: str) -> "argparse.ArgumentParser":
    """Return the parser that `parse` of the command's module makes, as it is when it parses."""
    import argparse
    import importlib
    from unittest import mock

    class Reached(Exception):
        """The parser has all its flags."""

    made: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        made.append(parser)
        raise Reached

    # `parse` makes its parser by itself. It is caught where that begins to parse, with all its flags.
    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        try:
            importlib.import_module(f"hvdtrain.{name}").parse([])
        except Reached:
            return made[0]
    raise AssertionError(f"{name} parses nothing")


def completion(shell: str) -> str:
    """Return a script for bash or zsh that completes names, flags and choices, from the parsers of all commands."""
    names = [name for names in by_purpose().values() for name in names]
    flags, choices = [], []
    for name in names:
        actions = [action for action in parser_of(name)._actions if action.help != "==SUPPRESS=="]
        known = " ".join(flag for action in actions for flag in action.option_strings)
        flags.append(f'        {name}) words="{known}" ;;')
        for action in actions:
            if action.option_strings and action.choices:
                keys = " | ".join(f'"{name} {flag}"' for flag in action.option_strings)
                choices.append(f'        {keys}) words="{" ".join(map(str, action.choices))}" ;;')
    text = BASH.format(names=" ".join(names), flags="\n".join(flags), choices="\n".join(choices))
    return ZSH + text if shell == "zsh" else text


def main() -> int:
    """Run a command, in this process. Return the exit code where there is none."""
    words = sys.argv[1:] or ["--help"]
    if any(words[0] in names for names in by_purpose().values()):
        del sys.argv[0]
        with contextlib.suppress(OSError):  # it was removed: the command says so
            sys.path[0] = sys.path[0] if sys.flags.safe_path else str(Path.cwd())  # as by `python -m`
        runpy.run_module(f"hvdtrain.{words[0]}", run_name="__main__", alter_sys=True)
        return 0
    from hvdtrain import __version__
    from hvdtrain.engines.errors import UserError
    from hvdtrain.engines.lines import say
    from hvdtrain.launching import exit_codes

    sys.argv[0] = "hvdtrain"
    if words in (["--help"], ["-h"]):
        say(help_text())
    elif words == ["--version"]:
        say(__version__)
    elif words in (["--completion", "bash"], ["--completion", "zsh"]):
        say(completion(words[1]).rstrip())
    else:
        exit_codes.end_with(UserError(f"{words[0]} is not a command: --help lists them", everywhere=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
