"""A training script's main, run in this process on the serial engine, and what it computed with."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step
from tests.e2e import launchers


@dataclass
class Trained:
    """What a script did. Lists have an entry for each micro-batch or each step, in order."""

    out: Path | None
    code: int = -1
    run: Run | None = None
    model: nn.Module | None = None
    optimizer: Any = None
    before: dict[str, Tensor] = field(default_factory=dict)  # the weights that training began with
    inputs: list[Tensor] = field(default_factory=list)  # of the model in training, one for each micro-batch
    outputs: list[Tensor] = field(default_factory=list)
    tested: list[Tensor] = field(default_factory=list)  # the model's outputs in evaluations
    losses: list[float] = field(default_factory=list)  # given to step.backward
    rates: list[float] = field(default_factory=list)  # one for each step
    norms: list[float] = field(default_factory=list)  # of the gradients as they are applied, one for each step
    threads: int = 0

    def events(self, name: str) -> list[dict[str, Any]]:
        return launchers.events(self.out, name) if self.out else []

    @property
    def summary(self) -> dict[str, Any]:
        assert self.out is not None
        return launchers.summary(self.out)


def trained(script: ModuleType, flags: str, out: Path | None = None) -> Trained:
    """Run `script` with `flags` and return what it did."""
    seen, hooks = Trained(out), []
    prepare, backward, update = Run.prepare, Step.backward, Step.update

    def prepared(run: Run, *parts: Any, **options: Any) -> Any:
        ready = prepare(run, *parts, **options)
        seen.run, seen.model, seen.optimizer = run, parts[0], parts[-1]
        seen.threads = torch.get_num_threads()
        seen.before = {name: value.clone() for name, value in parts[0].state_dict().items()}
        hooks.append(parts[0].register_forward_hook(forwarded))
        return ready

    def forwarded(model: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not model.training:
            seen.tested.append(output.detach())
        elif torch.is_grad_enabled():
            seen.inputs.append(inputs[0].detach())
            seen.outputs.append(output.detach())

    def backwards(step: Step, loss: Tensor, *rest: Any, **options: Any) -> None:
        seen.losses.append(loss.item())
        backward(step, loss, *rest, **options)

    def updated(step: Step, *rest: Any, **options: Any) -> None:
        seen.rates.append(step.lr)
        real = seen.optimizer.step

        def stepped(*arguments: Any, **named: Any) -> Any:
            gradients = [p.grad for p in seen.model.parameters() if p.grad is not None]  # type: ignore[union-attr]
            seen.norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())
            return real(*arguments, **named)

        seen.optimizer.step = stepped
        try:
            update(step, *rest, **options)
        finally:
            del seen.optimizer.step

    threads = torch.get_num_threads()
    words = f"--engine serial --no-progress --threads 1 {flags}".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "prepare", prepared)
        patch.setattr(Step, "backward", backwards)
        patch.setattr(Step, "update", updated)
        patch.setattr(sys, "argv", [str(script.__file__), *words, *(["--output-dir", str(out)] if out else [])])
        try:
            seen.code = script.main()
        finally:
            torch.set_num_threads(threads)
            for hook in hooks:
                hook.remove()
    return seen
