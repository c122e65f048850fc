"""Handles the events that end a run: stop signals, non-finite gradients, diverged replicas, hung or dead ranks.

All ranks make each decision together, at the same step.
"""

import contextlib
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.hangs import leaving
from hvdtrain.launching.exit_codes import STOPPED
from hvdtrain.training.records.telemetry import Telemetry
from hvdtrain.training.resilience.watchdog import Watchdog
from hvdtrain.training.resume import Checkpoints
from hvdtrain.training.state import TrainState

OVERFLOWS = 20  # consecutive steps that the loss scaler may skip: from 65536, it reaches 1 after halving 16 times


class Stopped(BaseException):
    """Raised on all ranks after the same step, following a stop request. `except Exception` does not catch it."""


class Guard:
    """Monitors training. Use it as a context manager around training. Creating it is a collective.

    Flags used: step_timeout, check_steps, max_skipped, amp, reduction.
    """

    def __init__(self, engine: Engine, flags: Namespace, telemetry: Telemetry):
        self.engine, self.telemetry = engine, telemetry
        self.check_steps = flags.check_steps
        self.scaled = flags.amp == "fp16"
        self.max_skipped = flags.max_skipped if flags.max_skipped is not None else OVERFLOWS * self.scaled
        # Adasum steps inside backward(). Overflows are therefore detected in the weights, and the step cannot be skipped.
        self.adasum = flags.reduction == "adasum"
        self._buffers: list[Tensor] = []
        self._compared_at: int | None = None  # the step after which the weights were last compared
        self._watchdog = Watchdog(engine, flags.step_timeout, failed=self._record, stopped=self._stopped)
        if self._watchdog.off:
            telemetry.say(f"warning: hung ranks will not be noticed: the ranks cannot connect ({self._watchdog.off})")

    def _record(self, headline: str) -> None:
        self.telemetry.event("error", kind="watchdog", message=headline)

    def _stopped(self, reason: str) -> None:
        self.telemetry.event("stop", reason=reason)
        how = "nothing to save: run the same command again"
        self.telemetry.say(f"stopped by {reason}, before the first step was finished; {how}")

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.engine.barrier()  # the watchdog still detects ranks that do not reach it
        elif isinstance(error, Failure):
            self.telemetry.event("error", kind="failure", message=str(error))
        agreed = error is None or isinstance(error, Failure) or (isinstance(error, UserError) and error.everywhere)
        self._watchdog.close(None if agreed else f"{type(error).__name__}: {error}")

    def heartbeat(self) -> None:
        """Tell the watchdog that this rank makes progress within a step or a phase: its time limit restarts."""
        self._watchdog.heartbeat()
        leaving.heartbeat()

    def phase(self, name: str, seconds: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a phase that is not part of a step. seconds: see `Progress.during`."""
        return self._watchdog.phase(name, seconds)

    def compute(self) -> None:
        """Tell the watchdog that the step computes gradients."""
        self._watchdog.compute()

    def update(self) -> None:
        """Tell the watchdog that the step has updated the weights. What follows may be work of one rank alone."""
        self._watchdog.update()

    def leave_steps(self) -> None:
        """Tell the watchdog that the loop over steps has ended."""
        self._watchdog.leave_steps()

    @property
    def stop_requested(self) -> str | None:
        """What requested a stop, or None. Ranks learn of a request at slightly different times."""
        return self._watchdog.stop_reason

    def stops_here(self, name: str) -> bool:
        """Return, on all ranks, whether any rank knows of a stop request. A collective.

        Call it after an operation that may end early because of `stop_requested`, such as an evaluation.
        """
        return bool(self.engine.sum(torch.tensor([float(self.stop_requested is not None)]), name).item())

    def begin_step(self, state: TrainState, models: Sequence[nn.Module]) -> None:
        """Call it before every step. Raises Failure on every rank if the replicas differ."""
        self._watchdog.begin_step(state.step)
        if state.step and self.check_steps and state.step % self.check_steps == 0:
            self.compare_replicas(state, models)
        if self.max_skipped:  # the forward pass changes buffers: keep a copy in case the step is skipped
            self._buffers = [buffer.clone() for model in models for buffer in model.buffers()]

    def finite(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether the reduced gradients are finite. The result is the same on all ranks, because NaN and infinity
        propagate through the reduction."""
        tensors = [p.detach() if self.adasum else p.grad for p in parameters if p.grad is not None]
        if not tensors:
            return True
        # Checked in Python: the kernels of isfinite and all, which nothing else uses, would double the cost.
        sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors]).tolist()
        return all(map(math.isfinite, sums))

    def explains(self, state: TrainState) -> bool:
        """Return whether to search for the cause of non-finite gradients. Not for occasional overflows of the loss scaler,
        which are normal."""
        return not self.scaled or self._gives_up(state)

    def _gives_up(self, state: TrainState) -> bool:
        return state.skipped + 1 > self.max_skipped or self.adasum

    def leave_out(self, state: TrainState, models: Sequence[nn.Module], culprit: str | None) -> None:
        """Report that this step is skipped. Raises Failure on every rank if too many consecutive steps were skipped. A
        collective.

        culprit: the first non-finite tensor on this rank (`non_finite.Inspection`), or None.
        """
        found = self.engine.all_gather_object(culprit, "guard.culprit")
        ranks = [f"rank {rank} on {self._watchdog.host(rank)}, {what}" for rank, what in enumerate(found) if what]
        blame = " and ".join(ranks) or "each rank's gradients are finite, but their sum over ranks is not"
        in_a_row = state.skipped + 1
        message = f"step {state.step + 1}: gradients are not finite: {blame}"
        message += f"; {in_a_row} step{'s'[: in_a_row > 1]} in a row, --max-skipped {self.max_skipped}"
        if self._gives_up(state):
            raise Failure(message)
        self.telemetry.say(f"warning: {message}: step skipped")
        self.telemetry.event("error", kind="non-finite", step=state.step + 1, message=message)

    def restore_buffers(self, models: Sequence[nn.Module]) -> None:
        """Restore batch norm's running statistics after a skipped step."""
        for buffer, before in zip((b for model in models for b in model.buffers()), self._buffers, strict=True):
            buffer.copy_(before)

    def compare_replicas(self, state: TrainState, models: Sequence[nn.Module]) -> None:
        """Raise Failure on every rank if the parameters are not bitwise equal on all ranks. A collective.

        A second call after the same step does nothing: a checkpoint and --check-steps may both request it.
        """
        if self.engine.size == 1 or self._compared_at == state.step:
            return
        self._compared_at = state.step
        named = named_parameters(models)
        if not named:
            return
        names = [name for name, _ in named]
        sums = torch.stack([checksum(parameter) for _, parameter in named]).cpu()
        rows = self.engine.all_gather(sums, "guard.replicas")
        kinds = Counter(tuple(row.tolist()) for row in rows)
        if len(kinds) == 1:
            return
        usual, votes = kinds.most_common(1)[0]
        unlike = [rank for rank, row in enumerate(rows) if tuple(row.tolist()) != usual]
        first = next(i for i in range(len(names)) if len(set(rows[:, i].tolist())) > 1)
        who = " and ".join(f"rank {rank} on {self._watchdog.host(rank)}" for rank in unlike)
        said = f"{who} has different weights than the other ranks"
        if votes * 2 <= self.engine.size:
            how = f"{who} differs from the other ranks"
            said = f"the weights differ between ranks, and no majority says which are right ({how})"
        since = (
            f"between steps {max(0, state.step - self.check_steps)} and {state.step}" if self.check_steps else "by now"
        )
        raise Failure(
            f"{said}: first in {names[first]}, {since}: start again from a checkpoint; check that host's memory"
        )

    def should_stop(self, state: TrainState, due: bool = False) -> bool:
        """Return, on all ranks, whether to save and stop after this step. Call it after every step.

        due: on rank 0, whether an automatic checkpoint is due. `should_save` then returns True after an agreed step.
        """
        watchdog = self._watchdog
        watchdog.finish_step(state.step)
        self._agree_to_save(state.step, due)
        if watchdog.off and watchdog.stop_at is None:
            asked = torch.tensor([float(watchdog.stop_reason is not None), float(due and self.engine.rank == 0)])
            stop, save = self.engine.sum(asked, "guard.stop").tolist()
            if stop:
                watchdog.stop_at = state.step
            if save:
                watchdog.save_at = state.step
        elif self.engine.rank == 0 and watchdog.stop_reason and watchdog.stop_at is None:
            watchdog.announce_stop(state.step + (self.engine.size > 1))
        return watchdog.stop_at is not None and state.step >= watchdog.stop_at

    def _agree_to_save(self, step: int, due: bool) -> None:
        """Agree on the step after which to save. Rank 0 announces it a step early, so that ranks rarely have to wait."""
        watchdog = self._watchdog
        if self.engine.size == 1 and due:
            watchdog.save_at = step
        if self.engine.size == 1 or self.engine.rank != 0 or watchdog.off:
            return
        if watchdog.save_at == step + 1:
            watchdog.confirm_save()
        elif due and watchdog.save_at is None:
            watchdog.propose_save(step + 2)

    def should_save(self, state: TrainState) -> bool:
        """Return, on all ranks, whether to save after this step. Call it once after every step, after `should_stop`."""
        at = self._watchdog.save_at
        if at is None or state.step < at:
            return False
        self._watchdog.save_at = None
        return True

    def leave(self, state: TrainState, checkpoints: Checkpoints) -> int:
        """Wait until the checkpoint is on the disk, and return the exit code. Raises Failure if it cannot be written."""
        unsaved = checkpoints.close(self.heartbeat)
        saved = f"saved after step {state.step}: run the same command to resume"
        saved = unsaved or (saved if checkpoints.writes else "nothing saved: no --output-dir")
        self.telemetry.event("stop", reason=self._watchdog.stop_reason, step=state.step, samples=state.samples)
        self.telemetry.say(f"stopped by {self._watchdog.stop_reason or 'another rank'}; {saved}")
        if unsaved:
            raise Failure(unsaved)
        if announced().launcher == "torchrun":  # torchrun raises a SignalException after a signal
            self.telemetry.say("the traceback that may follow is torchrun's own, and so is its exit code 1")
        return STOPPED


def named_parameters(models: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return each parameter once, with a unique name. With several models, the name begins with the model's number."""
    named: dict[nn.Parameter, str] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            named.setdefault(parameter, name if len(models) == 1 else f"{number}.{name}")
    return [(name, parameter) for parameter, name in named.items()]


def checksum(parameter: Tensor) -> Tensor:
    """Return an int64 scalar: the sum over all values of their bits times their position (from 1), modulo 2^64.

    It changes if a single bit flips, or if two different values are swapped. Computed on the parameter's device.
    """
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    bits = parameter.detach().contiguous().reshape(-1).view(kind)
    return (bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()
