"""Gradients that are not finite: the step is skipped, or the run ends. One line names the step and the rank.

NaN and infinity propagate through a reduction, so every rank that takes part in it sees them after the same step. Whose they
were, the losses tell, of which each rank has its own. Which layer made them, a second run tells: runs repeat to the bit, so
the same command with --find-non-finite goes on from the last checkpoint, and inspects every layer until it comes there.

On a CPU, the gradients are read at once. On an accelerator, that would wait for the device, so the verdict stays there as a
flag: fused optimizers take it as `found_inf`, as from torch's GradScaler, and leave weights and state unchanged if it is
set. The host reads it after the next step's reduction has been enqueued.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hvdtrain.engines import lines
from hvdtrain.engines.accelerators import Delayed
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.modules import prefixes_of_models, uncompiled_name
from hvdtrain.flags import Flags
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.prepare import FUSED
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Shared, Step
from hvdtrain.output.run_output import RunOutput

JOINED = 1024  # values of a gradient: up to here, to join it with others takes less time than a sum of its own
OVERFLOWS = 20  # consecutive steps that the loss scaler may skip: from 65536, it reaches 1 after halving 16 times
FIND = "the same command with --find-non-finite continues from the last checkpoint, and names the layer"


def gradients_are_finite(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether the reduced gradients are finite."""
    alike: dict[object, list[Tensor]] = {}
    large = []
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            if gradient.numel() <= JOINED and gradient.layout is torch.strided:
                alike.setdefault((gradient.dtype, gradient.device), []).append(gradient.flatten())
            else:
                large.append(gradient)
    small = itertools.chain.from_iterable(alike.values())
    # The sum of finite gradients may be too large for float32, where that of each is not.
    return have_finite_sums([*map(torch.cat, alike.values()), *large]) or have_finite_sums([*small, *large])


def have_finite_sums(gradients: Sequence[Tensor]) -> bool:
    # Checked in Python: the kernels of isfinite and all, which nothing else uses, would double the cost.
    # NaN and infinity stay in a sum: one number of each gradient is looked at.
    sums = []
    for one in gradients:
        sums.append((torch.view_as_real(one) if one.is_complex() else one).sum(dtype=torch.float32))
    return not sums or all(map(math.isfinite, torch.stack(sums).tolist()))


def not_finite(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a flag on the device, the same on all ranks: float32 [], 1 if a reduced gradient is not finite, else 0."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        norms = list(torch._foreach_norm(gradients, 1))  # one kernel for many tensors
    else:
        parts = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in gradients]
        norms = [part.float().abs().sum() for part in parts]  # a sum in a shorter type could overflow
    return torch.stack(norms).isfinite().all().logical_not().float()


def of_any(flags: Sequence[Tensor]) -> Tensor:
    """Return a flag on the device that is 1 if any of these is."""
    return flags[0] if len(flags) == 1 else torch.stack(list(flags)).amax()


def takes_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer.step` leaves all unchanged where its `found_inf` is set."""
    groups = optimizer.param_groups
    return isinstance(optimizer, FUSED) and all(
        group.get("fused") and all(p.device.type != "cpu" for p in group["params"]) for group in groups
    )


class NonFinite(Feature):
    """Reads after each reduction whether the gradients are finite. name_of: returns the name of a rank."""

    _finder: "Finder | None" = None
    _buffers: "Kept"

    def __init__(self, engine: Engine, flags: Flags, output: RunOutput, name_of: Callable[[int], str]):
        self._all, self._output, self._name_of, self._finds = engine, output, name_of, flags.find_non_finite
        self._scaled = flags.amp == "fp16"
        # How many steps in a row may be skipped.
        self.most: int = flags.max_skipped if flags.max_skipped is not None else OVERFLOWS * self._scaled

    def prepare(self, run: Run) -> None:
        self._prepared, self._state, self._engine = run.prepared(), run.state, run.prepared().engine
        if self._finds:
            self._finder = Finder(run.shared())

    def before_step(self, step: Step) -> None:
        if self.most:
            self._buffers = Kept(self._prepared.models)
        if self._finder is not None:
            self._finder.begin_step()

    def reduced(self, step: Step) -> None:
        # On a GPU, the backward pass and the reduction have only been enqueued.
        activity = self._all.activity
        activity.collective = "gradients"
        unsound = []
        for optimizer in step.backwards:
            if not gradients_are_finite(self._prepared.trained[optimizer]):
                unsound.append(optimizer)
        activity.collective = None
        if unsound:
            step.leave_out(unsound)
            self.report(step, self._state.skipped + 1)
            if self.most:
                self._buffers.restore()

    def close(self, *, failed: bool) -> None:
        if self._finder is not None:
            self._finder.close()

    def report(self, step: Step, in_a_row: int) -> None:
        """Report that `step` is skipped. Raises Failure if too many consecutive steps were skipped. A collective of those
        that average their gradients. Occasional overflows of the loss scaler are normal, and not reported.

        in_a_row: steps skipped, with this one.
        """
        if self._scaled and in_a_row <= self.most:
            return
        lacking = step.items.lacking() if step.items is not None else ""
        if lacking and in_a_row > self.most:
            raise UserError(
                f"{lacking}, or give --max-skipped, which leaves such steps out", everywhere=self._engine.of_all_ranks
            )
        self._prepared.raise_where_gradients_are_missing(step.missing)
        culprit = None if all(bool(loss.isfinite()) for loss in step.losses) else "the loss"
        if self._finder is not None:
            culprit = self._finder.first or culprit
        ranks = self._engine.ranks()  # with --sync-every, other ranks know nothing of it
        culprits = self._engine.all_gather_object(culprit, "guard.culprit")
        blamed = [f"{self._name_of(rank)}, {what}" for rank, what in zip(ranks, culprits, strict=True) if what]
        sound = "gradients are" if self._finder is not None else "loss is"
        blame = " and ".join(blamed) or f"each rank's {sound} finite, but the mean of their gradients is not"
        message = lacking or f"step {step.number}: gradients are not finite: {blame}"
        message += f"; {in_a_row} step{'s'[: in_a_row > 1]} in a row, --max-skipped {self.most}"
        if in_a_row > self.most:
            remedy = "" if self._finder is not None else f": {FIND}"
            raise Failure(message + remedy, everywhere=self._engine.of_all_ranks)
        if self._all.rank == ranks[0] != 0:
            lines.warn(f"{message}: step skipped")
        self._output.say(f"warning: {message}: step skipped")
        self._output.event("error", kind="non-finite", step=step.number, message=message)


class LateVerdict(NonFinite):
    """Leaves the verdict on the device, and reads it in the next step. At once: in steps that are logged or saved."""

    def prepare(self, run: Run) -> None:
        super().prepare(run)
        self._saves_every = run.flags.checkpoint_steps
        self._flags: list[Tensor] = []  # of the loops of the current step
        self._before: tuple[Step, Delayed] | None = None  # the step before, if its verdict is still to be read
        # Optimizers that leave out an update by themselves. Not before the first one, which must be known to be sound: the
        # fused SGD would leave the momentum uninitialized that it allocates in it.
        self._flagged: set[torch.optim.Optimizer] = set()
        for optimizer in self._prepared.optimizers:
            if takes_flag(optimizer):
                optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined] # GradScaler reads the flag
                optimizer.register_step_post_hook(self._updated)

    def _updated(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Take the flag back. From now on, `optimizer`, which has made an update, is given flags."""
        if not self._prepared.scaler.is_enabled():  # else GradScaler takes its own back
            vars(optimizer).pop("found_inf", None)
        self._flagged.add(optimizer)
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined] # GradScaler gives it the flag

    def reduced(self, step: Step) -> None:
        self.before_save()  # the device has this step's work to do meanwhile
        saves = self._saves_every and step.number % self._saves_every == 0
        if step.logged or saves or not self._flagged.issuperset(step.backwards):
            super().reduced(step)
            return
        flags = {optimizer: not_finite(self._prepared.trained[optimizer]) for optimizer in step.backwards}
        for optimizer, flag in flags.items():
            optimizer.found_inf = flag  # type: ignore[attr-defined] # as GradScaler gives it to fused optimizers
        skipped = of_any(list(flags.values()))
        self._flags.append(skipped)
        step.left_out = step.left_out or None
        if self.most:
            self._buffers.restore(skipped.bool())

    def after_step(self, step: Step) -> None:
        if self._flags:
            self._before = step, Delayed(of_any(self._flags))
            self._flags = []

    def before_save(self) -> None:
        """Read the verdict of the step before, and count that step as skipped or not. Also called before a save."""
        if self._before is None:
            return
        (before, verdict), self._before = self._before, None
        self._all.activity.collective = "gradients"  # the device may still wait for the other ranks
        unsound = bool(verdict.values())
        self._all.activity.collective = None
        if before.left_out is None:  # else it is counted
            before.left_out = unsound
            self._state.skipped = self._state.skipped + 1 if unsound else 0
        if unsound:
            self.report(before, self._state.skipped)


def of(engine: Engine, flags: Flags, output: RunOutput, name_of: Callable[[int], str]) -> NonFinite:
    """Return what reads the gradients on this device. --find-non-finite needs them at once."""
    late = engine.device.type != "cpu" and not flags.find_non_finite
    return (LateVerdict if late else NonFinite)(engine, flags, output, name_of)


class Finder:
    """Finds the first tensor on this rank that is not finite: the input or output of a layer, a loss, a gradient before it
    is reduced. It waits for the device after every layer."""

    def __init__(self, shared: Shared):
        self._shared = shared
        self.first: str | None = None  # in this step
        self._hooked: set[nn.Parameter] = set()
        self._hooks: list[RemovableHandle] = []
        for prefix, model in zip(prefixes_of_models(shared.prepared.models), shared.prepared.models, strict=True):
            for name, layer in model.named_modules():
                if not list(layer.children()):
                    label = f"{prefix}{uncompiled_name(name) if name else type(layer).__name__}"
                    self._hooks.append(layer.register_forward_hook(self._layer_hook(label)))
        # A compiled model does not call hooks that were added later, so run eagerly (set_stance: torch 2.6 and newer).
        self._compile_as: Callable[[str], object] = getattr(torch.compiler, "set_stance", lambda stance: None)
        self._compile_as("force_eager")

    def close(self) -> None:
        """Inspect no longer."""
        self._compile_as("default")
        for hook in self._hooks:
            hook.remove()

    def begin_step(self) -> None:
        """Begin a step. Parameters may have been frozen before, which take no hook."""
        self.first = None
        for name, parameter in self._shared.prepared.named(self._shared.prepared.optimizers):
            if parameter not in self._hooked:
                self._hooked.add(parameter)
                self._hooks.append(parameter.register_hook(self._gradient_hook(name)))

    def _layer_hook(self, name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def look(layer: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            self._look(f"input of {name} ({type(layer).__name__})", inputs)
            self._look(f"output of {name} ({type(layer).__name__})", output)

        return look

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if (step := self._shared.step) is not None and not is_finite(gradient):
                self._look("the loss", step.losses[-1])
                self._look(f"gradient of {name}", gradient)

        return look

    def _look(self, what: str, value: object) -> None:
        step = self._shared.step
        if self.first is None and step is not None and step.current is not None and not is_finite(value):
            at = f" in micro-batch {step.micro_batch + 1} of {step.micro_batches}" * (step.micro_batches > 1)
            self.first = what + at


def is_finite(value: object) -> bool:
    """Return whether all numbers in the tensors of nested values are finite."""
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_finite, value))
    return not isinstance(value, Tensor) or bool(value.detach().isfinite().all())


class Kept:
    """Copies of all buffers before a forward pass, which changes them, or puts others in their place."""

    def __init__(self, models: Sequence[nn.Module]):
        self._places = [
            (module, name, buffer)
            for model in models
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        # Buffers of one type are copied together: ResNet-50 has 159, and on a GPU each copy of one would be a kernel.
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
                split = chosen.split([buffer.numel() for buffer in buffers])
                parts = [part.view_as(buffer) for buffer, part in zip(buffers, split, strict=True)]
            pairs = [(buffer, part) for buffer, part in zip(buffers, parts, strict=True) if id(buffer) in current]
            if len(pairs) == 1:  # it may be sparse, which torch 2.3 does not copy by the other
                pairs[0][0].copy_(pairs[0][1])
            elif pairs:
                torch._foreach_copy_([buffer for buffer, _ in pairs], [part for _, part in pairs])


def joined(buffers: Sequence[Tensor]) -> Tensor:
    """Return a copy of one buffer, or of several of the same type as one tensor of one dimension."""
    return buffers[0].clone() if len(buffers) == 1 else torch.cat([buffer.flatten() for buffer in buffers])
