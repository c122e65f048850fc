"""Streams and events of the stand-in accelerator. Nothing runs in parallel; the order that a program demands is checked.

Each stream counts its operations. `seen` says up to which operation of every other stream its next one comes later (a vector
clock). What a stream uses must have been written before, by that order: else the program would race on a real device.
"""

import contextlib
from collections.abc import Iterator


class Line:
    """Something that works in order: a stream, or the host."""

    def __init__(self, name: str):
        self.name = name
        self.done = 0  # operations given to it
        self.seen: dict[Line, int] = {}  # operations of other lines that are complete before the next one of this

    def after(self, other: "Line", number: int) -> bool:
        """Return whether operation `number` of `other` is complete before the next one of this line."""
        return other is self or self.seen.get(other, 0) >= number

    def wait_for(self, point: "dict[Line, int]") -> None:
        """Begin the next operation only after those of `point`."""
        for line, number in point.items():
            self.seen[line] = max(self.seen.get(line, 0), number)

    def point(self) -> "dict[Line, int]":
        """Return all that is complete when this line has done what it has been given."""
        return {**self.seen, self: self.done}


class Device:
    """The state of the stand-in: its streams, the host, and the number of the training step."""

    def __init__(self) -> None:
        self.host = Line("host")
        self.default = Stream(name="default stream")
        self.current = self.default
        self.step = 0


class Stream(Line):
    """As `torch.cuda.Stream`."""

    def __init__(self, device: object = None, priority: int = 0, *, name: str = "side stream"):
        super().__init__(name)

    def wait_event(self, event: "Event") -> None:
        self.wait_for(event.recorded)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_for(stream.point())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        state.host.wait_for(self.point())
        on_wait(state.step)


class Event:
    """As `torch.cuda.Event`. It is complete from the step after the one that recorded it, or once somebody has waited."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False):
        self.recorded: dict[Line, int] = {}
        self.step = 0

    def record(self, stream: Stream | None = None) -> None:
        self.recorded, self.step = (stream or state.current).point(), state.step

    def wait(self, stream: Stream | None = None) -> None:
        (stream or state.current).wait_event(self)

    def query(self) -> bool:
        if state.step > self.step:
            state.host.wait_for(self.recorded)
        return state.step > self.step

    def synchronize(self) -> None:
        state.host.wait_for(self.recorded)
        on_wait(self.step)

    def elapsed_time(self, end: "Event") -> float:
        """Return a millisecond for each operation in between."""
        return float(sum(end.recorded.values()) - sum(self.recorded.values()))


@contextlib.contextmanager
def using(stream: Stream | None) -> Iterator[None]:
    """As `torch.cuda.stream`."""
    before, state.current = state.current, stream or state.current
    try:
        yield
    finally:
        state.current = before


def on_wait(step: int) -> None:
    """Called when the host waits for work of `step`. stand_in.py replaces it."""


state = Device()
