"""Handles the events that end a run: stop signals, non-finite gradients, diverged replicas.

All ranks make each decision together, at the same step.
"""

from argparse import Namespace
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from hvdtrain.engines import lines
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.hangs import leaving
from hvdtrain.hangs.messages import Fail
from hvdtrain.hangs.monitor import Monitor
from hvdtrain.launching.exit_codes import STOPPED
from hvdtrain.output.run_output import RunOutput
from hvdtrain.training.early_end import LeftEarly
from hvdtrain.training.features import replicas
from hvdtrain.training.resume import Checkpoints
from hvdtrain.training.shared_buffers import Kept
from hvdtrain.training.state import TrainState

OVERFLOWS = 20  # consecutive steps that the loss scaler may skip: from 65536, it reaches 1 after halving 16 times


class Stopped(BaseException):
    """Raised on all ranks after the same step, following a stop request. `except Exception` does not catch it."""


class Guard:
    """Ends or saves a run at a step that all ranks agree on. Use it as a context manager around training.

    worker: the ranks that average their gradients in every step; with --sync-every, not all. Flags used: check_steps,
    max_skipped, amp, sync_every.
    """

    def __init__(self, engine: Engine, worker: Engine, flags: Namespace, output: RunOutput, monitor: Monitor):
        self.engine, self.worker, self.output, self.monitor = engine, worker, output, monitor
        self.activity = engine.activity
        self.check_steps = flags.check_steps
        self.scaled = flags.amp == "fp16"
        self.max_skipped: int = flags.max_skipped if flags.max_skipped is not None else OVERFLOWS * self.scaled
        self.sync_every: int = flags.sync_every  # above 1, workers differ between exchanges (local_steps.py)
        self._buffers: Kept | None = None
        self._compared_at: tuple[int, int] | None = None  # step and number of ranks of the last comparison of weights
        if monitor.warning is not None:
            self.activity.asked = True
            output.say(monitor.warning)

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.engine.barrier()  # the monitor still detects ranks that do not reach it
        elif isinstance(error, Failure):
            self.output.event("error", kind="failure", message=str(error))
        agreed = error is None or (isinstance(error, (Failure, UserError)) and error.everywhere)
        mistake = isinstance(error, (UserError, LeftEarly))
        failure = None if agreed else Fail(f"{type(error).__name__}: {error}", mistake)
        self.monitor.close(failure)
        theirs = failure is not None and self.engine.rank and self.monitor.failed_alike(0, failure)
        if theirs and isinstance(error, (UserError, LeftEarly)):
            error.everywhere = True  # rank 0 prints it
        self.monitor.make_leaving().start()

    def heartbeat(self) -> None:
        """Report progress of this rank within a step or a phase, or after training: its time limit restarts."""
        self.activity.heartbeat()
        leaving.heartbeat()

    @property
    def stop_requested(self) -> str | None:
        """What requested a stop, or None. Ranks learn of a request at slightly different times."""
        return self.monitor.stop_reason

    def stops_here(self, name: str) -> bool:
        """Return, on all ranks, whether any rank knows of a stop request. A collective.

        Call it after an operation that may end early because of `stop_requested`, such as an evaluation.
        """
        return bool(self.engine.sum(torch.tensor([float(self.stop_requested is not None)]), name).item())

    def begin_step(self, state: TrainState, models: Sequence[nn.Module]) -> None:
        """Call it before a step if `max_skipped`, or if --check-steps wants it. Raises Failure on every rank of a worker if
        its replicas differ. With --sync-every, those of all ranks are compared after exchanges."""
        if state.step and self.check_steps and state.step % self.check_steps == 0:
            self.compare_replicas(state, models, self.worker)
        if self.max_skipped:  # the forward pass changes buffers: keep a copy in case the step is skipped
            self._buffers = Kept(models)

    def explains(self, state: TrainState) -> bool:
        """Return whether to search for the cause of non-finite gradients. Not for occasional overflows of the loss scaler,
        which are normal."""
        return not self.scaled or self._gives_up(state)

    def _gives_up(self, state: TrainState) -> bool:
        return state.skipped + 1 > self.max_skipped

    NOT_LOOKED = "the layer was not looked for, because the run is saved after this step"

    def report_skipped_step(self, state: TrainState, number: int, culprit: str | None) -> None:
        """Report that step `number` is skipped. Raises Failure if too many consecutive steps were skipped. A collective of
        the worker.

        culprit: the first non-finite tensor on this rank (`non_finite.Inspection`), or None.
        """
        members = self.worker.ranks()  # with --sync-every, other ranks know nothing of it
        found = self.worker.all_gather_object(culprit, "guard.culprit")
        ranks = [f"{self.monitor.name(rank)}, {what}" for rank, what in zip(members, found, strict=True) if what]
        blame = " and ".join(ranks) or "each rank's gradients are finite, but their sum over ranks is not"
        if culprit is self.NOT_LOOKED:
            blame = culprit
        in_a_row = state.skipped + 1
        message = f"step {number}: gradients are not finite: {blame}"
        message += f"; {in_a_row} step{'s'[: in_a_row > 1]} in a row, --max-skipped {self.max_skipped}"
        if self._gives_up(state):
            raise Failure(message, everywhere=self.worker.size == self.engine.size)
        if self.engine.rank == members[0] != 0:
            lines.warn(f"{message}: step skipped")
        self.output.say(f"warning: {message}: step skipped")
        self.output.event("error", kind="non-finite", step=number, message=message)

    def restore_buffers(self, skipped: Tensor | None = None) -> None:
        """Restore batch norm's running statistics after a skipped step. skipped: a flag on the device; None: it was."""
        if self._buffers is not None:
            self._buffers.restore(skipped)

    def compare_replicas(self, state: TrainState, models: Sequence[nn.Module], among: Engine | None = None) -> None:
        """Raise Failure on every rank if the parameters are not bitwise equal on all ranks. A collective.

        among: on these (default: all). A second call after the same step does nothing: a checkpoint and --check-steps may
        both request it.
        """
        among = self.engine if among is None else among
        if self._compared_at != (state.step, among.size):
            self._compared_at = state.step, among.size
            everywhere = among.size == self.engine.size
            replicas.compare(among, models, self.monitor.name, state.step, self.check_steps, everywhere)

    def should_stop(self, state: TrainState, due: bool = False) -> bool:
        """Return, on all ranks, whether to save and stop after this step. Call it where `activity.asked` or `due` is true;
        with --sync-every, after exchanges only. These are at most `sync_every` steps apart.

        due: on rank 0, whether an automatic checkpoint is due. `should_save` then returns True after an agreed step.
        """
        step, monitor = state.step, self.monitor
        self._hear_signals()
        stop, save = monitor.stop, monitor.save
        self.activity.asked = monitor.off is not None and self.engine.size > 1
        stops, decides = monitor.stop_reason is not None, self.engine.rank == 0
        ahead = int(self.engine.size > 1)  # rank 0 makes appointments early, so that ranks rarely have to wait
        if monitor.off and stop.step is None:  # without connections, all ranks decide, at this step
            asked = torch.tensor([float(stops), float(due and decides)])
            stops, due = (amount > 0 for amount in self.engine.sum(asked, "guard.stop").tolist())
            decides, ahead = True, 0
        if decides:
            if ahead and save.step is not None and save.step <= step + self.sync_every:
                save.wait()
            elif due and save.step is None:
                save.make(step + 2 * ahead * self.sync_every)
            if stops and stop.step is None:
                stop.make(step + ahead)
                stop.wait()
        return stop.step is not None and step >= stop.step

    def _hear_signals(self) -> None:
        """Hear stop signals again that the program has reset, and say which it handles itself now."""
        if handled := self.monitor.signals.regain():
            how = "leave them to hvdtrain, or send another one, such as SIGUSR1"
            self.output.say(
                f"warning: the program handles {', '.join(handled)} itself, so it does not save and stop: {how}"
            )

    def should_save(self, state: TrainState) -> bool:
        """Return, on all ranks, whether to save after this step. Call it once after every step, after `should_stop`."""
        monitor, save = self.monitor, self.monitor.save
        reached = save.step is not None and state.step >= save.step
        if reached:
            save.step = None
        if monitor.stop_reason or monitor.stop.step is not None or save.step is not None:
            self.activity.asked = True  # until it is done
        return reached

    def leave(self, state: TrainState, checkpoints: Checkpoints) -> int:
        """Wait until the checkpoint is on the disk, and return the exit code. Raises Failure if it cannot be written."""
        unsaved = checkpoints.close(self.heartbeat)
        saved = f"saved after step {state.step}: run the same command to resume"
        saved = unsaved or (saved if checkpoints.writes else "nothing saved: no --output-dir")
        self.output.event("stop", reason=self.monitor.stop_reason, step=state.step, samples=state.samples)
        self.output.say(f"stopped by {self.monitor.stop_reason or 'another rank'}; {saved}")
        if unsaved:
            raise Failure(unsaved)
        if announced().launcher == "torchrun":  # torchrun raises a SignalException after a signal
            self.output.say("the traceback that may follow is torchrun's own, and so is its exit code 1")
        return STOPPED
