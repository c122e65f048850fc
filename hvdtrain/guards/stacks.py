"""Which frames of a stack tell an author where a rank is."""

import sys
import sysconfig
import threading
import traceback
from pathlib import Path

STACK_FRAMES = 6  # printed per rank
PACKAGE = str(Path(__file__).resolve().parents[1])
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
WRAPPERS = (
    "contextlib.py",
    "hvdtrain/tuned.py",
    "hvdtrain/starter.py",
    "launching/run_script.py",
    "guards/activity.py",
)

Stack = list[traceback.FrameSummary]


def stack_of(thread: int | None) -> Stack:
    """Return the stack of a thread, outermost frame first; empty while it runs no Python."""
    frame = sys._current_frames().get(thread or 0)
    return traceback.extract_stack(frame) if frame else []  # without a frame: the caller's own


def main_stack() -> Stack:
    """Return the stack of the main thread, whose progress counts."""
    return stack_of(threading.main_thread().ident)


def programs(stack: Stack) -> Stack:
    """Return the frames of the program: not those of libraries, nor of hvdtrain, except of its commands."""
    shown = [frame for frame in stack if not frame.filename.startswith("<frozen")]
    return [
        frame
        for frame in shown
        if str(Path(frame.filename).parent) == PACKAGE or not frame.filename.startswith((PACKAGE, *LIBRARIES))
        if not frame.filename.endswith(WRAPPERS)
    ]


def where(stack: Stack) -> str:
    """Return the program's innermost line as FILE:LINE, FUNCTION; without one, the innermost of hvdtrain, or of all."""
    ours = [frame for frame in stack if frame.filename.startswith(PACKAGE)]
    for frames in (programs(stack), ours, stack):
        if frames:
            return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}, {frames[-1].name}"
    return "nowhere"


def worth_printing(stack: Stack, guest: bool = False) -> Stack:
    """Return the innermost frames, and the program's if it is further out. guest: without those of hvdtrain."""
    hidden = (PACKAGE, "<frozen") if guest else ("<frozen runpy",)
    shown = [f for f in stack if not f.filename.endswith(WRAPPERS) and not f.filename.startswith(hidden)]
    return [frame for frame in programs(shown)[-1:] if frame not in shown[-STACK_FRAMES:]] + shown[-STACK_FRAMES:]
