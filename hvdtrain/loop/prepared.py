"""The models and optimizers of a run as `run.prepare` has wrapped them, for its steps. prepare.py makes it."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import named_parameters

PARAMETER_ADDED = (
    "a parameter was added to an optimizer after run.prepare(): create the optimizer with all of its parameters, and freeze "
    "those that are trained later (requires_grad_(False), then requires_grad_())"
)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Prepared:
    """The prepared models and optimizers.

    engine: averages the gradients in a step. models: as the script has created them, for checkpoints and hashes. replicas:
    the same, for training. optimizers: wrapped. named: parameters with their names, in the order of the models.
    zero_for_missing: a parameter may lack a gradient, which counts as zero.
    """

    def __init__(
        self, engine: Engine, models: list[nn.Module], replicas: list[nn.Module],
        optimizers: list[torch.optim.Optimizer], scaler: torch.amp.GradScaler,
        named: Sequence[tuple[str, nn.Parameter]], *, zero_for_missing: bool,
    ):  # fmt: skip
        self.engine = engine
        self.models, self.replicas, self.optimizers, self.scaler = models, replicas, optimizers, scaler
        self._names = {parameter: name for name, parameter in named}
        # In the order of `named`. Some may be frozen (`requires_grad`) now, or later, or for a part of a step.
        self.trained: dict[torch.optim.Optimizer, list[nn.Parameter]] = {}
        for optimizer in optimizers:
            own = set(parameters_of(optimizer))
            self.trained[optimizer] = [p for _, p in named if p in own]
        self.dense: set[torch.optim.Optimizer] = set()  # those that have passed `require_dense` after a backward pass
        self.pending: set[torch.optim.Optimizer] = set()  # those with gradients of this step that are not applied yet
        self.updating = False  # whether `step.update` calls the optimizers
        self.zero_grads = {one: one.zero_grad for one in optimizers}
        self._zero_for_missing = zero_for_missing
        # Where ranks have other weights within an epoch: a context in which they have those that all share.
        self.weights_of_all: Callable[[], contextlib.AbstractContextManager[None]] | None = None

    def require_same_parameters(self) -> None:
        """Raise UserError for a parameter that was added to an optimizer after `prepare`, whose gradient would not be
        reduced, or that a model has no longer: the optimizer would go on with it."""
        now = {parameter for _, parameter in named_parameters(self.models)}
        if lost := [name for parameter, name in self._names.items() if parameter not in now]:
            remedy = "replace layers before run.prepare(), or copy_() other weights into them"
            raise UserError(f"the model has lost {lost[0]}, which run.prepare() was given: {remedy}")
        for optimizer, trained in self.trained.items():
            if not set(trained).issuperset(parameters_of(optimizer)):
                raise UserError(PARAMETER_ADDED)

    def require_dense(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UserError if a gradient is sparse, as of F.embedding(..., sparse=True) with a parameter of the script."""
        for parameter in self.trained[optimizer]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                remedy = "leave sparse=True out"
                raise UserError(f"{self._names[parameter]} has sparse gradients, which are not reduced: {remedy}")

    def own(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return `optimizer`. Raises UserError if it was not returned by `run.prepare`."""
        if optimizer not in self.trained:
            raise UserError("this optimizer did not come from run.prepare(): use the one that it returned")
        return optimizer

    def in_order_of(self, parts: Sequence[Any]) -> Any:
        """Return the wrapped objects in the order of `parts`: a single object, or a tuple."""
        of_models, of_optimizers = iter(self.replicas), iter(self.optimizers)
        ready = tuple(next(of_models) if isinstance(part, nn.Module) else next(of_optimizers) for part in parts)
        return ready[0] if len(ready) == 1 else ready

    def named(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[str, nn.Parameter]]:
        """Return the trainable parameters of `optimizers` with their names."""
        return [(self._names[p], p) for one in optimizers for p in self.trained[one] if p.requires_grad]

    def missing_gradients(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the names of the parameters that got no gradient and are not frozen. Raises UserError if the engine cannot
        signal that to other ranks."""
        missing = [self._names[p] for p in self.trained[optimizer] if p.grad is None and p.requires_grad]
        signals = self.engine.tells_missing_gradients and self.engine.size > 1
        if missing and not self._zero_for_missing and not signals:
            self.require_same_parameters()
            raise UserError(self._about_missing(missing))
        return missing

    def raise_where_gradients_are_missing(self, missing: list[str]) -> None:
        """Raise UserError on every rank of the engine if any of them has parameters without a gradient. A collective.

        missing: this rank's.
        """
        if self._zero_for_missing:
            return
        of_each_rank = self.engine.all_gather_object(missing, "missing_gradients")
        for rank, names in zip(self.engine.ranks(), of_each_rank, strict=True):
            if names:
                raise UserError(f"rank {rank}: {self._about_missing(names)}", everywhere=self.engine.of_all_ranks)

    @staticmethod
    def _about_missing(names: list[str]) -> str:
        return (
            f"{names[0]} got no gradient in this step: freeze it (requires_grad_(False)), or if this is intended, "
            "run.prepare(..., find_unused_parameters=True)"
        )
