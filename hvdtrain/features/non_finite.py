"""Gradients that are not finite: the first such tensor on each rank is named, by computing the step again. The step is
skipped, or the run ends."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hvdtrain.engines import lines
from hvdtrain.engines.accelerators import exact
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure
from hvdtrain.engines.modules import own_name, prefixes
from hvdtrain.flags import Flags
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.prepared import Prepared
from hvdtrain.loop.run import Run
from hvdtrain.loop.state import TrainState
from hvdtrain.loop.step import Step
from hvdtrain.output.run_output import RunOutput

OVERFLOWS = 20  # consecutive steps that the loss scaler may skip: from 65536, it reaches 1 after halving 16 times
NOT_LOOKED = "the layer was not looked for, because the run is saved after this step"


def most_skipped(flags: Flags) -> int:
    """Return how many steps in a row may be skipped."""
    most: int = flags.max_skipped if flags.max_skipped is not None else OVERFLOWS * (flags.amp == "fp16")
    return most


class NonFinite(Feature):
    """Names the first tensor that is not finite, and ends the run. group: the ranks that average their gradients in every
    step. name_of: returns the name of a rank."""

    prepared: Prepared
    state: TrainState

    def __init__(self, engine: Engine, group: Engine, flags: Flags, output: RunOutput, name_of: Callable[[int], str]):
        self._engine, self._group, self._output, self._name_of = engine, group, output, name_of
        self._scaled = flags.amp == "fp16"
        self.most = most_skipped(flags)

    def prepare(self, run: Run) -> None:
        self.prepared, self.state = run.prepared(), run.state
        run.shared().unsound = self.unsound

    def unsound(self, step: Step, loop: int) -> Iterator[None]:
        """Explain a step whose gradients are not finite. The micro-batches may be yielded again."""
        if self.explains(self.state.skipped + 1):
            yield from self.explain(step, step, loop, self.state.skipped + 1)

    def explains(self, in_a_row: int) -> bool:
        """Return whether to search for the cause. Not for occasional overflows of the loss scaler, which are normal.

        in_a_row: steps skipped, with this one.
        """
        return not self._scaled or in_a_row > self.most

    def explain(self, step: Step, of: Step, loop: int, in_a_row: int) -> Iterator[None]:
        """Yield the micro-batches of step `of` again within `step`, to find the first tensor that is not finite, and report
        it. A collective of the group.

        The weights are still those with which it computed, unless the step before has updated those of another optimizer.
        """
        if of.items is not None:
            of.items.require_some()
        were_finite = all(bool(exact(value).isfinite().all()) for value in of.sums.values())
        same_weights = of is step or len(self.prepared.optimizers) == 1
        inspection = Inspection(self.prepared.models, were_finite, same_weights=same_weights)
        with inspection.hooks():
            yield from step.again(of, loop, inspection)
        self.prepared.raise_where_gradients_are_missing(of.missing)
        self.report(of.number, inspection.result(), in_a_row)

    def report(self, number: int, culprit: str | None, in_a_row: int) -> None:
        """Report that step `number` is skipped. Raises Failure if too many consecutive steps were skipped. A collective of
        the group.

        culprit: the first tensor on this rank that is not finite, or None. in_a_row: steps skipped, with this one.
        """
        members = self._group.ranks()  # with --sync-every, other ranks know nothing of it
        culprits = self._group.all_gather_object(culprit, "guard.culprit")
        ranks = [f"{self._name_of(rank)}, {what}" for rank, what in zip(members, culprits, strict=True) if what]
        blame = " and ".join(ranks) or "each rank's gradients are finite, but their sum over ranks is not"
        if culprit is NOT_LOOKED:
            blame = culprit
        message = f"step {number}: gradients are not finite: {blame}"
        message += f"; {in_a_row} step{'s'[: in_a_row > 1]} in a row, --max-skipped {self.most}"
        if in_a_row > self.most:
            raise Failure(message, everywhere=self._group.size == self._engine.size)
        if self._engine.rank == members[0] != 0:
            lines.warn(f"{message}: step skipped")
        self._output.say(f"warning: {message}: step skipped")
        self._output.event("error", kind="non-finite", step=number, message=message)


class Skipping(NonFinite):
    """Does the same, and restores batch norm's running statistics, which the forward pass has changed, after a skipped
    step."""

    def before_step(self, step: Step) -> None:
        self.buffers = Kept(self.prepared.models)

    def unsound(self, step: Step, loop: int) -> Iterator[None]:
        yield from super().unsound(step, loop)
        self.buffers.restore()


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


def of(
    engine: Engine, group: Engine, flags: Flags, output: RunOutput, name_of: Callable[[int], str]
) -> NonFinite:  # fmt: skip
    """Return what --max-skipped asks for."""
    return (Skipping if most_skipped(flags) else NonFinite)(engine, group, flags, output, name_of)


class Kept:
    """Copies of all buffers before a forward pass, which changes them, or puts others in their place.

    Buffers of one type are copied together: ResNet-50 has 159, and on a GPU each copy of one would be a kernel.
    """

    def __init__(self, models: Sequence[nn.Module]):
        self._places = [
            (module, name, buffer)
            for model in models
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        alike: dict[object, list[Tensor]] = {}
        for buffer in {id(buffer): buffer for _, _, buffer in self._places}.values():
            dense = buffer.layout is torch.strided
            alike.setdefault((buffer.dtype, buffer.device) if dense else id(buffer), []).append(buffer)
        self._kept = [(buffers, joined(buffers)) for buffers in alike.values()]

    def restore(self, skipped: Tensor | None = None) -> None:
        """Restore them. skipped: only if this flag on the device is set; then not those in whose place there are others."""
        if skipped is None:
            for module, name, buffer in self._places:
                module._buffers[name] = buffer
        current = {id(buffer) for module, name, buffer in self._places if module._buffers.get(name) is buffer}
        for buffers, before in self._kept:
            chosen = before if skipped is None else torch.where(skipped, before, joined(buffers))
            parts = [chosen]
            if len(buffers) > 1:
                parts = [part.view_as(one) for one, part in zip(buffers, chosen.split(sizes(buffers)), strict=True)]
            pairs = [(buffer, part) for buffer, part in zip(buffers, parts, strict=True) if id(buffer) in current]
            if pairs:
                torch._foreach_copy_([one for one, _ in pairs], [part for _, part in pairs])


def sizes(buffers: Sequence[Tensor]) -> list[int]:
    return [buffer.numel() for buffer in buffers]


def joined(buffers: Sequence[Tensor]) -> Tensor:
    """Return a copy of one buffer, or of several of the same type as one tensor of one dimension."""
    return buffers[0].clone() if len(buffers) == 1 else torch.cat([buffer.flatten() for buffer in buffers])
