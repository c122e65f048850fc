"""What this process is doing: where its main thread and its GPU are, whether it works, whether it has a core to work on."""

import contextlib
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from hvdtrain.engines import atomic, files
from hvdtrain.engines.lines import WRITE_SECONDS, within
from hvdtrain.launching import processes

STACK_FRAMES = 6  # printed
PACKAGE_PATH = str(Path(__file__).resolve().parents[1])
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
WRAPPER_FILES = (
    *("contextlib.py", "hvdtrain/tuned.py", "hvdtrain/starter.py"),
    *("launching/run_script.py", "guards/activity.py"),
)
LEAST_SHARE = 0.05  # of a core; a loop that only polls uses less
MOST_TURNS = 20.0  # time slices per second: a thread that gets more is not starved

# torch's Flight Recorder, a ring of NCCL's last collectives; torch 2.11 warns of the second name.
RING, RING_SIZES, RENAMED = "64", ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), (2, 11)

Stack = list[traceback.FrameSummary]


def stack_of(thread: int | None) -> Stack:
    """Return the stack of a thread, outermost frame first; empty while it runs no Python."""
    frame = sys._current_frames().get(thread or 0)
    found: Stack = []
    while frame is not None:
        code = frame.f_code
        # Not by `traceback.extract_stack`, which reads the source: on a file system that hangs, this would, too.
        found.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
        frame = frame.f_back
    return found[::-1]


def main_stack() -> Stack:
    """Return the stack of the main thread, whose progress counts."""
    return stack_of(threading.main_thread().ident)


def programs(stack: Stack) -> Stack:
    """Return the frames of the program: not those of libraries, nor of hvdtrain, except of its commands."""
    return [
        frame
        for frame in stack
        if str(Path(frame.filename).parent) == PACKAGE_PATH or not frame.filename.startswith((PACKAGE_PATH, *LIBRARIES))
        if not frame.filename.startswith("<frozen") and not frame.filename.endswith(WRAPPER_FILES)
    ]


def where(stack: Stack) -> str:
    """Return the program's innermost line as FILE:LINE, FUNCTION; without one, the innermost of hvdtrain, or of all."""
    ours = [frame for frame in stack if frame.filename.startswith(PACKAGE_PATH)]
    for frames in (programs(stack), ours, stack):
        if frames:
            return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}, {frames[-1].name}"
    return "nowhere"


def shown_frames(stack: Stack, guest: bool = False) -> str:
    """Return the innermost frames as text, and the program's if it is further out. guest: without those of hvdtrain."""
    hidden = (PACKAGE_PATH, "<frozen") if guest else ("<frozen runpy",)
    frames = [f for f in stack if not f.filename.endswith(WRAPPER_FILES) and not f.filename.startswith(hidden)]
    inner = frames[-STACK_FRAMES:]
    shown = [frame for frame in programs(frames)[-1:] if frame not in inner] + inner
    read: list[str] = []
    within(WRITE_SECONDS, lambda: read.extend(traceback.format_list(shown)))
    return "".join(read or traceback.format_list([(each.filename, each.lineno or 0, each.name, "") for each in shown]))


class Work:
    """Evidence of work by this process since the last call of `seen`.

    Counted are the program's threads, Python's without daemons, and its child processes.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}  # CPU seconds, bytes read and written
        self._at = time.monotonic()

    def seen(self) -> bool:
        """Return whether anything used at least a twentieth of a core, read or wrote, or the main thread waits for a
        disk."""
        now, at = {which: used(which) for which in threads_and_children()}, time.monotonic()
        seconds, transferred = 0.0, False
        for which, (cpu, count) in now.items():
            cpu_before, count_before = self._before.get(which, (0.0, 0))
            seconds += max(0.0, cpu - cpu_before)
            transferred = transferred or count > count_before
        enough = seconds >= LEAST_SHARE * (at - self._at)
        self._before, self._at = now, at
        return transferred or (enough and seconds > 0) or waits_for_disk()


def waits_for_disk() -> bool:
    """Return whether the main thread is in a call that only a device can end, such as fsync."""
    thread = processes.stat(f"self/task/{os.getpid()}")
    return thread is not None and thread.state == "D"


def threads_and_children() -> Iterator[str]:
    """Yield the program's threads and child processes, as `processes.stat` takes them."""
    for thread in threading.enumerate():
        # Trap: in a forked rank, the main thread's native_id is still that of its parent.
        number = os.getpid() if thread is threading.main_thread() else thread.native_id
        # Daemons are left out: those of Horovod, MPI and the watch run while the program hangs.
        if not thread.daemon and number is not None:
            yield f"self/task/{number}"
    yield from map(str, processes.descendants(os.getpid()))


def used(which: str) -> tuple[float, int]:
    """Return the CPU seconds of a process or thread, and the bytes that it has read and written; 0 for what is unknown."""
    process = processes.stat(which)
    return process.cpu_seconds if process else 0.0, processes.bytes_transferred(which)


class Starvation:
    """Adds up for how long threads of this process were ready to run but had no core: such a rank is starved, not hung.

    Call `seconds` about once a second, always from the same thread, which is itself not counted.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._counted_at = time.monotonic()
        self._turns: dict[int, processes.Turns] = {}  # at that time

    def reset(self) -> None:
        """Set the sum to 0."""
        self._seconds = 0.0

    def seconds(self) -> float:
        """Return the time since `reset`, in seconds, summed over threads.

        A thread counts if it is ready to run and gets few time slices.
        """
        now, mine = time.monotonic(), threading.get_native_id()
        elapsed = now - self._counted_at
        turns = {
            thread: turns for thread in processes.own_threads() if thread != mine and (turns := processes.turns(thread))
        }
        for thread, (running, _, slices) in turns.items():
            before, state = self._turns.get(thread), processes.stat(f"self/task/{thread}")
            # MPI's busy-wait loops get many slices:
            # there may be more of them than cores, but each yields, and soon runs again.
            if before and state and state.state == "R" and 0 < slices < before.slices + MOST_TURNS * elapsed:
                self._seconds += elapsed - (running - before.cpu_seconds)
        self._counted_at, self._turns = now, turns
        return max(0.0, self._seconds)


# ---- the last collectives of a GPU

_recorder = ""  # the kind of torch's that is on: "nccl", or "fr" for Gloo's


def record_collectives(environment: MutableMapping[str, str] = os.environ, kind: str = "nccl") -> None:
    """Record them from now on, unless the user has set the size of the ring. Call it before a group is made."""
    global _recorder
    import torch

    _recorder = kind
    if not any(name in environment for name in RING_SIZES):
        environment[RING_SIZES[tuple(map(int, torch.__version__.split(".")[:2])) < RENAMED]] = RING


def write_collectives(directory: Path, rank: int) -> None:
    """Write them to a file in `directory`, which torch's `torchfrtrace` compares with those of other ranks."""
    if _recorder:
        import torch

        with contextlib.suppress(OSError, RuntimeError):
            ring = getattr(torch._C._distributed_c10d, f"_dump_{_recorder}_trace")()
            atomic.write_atomically(files.make_directory(directory) / f"rank_{rank}", ring, sync=False)
