"""Local steps: each group trains alone for --sync-every steps, then the ranks exchange how far they have come (DiLoCo,
arXiv:2311.08105). A group is a rank, or the ranks of a host, which average their gradients in every step and stay equal.

At an exchange, the weights' changes since the last one are averaged over ranks. The shared weights take a step of SGD with
Nesterov momentum in that direction, the same on all ranks, and every rank continues from there. In a mean over ranks, a host
counts by the number of its ranks. The optimizers' states stay with their groups. Whatever needs equal weights happens at
exchanges only: checkpoints, stops, comparisons. An evaluation between two exchanges sees the weights of the first one.

A checkpoint has the state of rank 0, and what each group has of its own: optimizers, loss scaler, number of skipped steps.
The states in a group are equal, so its first rank's is saved.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint import contents
from hvdtrain.checkpoint.own import Moment, Saved
from hvdtrain.engines.base import WIRE_DTYPES, Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.modules import floating_buffers
from hvdtrain.engines.parts import OneRank, RanksOfHost
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


class LocalSteps(Feature):
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
        # Of each rank, the first one of its group.
        self._leaders: list[int] = engine.all_gather_object(self._group.ranks()[0], "workers")

    def prepare(self, run: Run) -> None:
        self._run, self._prepared = run, run.prepared()
        self._prepared.weights_of_all = self.shared_weights
        # Weights are equal after an exchange only, so that checkpoints and stops fall there.
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
        # By name. What a program freezes or unfreezes later stays where it is.
        named = dict(prepared.named(list(prepared.trained)))
        self._names, self._parameters = list(named), list[Tensor](named.values())
        # Float32 also for weights of a shorter type, in which small changes would be lost.
        self._momenta = [
            torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in self._parameters
        ]
        self._shared = [p.detach().clone() for p in self._parameters]
        # What no optimizer trains: frozen weights, those that the script itself changes, registered averages of weights.
        self._others: list[Tensor] = []
        self._others_shared: list[Tensor] = []
        # Buffers, too: they are made the same anyway.
        self._known = {*self._parameters, *floating_buffers(prepared.models)}
        self._follow(p for model in prepared.models for p in model.parameters())
        self._follows_registered = False

    def _follow(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor not in self._known and tensor.is_floating_point():
                self._known.add(tensor)
                self._others.append(tensor)
                self._others_shared.append(tensor.detach().clone())

    def _refuse_gather(self, rows: object) -> Tensor:
        raise UserError("run.gather() cannot go with --sync-every: ranks take their steps alone", everywhere=True)

    def before_step(self, step: Step) -> None:
        if not self._follows_registered:  # in the first step: modules such as an average of the weights
            for module in self._run.checkpoints.registered.values():
                if isinstance(module, nn.Module):
                    self._follow((*module.parameters(), *floating_buffers([module])))
        self._follows_registered = True

    def after_step(self, step: Step) -> None:
        if not step.last and step.number % self._exchange_steps:
            # Ranks have other weights between two exchanges, and a checkpoint has those of all.
            step.may_save = False
        else:
            self.after_steps()

    def after_steps(self) -> None:
        step, every = self._run.state.step, self._check_steps
        if step == self._exchanged_at:
            return
        compares = bool(every) and step // every > self._exchanged_at // every
        if compares:  # afterwards, replicas of a host that differ would be equal again
            self._compare(self._group)
        self.exchange(step)
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
            # Nesterov momentum, as DiLoCo has it: the step is the mean change plus `decay` times the new momentum.
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
        # Divided before the cast: float16 ends at 65,504, also for the sum over ranks.
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

    # ---- checkpoints: of rank 0 the momenta of the shared weights, and what each group has of its own

    @property
    def about(self) -> tuple[str, str]:  # type: ignore[override] # it names the optimizers
        kinds = " or ".join(type(optimizer).__name__ for optimizer in self._prepared.optimizers)
        return f"the state of {kinds}", "use another optimizer"

    def _named_momenta(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._momenta, strict=True))

    def state(self, moment: Moment) -> Any:
        prepared, rank = self._prepared, self._all.rank
        if self._leaders[rank] != rank:
            return None
        own = {"skipped": self._run.state.skipped, "scaler": prepared.scaler.state_dict()}
        if rank == 0:  # its optimizers are in the checkpoint anyway
            return own | {"leaders": self._leaders, "momenta": self._named_momenta()}
        names = [contents.names_of(optimizer, prepared.models) for optimizer in prepared.optimizers]
        return own | {"optimizers": [optimizer.state_dict() for optimizer in prepared.optimizers], "names": names}

    def load(self, saved: Saved) -> None:
        """Restore this rank's, once the optimizers of rank 0 are on every rank."""
        if (of_all := saved.states[0]) is None:  # of a run without --sync-every
            return
        if of_all["leaders"] == self._leaders:
            own, prepared = saved.states[self._leaders[saved.rank]], self._prepared
            if "optimizers" in own:
                contents.load_optimizers(prepared.optimizers, prepared.models, own["optimizers"], own["names"])
            self._run.state.skipped = own["skipped"]
            if own["scaler"]:
                prepared.scaler.load_state_dict(own["scaler"])
        else:
            count = len(saved.states)
            why = f"of {count} ranks" if count != saved.ranks_now else "because other ranks shared a host"
            remedy = f"each of {saved.ranks_now} ranks begins with the optimizer state of rank 0"
            self._run.say(f"--sync-every {self._exchange_steps}: {remedy}, {why}")
        momenta = self._named_momenta()
        if momenta.keys() != of_all["momenta"].keys():
            remedy = "other parameters were trained: build the model as the run did"
            raise UserError(f"the checkpoint does not match the model: {remedy}", everywhere=True)
        for name, momentum in of_all["momenta"].items():
            momenta[name].copy_(momentum)
