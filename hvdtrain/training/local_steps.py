"""Local steps: each worker trains alone for --sync-every steps, then the ranks exchange how far they have come (DiLoCo,
arXiv:2311.08105). A worker is a rank, or the ranks of a host, which average their gradients in every step and stay equal.

At an exchange, the weights' changes since the last one are averaged over ranks. The shared weights take a step of SGD with
Nesterov momentum in that direction, the same on all ranks, and every rank continues from there. In a mean over ranks, a host
counts by the number of its ranks. The optimizers' states stay with their workers. Whatever needs equal weights happens at
exchanges only: checkpoints, stops, comparisons. An evaluation between two exchanges sees the weights of the first one.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hvdtrain.cli import Flags
from hvdtrain.engines.base import WIRE_DTYPES, Engine
from hvdtrain.engines.buffers import floating_buffers
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.training.prepared import Prepared


def worker_of(engine: Engine, flags: Flags) -> Engine:
    """Return the ranks that average their gradients in every step: all of them, those of this host, or this rank alone. A
    collective."""
    if flags.sync_every == 1 or flags.evaluate is not None:
        return engine
    from hvdtrain.engines.parts import OneRank, RanksOfHost

    if flags.sync_within == "rank":
        return OneRank(engine)
    worker = RanksOfHost(engine)
    each = f"each of {worker.hosts} hosts" if worker.hosts > 1 else "the only host: nobody is left to exchange with"
    engine.notes.append(f"--sync-within host: gradients are averaged within {each}")
    return worker


class LocalSteps:
    """The weights that all ranks share, and their exchange. Create it once the weights are restored, before training.

    done: steps done. name_of: returns the name of a rank.
    """

    def __init__(self, engine: Engine, flags: Flags, prepared: Prepared, done: int, name_of: Callable[[int], str]):
        self._engine, self._prepared, self._name_of = engine, prepared, name_of
        self._every: int = flags.sync_every
        self._rate, self._decay = flags.outer_lr, flags.outer_momentum
        self._wire, self._predivide = WIRE_DTYPES[flags.compression], flags.gradient_predivide_factor
        self._exchanged_at = done  # the step after which the weights were last exchanged
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

    def follow(self, module: nn.Module) -> None:
        """Average also a registered module over ranks, such as an average of the weights."""
        self._follow((*module.parameters(), *floating_buffers([module])))

    def _follow(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self._known and tensor.is_floating_point():
                self._known.add(id(tensor))
                self._others.append(tensor)
                self._others_shared.append(tensor.detach().clone())

    def is_due(self, step: int) -> bool:
        """Return whether an exchange follows step number `step`, as at the end of an epoch in any case."""
        return step % self._every == 0

    def passed(self, interval: int, step: int) -> bool:
        """Return whether a multiple of `interval` lies after the last exchange, up to `step`. 0: never."""
        return bool(interval) and step // interval > self._exchanged_at // interval

    # ---- the exchange

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        """Average what the ranks have learnt, after `step` steps. A collective. Raises Failure on every rank if a weight is
        not finite."""
        with self._engine.activity.during("exchange of weights"):
            means = self._averaged(torch._foreach_sub(self._parameters, self._shared), step)
            torch._foreach_mul_(self._momenta, self._decay)
            torch._foreach_add_(self._momenta, means)
            torch._foreach_add_(means, self._momenta, alpha=self._decay)
            torch._foreach_add_(self._shared, means, alpha=self._rate)
            torch._foreach_copy_(self._parameters, self._shared)
            self._exchange_others(step)
            for model in self._prepared.models:
                self._engine.average_buffers(model)
            self._prepared.buffers.take_rank_0s()
        self._exchanged_at = step

    def _exchange_others(self, step: int) -> None:
        if not self._others:
            return
        pairs = zip(self._others, self._others_shared, strict=True)
        changes = [torch.where(own == shared, 0, own - shared) for own, shared in pairs]  # of -inf in a mask, too: 0
        mine = torch.stack([change.any() for change in changes]).int().cpu()
        changed = self._engine.sum(mine, "exchange.changed").tolist()  # most are frozen: nothing to send
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
        self._engine.all_reduce_(sent, "sum", "exchange")
        mean = sent.to(exact).mul_(self._predivide / self._engine.size)
        if not mean.sum().isfinite():
            self._raise_not_finite(bool(flat.sum().isfinite()), step)
        sizes = [change.numel() for change in changes]
        return [part.view_as(change) for part, change in zip(mean.split(sizes), changes, strict=True)]

    def _raise_not_finite(self, finite: bool, step: int) -> None:
        found = self._engine.all_gather_object(finite, "exchange.finite")
        ranks = " and ".join(self._name_of(rank) for rank, sound in enumerate(found) if not sound)
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

    # ---- checkpoints: what is equal on all ranks; own_states.py has the rest

    def names(self) -> list[str]:
        """Return the names of the parameters that have a momentum, in its order."""
        return [name for name, _ in self._prepared.named(list(self._prepared.trained))]

    def momentum(self) -> Tensor:
        """Return the momenta of the shared weights, one after the other."""
        return torch.cat([momentum.reshape(-1) for momentum in self._momenta])

    def restore(self, tensors: Mapping[str, Tensor] | None, names: Sequence[str]) -> None:
        """Restore the momenta. A collective. tensors: of the checkpoint, on rank 0. names: in its order."""
        flat = self.momentum().cpu()
        if sorted(names) != sorted(self.names()):
            how = "other parameters were trained: check --model"
            raise UserError(f"the checkpoint does not match the model: {how}", everywhere=True)
        if tensors is not None:
            flat.copy_(tensors["outer.momentum"])
        self._engine.broadcast_(flat, "checkpoint.momentum")
        own = dict(zip(self.names(), self._momenta, strict=True))
        ordered = [own[name] for name in names]
        for momentum, part in zip(ordered, flat.split([one.numel() for one in ordered]), strict=True):
            momentum.copy_(part.view_as(momentum))
