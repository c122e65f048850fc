"""Wait for an event, with a limit far above the usual time."""

import time
from collections.abc import Callable


def wait_for(what: Callable[[], object], why: object, seconds: float = 60.0) -> None:
    """Return as soon as `what` is true. Raises AssertionError where that takes so many seconds. why: what is wrong then."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, why() if callable(why) else why
        time.sleep(0.05)
