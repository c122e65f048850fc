"""What an author may do wrong with a run and in a step, and what to do instead."""

import contextlib
import gc
import re
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hvdtrain.engines.errors import UserError
from hvdtrain.program.uses import codes_of, reads, variables_of

# Of `Run`: when, and the line with its remedy. Capitals stand for values.
REFUSALS = {
    "ended": "WHAT after the end of its training: move it into `with training.start(flags) as run:`",
    "not prepared": "WHAT before run.prepare(): write `model, optimizer = run.prepare(model, optimizer)` first",
    "described twice": "run.describe_data() was already called (run.prepare calls it, too): "
    "call it once, before run.prepare",
    "prepared twice": "run.prepare() was called twice: "
    "give it all models and optimizers at once; another training, such as the next fold, is another training.start()",
    "registered late": "run.register() once training has begun, where a resumed run could not restore it: "
    "call it before the loop over run.epochs",
    "total of a stream": "run.total_steps(): the length of a stream is not known: "
    "write run.epochs(steps=NUMBER), and give the scheduler this number",
    "more done": "the checkpoint does not match the data: DONE samples of this epoch are done, and it has COUNT: "
    "give the same data",
    "steps outside of epochs": "run.steps() outside of run.epochs(): write `for epoch in run.epochs(N):` around it",
    "steps twice": "run.steps() was called twice in one epoch: "
    'give it both data sets, run.steps({"a": ..., "b": ...}), or an epoch each, run.steps(..., changes=True)',
    "epoch ended outside of a step": "run.end_epoch() outside of a step: call it in the loop over run.steps",
    "epoch of a stream ended": "run.end_epoch(): the length of a stream is not known: "
    "let the stream end on every rank, or train by run.epochs(steps=N)",
    "epoch left": "epoch NUMBER was left after PART samples: "
    "let `for step in run.steps(...)` run to its end (run.epochs(steps=N) ends after N steps)",
    "epoch without steps": "epoch NUMBER had no steps: write `for step in run.steps(...):` in it",
    "evaluation in evaluation": "run.evaluating() inside of run.evaluating(): end the first block before the next",
    "predicted outside": "run.predict() outside of run.evaluating(): write `with run.evaluating(...):` around it",
    "recorded nothing": "run.record() got nothing: write run.record(loss=...)",
    "recorded outside": "run.record() outside of run.evaluating(): "
    "write `with run.evaluating(...):` around it (training metrics go to step.record())",
    "best in the loop": "run.load_best() in the loop over run.epochs, which trains on: call it after the loop",
    "best without checkpoints": "run.load_best() needs the checkpoints of the run: give it --output-dir",
    "best of nothing": "run.load_best(): no epoch was evaluated: "
    "write run.evaluating() and run.record() in the loop over run.epochs",
    "program without example": "run.export(NAME): a program needs an example: run.export(FILE, model, example)",
}


BESIDE_STEPS: dict[type, str] = {
    enumerate: "enumerate(run.steps(...)) begins at 0 again in an epoch that is resumed: count by step.number",
    zip: "zip(run.steps(...), OTHER) begins OTHER again in an epoch that is resumed: give both data sets to run.steps",
}


def beside_steps(steps: object) -> str | None:
    """Return what to say of an iterator around that of the steps, which an epoch that is resumed begins again."""
    # The program has just made it, so only young objects are looked at: a look at all takes 70 ms.
    young = (one for generation in (0, 1) for one in gc.get_objects(generation))
    for one in young:
        if type(one) in BESIDE_STEPS:
            held = gc.get_referents(one)  # of zip, a tuple
            if any(part is steps for part in (*held, *gc.get_referents(*held))):
                return BESIDE_STEPS[type(one)]
    return None


def refusal(when: str, *, everywhere: bool = False, **values: object) -> UserError:
    """Return the error for what REFUSALS has under `when`. values: by their names in capitals."""
    text = REFUSALS[when]
    for name, value in values.items():
        text = text.replace(name, str(value))
    return UserError(text, everywhere=everywhere)


class LaterParts:
    """Notices optimizers and schedulers that a program makes in its loop, for a second stage: the step goes on with those of
    before, and no checkpoint has these."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Any] | None = None  # those that were there when the first epoch began

    def require_none(self, frame: FrameType, trained: Mapping[Any, list[nn.Parameter]], named: dict[str, Any]) -> None:
        """Look into the variables of whoever takes the steps, and the attributes of what they hold. Raises UserError."""
        held = [*trained, *named.values(), *variables_of(frame).values()]
        for value in list(held):
            # Any: an object of another library may not be asked for its attributes.
            with contextlib.suppress(Exception):
                held += list(vars(value).values())
        parts = [one for one in held if isinstance(one, torch.optim.Optimizer | lr_scheduler.LRScheduler)]
        if self._known is None:
            self._known = weakref.WeakSet(parts)
        for one in parts:
            optimizer = one.optimizer if isinstance(one, lr_scheduler.LRScheduler) else one
            own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            if one not in self._known and any(own & {*some} for some in trained.values()):
                kind = type(one).__name__
                if optimizer is one:
                    remedy = "give it to run.prepare(), before the loop, or set the rates of the first one"
                    raise UserError(f"a {kind} was made in the loop over epochs, which no step applies: {remedy}")
                remedy = "make it before the loop, as a part of a SequentialLR, and give that to run.register"
                raise UserError(f"a {kind} was made in the loop over epochs, which no checkpoint has: {remedy}")


# As programs write the attribute of parameters, and mean to freeze a module, or misspell it.
FREEZING = re.compile("required?s?_?grads?_?")


def without_effect(models: Sequence[nn.Module], trained: Collection[nn.Parameter]) -> str:
    """Return a warning if the program has set `requires_grad` of a module, which torch does not read, or misspelt that of a
    parameter, so that weights are trained, or are not, all the same; else an empty text. trained: by the optimizers."""
    modules = [pair for model in models for pair in model.named_modules()]
    held: list[tuple[str, Any]] = [*modules, *(pair for model in models for pair in model.named_parameters())]
    found = [(*pair, name, value) for pair in held for name, value in vars(pair[1]).items() if FREEZING.fullmatch(name)]
    for where, what, name, value in found:
        weights = list(what.parameters()) if isinstance(what, nn.Module) else [what]
        flags = {weight.requires_grad for weight in weights if weight in trained}
        if type(value) is not bool or (True not in flags if not value else flags != {False}):
            continue
        kinds = {kind for _, module in modules for kind in type(module).__mro__}
        own = [kind for kind in kinds - {object} if not kind.__module__.startswith("torch.")]
        if not any(reads(code, name) for kind in own for code in codes_of(kind)):
            where = where or "model"
            kind = "module, only on its parameters" if isinstance(what, nn.Module) else "parameter"
            return f"{where}.{name} = {value} has no effect on a {kind}: write {where}.requires_grad_({value})"
    return ""


class Outputs:
    """Notices a model's output that is kept from one loop over `step.batches()` to the next in the same step.

    With one micro-batch that is right. With several, the variable holds only the last one's, for every micro-batch of the
    next loop: a GAN's `fake`, for instance. models: those that the script calls.
    """

    def __init__(self, models: Sequence[nn.Module], step: int):
        self._models, self._step, self._loop = models, step, 0
        self._made: list[tuple[int, weakref.ref[Tensor]]] = []  # loop, output
        self._remove: list[Callable[[], None]] = []

    def begin(self, loop: int) -> None:
        """Watch the models until `end`. loop: its number in the step."""
        self._loop = loop
        for model in self._models:
            hooks = model.register_forward_pre_hook(self._before), model.register_forward_hook(self._after)
            self._remove += [hook.remove for hook in hooks]

    def end(self) -> None:
        """Watch the models no longer."""
        while self._remove:
            self._remove.pop()()

    def _before(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        """Raise UserError if one of `inputs` is the output of an earlier loop, also if it was detached."""
        kept = {}
        for loop, reference in self._made:
            output = reference()
            if output is not None and output.numel():
                # By memory: what `detach` returns is another tensor with the same one.
                kept[output.untyped_storage().data_ptr()] = loop
        for one in inputs:
            if isinstance(one, Tensor) and kept.get(one.untyped_storage().data_ptr(), self._loop) != self._loop:
                raise UserError(
                    f"step {self._step}: a model got an output of the loop before, which is that of its last micro-batch: "
                    "compute it again in this loop, or make both updates from one loop over step.batches()"
                )

    def _after(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if isinstance(output, Tensor):
            self._made.append((self._loop, weakref.ref(output)))


def instead_of_a_loss(given: object) -> str:
    """Return what `given` is, and what to give instead, for a message."""
    remedy = "take the mean over this micro-batch, loss.mean()"
    if isinstance(given, Tensor) and given.numel() == 1:
        return "a loss without a gradient: compute it from the model, without detach()"
    if isinstance(given, Tensor):
        return f"a tensor of shape {tuple(given.shape)}, not a scalar: {remedy}"
    if given is None:
        return "None, not a loss: a Hugging Face model computes one if the batch has labels"
    if hasattr(given, "loss") or (isinstance(given, Mapping) and "loss" in given):
        remedy = "give it the loss in it"
    return f"a {type(given).__name__}, not a scalar: {remedy}"


def in_checkpoint(error: BaseException) -> bool:
    """Return whether `error` was raised in a backward pass within a backward pass, that of torch.utils.checkpoint."""
    return any("checkpoint" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def backward_explained(error: Exception, step: int) -> UserError | None:
    """Return what an error of a backward pass in this step means; None: what it says itself."""
    if "backward through the graph a second time" in str(error):
        remedy = "detach() what another backward pass has used, or compute it again in this loop"
        return UserError(f"step {step}: step.backward() got a part of an earlier loss: {remedy}")
    # Horovod's hook, and that of virtual.py, raise an AssertionError without a text; DDP's reducer says "mark a variable
    # ready only once".
    if (isinstance(error, AssertionError) and not str(error)) or "mark a variable ready only once" in str(error):
        remedy = "leave loss.backward() out, and call step.backward() once, with the sum of the losses"
        if in_checkpoint(error):
            remedy = "a block that is checkpointed twice needs use_reentrant=False"
        return UserError(f"step {step}: a gradient was computed twice in a micro-batch: {remedy}")
    return None
