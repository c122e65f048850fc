"""--virtual-ranks: what a run needs of it beside its engine, which has the turns and the sums (engines/virtual.py)."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.checkpoint.own import Moment, Saved
from hvdtrain.engines.base import Engine
from hvdtrain.engines.cores import cores_here
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.engines.virtual import VirtualRanks, not_with_turns
from hvdtrain.flags import Flags
from hvdtrain.loop.evaluation import NONE, SharedBuffers
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step


def virtual_ranks_on(processes: Engine, flags: Flags) -> VirtualRanks:
    """Return the engine of the ranks. A collective."""
    engine = VirtualRanks(processes, flags.virtual_ranks)
    if flags.threads is None:
        # The number of threads changes how sums are rounded: it follows from V, not from the number of processes.
        cores = min(processes.all_gather_object(cores_here(os.environ, announced()), "virtual.cores"))
        torch.set_num_threads(max(1, cores // engine.size))
    return engine


class BuffersOfTurns(SharedBuffers):
    """The buffers of a run's models in an evaluation: those of all ranks are averaged."""

    def __init__(self, engine: VirtualRanks, models: Sequence[nn.Module], say: Callable[[str], None]):
        super().__init__(engine, models, say)
        self._engine: VirtualRanks = engine
        self._ranks = engine.buffers
        self._before: Any = None

    def share(self, position: object, registered: Mapping[str, nn.Module]) -> None:
        if self._engine.in_turn:
            raise not_with_turns("run.evaluating() inside of step.batches()", "call it after the loop")
        if position != self._shared_at:
            self._before = self._ranks.noted()
        super().share(position, registered)

    def make_alike(self, registered: Mapping[str, nn.Module] = NONE) -> None:
        super().make_alike(registered)  # of registered modules, which have no turns
        self._ranks.average()

    def restore_own(self) -> None:
        super().restore_own()
        self._ranks.restore(self._before)


class VirtualFeature(Feature):
    """Restores the buffers of each rank after a step that is skipped, and refuses what could not hold."""

    def __init__(self, engine: Engine, flags: Flags):
        assert isinstance(engine, VirtualRanks)
        self._ranks, self._flags, self._before = engine, flags, engine.buffers.noted()

    def prepare(self, run: Run) -> None:
        self._run = run
        run.buffers = BuffersOfTurns(self._ranks, run.prepared().models, run.say)
        if self._ranks.device.type != "cpu" and (self._flags.max_skipped or self._flags.amp == "fp16"):
            raise not_with_turns("skipped steps on a GPU", "use --amp bf16, and leave --max-skipped out")
        self._ranks.take_turn(None)  # rank 0's buffers for all, as the checkpoint has them

    def before_step(self, step: Step) -> None:
        for name in self._run.checkpoints.generators.registered:
            raise not_with_turns(f"run.register({name}=...), a generator", "draw from torch's own in step.batches()")
        self._before = self._ranks.buffers.noted()

    def after_step(self, step: Step) -> None:
        if step.left_out:
            self._ranks.buffers.restore(self._before)

    def state(self, moment: Moment) -> Any:
        return {"device": self._ranks.device.type, "threads": torch.get_num_threads()}

    def load(self, saved: Saved) -> None:
        if saved.state is None:  # --resume PATH of a run without
            return
        if (device := saved.state["device"]) != self._ranks.device.type:
            message = f"--virtual-ranks: the run began on {device}, and this is {self._ranks.device.type}"
            raise UserError(f"{message}: add --device {device}", everywhere=True)
        threads, now = saved.state["threads"], torch.get_num_threads()
        if threads != now and self._ranks.rank == 0:
            remedy = f"add --threads {threads} for the same bits"
            self._run.say(f"warning: --virtual-ranks: {now} torch threads per rank instead of {threads}: {remedy}")
