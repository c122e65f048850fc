"""Models and optimizers wrapped by the engine and synchronized over all ranks, with the loss scaler of --amp."""

import hashlib
import inspect
import io
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.cli import Flags
from hvdtrain.engines.base import Engine, Reduction
from hvdtrain.engines.errors import UserError
from hvdtrain.models.weights import load_weights
from hvdtrain.training import extra_states
from hvdtrain.training.names import Models, kind_of, named_parameters
from hvdtrain.training.schedules import is_scheduled
from hvdtrain.training.shared_buffers import SharedBuffers, give_memory
from hvdtrain.training.verdict import fuse, takes_flag

REPLICAS = nn.DataParallel, nn.parallel.DistributedDataParallel
ADDED = (
    "a parameter was added to an optimizer after run.prepare(): create the optimizer with all of its parameters, and freeze "
    "those that are trained later (requires_grad_(False), then requires_grad_())"
)
_of_earlier_runs: weakref.WeakSet[object] = weakref.WeakSet()  # layers with trainable parameters


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def refuse_layer(name: str, layer: nn.Module, engine: Engine, *, local_steps: bool) -> None:
    """Raise UserError for a layer with which ranks cannot train, or would train wrongly without an error."""
    said = ""
    of_torch = isinstance(layer, nn.SyncBatchNorm)
    synchronizes = type(layer).__name__ == "SyncBatchNorm"
    if isinstance(layer, REPLICAS):
        kind = type(layer).__name__
        said = f"a {kind} would reduce gradients, too: give it the model inside, and choose by --engine"
    elif isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
        said = f"{name or 'the model'} has sparse gradients, which are not reduced: leave sparse=True out"
    elif synchronizes and local_steps:
        said = "SyncBatchNorm makes ranks wait in every step: use nn.BatchNorm, or leave --sync-every out"
    elif isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None and engine.size > 1:
        after = f"weight.data.renorm_({layer.norm_type:g}, 0, {layer.max_norm:g})"
        how = f"leave it out, and write {after} of the layer after step.update()"
        said = f"{name or 'the model'} has max_norm, which changes its weights on each rank alone: {how}"
    elif synchronizes and engine.device.type == "cpu" and not (of_torch and engine.name == "serial"):
        said = f"{name or 'the model'} is a SyncBatchNorm, which runs on GPUs only: use nn.BatchNorm on CPUs"
    elif of_torch and engine.name == "horovod":
        how = "use horovod.torch.SyncBatchNorm, or --engine ddp"
        said = f"torch.nn.SyncBatchNorm synchronizes nothing under Horovod: {how}"
    elif synchronizes and not of_torch and engine.name == "ddp":
        how = "use torch.nn.SyncBatchNorm, or --engine horovod"
        said = f"horovod.torch.SyncBatchNorm does not work under --engine ddp: {how}"
    elif layer in _of_earlier_runs:
        how = "create models and optimizers anew for each run, or copy.deepcopy(model) to go on with its weights"
        said = f"this {type(layer).__name__} was trained by an earlier run: {how}"
    if said:
        raise UserError(f"run.prepare(): {said}")


def callable_alone(function: Callable[..., object]) -> bool:
    """Return whether `function` may be called without arguments."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def refuse_optimizer(optimizer: torch.optim.Optimizer, known: Iterable[nn.Parameter]) -> None:
    """Raise UserError for an optimizer with which ranks cannot train. known: the parameters of the models."""
    said = ""
    if hasattr(optimizer, "skip_synchronize"):
        said = "a DistributedOptimizer would reduce gradients, too: give it the optimizer inside"
    elif isinstance(optimizer, torch.optim.LBFGS):
        how = "use SGD, Adam or another that does not call a closure"
        said = f"LBFGS computes the loss several times in a step, and ranks would differ: {how}"
    elif isinstance(optimizer, torch.optim.SparseAdam):
        said = "SparseAdam needs sparse gradients, which are not reduced: use Adam"
    elif is_scheduled(optimizer):
        how = "create it afterwards, from the optimizer that this returns"
        said = f"a learning rate scheduler was created before: {how}"
    elif not callable_alone(optimizer.step):
        said = f"{type(optimizer).__name__}.step() takes arguments that step.update() does not give: give them defaults"
    elif not set(parameters_of(optimizer)).issubset(known):
        said = "an optimizer has parameters of a model that was not given: pass that model, too"
    if said:
        raise UserError(f"run.prepare(): {said}")


def refuse_unsupported(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], names: Mapping[nn.Parameter, str],
    engine: Engine, *, local_steps: bool,
) -> None:  # fmt: skip
    """Raise UserError for what ranks cannot train with, or would train wrongly without an error. names: of the parameters.

    What an earlier run of this process has trained is refused, too: its gradients would be reduced twice, and a fold of a
    cross-validation would begin with weights that have seen its data.
    """
    layers = [pair for model in models for pair in model.named_modules()]
    for name, layer in layers:
        refuse_layer(name, layer, engine, local_steps=local_steps)
    for name, buffer in ((name, one) for model in models for name, one in model.named_buffers()):
        if buffer.is_quantized and engine.size > 1:
            how = "keep its integers, buffer.int_repr(), and the scale"
            raise UserError(f"run.prepare(): {name} is quantized, and ranks exchange no such tensors: {how}")
    taken: set[nn.Parameter] = set()
    for optimizer in optimizers:
        refuse_optimizer(optimizer, names)
        if shared := taken.intersection(parameters_of(optimizer)):
            how = "give each parameter to one optimizer, or several losses to one step.backward()"
            raise UserError(f"run.prepare(): {names[shared.pop()]} is in two optimizers: {how}")
        taken.update(parameters_of(optimizer))
    _of_earlier_runs.update(
        layer for _, layer in layers if any(p.requires_grad for p in layer.parameters(recurse=False))
    )


def refuse_replicas(name: str, module: nn.Module) -> None:
    """Raise UserError if a module that is registered under `name` holds what `run.prepare` has returned under DDP."""
    for layer in module.modules():
        if isinstance(layer, REPLICAS):
            said = f"run.register({name}=...) holds a {type(layer).__name__}, whose weights have other names"
            raise UserError(f"{said}: make it of the model that you gave to run.prepare()")


def require_alike(engine: Engine, models: Models, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise UserError on every rank if ranks have built different models or optimizers. A collective."""
    mine = [f"{name}: {kind_of(tensor)}" for name, tensor in named_parameters(models)]
    mine += [f"{kind_of(buffer)} buffer{sparse_values(buffer)}" for model in models for buffer in model.buffers()]
    mine += [name for model in models for states in extra_states.of({"": model}).values() for name in states]
    mine += [type(optimizer).__name__ for optimizer in optimizers]
    digests = engine.all_gather_object(hashlib.sha256("\n".join(mine).encode()).hexdigest(), "prepare.alike")
    if len(set(digests)) == 1:
        return
    theirs = engine.all_gather_object(mine, "prepare.names")
    for rank, other in enumerate(theirs):
        first = next((pair for pair in zip_longest(theirs[0], other, fillvalue="nothing") if pair[0] != pair[1]), None)
        if first is not None:
            said = f"rank 0 has {first[0]} where rank {rank} has {first[1]}"
            how = "build the same models and optimizers on every rank"
            raise UserError(f"run.prepare(): {said}: {how}", everywhere=True)


def sparse_values(buffer: Tensor) -> str:
    """Return what tells the values of a sparse buffer, which is not broadcast, from others; "" for others."""
    if buffer.layout is torch.strided:
        return ""
    torch.save(buffer, content := io.BytesIO())
    return f", sparse, SHA-256 {hashlib.sha256(content.getvalue()).hexdigest()[:12]}"


class Prepared:
    """The prepared models and optimizers. Creating it is a collective. Restore a checkpoint after it, before training.

    worker: the ranks that average their gradients in every step. names: of the parts; "": the script gave none.
    micro_batches: maximum number per step. find_unused_parameters: some parameters may get no gradient in some steps.
    """

    def __init__(
        self, engine: Engine, worker: Engine, flags: Flags, parts: Sequence[Any], names: Sequence[str],
        micro_batches: int, find_unused_parameters: bool,
    ):  # fmt: skip
        given = [part for part in parts if isinstance(part, nn.Module)]
        # A compiled model is called as it is; its weights have the names of the model inside.
        inside = (getattr(model, "_orig_mod", model) for model in given)
        models = Models(inside, (name for name, part in zip(names, parts, strict=True) if isinstance(part, nn.Module)))
        optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        if len(models) + len(optimizers) != len(parts) or not models or not optimizers:
            kinds = ", ".join(type(part).__name__ for part in parts) or "nothing"
            raise UserError(f"run.prepare() got {kinds}: give it models and optimizers (run.register takes schedulers)")
        if any(nn.parameter.is_lazy(one) for model in models for one in (*model.parameters(), *model.buffers())):
            raise UserError("run.prepare(): a layer has no shape yet: call the model once before")
        self._engine = engine
        require_alike(engine, models, optimizers)
        for model in models:
            model.to(engine.device)
            give_memory(model)
        if flags.weights is not None:
            with engine.raising_together("weights"):
                if engine.rank == 0:
                    load_weights(models[0], flags.weights)
        named = named_parameters(models)
        with engine.raising_together("prepare"):
            self._names = {parameter: name for name, parameter in named}
            refuse_unsupported(models, optimizers, self._names, engine, local_steps=worker is not engine)
        if engine.device.type != "cpu":
            for optimizer in optimizers:
                frozen = any(not parameter.requires_grad for parameter in parameters_of(optimizer))
                fuse(optimizer, may_lack_gradients=find_unused_parameters or frozen)
        how = Reduction(
            flags.compression, flags.gradient_predivide_factor, flags.reduction, micro_batches, find_unused_parameters
        )
        if worker is not engine:  # compressed is what goes between hosts, the weights
            how = how._replace(compression="none", predivide=1.0)
        self.models = models  # as created by the script; for checkpoints, hashes and inspection
        self.gradients = worker
        self.replicas = [self.gradients.distribute_model(model, how) for model in given]  # for training
        self.optimizers = [self.gradients.distribute_optimizer(optimizer, named, how) for optimizer in optimizers]
        self.scaler = torch.amp.GradScaler(engine.device.type, enabled=flags.amp == "fp16")
        # In the order of `named`. Some may be frozen (`requires_grad`) now, or later, or for a part of a step.
        self.trained: dict[torch.optim.Optimizer, list[nn.Parameter]] = {}
        for optimizer in self.optimizers:
            own = set(parameters_of(optimizer))
            self.trained[optimizer] = [p for _, p in named if p in own]
        # Optimizers on an accelerator that leave out an update by themselves. Not before the first one, which must be
        # known to be sound: the fused SGD would leave the momentum uninitialized that it allocates in it.
        self.flagged: set[torch.optim.Optimizer] = set()
        self.unflagged = {one for one in self.optimizers if takes_flag(one)}
        for optimizer in self.unflagged:
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined] # GradScaler reads the flag
        self.dense: set[torch.optim.Optimizer] = set()  # those that have passed `require_dense` after a backward pass
        self.pending: set[torch.optim.Optimizer] = set()  # those with gradients of this step that are not applied yet
        self.updating = False  # whether `step.update` calls the optimizers
        self.zero_grads = {one: one.zero_grad for one in self.optimizers}
        self.buffers = SharedBuffers(engine, models)
        self._zero_for_missing = find_unused_parameters
        for model in models:
            engine.broadcast_model(model)
        if flags.weights is not None:
            extra_states.share(engine, {"": models[0]})
        for optimizer in self.optimizers:
            engine.broadcast_optimizer_state(optimizer)

    def require_same_groups(self) -> None:
        """Raise UserError for a parameter that was added to an optimizer after `prepare`: its gradient would not be
        reduced."""
        for optimizer, trained in self.trained.items():
            if not set(trained).issuperset(parameters_of(optimizer)):
                raise UserError(ADDED)

    def require_dense(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UserError if a gradient is sparse, as of F.embedding(..., sparse=True) with a parameter of the script."""
        for parameter in self.trained[optimizer]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                how = "leave sparse=True out"
                raise UserError(f"{self._names[parameter]} has sparse gradients, which are not reduced: {how}")

    def first_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that `optimizer`, one of `unflagged`, has made its first update: from now on, it is given flags."""
        self.unflagged.remove(optimizer)
        self.flagged.add(optimizer)
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined] # GradScaler gives it the flag

    def in_order_of(self, parts: Sequence[Any]) -> Any:
        """Return the wrapped objects in the order of `parts`: a single object, or a tuple."""
        of_models, of_optimizers = iter(self.replicas), iter(self.optimizers)
        ready = tuple(next(of_models) if isinstance(part, nn.Module) else next(of_optimizers) for part in parts)
        return ready[0] if len(ready) == 1 else ready

    def own(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return `optimizer`. Raises UserError if it was not returned by `run.prepare`."""
        if optimizer not in self.trained:
            raise UserError("this optimizer did not come from run.prepare(): use the one that it returned")
        return optimizer

    def named(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[str, nn.Parameter]]:
        """Return the trainable parameters of `optimizers` with their names."""
        return [(self._names[p], p) for one in optimizers for p in self.trained[one] if p.requires_grad]

    def missing_gradients(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the names of the parameters that got no gradient and are not frozen. Raises UserError if the engine cannot
        signal that to other ranks."""
        missing = [self._names[p] for p in self.trained[optimizer] if p.grad is None and p.requires_grad]
        told = self.gradients.tells_missing_gradients and self.gradients.size > 1
        if missing and not self._zero_for_missing and not told:
            raise UserError(self._about_missing(missing))
        return missing

    def raise_where_gradients_are_missing(self, missing: list[str]) -> None:
        """Raise UserError on every rank of this worker if any of them has parameters without a gradient. A collective.

        missing: this rank's.
        """
        if self._zero_for_missing:
            return
        everywhere = self.gradients.size == self._engine.size
        theirs = self.gradients.all_gather_object(missing, "missing_gradients")
        for rank, names in zip(self.gradients.ranks(), theirs, strict=True):
            if names:
                raise UserError(f"rank {rank}: {self._about_missing(names)}", everywhere=everywhere)

    @staticmethod
    def _about_missing(names: list[str]) -> str:
        return (
            f"{names[0]} got no gradient in this step: freeze it (requires_grad_(False)), or if this is intended, "
            "run.prepare(..., find_unused_parameters=True)"
        )
