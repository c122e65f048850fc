"""The end of MPI, which all ranks come to together: at the end of the process.

MPI cannot be started again in a process that has shut it down, and the program may train again, for instance on the next
fold. `hvd.init` then does nothing. Trap: shutting MPI down waits for ranks that work on after training.
"""

import atexit
import contextlib
import ctypes
import threading
from typing import Any

from hvdtrain.guards import limits

# For MPI's own part of its end, which takes 5 ms, and goes on beside Python's, which takes 30. It removes the rank's file in
# /dev/shm.
END_SECONDS = 0.02


def shut_down_at_exit(hvd: Any, *, killed: bool) -> None:
    """Shut down `hvd`, the module horovod.torch, when this process ends.

    killed: Open MPI's mpirun kills the job. It no longer answers the last question of MPI_Finalize, for which this rank
    would wait until SIGKILL, a second later.
    """
    atexit.unregister(_shut_down)
    atexit.unregister(_shut_down_unanswered)
    if killed and hasattr(ctypes.CDLL(None), "on_exit"):
        ends = threading.Event()
        thread = threading.Thread(target=lambda: ends.wait() and hvd.shutdown(), name="end of MPI", daemon=True)
        with contextlib.suppress(RuntimeError):  # this user may have no more threads
            thread.start()  # here: since Python 3.12, exit handlers can start none
        atexit.register(_shut_down_unanswered, hvd, ends, thread)
    else:
        atexit.register(_shut_down, hvd)


def _shut_down(hvd: Any) -> None:
    with limits.ending(suspended=True):
        hvd.shutdown()


def _shut_down_unanswered(hvd: Any, ends: threading.Event, thread: threading.Thread) -> None:
    # A rank that has ended interrupts mpirun's second, and SIGKILL follows: wait here for those that work on after training.
    with limits.ending(suspended=True), contextlib.suppress(Exception):  # the program has shut Horovod down itself
        hvd.barrier()
    ends.set()
    with contextlib.suppress(RuntimeError):  # it was not started: Horovod's own exit handler follows
        thread.join(END_SECONDS)
    if thread.is_alive():
        atexit.unregister(hvd.mpi_ops._basics.shutdown)  # Horovod's own exit handler would wait, too
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        # And so would the destructors of its library. After Python's own end, leave with the exit code, before they run.
        libc.on_exit(libc._exit, None)
