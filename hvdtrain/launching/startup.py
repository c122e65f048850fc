"""What a command does before it imports anything large. Importing hvdtrain does none of this.

if __name__ == "__main__":
    startup.begin()
"""

import atexit
import gc
import os
import signal
import sys
from types import FrameType

from hvdtrain.launching import import_timeout

# Signals that end what comes before training in one line, with this exit code. SIGUSR1 asks a run to save and stop.
EXIT_CODE_OF_SIGNAL = {signal.SIGINT: 130, signal.SIGUSR1: 75}
UNSAVED = "hvdtrain: {} before training: nothing to save\n"
paused = False  # whether `begin` has disabled the garbage collector


def begin() -> None:
    """Prepare the process of a command, and import torch within its time limit. `exit_codes.run_command` is called next."""
    global paused
    open_standard_streams()
    require_directory()
    import_timeout.report_start()
    hear_signals()
    if "torch" not in sys.modules:
        # Garbage collection would take a sixth of the time of the imports and free nothing (docs/evidence/tuning.md).
        paused = gc.isenabled()
        gc.disable()
        import_timeout.import_torch()


def require_directory() -> None:
    """End this process if its working directory was removed: torch's libraries cannot be loaded there, and name no cause."""
    try:
        os.getcwd()  # noqa: PTH109
    except OSError as error:
        from hvdtrain.engines import errors
        from hvdtrain.launching import exit_codes

        message = (
            f"the working directory cannot be found ({error.strerror}): it was removed or moved; cd to one that exists"
        )
        exit_codes.end_with(errors.UserError(message, everywhere=True))


def hear_signals() -> None:
    """Let these signals end the process in one line, until `leave_signals`: a traceback of the imports would say nothing."""
    for number in EXIT_CODE_OF_SIGNAL:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def leave_signals() -> None:
    """Let these signals do again what they do in Python."""
    for number in EXIT_CODE_OF_SIGNAL:
        if signal.getsignal(number) == _end:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, UNSAVED.format(signal.Signals(number).name).encode())
    os._exit(EXIT_CODE_OF_SIGNAL[signal.Signals(number)])


def end_of_imports() -> None:
    """Enable the garbage collector again, if `begin` has disabled it, and keep it from examining what is imported by now."""
    global paused
    leave_signals()
    # What is imported stays until the end. Without this, a last collection over torch's objects takes 0.6 s of CPU time
    # (docs/evidence/tuning.md).
    freeze()
    if paused:
        paused = False
        gc.enable()


def freeze() -> None:
    """Keep the garbage collector from examining what is imported by now."""
    gc.freeze()
    # Imported by torchvision. It prints forty lines if its objects are not collected at the exit.
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)


def open_standard_streams() -> None:
    """Open /dev/null in place of standard streams that are closed (`>&-`)."""
    # The next file that is opened would take the number of a closed stream, and receive what libraries print.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:  # Python found it closed
            stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
