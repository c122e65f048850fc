"""Stop signals and automatic checkpoints: all ranks decide together, at the same step."""

import contextlib
import enum
from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError, of_a_program
from hvdtrain.engines.launchers import announced
from hvdtrain.guards import limits
from hvdtrain.guards.connection import Fail
from hvdtrain.guards.watch import STOP_SIGNALS, Watch
from hvdtrain.launching.exit_codes import FAILED, STOPPED, WRONG_INPUT
from hvdtrain.loop.state import TrainState
from hvdtrain.output.run_output import RunOutput

OF_LOST_RANKS = ("HorovodInternalError", "gloo/transport", "NCCL", "Connection closed by peer")  # errors of engines


class Stopped(BaseException):
    """Raised on all ranks after the same step, following a stop request. `except Exception` does not catch it."""


class LeftEarly(Failure):
    """The program has called sys.exit() without an error: on one rank, or by the same line on all."""


class Decision(enum.Enum):
    """What follows a step."""

    GO_ON = enum.auto()
    SAVE = enum.auto()
    SAVE_AUTOMATICALLY = enum.auto()  # the next such checkpoint may replace it
    STOP = enum.auto()  # save, and end


class Stopping:
    """Decides whether to save or stop after a step. Use it as a context manager around training.

    checkpoint_steps: steps between two checkpoints; None: they are automatic, or there are none.
    """

    stride = 1  # steps between two of which all ranks may decide; a feature may raise it

    def __init__(self, engine: Engine, output: RunOutput, watch: Watch, checkpoint_steps: int | None):
        self.engine, self.output, self.watch = engine, output, watch
        self._activity = engine.activity
        self._every = checkpoint_steps
        self._is_stopped = False
        self.save_at = float("inf")  # the step after which --checkpoint-steps wants the next checkpoint
        if watch.warning is not None:
            self._activity.asked = True
            output.say(watch.warning)

    def __enter__(self) -> "Stopping":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.engine.barrier()  # the watch still detects ranks that do not reach it
        # A record that ends without a word cannot be told from that of a killed run.
        elif isinstance(error, Failure):
            self.output.event("error", kind="failure", message=str(error))
        agreed = error is None or (isinstance(error, (Failure, UserError)) and error.everywhere)
        mistake = isinstance(error, (UserError, LeftEarly))
        failure = None if agreed or error is None else Fail(of_a_program(error), mistake)
        self.watch.close(failure)
        theirs = failure is not None and self.engine.rank and self.watch.peers.failed_alike(0, failure)
        if theirs and isinstance(error, (UserError, LeftEarly)):
            error.everywhere = True  # rank 0 prints it
        self.watch.make_leaving().start()
        failed = [gone.failure for gone in self.watch.peers.gone.values() if gone.failure is not None]
        # A collective fails on all ranks as one of them goes. Their tracebacks would hide the line that names it.
        if failed and failure is not None and any(word in f"{type(error).__name__} {error}" for word in OF_LOST_RANKS):
            raise SystemExit(WRONG_INPUT if all(one.mistake for one in failed) else FAILED) from None  # told by `close`

    def heartbeat(self) -> None:
        """Report progress of this rank within a step or a phase, or after training: its time limit restarts."""
        self._activity.heartbeat()
        limits.heartbeat()

    def is_asked_anywhere(self) -> bool:
        """Return, on all ranks, whether any rank knows of a stop request. A collective."""
        # Ranks hear of a signal at slightly different times:
        # if each decided alone, some would wait in the next collective.
        mine = torch.tensor([float(self.watch.stop_reason is not None)])
        return bool(self.engine.sum(mine, "evaluate.stop").item())

    # ---- after a step

    def begin(self, step: int) -> None:
        """Begin to decide, after `step` steps."""
        if self._every:
            self.save_at = (step // self._every + 1) * self._every

    def decide(self, step: int, due: bool) -> Decision:
        """Return, on all ranks, what follows `step`. Call it if `activity.asked` or `due`, or at `save_at`.

        due: on rank 0, whether an automatic checkpoint is due.
        """
        saves, stops = step >= self.save_at, False
        if saves:
            self.begin(step)
        if due or self._activity.asked:
            self._hear_signals()
            # Without connections between ranks, a signal is only heard of by asking: all ask after each step.
            self._activity.asked = self.watch.off is not None and self.engine.size > 1
            self._appoint(step, due)
            stops = self.watch.stop.step is not None and step >= self.watch.stop.step
            saves = self._is_time_to_save(step) or saves
        if stops:
            return Decision.STOP
        if not saves:
            return Decision.GO_ON
        return Decision.SAVE_AUTOMATICALLY if self._every is None else Decision.SAVE

    def _appoint(self, step: int, due: bool) -> None:
        """On rank 0: tell all ranks after which step to save or to stop, if that is asked for."""
        stops, decides = self.watch.stop_reason is not None, self.engine.rank == 0
        if self.watch.off and self.watch.stop.step is None:
            # Without connections, all ranks decide together, and at this step.
            asked = torch.tensor([float(stops), float(due and decides)])
            stops, due = (amount > 0 for amount in self.engine.sum(asked, "guard.stop").tolist())
            self._make_appointments(step, stops, due, ahead=0)
        elif decides:
            self._make_appointments(step, stops, due, ahead=int(self.engine.size > 1))

    def _make_appointments(self, step: int, stops: bool, due: bool, ahead: int) -> None:
        """ahead: 1 if other ranks have to hear of an appointment before its step, else 0."""
        stop, save = self.watch.stop, self.watch.save
        if ahead and save.step is not None and save.step <= step + self.stride:
            save.wait()
        elif due and save.step is None:
            # Two steps ahead: the message arrives before the other
            # ranks reach that step, so that they rarely wait for it.
            save.make(step + 2 * ahead * self.stride)
        if stops and stop.step is None:
            stop.make(step + ahead)
            stop.wait()

    def _is_time_to_save(self, step: int) -> bool:
        """Return whether the appointed step is reached. If there is one left, all ask again after the next step."""
        watch, save = self.watch, self.watch.save
        reached = save.step is not None and step >= save.step
        if reached:
            save.step = None
        if watch.stop_reason or watch.stop.step is not None or save.step is not None:
            self._activity.asked = True  # until it is done
        return reached

    def _hear_signals(self) -> None:
        """Hear stop signals again that the program has reset, and say which it handles itself now."""
        names = {number.name for number in STOP_SIGNALS}
        if handled := [name for name in self.watch.signals.regain() if name in names]:
            remedy = "leave them to hvdtrain, or send another one, such as SIGUSR1"
            self.output.say(
                f"warning: the program handles {', '.join(handled)} itself, so it does not save and stop: {remedy}"
            )

    # ---- the end

    def stopped(self) -> Stopped:
        """Return what ends the program's loops. All is saved."""
        self._is_stopped = True
        return Stopped()

    def require_uncaught(self) -> None:
        """Raise it again if the program has caught it."""
        if self._is_stopped:
            self.output.say("warning: the program has caught what stops it: write `except Exception:` for `except:`")
            raise self.stopped()

    def leave(self, state: TrainState, unsaved: str | None, *, writes: bool) -> int:
        """Return the exit code of a run that was stopped. Raises Failure if its checkpoint could not be written.

        unsaved: why not. writes: whether there are checkpoints.
        """
        saved = f"saved after step {state.step}: run the same command to resume"
        saved = unsaved or (saved if writes else "nothing saved: no --output-dir")
        self.output.event("stop", reason=self.watch.stop_reason, step=state.step, samples=state.samples)
        self.output.say(f"stopped by {self.watch.stop_reason or 'another rank'}; {saved}")
        if unsaved:
            raise Failure(unsaved)
        if announced().launcher == "torchrun":  # torchrun raises a SignalException after a signal
            self.output.say("the traceback that may follow is torchrun's own, and so is its exit code 1")
        return STOPPED


@contextlib.contextmanager
def early_ends_refused(engine: Engine, place: Callable[[], str]) -> Iterator[None]:
    """Context manager around the program's part of the training block, in which whatever would end it early, in silence or
    with another rank blamed, is said in one line. place: called for where in the training it is."""
    with contextlib.ExitStack() as stack:
        # `hvd.shutdown()` or `destroy_process_group()` in the block
        # would take the engine from under the other ranks' collectives.
        for module, name in engine.ending_calls():
            whole = getattr(module, name)
            stack.callback(setattr, module, name, whole)
            setattr(module, name, _refusal(name, whole))
        try:
            yield
        except SystemExit as left:
            if not (left.code is None or (isinstance(left.code, int) and left.code & 0xFF == 0)):  # 256 ends with 0
                raise
            remedy = "end the loops by `break`, or call sys.exit() after the block of training.start()"
            message = f"sys.exit() {place()}, without a result: {remedy}"
            raise LeftEarly(message, everywhere=False) from None


def _refusal(name: str, whole: Callable[..., object]) -> Callable[..., object]:
    def refuse(*arguments: object, **named: object) -> object:
        if arguments or named:  # destroy_process_group(group) of the program's own group: allowed
            return whole(*arguments, **named)
        remedy = "leave it out: hvdtrain does so at the end"
        raise UserError(f"{name}() during training, which the other ranks continue: {remedy}")

    return refuse
