"""Several loops over `run.epochs` in one program, such as with frozen layers and then without.

A run that is resumed in a later loop leaves out those before. What the program does between two of them it does again:
`loader = ...`, `net.requires_grad_()`, `teacher = copy.deepcopy(net)`. So each object has by then what it had at the end of
the first of them, from the checkpoint that was saved there, and which is kept. When the loop begins that is resumed, each
has what the newest checkpoint has.
"""

from collections.abc import Callable
from dataclasses import asdict

from hvdtrain.checkpoint import checkpoint
from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.checkpoint.saving import Checkpoints
from hvdtrain.engines.errors import UserError
from hvdtrain.loop.state import TrainState


class EndedLoops:
    """The loops over epochs of a program that are over. checkpoints: of the run, with all objects. state: the position."""

    def __init__(self, checkpoints: Checkpoints, state: TrainState):
        self._checkpoints, self._state = checkpoints, state
        # The number of steps at the end of each loop that is over, in the checkpoint that is resumed and in this program.
        self._saved: list[int] = (checkpoints.resume.facts or {}).get("loops", [])
        self._ended = checkpoints.ended_loops
        self._begun = False  # one that is not left out
        # Of the newest checkpoint, until its loop begins: the position, and what gives all objects their states.
        self._newest: tuple[Facts, Callable[[], None]] | None = None

    @property
    def leaves_out(self) -> bool:
        """Whether the next loop is over in the checkpoint that is resumed."""
        return len(self._ended) < len(self._saved)

    def leave_out(self) -> None:
        """Give all objects the states with which the next loop ended. A collective."""
        step = self._saved[len(self._ended)]
        self._ended.append(step)
        if self._newest is None:
            self._checkpoints.objects.restore_settings()
            self._checkpoints.objects.require_restored()
            self._newest = asdict(self._state), self._checkpoints.states()
        if (facts := self._checkpoints.load_earlier(step)) is None:
            what = f"{checkpoint.name_of(step)}, of the end of loop {len(self._ended)} over run.epochs, cannot be read"
            effect = "what the program makes after that loop, it makes from the newest weights"
            self._checkpoints.output.say(f"warning: {what}: {effect}")
            return
        vars(self._state).update(facts["state"] | {"best": self._state.best})

    def begin(self, heartbeat: Callable[[], None]) -> bool:
        """Begin a loop that is not left out. Return whether it is the first of these. A collective."""
        if self._newest is not None:
            position, put_back = self._newest
            put_back()
            vars(self._state).update(position)
            self._newest = None
        elif self._begun:
            self._ended.append(self._state.step)
            self._checkpoints.flush(heartbeat)  # else a later one may replace it
        first, self._begun = not self._begun, True
        return first

    def require_all(self) -> None:
        """Raise UserError, at the end, if the program has no loop that goes on."""
        if self._newest is not None:
            message = (
                f"the run was in loop {len(self._saved) + 1} over run.epochs, and the program has {len(self._ended)}"
            )
            raise UserError(f"{message}: write all its loops, or use another --output-dir", everywhere=True)
