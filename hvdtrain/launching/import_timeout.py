"""A rank's start before it has an engine: it reports that Python runs, and has a time limit to import torch.

Imports almost nothing, because commands import it before anything else.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PIPE = "HVDTRAIN_START_PIPE"  # from launch/restarts.sh: pid, file descriptor, link of the descriptor in /proc
START_TIMEOUT_VARIABLE = "HVDTRAIN_START_TIMEOUT"
LIMIT_SECONDS = 600.0
MOST_SECONDS = 1e6  # what every clock and timer here can take: eleven days
AFTER_MESSAGE = 3.0  # seconds from the message to the end; rank 0 is RANK_ZERO_FIRST earlier than the others
RANK_ZERO_SECONDS = 2.0


def report_start() -> None:
    """Tell the wrapper that started this rank, if it runs on this host, that Python and hvdtrain could be read."""
    words = os.environ.get(PIPE, "").split()
    if len(words) != 3:
        return
    pid, descriptor, link = words
    path = f"/proc/{pid}/fd/{descriptor}"
    with contextlib.suppress(OSError):  # the wrapper is on another host, or has ended
        # The number in "pipe:[NUMBER]" makes it unlikely that another host has the same pid and file descriptor.
        if link.startswith("pipe:") and os.readlink(path) == link:  # noqa: PTH115 - pathlib takes time to import
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"\n")
            os.close(pipe)


def limit_seconds() -> float:
    """Return the time limit from the environment; 0: no limit."""
    with contextlib.suppress(ValueError):
        return min(max(0.0, float(os.environ.get(START_TIMEOUT_VARIABLE) or LIMIT_SECONDS)), MOST_SECONDS)
    return LIMIT_SECONDS


def import_torch() -> None:
    """Import torch, within its time limit."""
    limit_import()
    import torch  # noqa: F401


@functools.cache  # one limit inside of another would end it
def limit_import() -> None:
    """Give this process's first import of torch a time limit, whoever imports it, if a launcher has started the process."""
    ImportHook("torch", during=limited_as_rank)


def limited_as_rank() -> contextlib.AbstractContextManager[None]:
    """Return a context manager around importing torch."""
    from hvdtrain.engines.launchers import LAUNCHERS

    rank = next((os.environ[launcher.rank] for launcher in LAUNCHERS if launcher.rank in os.environ), None)
    seconds = limit_seconds() if rank is not None else 0.0
    which = f"rank {rank} on {os.uname().nodename}"
    message = f"hvdtrain: error: {which} could not import torch within {seconds:.0f} s: is its file system slow?"
    return limited(seconds, message, 0.0 if rank == "0" else RANK_ZERO_SECONDS)


@contextlib.contextmanager
def limited(seconds: float, message: str, late: float = 0.0) -> Iterator[None]:
    """Context manager that ends this process, with a message and a traceback, if the block takes longer; 0: no limit.

    late: seconds that are added, so that another process speaks first.
    """
    if not seconds:
        yield
        return
    import faulthandler
    import signal
    import threading

    from hvdtrain.engines.lines import say_within

    over = threading.Event()

    def warn() -> None:
        if not over.wait(seconds + late):
            say_within(f"{message}\n")

    thread = threading.Thread(target=warn, name="import", daemon=True)
    thread.start()
    # No Python thread runs while a library is loaded, which holds the GIL.
    # That of faulthandler is written in C, and needs none.
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # sys.stderr is not a file
        faulthandler.dump_traceback_later(seconds + late + AFTER_MESSAGE, exit=True)
    # If nobody reads the output, faulthandler waits for ever. Then the kernel ends the process, by SIGALRM.
    own = signal.setitimer(signal.ITIMER_REAL, seconds + late + 3 * AFTER_MESSAGE)  # of the program
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *own)
        faulthandler.cancel_dump_traceback_later()
        over.set()
        thread.join()


class ImportHook:
    """Calls `then(module)` right after the first import of the module `name`, or at once if it is already imported.

    during: returns a context manager around the import, and around the search for the module before it.
    """

    def __init__(
        self, name: str, then: "Callable[[ModuleType], None]" = lambda module: None,
        during: "Callable[[], contextlib.AbstractContextManager[None]]" = contextlib.nullcontext,
    ):  # fmt: skip
        self.name, self.then, self.during = name, then, during
        if name in sys.modules:
            then(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname != self.name:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        try:
            with self.during():
                spec = importlib.util.find_spec(fullname)
        finally:  # until it is imported: a program may ask first whether it is there
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: "ModuleType") -> None:
                with self.during():
                    load(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign] # of this loader alone
        return spec
