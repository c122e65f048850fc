"""How the monitor of a rank behaves, and whom it tells."""

import os
from collections.abc import Callable
from typing import NamedTuple

from hvdtrain.guards.timeouts import HangTimeouts


class Timing(NamedTuple):
    """Time limits and intervals, in seconds."""

    look: float = 1.0  # between two checks of the main thread
    reply: float = 3.0  # for a rank to send its report
    grace: float = 3.0  # for launcher and engine to end a job with a dead rank themselves
    leave: float = 3.0  # for the main thread to stop before the first step is finished, when there is nothing to save


class Settings(NamedTuple):
    """failed, stopped: called on rank 0, in the monitor's thread, with the reason, before all ranks end.

    guest: the program does not use hvdtrain: its signals and launchers are not monitored, and our frames not printed.
    leave: exits the process.
    """

    timeouts: HangTimeouts
    failed: Callable[[str], None] = lambda headline: None
    stopped: Callable[[str], None] = lambda reason: None
    guest: bool = False
    timing: Timing = Timing()
    leave: Callable[[int], None] = os._exit
