"""What the ranks' monitors tell each other, and how it is written: a line of JSON, [KIND, FIELD, ...]."""

import json
from typing import NamedTuple, get_args

from hvdtrain.guards.diagnosis import Report
from hvdtrain.guards.flight import Last


class Ask(NamedTuple):
    """Where are you? Answered by `Stand`."""


class Stand(NamedTuple):
    """The report of a rank, the lines of its stack, and the collectives of its GPU."""

    report: Report
    stack: list[str]
    collectives: Last = Last()


class Stop(NamedTuple):
    """A request to stop, from any rank to rank 0, and from rank 0 to all."""

    reason: str


class Appoint(NamedTuple):
    """The step after which all ranks do `what`: "stop" or "save". From rank 0; answered by `Know`."""

    what: str
    step: int
    reason: str | None


class Know(NamedTuple):
    """The sender knows of the step after which to do `what`."""

    what: str


class Fail(NamedTuple):
    """The sender leaves the job alone, because of this error. mistake: of the input or the program, which other ranks may
    make, too."""

    error: str
    mistake: bool = False


class End(NamedTuple):
    """The job ends with this exit code."""

    exit_code: int


class Bye(NamedTuple):
    """The sender has finished."""


Message = Ask | Stand | Stop | Appoint | Know | Fail | End | Bye
KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return the line of a message."""
    return json.dumps([type(message).__name__, *message]).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message of a line. Raises ValueError if it is none, also if it is nested more deeply than Python reads."""
    try:
        kind, *fields = json.loads(line)
        if KINDS[kind] is Stand:
            report = Report(*fields[0])
            fields[0] = report._replace(called=tuple(report.called))
            fields[2] = Last(*fields[2])
        message: Message = KINDS[kind](*fields)
        return message
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise ValueError(f"no message: {line[:80]!r}") from error
