"""What this rank is doing: the collective and the phase that it is in. The engine and the loop set it, the monitor reads it.

The main thread writes, the monitor's thread reads: plain attributes, no lock.
"""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from hvdtrain.engines.errors import Failure


class Phase(NamedTuple):
    """A phase of the main thread. seconds: time limit without progress, at least that of a step; None: the default for this
    name."""

    name: str
    seconds: float | None = None


START, FIRST_STEP, STEP, COMPILATION = Phase("start-up"), Phase("first step"), Phase("step"), Phase("compilation")
UPDATED = Phase("the end of a step")  # after the update: the limit of a step, and a longer one while it is at work
BETWEEN = Phase("between epochs")  # outside of the loop over steps
UNREAD = Phase("output that nobody reads")
LAST_CALLED = 8  # collectives whose names are kept; a rank may be some ahead of another


class Activity:
    """What the main thread of this rank is doing, and how often that changed."""

    def __init__(self) -> None:
        self.collective: str | None = None  # the one in which it waits for other ranks
        # How many of all ranks were called, and the last ones. Every rank calls the same in the same order. Replaced as a
        # whole, because the monitor reads it.
        self.called: tuple[int, tuple[str, ...]] = (0, ())
        self.step = 0  # steps finished since the beginning of training
        self.finished = 0  # steps finished by this process
        self.moves = 0  # changes with any progress
        # Set by the monitor when a stop or a checkpoint is requested or agreed: `stopping.decide` is called after the step.
        # Always set where the ranks could not be connected.
        self.asked = False
        # The device computes on after a call has returned: a call outside of a collective may wait for a collective there.
        self.asynchronous = False
        self._compiling = 0  # compilations in progress
        self._base = START
        self._inside: list[Phase] = []

    @property
    def phase(self) -> Phase:
        """The current phase."""
        if self._compiling:
            return COMPILATION
        inside = self._inside[-1:]  # a copy: the main thread may leave the phase at any time
        return inside[0] if inside else self._base

    def call(self, collective: str, of_all: bool = True) -> None:
        """Report the call of a collective, in which this rank then waits. of_all: for all ranks of the run, or some."""
        if of_all:
            count, names = self.called
            self.called = count + 1, (*names[1 - LAST_CALLED :], collective)
        self.collective = collective

    def heartbeat(self) -> None:
        """Report progress within a phase, such as one batch of an evaluation. The time limit restarts."""
        self.moves += 1

    def begin_step(self, step: int) -> None:
        """Report the beginning of a step. step: number of finished steps. The first step has a longer limit."""
        self.step = step
        self._base = FIRST_STEP if self._base in (START, FIRST_STEP) else STEP
        self.moves += 1

    def compute(self) -> None:
        """Report that the step computes gradients, perhaps again after an update."""
        if self._base is UPDATED:
            self._base = STEP

    def update(self) -> None:
        """Report that the step has updated the weights. What follows in it may be work of one rank alone."""
        if self._base is STEP:
            self._base = UPDATED
            self.moves += 1

    def finish_step(self, step: int) -> None:
        """Report the end of a step. step: number of finished steps."""
        self.step = step
        self.finished += 1
        self._base = STEP
        self.moves += 1

    def leave_steps(self) -> None:
        """Report the end of the loop over steps."""
        self._base = BETWEEN
        self.moves += 1

    @contextlib.contextmanager
    def during(self, name: str, seconds: float | None = None) -> Iterator[None]:
        """Context manager for a phase. seconds: time limit without progress, at least that of a step; None: the default for
        this name, at least 10 times the limit of a step."""
        self._inside.append(Phase(name, seconds))
        self.moves += 1
        try:
            yield
        finally:
            self._inside.pop()
            self.moves += 1

    @contextlib.contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Context manager for a collective."""
        outer, self.collective = self.collective, collective
        try:
            yield
        finally:
            self.collective = outer

    # ---- compilations by torch.compile, which may take minutes at the first step and at each new shape

    def hear_of_compilations(self) -> None:
        """Register for them, once torch._dynamo is imported and after each reset of it: call this repeatedly."""
        # Looked up, not imported: to import torch._dynamo takes seconds.
        handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        known = getattr(handler, "start_callbacks", None)
        if known is None or self.begin_compilation in known:
            return
        # One that has begun since then. PyTorch 2.3 does not count them.
        if getattr(handler, "_CompilationCallbackHandler__pending_callbacks_counter", 0):
            self.begin_compilation()
        handler.register_start_callback(self.begin_compilation)
        handler.register_end_callback(self.end_compilation)

    def begin_compilation(self, *_: object) -> None:
        """Report the beginning of a compilation."""
        self._compiling += 1
        self.moves += 1

    def end_compilation(self, *_: object) -> None:
        """Report the end of a compilation."""
        self._compiling = max(0, self._compiling - 1)  # it may have begun before the callback was registered
        self.moves += 1


# What Gloo's, MPI's and Horovod's errors say where another rank has ended or does not answer.
LOST = re.compile(
    r"Horovod has been shut down|([Rr]ead|[Ww]rite) error.*|Connection (closed|reset).*|[Tt]imed out.*|Broken pipe"
)
Method = TypeVar("Method", bound=Callable[..., Any])


def collective(method: Method) -> Method:
    """Decorate a method of an engine, in which this rank waits for other ranks.

    While it runs, `activity.collective` is its argument `name`, or the name of the method if it has no such argument. Raises
    Failure where the connection to the other ranks is lost: a traceback of this rank would say nothing about that.
    """

    @functools.wraps(method)
    def waits(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("name", args[-1] if args else None)
        activity = self.activity
        outer = activity.collective
        activity.call(name if isinstance(name, str) else method.__name__, self.of_all_ranks)
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            lost = LOST.search(str(error))
            if outer is not None or lost is None:
                raise
            message = f"the connection to the other ranks is lost in {activity.collective} ({lost[0]})"
            remedy = "one of them has ended, or look at the network between them"
            raise Failure(f"{message}: {remedy}", everywhere=False) from error
        finally:
            activity.collective = outer

    return waits  # type: ignore[return-value] # it takes and returns what the method does
