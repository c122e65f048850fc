"""Local steps: each group trains alone for --sync-every steps, then the ranks exchange how far they have come (DiLoCo,
arXiv:2311.08105). A group is a rank, or the ranks of a host, which average their gradients in every step and stay equal.

At an exchange, the weights' changes since the last one are averaged over ranks. The shared weights take a step of SGD with
Nesterov momentum in that direction, the same on all ranks, and every rank continues from there. In a mean over ranks, a host
counts by the number of its ranks. The optimizers' states stay with their groups. Whatever needs equal weights happens at
exchanges only: checkpoints, stops, comparisons. An evaluation between two exchanges sees the weights of the first one.

A checkpoint has the state of rank 0, and what each group has of its own: optimizers, loss scaler, number of skipped steps.
The states in a group are equal, so its first rank's is saved.

own        JSON as uint8: of each group, the state that is no tensor, with shape and type of its tensors
own.rows   int64 [groups - 1, n]: of each but the first, the bytes of its tensors, one after the other, padded
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint import contents, loading
from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.checkpoint.parts import Content, Part
from hvdtrain.engines.base import WIRE_DTYPES, Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.modules import floating_buffers
from hvdtrain.engines.parts import OneRank, RanksOfHost
from hvdtrain.engines.portable import flattened, unflattened
from hvdtrain.flags import Flags
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step


def group_of(engine: Engine, flags: Flags) -> Engine:
    """Return the ranks that average their gradients in every step: those of this host, or this rank alone. A collective."""
    if flags.sync_within == "rank":
        return OneRank(engine)
    group = RanksOfHost(engine)
    each = f"each of {group.hosts} hosts" if group.hosts > 1 else "the only host: nobody is left to exchange with"
    engine.notes.append(f"--sync-within host: gradients are averaged within {each}")
    return group


class LocalSteps(Feature, Part):
    """The weights that all ranks share, and their exchange. A collective.

    name_of: returns the name of a rank. compare: compares the weights among ranks, every `check_steps`.
    """

    def __init__(self, engine: Engine, flags: Flags, name_of: Callable[[int], str], compare: Callable[[Engine], None]):
        self._all, self._name_of, self._compare = engine, name_of, compare
        self.averaging = self._group = group_of(engine, flags)
        self._exchange_steps: int = flags.sync_every
        self._check_steps: int = flags.check_steps
        self._rate, self._decay = flags.outer_lr, flags.outer_momentum
        self._wire, self._predivide = WIRE_DTYPES[flags.compression], flags.gradient_predivide_factor
        self._leaders: list[int] = engine.all_gather_object(
            self._group.ranks()[0], "workers"
        )  # of each rank, its group's first

    def prepare(self, run: Run) -> None:
        self._run, self._prepared = run, run.prepared()
        self._prepared.weights_of_all = self.shared_weights
        run.stopping.stride = self._exchange_steps
        run.gather = self._refuse_gather  # type: ignore[method-assign] # of this run alone
        for layer in (layer for model in self._prepared.models for layer in model.modules()):
            if type(layer).__name__ == "SyncBatchNorm":  # torch's, or Horovod's
                remedy = "use nn.BatchNorm, or leave --sync-every out"
                raise UserError(
                    f"run.prepare(): SyncBatchNorm makes ranks wait in every step: {remedy}", everywhere=True
                )
        self._exchanged_at = run.state.step  # the step after which the weights were last exchanged
        prepared = self._prepared
        self._parameters: list[Tensor] = [p for one in prepared.trained.values() for p in one if p.requires_grad]
        # Float32 also for weights of a shorter type, in which small changes would be lost.
        self._momenta = [
            torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in self._parameters
        ]
        self._shared = [p.detach().clone() for p in self._parameters]
        # What no optimizer trains: frozen weights, those that the script itself changes, registered averages of weights.
        self._others: list[Tensor] = []
        self._others_shared: list[Tensor] = []
        self._known = {
            id(t) for t in (*self._parameters, *floating_buffers(prepared.models))
        }  # buffers: made the same anyway
        self._follow(p for model in prepared.models for p in model.parameters())
        self._follows_registered = False

    def _follow(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self._known and tensor.is_floating_point():
                self._known.add(id(tensor))
                self._others.append(tensor)
                self._others_shared.append(tensor.detach().clone())

    def _refuse_gather(self, rows: Tensor) -> Tensor:
        raise UserError("run.gather() cannot go with --sync-every: ranks take their steps alone", everywhere=True)

    def before_step(self, step: Step) -> None:
        if not self._follows_registered:  # in the first step: modules such as an average of the weights
            for module in self._run.checkpoints.registered.values():
                if isinstance(module, nn.Module):
                    self._follow((*module.parameters(), *floating_buffers([module])))
        self._follows_registered = True

    def after_step(self, step: Step) -> None:
        if not step.last and step.number % self._exchange_steps:
            step.may_save = False
            return
        compares = (
            bool(self._check_steps) and step.number // self._check_steps > self._exchanged_at // self._check_steps
        )
        if compares:  # afterwards, replicas of a host that differ would be equal again
            self._compare(self._group)
        self.exchange(step.number)
        if compares:
            self._compare(self._all)
        self._run.clock.mark("communication")

    # ---- the exchange

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        """Average what the ranks have learnt, after `step` steps. A collective. Raises Failure on every rank if a weight is
        not finite."""
        with self._all.activity.during("exchange of weights"):
            means = self._averaged(torch._foreach_sub(self._parameters, self._shared), step)
            torch._foreach_mul_(self._momenta, self._decay)
            torch._foreach_add_(self._momenta, means)
            torch._foreach_add_(means, self._momenta, alpha=self._decay)
            torch._foreach_add_(self._shared, means, alpha=self._rate)
            torch._foreach_copy_(self._parameters, self._shared)
            self._exchange_others(step)
            self._run.buffers.make_alike()
        self._exchanged_at = step

    def _exchange_others(self, step: int) -> None:
        if not self._others:
            return
        pairs = zip(self._others, self._others_shared, strict=True)
        changes = [torch.where(own == shared, 0, own - shared) for own, shared in pairs]  # of -inf in a mask, too: 0
        mine = torch.stack([change.any() for change in changes]).int().cpu()
        changed = self._all.sum(mine, "exchange.changed").tolist()  # most are frozen: nothing to send
        these = [number for number, anywhere in enumerate(changed) if anywhere]
        if not these:
            return
        means = self._averaged([changes[number] for number in these], step)
        for number, mean in zip(these, means, strict=True):
            self._others_shared[number].add_(mean)
            self._others[number].copy_(self._others_shared[number])

    def _averaged(self, changes: Sequence[Tensor], step: int) -> list[Tensor]:
        """Return the mean of `changes` over ranks, in float32 or longer."""
        flat = torch.cat([change.reshape(-1) for change in changes])
        exact = torch.promote_types(flat.dtype, torch.float32)
        sent = flat / self._predivide
        sent = sent if self._wire is None else sent.to(self._wire)
        self._all.all_reduce_(sent, "sum", "exchange")
        mean = sent.to(exact).mul_(self._predivide / self._all.size)
        if not mean.sum().isfinite():
            self._raise_not_finite(bool(flat.sum().isfinite()), step)
        sizes = [change.numel() for change in changes]
        return [part.view_as(change) for part, change in zip(mean.split(sizes), changes, strict=True)]

    def _raise_not_finite(self, finite: bool, step: int) -> None:
        culprits = self._all.all_gather_object(finite, "exchange.finite")
        ranks = " and ".join(self._name_of(rank) for rank, sound in enumerate(culprits) if not sound)
        who = f"the weights of {ranks} are" if ranks else "each rank's weights are finite, but their sum over ranks is"
        raise Failure(f"exchange after step {step}: {who} not finite: start again with a lower --lr or --outer-lr")

    @contextlib.contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Context manager in which the models have the weights of the last exchange, between two exchanges."""
        tensors, shared = [*self._parameters, *self._others], [*self._shared, *self._others_shared]
        with torch.no_grad():
            own = [tensor.clone() for tensor in tensors]
            torch._foreach_copy_(tensors, shared)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(tensors, own)

    # ---- checkpoints: what is equal on all ranks, and what each group has of its own

    def parts(self) -> Sequence[Part]:
        return [self]

    def _names(self) -> list[str]:
        """Return the names of the parameters that have a momentum, in its order."""
        return [name for name, _ in self._prepared.named(list(self._prepared.trained))]

    def _momentum(self) -> Tensor:
        """Return the momenta of the shared weights, one after the other."""
        return torch.cat([momentum.reshape(-1) for momentum in self._momenta])

    def save(self, content: Content) -> None:
        prepared, skipped = self._prepared, self._run.state.skipped
        content.tensors |= states_of_groups(self._all, self._leaders, prepared.optimizers, prepared.scaler, skipped)
        content.live["outer.momentum"] = self._momentum()
        content.facts |= {"outer": self._names(), "workers": self._leaders}

    def restore(self, content: Content) -> None:
        facts, prepared, engine = content.facts, self._prepared, self._all
        if not facts["workers"]:  # of a run without --sync-every
            return
        tensors = content.tensors or None
        if facts["workers"] == self._leaders:
            own = restore_own(engine, self._leaders, tensors, prepared.optimizers, prepared.models, facts["parameters"])
            self._run.state.skipped = own["skipped"]
            if own["scaler"]:
                prepared.scaler.load_state_dict(own["scaler"])
        else:
            remedy = f"each of {engine.size} ranks begins with the optimizer state of rank 0"
            unlike = facts["world_size"] != engine.size
            why = f"of {facts['world_size']} ranks" if unlike else "because other ranks shared a host"
            self._run.say(f"--sync-every {self._exchange_steps}: {remedy}, {why}")
        self._restore_momentum(tensors, facts["outer"])

    def _restore_momentum(self, tensors: Mapping[str, Tensor] | None, names: Sequence[str]) -> None:
        """Restore the momenta. A collective. tensors: of the checkpoint, on rank 0. names: in its order."""
        flat = self._momentum().cpu()
        if sorted(names) != sorted(self._names()):
            remedy = "other parameters were trained: check --model"
            raise UserError(f"the checkpoint does not match the model: {remedy}", everywhere=True)
        if tensors is not None:
            flat.copy_(tensors["outer.momentum"])
        self._all.broadcast_(flat, "checkpoint.momentum")
        own = dict(zip(self._names(), self._momenta, strict=True))
        ordered = [own[name] for name in names]
        for momentum, part in zip(ordered, flat.split([one.numel() for one in ordered]), strict=True):
            momentum.copy_(part.view_as(momentum))


def states_of_groups(
    engine: Engine,
    leaders: Sequence[int],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    skipped: int,
) -> dict[str, Tensor]:
    """Return the tensors for a checkpoint. A collective. Every rank needs memory for the states of all.

    leaders: of each rank, the first rank of its group.
    """
    first = sorted(set(leaders))
    kinds = " or ".join(type(optimizer).__name__ for optimizer in optimizers)
    with contents.storable(f"the state of {kinds}", "use another optimizer"):
        packed, row = flattened([optimizer.state_dict() for optimizer in optimizers])
    facts = {"optimizers": packed, "scaler": scaler.state_dict(), "skipped": skipped, "length": len(row)}
    ranks, rows = engine.all_gather_flattened(facts, row, "checkpoint.own")
    return {"own": contents.encoded([ranks[rank] for rank in first]), "own.rows": rows[first[1:]].clone()}


def restore_own(
    engine: Engine,
    leaders: Sequence[int],
    tensors: Mapping[str, Tensor] | None,
    optimizers: Sequence[torch.optim.Optimizer],
    models: Sequence[nn.Module],
    names: Sequence[Sequence[Sequence[str]]],
) -> Facts:
    """Restore this rank's optimizers, once those of rank 0 are on every rank. Return what else is its own: "scaler",
    "skipped". A collective, with the `leaders` that have written it. tensors: of the checkpoint, on rank 0.
    names: see `loading.load_optimizers`.
    """
    me = sorted(set(leaders)).index(leaders[engine.rank])
    saved = None if tensors is None else (contents.decoded(tensors["own"]), tensors["own.rows"])
    packed, rows = engine.broadcast_nested(saved, "checkpoint.own")
    if me:
        loading.load_optimizers(optimizers, models, unflattened(packed[me]["optimizers"], rows[me - 1]), names)
    return {name: packed[me][name] for name in ("scaler", "skipped")}
