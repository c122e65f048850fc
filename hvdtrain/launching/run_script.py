"""Run another script in this process as the interpreter would run `python FILE ...` or `python -m MODULE ...`.

`__main__`, sys.argv, sys.path[0], the exit code, tracebacks, and the main module that multiprocessing imports in workers
are those of the script. A forked rank also ends as the interpreter does. Does not import torch.

The option -P before `-m hvdtrain.NAME` concerns only that module (the wrappers in launch/ use it). PYTHONSAFEPATH and -I
also keep the script's directory out of its sys.path.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from itertools import pairwise
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NamedTuple, NoReturn

from hvdtrain.engines.errors import UserError
from hvdtrain.engines.lines import put_line

PACKAGE_DIRECTORY = Path(__file__).parents[1]
# Files whose frames a traceback of the script does not show: what runs it, and the hooks that it calls.
OURS = (
    "tuned", "starter", "engines/foreign", "launching/exit_codes", "launching/forker", "launching/import_timeout",
    "launching/run_script",
)  # fmt: skip
HIDDEN = {"<frozen runpy>", "<frozen importlib.util>"} | {str(PACKAGE_DIRECTORY / f"{name}.py") for name in OURS}


class Program(NamedTuple):
    """A script to run, and the interpreter state that it expects."""

    code: CodeType
    main: ModuleType  # becomes sys.modules["__main__"]
    argv: list[str]
    directory: str | None  # becomes sys.path[0]; None: sys.path is not changed
    text: bytes | None = None  # of a file, which may be a pipe and not be read again


def find_program(words: list[str]) -> Program:
    """Return the program for `words`: a file, or "-m" and a module, followed by its arguments.

    Raises UserError if there is no such program. Like `python -m`, this imports the packages that contain a module.
    """
    if not words or words == ["-m"]:
        raise UserError("nothing to run: name a file, as in `train.py`, or `-m MODULE`", everywhere=True)
    try:
        return _module(words[1], words[2:]) if words[0] == "-m" else _file(words[0], words[1:])
    except Exception:  # a syntax error in the script, or an exception of its package
        hide_frames()
        raise


def _file(name: str, arguments: list[str]) -> Program:
    if Path(name).is_dir():
        raise UserError(f"{name} is a directory: name the script in it")
    path = os.path.abspath(name)  # noqa: PTH100 - like the interpreter, does not resolve links
    try:
        with io.open_code(path) as file:
            text = file.read()
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror}): name a Python script, or `-m MODULE`") from None
    if b"\0" in text:  # compiled, or an archive
        raise UserError(f"{name} is no source code of Python: name a script (.py), or `-m MODULE`", everywhere=True)
    code = compile(text, path, "exec", dont_inherit=True)
    main = _main(path, SourceFileLoader("__main__", path), None)
    safe_path = bool(os.environ.get("PYTHONSAFEPATH")) or sys.flags.isolated
    return Program(code, main, [name, *arguments], None if safe_path else str(Path(path).resolve().parent), text)


def _module(name: str, arguments: list[str]) -> Program:
    absent = f"-m {name}: no such module here; name a module that `python -m` finds, or a file"
    spec = _spec(name, absent)
    if spec.submodule_search_locations is not None:  # a package: run its __main__
        spec = _spec(f"{name}.__main__", f"-m {name}: a package without __main__; name a module in it")
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise UserError(f"-m {name}: no Python code; name a module that `python -m` can run", everywhere=True)
    main = _main(spec.origin, spec.loader, spec)
    return Program(code, main, [spec.origin or name, *arguments], None)


def _spec(name: str, absent: str) -> ModuleSpec:
    try:
        spec = None if name.startswith(".") else importlib.util.find_spec(name)
    except ValueError:  # a module without a spec
        spec = None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # an import inside the package failed
        spec = None
    if spec is None:
        raise UserError(absent)
    return spec


def _main(path: str | None, loader: object, spec: ModuleSpec | None) -> ModuleType:
    main = ModuleType("__main__")
    package = spec.parent if spec is not None else None
    main.__dict__.update(
        __builtins__=builtins, __file__=path, __cached__=spec.cached if spec else None, __loader__=loader,
        __package__=package, __spec__=spec, __annotations__={},
    )  # fmt: skip
    return main


def source(program: Program) -> str:
    """Return the source code of `program`; "" if there is none."""
    if program.text is not None:
        return importlib.util.decode_source(program.text)
    loader, spec = program.main.__loader__, program.main.__spec__
    get_source = getattr(loader, "get_source", None)
    try:
        return (get_source(spec.name if spec is not None else "__main__") if get_source is not None else None) or ""
    except (ImportError, SyntaxError, OSError):
        return ""


def run_program(program: Program) -> None:
    """Run `program`. Its exceptions propagate; their tracebacks are printed without frames of hvdtrain."""
    sys.argv = program.argv
    if program.directory is not None:
        if sys.flags.safe_path:  # sys.path begins with the standard library
            sys.path.insert(0, program.directory)
        else:
            sys.path[0] = program.directory
    sys.modules["__main__"] = program.main  # not restored: threads, pickle and exit handlers still use it
    try:
        exec(program.code, program.main.__dict__)
    except SystemExit:
        raise
    except BaseException:
        hide_frames()
        raise


def hide_frames() -> None:
    """Make the interpreter print an uncaught exception, and those in its __cause__ and __context__, without HIDDEN files."""
    hook = sys.excepthook  # the script may have set its own

    def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        seen: set[int] = set()
        link: BaseException | None = error
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = without_hidden(link.__traceback__)
            link = link.__cause__ or link.__context__
        hook(kind, error, error.__traceback__)

    sys.excepthook = show


def without_hidden(frames: TracebackType | None) -> TracebackType | None:
    """Take the frames of HIDDEN files out of a traceback, and return what is left."""
    kept: list[TracebackType | None] = []
    while frames is not None:
        if frames.tb_frame.f_code.co_filename not in HIDDEN:
            kept.append(frames)
        frames = frames.tb_next
    for frame, following in pairwise([*kept, None]):
        assert frame is not None
        frame.tb_next = following
    return kept[0] if kept else None


# ---- a forked rank
#
# It ends as the interpreter does, up to the point where that would clear all modules: this would copy nearly every memory
# page with Python objects that the ranks share, 0.4 s of CPU time and 160 MB per rank. The interpreter waits for threads and
# calls exit handlers, in reverse order. `prepare_exit` registers one before all others, so it is called last. It does what
# clearing the modules would do for the program, and ends the process.

_ended: tuple[int, dict[str, object]] | None = None  # in a rank whose program has ended: its exit code and namespace


def prepare_exit() -> None:
    """Register the last exit handler. Call it before the imports that the ranks share."""
    atexit.register(_end)


def run_rank(program: Program, report: Callable[[int], object]) -> NoReturn:
    """Run the program and exit as the interpreter would.

    report: called with the exit code as soon as the program has failed, because exit handlers may wait for other ranks
    (`hvd.shutdown`).
    """
    global _ended
    code = 0
    try:
        run_program(program)
    except SystemExit as left:
        code = code_of(left)
    except BaseException as error:
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        sys.last_traceback = sys.last_value = None  # they keep the program's objects alive
        error.__traceback__ = None
    if code != 0:
        with contextlib.suppress(OSError):  # nobody hears it any more
            report(code if code > 0 else 128 - code)
    atexit.unregister(gc.unfreeze)  # of triton (startup.py): all of torch's objects would be examined, and copied
    _ended = code, program.main.__dict__
    sys.exit(code)


def code_of(left: SystemExit) -> int:
    """Return the exit code of a program that was left by this exception, as the interpreter does."""
    if left.code is None:
        return 0
    if isinstance(left.code, int):
        # The kernel keeps eight bits of an exit code.
        return left.code & 0xFF
    put_line(sys.stderr, f"{left.code}\n")
    return 1


def _end() -> None:
    """Flush the program's open files, drop its objects, and end the process with its exit code."""
    if _ended is None:  # not a rank
        return
    code, namespace = _ended
    namespace.clear()
    gc.collect()  # calls the finalizers of the program's objects
    for each in gc.get_objects():  # not those from before the fork, which are frozen
        if issubclass(type(each), io.IOBase):  # `isinstance` asks the object, and some warn when they are asked
            with contextlib.suppress(Exception):  # closed, or a full disk
                each.flush()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception as error:  # as the interpreter says it
            put_line(sys.stderr, f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n")
            code = code if code < 0 else 120
    ctypes.CDLL(None).fflush(None)  # buffers of C stdio
    if code < 0:  # an interrupt: end by the signal, so that a shell notices it
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
