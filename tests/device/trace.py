"""Run a training script on the stand-in accelerator, and print what its quiet steps made the host do (stand_in.py).

python -m tests.device.trace hvdtrain.mnist --dataset digits --epochs 1
python -m tests.device.trace docs/programs/gan.py --epochs 1
"""

import importlib
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.device import stand_in
from tests.device.streams import state

KINDS = ("read", "wait", "pageable", "late", "pinned", "out")


class Trace(NamedTuple):
    """What was noted in a run."""

    code: int  # the exit code
    error: str  # how the run has ended, if by a Failure
    steps: list[int]
    quiet: list[int]  # the steps that neither log nor save; without the first two
    noted: Counter[tuple[int, str, str]]

    def per_step(self) -> dict[str, int]:
        """Return the number of each kind in the quiet step that has the most of it."""
        found = {}
        for kind in KINDS:
            counts = Counter(dict.fromkeys(self.quiet, 0))
            for (step, other, _), count in self.noted.items():
                if other == kind and step in counts:
                    counts[step] += count
            found[kind] = max(counts.values(), default=0)
        return {kind: count for kind, count in found.items() if count}

    def lines(self) -> list[str]:
        """Return what quiet steps did, by kind and line."""
        by_line: Counter[tuple[str, str]] = Counter()
        for (step, kind, line), count in self.noted.items():
            if step in self.quiet:
                by_line[kind, line] += count
        return [
            f"{count / len(self.quiet):6.2f} a step  {kind:8} {line}" for (kind, line), count in sorted(by_line.items())
        ]


def load(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def traced(script: str, flags: Sequence[str]) -> Trace:
    """Run a script in this process, on the stand-in. `stand_in.install` must have been called."""
    from hvdtrain.checkpoint import contents
    from hvdtrain.checkpoint.saving import Checkpoints
    from hvdtrain.engines import portable, single
    from hvdtrain.engines.errors import Failure
    from hvdtrain.loop import run as loops
    from hvdtrain.loop.step import Step
    from hvdtrain.output import clock

    clock.SIDES[stand_in.NAME] = 64
    portable.TENSOR_TYPES.add(stand_in.OnDevice)
    stand_in.ledger.noted.clear()
    state.step = 0
    steps: dict[int, bool] = {}

    class Noted(Step):
        def __init__(self, *arguments: Any, **named: Any):
            super().__init__(*arguments, **named)
            state.step = self.number
            steps[state.step] = self.logged

    save, snapshot = Checkpoints.save, contents.snapshot

    def arrived(*arguments: Any) -> dict[str, Tensor]:
        copies = snapshot(*arguments)
        for copy in copies.values():
            stand_in.memory.require_arrived(copy)  # another thread writes them, which the dispatch mode does not see
        return copies

    def saved(*arguments: Any, **named: Any) -> None:
        steps[state.step] = True
        save(*arguments, **named)

    module = load(script)
    before = single.SerialEngine.choose_device, loops.Step, sys.argv
    single.SerialEngine.choose_device = lambda engine, wanted: torch.device(stand_in.NAME, 0)  # type: ignore[method-assign]
    loops.Step, Checkpoints.save, contents.snapshot = Noted, saved, arrived  # type: ignore[misc,method-assign]
    sys.argv = [script, "--engine", "serial", "--no-progress", "--threads", "1", *flags]
    code, error = 1, ""
    try:
        with stand_in.Mode():
            code = module.main()
    except Failure as failure:
        error = str(failure)
    finally:
        single.SerialEngine.choose_device, loops.Step, sys.argv = before  # type: ignore[method-assign,misc]
        Checkpoints.save, contents.snapshot = save, snapshot  # type: ignore[method-assign]
    if unrecorded := stand_in.memory.unrecorded():
        raise RuntimeError(f"memory of another stream, without record_stream: {', '.join(unrecorded)}")
    numbers = sorted(steps)
    quiet = [step for step in numbers[2:] if not steps[step]]
    return Trace(code, error, numbers, quiet, stand_in.ledger.noted.copy())


def main() -> None:
    stand_in.install()
    if sys.argv[1] == "--all":  # the runs as JSON: [[script, flags], ...]; prints a line of JSON for each
        for script, flags in json.loads(sys.argv[2]):
            found = traced(script, flags)
            row = [found.code, found.error, len(found.steps), len(found.quiet), found.per_step(), found.lines()]
            print("TRACE", json.dumps(row))
        return
    found = traced(sys.argv[1], sys.argv[2:])
    print(*found.lines(), sep="\n")
    print(f"exit code {found.code}; {len(found.quiet)} of {len(found.steps)} steps are quiet")
    print(f"in one at most {found.per_step()}")


if __name__ == "__main__":
    main()
