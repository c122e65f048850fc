"""The parsed flags of a command, as the rest of the program gets them. cli.py has the parser. Does not import torch."""

import argparse
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from hvdtrain.engines.errors import UserError

URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")
# Flags that may change when a run is resumed: where and how it runs, its output, and when it ends early.
MAY_CHANGE = frozenset({
    *("check_steps", "checkpoint_steps", "compression", "deterministic", "device", "engine"),
    *("gradient_predivide_factor", "keep", "log_steps", "max_skipped", "mfu", "no_progress", "output_dir"),
    *("profile", "resume", "step_timeout", "tensorboard", "threads", "track", "tuning", "verbose", "weights", "evaluate"),
    *("predict", "mirror", "mirror_timeout", "find_non_finite"),
})  # fmt: skip
LARGE_GPU = 70 * 2**30  # bytes: of 80 GB and more
# Flags that --evaluate does not take from the run.
OF_TRAINING = frozenset({"compile", "target_accuracy", "virtual_ranks"})


class Flags(argparse.Namespace):
    """The parsed flags of `parser`.

    may_change: names of the flags that may change when a run is resumed. derived: names of the flags that were not given,
    and whose value follows from the number of ranks; it may differ when another number of ranks resumes.
    """

    def __init__(
        self, parser: argparse.ArgumentParser, words: Sequence[str] = (), may_change: frozenset[str] = MAY_CHANGE
    ):
        super().__init__()
        self._program, self._may_change, self._derived = parser.prog, may_change, frozenset[str]()
        self._parser, self._words = parser, words
        self._typed: dict[str, object] = {}
        self._engine_reason = ""
        self._on_large_gpus: dict[str, object] = {}
        self._amp_of_cpus = "off"

    def __getstate__(self) -> dict[str, object]:
        # Without the parser, whose types may be functions that cannot be sent to a data set's worker.
        return {name: value for name, value in vars(self).items() if name != "_parser"}

    @property
    def program(self) -> str:
        return self._program

    @property
    def may_change(self) -> frozenset[str]:
        return self._may_change

    @property
    def derived(self) -> frozenset[str]:
        return self._derived

    @property
    def typed(self) -> dict[str, object]:
        """The flags that name files, as they were given. They stay the same where a run is moved with its program."""
        return self._typed

    def were_given(self, name: str) -> bool:
        """Return whether the command has this flag."""
        return any(word.partition("=")[0] == f"--{name}" for word in self._words)

    @property
    def engine_reason(self) -> str:
        """Why --engine auto chose this engine; "" if the engine was named."""
        return self._engine_reason

    def derive(self, name: str, value: object) -> None:
        """Set a flag that was not given, from the number of ranks."""
        setattr(self, name, value)
        self._derived |= {name}

    def on_large_gpus(self, **values: object) -> None:
        """Set these flags, which were not given, where each rank has a GPU of at least LARGE_GPU bytes: `settle` does."""
        self._on_large_gpus = values

    @property
    def amp_of_cpus(self) -> str:
        """The --amp of CPUs, if none is given."""
        return self._amp_of_cpus

    def bf16_on_cpus(self) -> None:
        """Without --amp, compute in bf16 on CPUs that multiply it, too: of networks that were measured to be faster."""
        self._amp_of_cpus = "auto"

    def settle(self, gpu_bytes: int) -> None:
        """Set the flags that follow from the memory of the smallest GPU; 0: a rank has none."""
        vars(self).update(self._on_large_gpus if gpu_bytes >= LARGE_GPU else {})

    def adopt(self, config: Mapping[str, object]) -> None:
        """With --evaluate: set each flag that was not given to the value that it had in the run. Raises UserError.

        config: of its checkpoint. Where and how to compute is this command's choice.
        """
        theirs = {name: value for name, value in config.items() if name not in MAY_CHANGE | OF_TRAINING}
        mine = argparse.ArgumentParser.parse_args(self._parser, self._words, argparse.Namespace(**theirs))
        left = {name: value for name, value in theirs.items() if getattr(mine, name) is value}  # not given
        try:
            words = [*self._words_of(left), *self._words]
            # Without the lists that are in `words`, which action="extend" would make longer.
            in_words = {action.dest for action in self._parser._actions if action.nargs in ("*", "+")}
            others = {name: value for name, value in theirs.items() if name not in in_words or not value}
            parsed = argparse.ArgumentParser.parse_args(self._parser, words, argparse.Namespace(**others))
        except UserError as error:
            said = f"the checkpoint to evaluate has a flag that is not valid ({error})"
            raise UserError(f"{said}: name a run of this program, or give this flag", everywhere=True) from error
        absolute(parsed)
        for name in left.keys() & self.given().keys():
            setattr(self, name, getattr(parsed, name))

    def _words_of(self, config: Mapping[str, object]) -> list[str]:
        """Return the command line that gives the flags these values, as they are in records. It leaves out switches."""
        words, single = [], (None, "?")
        # Lists come first: the last one would take positional words that follow.
        for action in sorted(self._parser._actions, key=lambda action: action.nargs in single):
            value = config.get(action.dest)
            if not action.option_strings or isinstance(value, bool):
                continue
            if action.nargs in single and isinstance(value, (str, int, float)):
                words.append(f"{action.option_strings[0]}={value}")
            elif action.nargs in ("*", "+") and isinstance(value, list) and value:
                words += [action.option_strings[0], *map(str, value)]
        return words

    def given(self) -> dict[str, object]:
        """Return the flags by name, as stored in records and checkpoints: functions by their names, not their addresses."""
        held = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {name: value.__qualname__ if isinstance(value, FunctionType) else value for name, value in held.items()}

    def of_all_ranks(self) -> dict[str, str]:
        """Return the flags that must be the same on all ranks, as text."""
        # Paths may differ between hosts.
        given = self.given().items()
        return {name: str(plain(value)) for name, value in given if not names_files(value) and name != "data_dir"}


def as_text(value: object) -> str:
    """Return an object as text, without where it is in memory."""
    # An address in memory is another one in each process: ranks would differ, and a resumed run.
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def refused(value: object) -> None:
    """Raise ValueError for an object that JSON does not have."""
    raise ValueError(f"a {type(value).__name__}")


def plain(value: Any, other: Callable[[Any], object] = as_text) -> Any:
    """Return `value` as JSON that a later start of the same command has, too. Tuples, tensors and arrays become lists, sets
    sorted lists, paths text, and other objects what `other` makes of them."""
    if isinstance(value, (list, tuple)):
        return [plain(item, other) for item in value]
    if isinstance(value, (set, frozenset)):
        # A set has another order in each process.
        return sorted((plain(item, other) for item in value), key=repr)
    if isinstance(value, dict):
        return {str(key): plain(item, other) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist(), other)
    return str(value) if isinstance(value, Path) else other(value)


def alike(one: object, other: object) -> bool:
    """Return whether two values of `plain` are the same. NaN, which is not equal to itself, is."""
    return one == other or repr(one) == repr(other)


def expanded(path: Path) -> Path:
    """Return `path` with a leading ~ expanded, which the shell does not do in --data-dir=~/x."""
    with contextlib.suppress(RuntimeError):  # no such user
        return path.expanduser()
    return path


def absolute_path(path: Path) -> Path:
    """Return `path` made absolute."""
    return expanded(path).absolute()


def absolute(flags: argparse.Namespace, change: Callable[[Path], Path] = absolute_path) -> None:
    """Make the paths in `flags` absolute, because the program may change its working directory later; or `change` them."""
    for name, value in vars(flags).items():
        if isinstance(value, Path):
            setattr(flags, name, change(value))
        elif isinstance(value, list) and names_files(value):
            setattr(flags, name, [change(item) if isinstance(item, Path) else item for item in value])


def names_files(value: object) -> bool:
    """Return whether a flag's value is a path, or a list of paths."""
    return isinstance(value, Path) or (isinstance(value, list) and any(isinstance(item, Path) for item in value))


def is_url(text: object) -> bool:
    """Return whether a flag's value names a place for fsspec, such as s3://bucket/run, and not a path."""
    return isinstance(text, str) and URL.fullmatch(text) is not None
