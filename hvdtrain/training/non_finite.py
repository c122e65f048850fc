"""Finds the first non-finite tensor in a rank's forward and backward pass, by computing a step again."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hvdtrain.training.names import own_name, prefixes


class Inspection:
    """Inspects all tensors while the micro-batches of a step are computed again. Gradients are not changed."""

    def __init__(self, models: Sequence[nn.Module], losses_were_finite: bool, *, same_weights: bool = True):
        """models: without wrappers. losses_were_finite: whether this rank's losses were finite the first time. same_weights:
        whether all weights are those of the first time."""
        self.models = models
        self._same_weights = same_weights
        self._losses_were_finite = losses_were_finite
        self._found: str | None = None
        self._where = ""

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Context manager that inspects the inputs and outputs of every layer."""
        handles = []
        for prefix, model in zip(prefixes(self.models), self.models, strict=True):
            leaves = [(own_name(name), layer) for name, layer in model.named_modules() if not list(layer.children())]
            for name, module in leaves:
                label = f"{prefix}{name}" if name else f"{prefix}{type(module).__name__}"
                handles.append(module.register_forward_hook(self._hook(label)))
        # A compiled model does not call hooks that were added later, so run eagerly (set_stance: torch 2.6 and newer).
        stance = getattr(torch.compiler, "set_stance", None)
        try:
            with stance("force_eager") if stance is not None else contextlib.nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def micro_batch(self, number: int, count: int) -> None:
        """Set the current micro-batch: `number` (from 0) of `count`."""
        self._where = f" in micro-batch {number + 1} of {count}" if count > 1 else ""

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def look(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            kind = type(module).__name__
            self._look(f"input of {name} ({kind})", inputs)
            self._look(f"output of {name} ({kind})", output)

        return look

    def _look(self, what: str, values: object) -> None:
        if self._found is not None:
            return
        if isinstance(values, Tensor):
            if not bool(values.detach().isfinite().all()):
                self._found = f"{what}{self._where}"
        elif isinstance(values, dict):
            self._look(what, list(values.values()))
        elif isinstance(values, (list, tuple)):
            for value in values:
                self._look(what, value)

    def backward(self, loss: Tensor, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Inspect the loss, and the gradients of `named` from the last layer to the first."""
        self._look("the loss", loss)
        if self._found is not None:
            return
        gradients = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
        for (name, _), gradient in reversed(list(zip(named, gradients, strict=True))):
            self._look(f"gradient of {name}", gradient)

    def result(self) -> str | None:
        """Return the first non-finite tensor on this rank; None if all tensors were finite, now and the first time."""
        if self._found is None and not self._losses_were_finite:
            if not self._same_weights:
                return "a loss that is finite when computed again, after the step's other updates"
            return "a loss that is finite when computed again: check that host's memory"
        return self._found
