"""Makes models and optimizers ready for training: checked, on the device, wrapped by the engine, the same on all ranks."""

import contextlib
import gc
import hashlib
import inspect
import io
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint.own import extra_state, share_extra_state
from hvdtrain.checkpoint.randomness import is_generator
from hvdtrain.engines.base import Engine, Reduction
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import Models, kind_of, named_parameters
from hvdtrain.flags import Flags
from hvdtrain.loop.optim import is_scheduled

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # with a kernel that takes `found_inf`
REPLICAS = nn.DataParallel, nn.parallel.DistributedDataParallel
_of_earlier_runs: weakref.WeakSet[object] = weakref.WeakSet()  # layers with trainable parameters
PARAMETER_ADDED = (
    "a parameter was added to an optimizer after run.prepare(): create the optimizer with all of its parameters, and freeze "
    "those that are trained later (requires_grad_(False), then requires_grad_())"
)


# ---- what the steps use of them


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


LARGE_BYTES = 64 * 2**20  # bytes of a run's weights


class Prepared:
    """The prepared models and optimizers.

    engine: averages the gradients in a step. models: as the script has created them, for checkpoints and hashes. replicas:
    the same, for training. optimizers: wrapped. named: parameters with their names, in the order of the models.
    zero_for_missing: a parameter may lack a gradient, which counts as zero.
    """

    bytes_before = 0  # of the weights of the run before in this process

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
        # Whether gradients after a backward pass are those of the step, if there is one micro-batch. With Horovod, they are
        # being reduced, with --amp fp16 they are scaled.
        self.reduces_at_once = not engine.reduces_after_backward and not scaler.is_enabled()
        self._zero_for_missing = zero_for_missing
        # Where ranks have other weights within an epoch: a context in which they have those that all share.
        self.weights_of_all: Callable[[], contextlib.AbstractContextManager[None]] | None = None
        # Whether they may still be there. Of small ones, the collector will find enough by itself: a call takes 0.2 s.
        self.is_crowded = Prepared.bytes_before >= LARGE_BYTES
        Prepared.bytes_before = sum(p.numel() * p.element_size() for p in self._names)

    def make_room(self) -> None:
        """Free the models of the run before, which is full of circles of objects. Called in the first step: by then, the
        program's variables are those of this run."""
        self.is_crowded = False
        gc.collect()

    def require_same_parameters(self) -> None:
        """Raise UserError for a parameter that was added to an optimizer after `prepare`, or taken out of one, or that a
        model has no longer."""
        # The optimizer would go on with a parameter that the model has no longer, and nothing would learn.
        now = {parameter for _, parameter in named_parameters(self.models)}
        if lost := [name for parameter, name in self._names.items() if parameter not in now]:
            remedy = "replace layers before run.prepare(), or copy_() other weights into them"
            raise UserError(f"the model has lost {lost[0]}, which run.prepare() was given: {remedy}")
        for optimizer, trained in self.trained.items():
            held = set(parameters_of(optimizer))
            # Engines have put their hooks on parameters in `prepare`: gradients of later ones are not reduced.
            if not held.issubset(trained):
                raise UserError(PARAMETER_ADDED)
            # A resumed run makes the optimizer with all parameters, and could not restore its state.
            if gone := [self._names[parameter] for parameter in trained if parameter not in held]:
                remedy = "leave it there, and freeze it (requires_grad_(False))"
                raise UserError(f"{gone[0]} was taken out of an optimizer after run.prepare(): {remedy}")

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
            f"{names[0]} got no gradient in this step: freeze it (requires_grad_(False)), give step.backward() the sum of "
            "all losses that use it, or if this is intended, run.prepare(..., find_unused_parameters=True)"
        )


# ---- whether ranks can train with them


def about_layer(name: str, layer: nn.Module, engine: Engine) -> str:
    """Return why ranks cannot train with a layer, or would train wrongly without an error; "": they can."""
    name = name or "the model"
    embeds = isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    if isinstance(layer, REPLICAS):
        kind = type(layer).__name__
        return f"a {kind} would reduce gradients, too: give it the model inside, and choose by --engine"
    if embeds and layer.sparse:
        return f"{name} has sparse gradients, which are not reduced: leave sparse=True out"
    if embeds and layer.max_norm is not None and engine.size > 1:
        after = f"weight.data.renorm_({layer.norm_type:g}, 0, {layer.max_norm:g})"
        remedy = f"leave it out, and write {after} of the layer after step.update()"
        return f"{name} has max_norm, which changes its weights on each rank alone: {remedy}"
    if layer in _of_earlier_runs:
        remedy = "create models and optimizers anew for each run, or copy.deepcopy(model) to go on with its weights"
        return f"this {type(layer).__name__} was trained by an earlier run: {remedy}"
    return ""


def about_batch_norm(name: str, layer: nn.Module, engine: Engine) -> str:
    """Return why a SyncBatchNorm of torch or of Horovod does not work here; "": it does, or is none."""
    of_torch = isinstance(layer, nn.SyncBatchNorm)
    if not of_torch and type(layer).__name__ != "SyncBatchNorm":
        return ""
    if engine.device.type == "cpu" and not (of_torch and engine.name == "serial"):
        return f"{name or 'the model'} is a SyncBatchNorm, which runs on GPUs only: use nn.BatchNorm on CPUs"
    if of_torch and engine.name == "horovod":
        remedy = "use horovod.torch.SyncBatchNorm, or --engine ddp"
        return f"torch.nn.SyncBatchNorm synchronizes nothing under Horovod: {remedy}"
    if not of_torch and engine.name == "ddp":
        remedy = "use torch.nn.SyncBatchNorm, or --engine horovod"
        return f"horovod.torch.SyncBatchNorm does not work under --engine ddp: {remedy}"
    return ""


def callable_alone(function: Callable[..., object]) -> bool:
    """Return whether `function` may be called without arguments."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def refuse_optimizer(optimizer: torch.optim.Optimizer, known: Mapping[nn.Parameter, str]) -> None:
    """Raise UserError for an optimizer with which ranks cannot train. known: the parameters of the models, with names."""
    message = ""
    if hasattr(optimizer, "skip_synchronize"):
        message = "a DistributedOptimizer would reduce gradients, too: give it the optimizer inside"
    elif isinstance(optimizer, torch.optim.LBFGS):
        remedy = "use SGD, Adam or another that does not call a closure"
        message = f"LBFGS computes the loss several times in a step, and ranks would differ: {remedy}"
    elif hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        remedy = "let its step() make both in turn, and call step.update() twice in a step, as docs/programs/sam.py"
        message = f"SAM's first_step() and second_step() are not called: {remedy}"
    elif isinstance(optimizer, torch.optim.SparseAdam):
        message = "SparseAdam needs sparse gradients, which are not reduced: use Adam"
    elif is_scheduled(optimizer):
        remedy = "create it afterwards, from the optimizer that this returns"
        message = f"a learning rate scheduler was created before: {remedy}"
    elif not callable_alone(optimizer.step):
        message = (
            f"{type(optimizer).__name__}.step() takes arguments that step.update() does not give: give them defaults"
        )
    elif not set(parameters_of(optimizer)).issubset(known):
        remedy = "pass that model, too; of a Parameter by itself, a module that has it, such as nn.ParameterList"
        message = f"an optimizer has parameters of a model that was not given: {remedy}"
        own = set(parameters_of(optimizer))
        if own and not own.intersection(known):
            remedy = "make it after the model, or its copy"
            message = f"an optimizer has parameters of a model that was not given, and no others: {remedy}"
        lacking = [name for parameter, name in known.items() if parameter.requires_grad and parameter not in own]
        if lacking and own.intersection(known):
            message += (
                f"; if the model was changed since, as {lacking[0]} is in no group, make the optimizer after that"
            )
    if message:
        raise UserError(f"run.prepare(): {message}")


def refuse_parts(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], names: Mapping[nn.Parameter, str],
    engine: Engine,
) -> None:  # fmt: skip
    """Raise UserError for what ranks cannot train with, or would train wrongly without an error. names: of the parameters.

    What an earlier run of this process has trained is refused, too.
    """
    layers = [pair for model in models for pair in model.named_modules()]
    for name, layer in layers:
        if message := about_batch_norm(name, layer, engine) or about_layer(name, layer, engine):
            raise UserError(f"run.prepare(): {message}")
    for name, buffer in ((name, one) for model in models for name, one in model.named_buffers()):
        if buffer.is_quantized and engine.size > 1:
            remedy = "keep its integers, buffer.int_repr(), and the scale"
            raise UserError(f"run.prepare(): {name} is quantized, and ranks exchange no such tensors: {remedy}")
    taken: set[nn.Parameter] = set()
    for optimizer in optimizers:
        refuse_optimizer(optimizer, names)
        if shared := taken.intersection(parameters_of(optimizer)):
            remedy = "give each parameter to one optimizer, or several losses to one step.backward()"
            raise UserError(f"run.prepare(): {names[shared.pop()]} is in two optimizers: {remedy}")
        taken.update(parameters_of(optimizer))
    # Hooks stay on the parameters, so a second run would reduce gradients twice.
    # And a fold would begin with weights that know its data.
    _of_earlier_runs.update(
        layer for _, layer in layers if any(p.requires_grad for p in layer.parameters(recurse=False))
    )


def refuse_replicas(name: str, module: nn.Module) -> None:
    """Raise UserError if a module that is registered under `name` holds what `run.prepare` has returned under DDP."""
    for layer in module.modules():
        if isinstance(layer, REPLICAS):
            message = f"run.register({name}=...) holds a {type(layer).__name__}, whose weights have other names"
            raise UserError(f"{message}: make it of the model that you gave to run.prepare()")


def sorted_objects(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `run.register` was given: objects with a state, and generators of random numbers. Raises UserError."""
    generators = {name: what for name, what in objects.items() if is_generator(what)}
    others = {name: what for name, what in objects.items() if name not in generators}
    for name, what in others.items():
        if not (hasattr(what, "state_dict") and hasattr(what, "load_state_dict")):
            raise UserError(f"run.register({name}=...) got a {type(what).__name__}: it has no state_dict")
        if isinstance(what, nn.Module):
            refuse_replicas(name, what)
    return others, generators


def require_alike(engine: Engine, models: Models, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise UserError on every rank if ranks have built different models or optimizers. A collective."""
    mine = [f"{name}: {kind_of(tensor)}" for name, tensor in named_parameters(models)]
    mine += [f"{kind_of(buffer)} buffer{sparse_values(buffer)}" for model in models for buffer in model.buffers()]
    mine += [name for model in models for name in extra_state(model)]
    mine += [type(optimizer).__name__ for optimizer in optimizers]
    names = {parameter: name for name, parameter in named_parameters(models)}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            place = f"of group {number} of {type(optimizer).__name__}"
            mine += [f"{names.get(one, 'another')} as parameter {i} {place}" for i, one in enumerate(group["params"])]
    # The names of a large model are long. They are only sent if their digests differ.
    digests = engine.all_gather_object(hashlib.sha256("\n".join(mine).encode()).hexdigest(), "prepare.alike")
    if len(set(digests)) == 1:
        return
    theirs = engine.all_gather_object(mine, "prepare.names")
    for rank, other in enumerate(theirs):
        first = next((pair for pair in zip_longest(theirs[0], other, fillvalue="nothing") if pair[0] != pair[1]), None)
        if first is not None:
            message = f"rank 0 has {first[0]} where rank {rank} has {first[1]}"
            remedy = "build the same models and optimizers on every rank, without sets, whose order differs"
            raise UserError(f"run.prepare(): {message}: {remedy}", everywhere=True)


def sparse_values(buffer: Tensor) -> str:
    """Return what tells the values of a sparse buffer, which is not broadcast, from others; "" for others."""
    if buffer.layout is torch.strided:
        return ""
    # Engines broadcast dense tensors only, so that a sparse one has to be the same from the start.
    torch.save(buffer, content := io.BytesIO())
    return f", sparse, SHA-256 {hashlib.sha256(content.getvalue()).hexdigest()[:12]}"


def fuse(optimizer: torch.optim.Optimizer, *, may_lack_gradients: bool) -> None:
    """Let an optimizer of torch use its fused kernel on an accelerator, unless the author has chosen another one.

    may_lack_gradients: some parameters may have no gradient; then not for SGD.
    """
    if not isinstance(optimizer, FUSED):
        return
    # The fused kernel of SGD needs the momenta of all parameters, or of none.
    if may_lack_gradients and isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        open_to_choice = group.get("fused") is None and group.get("foreach") is None
        plain = not group.get("differentiable") and not group.get("capturable")
        if open_to_choice and plain and all(p.is_floating_point() and p.device.type != "cpu" for p in group["params"]):
            group["fused"] = True


def sorted_parts(
    parts: Sequence[Any], names: Sequence[str]
) -> tuple[list[nn.Module], Models, list[torch.optim.Optimizer]]:
    """Return the models as given, the models without what torch.compile puts around them, and the optimizers. Raises
    UserError for other objects."""
    given = [part for part in parts if isinstance(part, nn.Module)]
    # A compiled model is called as it is; its weights have the names of the model inside.
    inside = (getattr(model, "_orig_mod", model) for model in given)
    models = Models(inside, (name for name, part in zip(names, parts, strict=True) if isinstance(part, nn.Module)))
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    if len(models) + len(optimizers) != len(parts) or not models or not optimizers:
        kinds = [type(part).__name__ for part in parts]
        if len(models) + len(optimizers) == len(parts):
            kinds += ["no model"] * (not models) + ["no optimizer"] * (not optimizers)
        remedy = "give it models and optimizers (run.register takes schedulers)"
        raise UserError(f"run.prepare() got {', '.join(kinds)}: {remedy}")
    if any(nn.parameter.is_lazy(one) for model in models for one in (*model.parameters(), *model.buffers())):
        raise UserError("run.prepare(): a layer has no shape yet: call the model once before")
    return given, models, optimizers


def prepare(
    engine: Engine, averaging: Engine, flags: Flags, parts: Sequence[Any], names: Sequence[str], micro_batches: int,
    find_unused_parameters: bool, weights: Path | None,
) -> Prepared:  # fmt: skip
    """Return the prepared models and optimizers. A collective. Restore a checkpoint after it, before training.

    averaging: what averages the gradients of a step. names: of the parts; "": the script gave none.
    micro_batches: maximum number per step. find_unused_parameters: some parameters may get no gradient in some steps.
    weights: the file to begin with; None where a checkpoint has them.
    """
    given, models, optimizers = sorted_parts(parts, names)
    optimize_scripts_at_once()
    for optimizer in optimizers:
        complete(optimizer)
    require_alike(engine, models, optimizers)
    for model in models:
        model.to(engine.device)
        give_memory(model)
    if weights is not None:
        from hvdtrain.models.weights import load_weights

        with engine.raising_together("weights"):
            # The others get these weights by the broadcast below: one rank reads the file, not all at once.
            if engine.rank == 0:
                load_weights(models[0], weights)
    named = named_parameters(models)
    with engine.raising_together("prepare"):
        names_of = {parameter: name for name, parameter in named}
        refuse_parts(models, optimizers, names_of, engine)
    if engine.device.type != "cpu":
        for optimizer in optimizers:
            frozen = any(not parameter.requires_grad for parameter in parameters_of(optimizer))
            fuse(optimizer, may_lack_gradients=find_unused_parameters or frozen)
    reduction = Reduction(
        flags.compression, flags.gradient_predivide_factor, flags.reduction, micro_batches, find_unused_parameters
    )
    replicas = [averaging.distribute_model(model, reduction) for model in given]
    optimizers = [averaging.distribute_optimizer(optimizer, named, reduction) for optimizer in optimizers]
    scaler = torch.amp.GradScaler(engine.device.type, enabled=flags.amp == "fp16")
    prepared = Prepared(averaging, models, replicas, optimizers, scaler, named, zero_for_missing=find_unused_parameters)
    for model in models:
        engine.broadcast_model(model)
    if weights is not None:
        share_extra_state(engine, models[0])
    for optimizer in optimizers:
        engine.broadcast_optimizer_state(optimizer)
    return prepared


def optimize_scripts_at_once() -> None:
    """Let TorchScript optimize models and functions when they are first called, as in torch before 1.10, and not after the
    first calls: a process that resumes a run would compute its first steps with other bits."""
    torch._C._jit_set_profiling_executor(False)


def complete(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer around another one, whose author has not called super().__init__(), what torch expects there."""
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        inner = [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
        defaults = {"defaults": dict(inner[0].defaults) if inner else {}}
        torch.optim.Optimizer.__setstate__(optimizer, defaults | vars(optimizer))


def give_memory(model: nn.Module) -> None:
    """Give expanded buffers and lazy conjugates memory of their own."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.layout is not torch.strided:
                continue
            # Values are received into the buffer's memory.
            # Elements that share memory, or are computed when read, cannot take them.
            own = buffer.resolve_conj().resolve_neg()
            if any(stride == 0 and size > 1 for stride, size in zip(own.stride(), own.shape, strict=True)):
                own = own.contiguous()
            module._buffers[name] = own
