"""How a program ends: one line on standard error and an exit code."""

import argparse
import atexit
import contextlib
import linecache
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.engines.lines import say_within, write_whole_lines
from hvdtrain.launching import startup
from hvdtrain.launching.processes import require_proc

# 0: success.
FAILED = 1
WRONG_INPUT = 2  # one line names the remedy
TARGET_MISSED = 3
# Stopped on request, and can be resumed. EX_TEMPFAIL of sysexits.h: Slurm and Kubernetes can distinguish it from a failure.
STOPPED = 75
INTERRUPTED = 130  # by a second Ctrl-C
CALLS = {  # what to write instead, by the name of a method
    "backward": "write step.backward(loss) once in a micro-batch, with the sum of all losses",
    "record": "give each value a name, as in run.record(loss=values)",
    "update": "write step.update() after the loop over step.batches(), with clip_norm= for clipping",
}
LEFT_OF_DDP = {  # what torch and Python say of a program that was written for it, and what we say
    "Default process group has not been initialized": "torch.distributed begins with training.start(): "
    "use run.rank and run.size in its block",
    "Process group cannot be None": "destroy_process_group() after training: leave it out: hvdtrain has done so",
    r"'\w*Sampler' object has no attribute 'set_epoch'": "sampler.set_epoch(): leave it out: each epoch has another order",
    "object has no attribute 'module'": "run.prepare() returns the model itself: leave out .module",
}
stop_requests: list[str] = []  # that trainings of this process have heeded
LINGER_SECONDS = 2.0  # how long ranks other than 0 wait before they print an error and exit


def run_command(main: Callable[[], int]) -> NoReturn:
    """Call `main` and exit with the code that it returns. A UserError or Failure prints one line on stderr and sets the
    exit code."""
    startup.open_standard_streams()
    startup.require_directory()
    write_whole_lines()
    startup.end_of_imports()
    try:
        require_proc()
        if not callable(main):
            raise UserError("training.main() got what main() returned: write training.main(main)", everywhere=True)
        code = main()
    except KeyboardInterrupt:
        if not stop_requests:
            raise
        code = INTERRUPTED
    except (UserError, Failure) as error:
        end_with(error)
    except (TypeError, AttributeError) as error:
        if (meant := of_python(error)) is None:
            raise
        end_with(meant)
    except (RuntimeError, ValueError, AssertionError, OSError, argparse.ArgumentError) as error:
        if (with_remedy := of_the_user(str(error))) is None:
            raise
        end_with(with_remedy)
    if stop_requests and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        # What has been said is all: another Ctrl-C would add tracebacks of exit handlers. Not now: a notebook lives on.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def of_python(error: TypeError | AttributeError) -> UserError | None:
    """Return what an error of Python means, if the program has made one of these mistakes."""
    whose = not isinstance(error, AttributeError) or error.name != "module" or hasattr(error.obj, "named_parameters")
    return of_a_call(error) or without_directory(error) or (left_of_ddp(str(error)) if whose else None)


def left_of_ddp(message: str) -> UserError | None:
    """Return what this means in a program that was written for DistributedDataParallel; None if it is nothing of that."""
    meant = [line for said, line in LEFT_OF_DDP.items() if re.search(said, message)]
    return UserError(meant[0]) if meant else None


def of_a_call(error: Exception) -> UserError | None:
    """Return the error of a call of ours that Python refuses, such as `step.backward(loss, retain_graph=True)`."""
    called = re.match(r"(Run|RunTools|Step)\.(\w+)\(\) ((?:got|takes|missing) .*)", str(error))
    if called is None:
        return None
    caller = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(caller.filename).name}, line {caller.lineno}"
    remedy = CALLS.get(called[2], "see the reference of functions")
    return UserError(f"{where}: {'step' if called[1] == 'Step' else 'run'}.{called[2]}() {called[3]}: {remedy}")


def without_directory(error: TypeError | AttributeError) -> UserError | None:
    """Return the error of a line of the program that uses an output directory which is None, as in `None / "notes.txt"`."""
    operator = re.search("for (.+): 'NoneType' and", str(error))
    if isinstance(error, AttributeError) and error.obj is None:
        after = rf"\.{error.name}\b"
    elif operator is not None or "os.PathLike" in str(error):
        after = rf"\s*{re.escape(operator[1])}" if operator is not None else r"\b"
    else:
        return None
    with contextlib.suppress(Exception):  # any: the source and the variables are the author's
        frames = list(traceback.walk_tb(error.__traceback__))[-4:]  # os.path.join and pathlib have their own
        for frame, number in frames:
            file, names = frame.f_code.co_filename, {**frame.f_globals, **frame.f_locals}
            line, source = linecache.getline(file, number), "".join(linecache.getlines(file))
            owners = re.findall(rf"\b(\w+)\.output_dir{after}", line)
            for name in re.findall(rf"\b(\w+){after}", line):
                owners += re.findall(rf"\b{name} = (\w+)\.output_dir\b", source) if names.get(name, "") is None else []
            for owner in owners:
                if getattr(names.get(owner), "output_dir", "") is None:
                    where, of_run = f"{Path(file).name}, line {number}", type(names[owner]).__name__ != "Flags"
                    others = ", and on ranks other than 0, which write no files" if of_run else ""
                    message = f"{where}: {owner}.output_dir is None without --output-dir{others}"
                    return UserError(f"{message}: write `if {owner}.output_dir:` around what writes there")
    return None


def of_the_user(message: str) -> UserError | Failure | None:
    """Return the error with its remedy, if the `message` of an error of torch or argparse has one."""
    if left := left_of_ddp(message):
        return left
    if twice := re.match("argument .*: conflicting option strings?: (.*)", message):
        name = twice[1].partition(",")[0].lstrip("-").replace("-", "_")
        remedy = f"leave it out, and use flags.{name} of the flags that parse_args() returns, or take another name"
        return UserError(f"the parser has {twice[1]} already, as each training run does: {remedy}", everywhere=True)
    if re.search("gloo/transport/.*(reset by peer|closed by peer|Broken pipe)", message):  # in a collective
        return Failure("the connection to another rank was lost: see what that rank printed, and start again")
    if "can't start new thread" in message:
        remedy = "end some, raise `ulimit -u`, or use fewer ranks"
        return UserError(f"this user may have no more processes and threads: {remedy}")
    if "Too many open files" in message:
        return UserError("this process may open no more files: raise `ulimit -n`, or use fewer ranks of a host")
    if "unable to allocate shared memory" in message or "out of shared memory" in message:  # of DataLoader workers
        remedy = (
            "make it larger (docker run --shm-size 8g; Kubernetes: emptyDir with medium: Memory), or use fewer workers"
        )
        return UserError(f"/dev/shm is too small for the batches of the DataLoader's workers: {remedy}")
    if tried := re.search(
        r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes|out of memory. Tried to allocate ([\d.]+ \w+)", message
    ):
        amount = tried[2] or f"{int(tried[1]):,} bytes"
        return UserError(f"there is not enough memory for another {amount}: use a smaller --batch-size, or fewer ranks")
    if message.startswith("Expected more than 1 value per channel when training"):
        remedy = "write DataLoader(..., drop_last=True), or use another --batch-size"
        return UserError(f"batch norm got a single sample, as the last step may leave one to a rank: {remedy}")
    operation, _, rest = message.partition(" does not have a deterministic implementation")
    if rest:  # with --deterministic on a GPU
        remedy = "leave --deterministic out, or use another layer"
        return UserError(f"{operation} has no algorithm whose bits repeat: {remedy}", everywhere=True)
    return None


def end_with(error: UserError | Failure) -> NoReturn:
    """Print `error` in one line and exit with its exit code."""
    path = Path(sys.argv[0])
    say_error(error, f"hvdtrain.{path.stem}" if path.parent.name == "hvdtrain" else path.stem)
    sys.exit(error.exit_code)


def say_error(error: UserError | Failure, script: str) -> None:
    """Print `error` in one line, prefixed with `script`.

    Rank 0 prints at once. The other ranks wait for LINGER_SECONDS first, and print only errors that rank 0 may not have.
    """
    try:
        rank = announced().rank
    except UserError:
        rank = 0
    if rank != 0:
        # mpirun ends the job when the first rank fails, and would kill rank 0 before it has printed its error.
        time.sleep(LINGER_SECONDS)
        script += f": rank {rank} on {socket.gethostname()}"
    if rank == 0 or not error.everywhere:
        say_within(f"{script}: error: {error}\n")
