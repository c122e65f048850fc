"""Run any Horovod script, unmodified, with the settings that make Horovod fast on this machine.

horovodrun -np 8 python -m hvdtrain.tuned train.py --epochs 3         instead of `... python train.py --epochs 3`
mpirun -np 8 python -m hvdtrain.tuned -m package.train --epochs 3     a module
launch/horovodrun.sh -np 8 -- python -m hvdtrain.tuned train.py

Before torch is imported, it sets, unless your environment already does: OMP_NUM_THREADS, from the cores available to each
rank; settings that keep the threads of Horovod and MPI from competing with computation; malloc options. The script is the
main program: arguments, exit code, signals, tracebacks and worker processes are the same as without hvdtrain.tuned.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hvdtrain.cli import Parser, number_that
from hvdtrain.engines.cores import cpu_quota, share_of_host
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import Announced, announced, bound_by_default, cores_of_job, ranks_on_host
from hvdtrain.engines.library_settings import FAST, FIXED_SUMS, tuned_environment
from hvdtrain.engines.lines import put_line
from hvdtrain.launching import import_timeout, run_script, startup
from hvdtrain.launching.exit_codes import end_with
from hvdtrain.models import compile_cache

if TYPE_CHECKING:
    from hvdtrain.engines.foreign import ScriptWatchdog

COMMAND_NAME = "hvdtrain.tuned"


def seconds(text: str) -> float | str:
    """Return "auto" or a number of seconds. Raises ArgumentTypeError."""
    return text if text == "auto" else number_that(text, "of seconds above 0, nor auto", lambda value: 0 < value <= 1e9)


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of hvdtrain.tuned, and the script to run with its arguments. Raises UserError on bad input."""
    parser = Parser(COMMAND_NAME, __doc__)
    parser.usage = f"LAUNCHER python -m {COMMAND_NAME} [OPTIONS] (FILE | -m MODULE) ARGUMENTS..."
    parser.add_argument(
        "--watch", type=seconds, metavar="SECONDS",
        help="end the job after so long without progress; auto: 30 or more, an hour if a rank works (default: never)",
    )  # fmt: skip
    parser.add_argument("--repeatable", action="store_true", help="make runs repeat bit for bit; not with hvd.join")
    flags, words = parser.parse_own(sys.argv[1:] if argv is None else argv)
    return flags, words


def tune(place: Announced, repeatable: bool) -> str:
    """Set what the environment does not set yet, before torch is imported, and return a description. Raises UserError."""
    notes = []
    if bound_by_default(os.environ):
        # The kernel reduces the set to the cores that the job is allowed.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        notes.append("mpirun's default binding to one core undone")
    ranks = ranks_on_host(os.environ, place)
    threads, cores = share_of_host(ranks or 1, min(cpu_quota(), cores_of_job(os.environ, place)))
    # Where the launcher does not tell how many ranks share this host, their threads are left to torch and the launcher.
    settings = tuned_environment(os.environ, FAST if ranks is None else {"OMP_NUM_THREADS": str(threads)} | FAST)
    if place.launcher == "none":
        # Open MPI 4 would start a daemon first, which takes time, and which a relocated MPI cannot find.
        settings |= tuned_environment(os.environ, {"OMPI_MCA_ess_singleton_isolated": "1"})
    if repeatable:
        settings |= tuned_environment(os.environ, FIXED_SUMS)
        if os.environ.get("HOROVOD_DISABLE_GROUP_FUSION", "1") != "1":
            raise UserError("--repeatable needs HOROVOD_DISABLE_GROUP_FUSION=1: unset yours", everywhere=True)
    os.environ.update(settings)
    if "torch" in sys.modules and "OMP_NUM_THREADS" in settings:  # a starter imported it: too late for the variable
        sys.modules["torch"].set_num_threads(threads)
    notes += [f"{name}={value}" for name, value in settings.items()]
    if not Path("/dev/nvidiactl").exists():  # on a GPU, a step uses little host memory
        from hvdtrain.engines.library_settings import keep_freed_memory

        if keep_freed_memory(os.environ):
            notes.append("malloc keeps freed memory")
    line = f"{place.size} rank{'s'[: place.size > 1]}, "
    if ranks is None:
        remedy = "set OMP_NUM_THREADS to each rank's share of its cores"
        line += f"{place.launcher} does not tell how many on this host: {remedy}"
    else:
        used = os.environ["OMP_NUM_THREADS"]
        line += f"on this host {ranks} x {used} thread{'s'[: used != '1']} on {cores:g} core{'s'[: cores != 1]}"
    return f"{line}; {'; '.join(notes) or 'everything is set already'}"


def refuse_torchrun(place: Announced) -> None:
    """Raise UserError under torchrun."""
    if place.launcher == "torchrun":
        remedy = "start with horovodrun or mpirun"
        raise UserError(f"Horovod cannot see the ranks that torchrun starts: {remedy}", everywhere=True)


def attach_to_script(flags: argparse.Namespace, place: Announced) -> list["ScriptWatchdog"]:
    """Hook into the script's import of Horovod, and return the list to which its watchdog is then added."""
    watchdogs: list[ScriptWatchdog] = []

    def arrived(hvd: ModuleType) -> None:
        # Imported here, because torch must not be imported before the script does it.
        from hvdtrain.engines import foreign

        if flags.watch is not None:
            watchdogs.append(foreign.ScriptWatchdog(None if flags.watch == "auto" else flags.watch))
        foreign.attach(hvd, place, watchdogs[0] if watchdogs else None, repeatable=flags.repeatable)

    import_timeout.ImportHook("horovod.torch", arrived)
    return watchdogs


def script_of(words: list[str]) -> str:
    """Return the script or `-m MODULE`, without arguments."""
    return " ".join(words[: 1 + (words[0] == "-m")])


def main() -> None:
    startup.open_standard_streams()
    import_timeout.report_start()
    try:
        flags, words = parse()
        place = announced()
        refuse_torchrun(place)
        done = tune(place, flags.repeatable)
        compile_cache.use_private()
        script = run_script.find_program(words)
        watchdogs = attach_to_script(flags, place)
    except UserError as error:
        end_with(error)
    if place.rank == 0:
        say_in_one_write(done)
    mine = os.getpid()
    failed: BaseException | None = None
    code: object = 0
    import_timeout.limit_import()
    try:
        run_script.run_program(script)
    except SystemExit as left:
        code = left.code
        raise
    except BaseException as raised:
        failed = raised
        raise
    finally:
        if os.getpid() == mine:  # not in a child that the script forked
            for watchdog in watchdogs:
                watchdog.end(failed, code)
            if failed is None and not code:
                warn_if_unused(place, words)


def warn_if_unused(place: Announced, words: list[str]) -> None:
    """Print a warning if the script never imported Horovod."""
    if place.rank == 0 and not any(name.split(".")[0] == "horovod" for name in sys.modules):
        alone = f": its {place.size} ranks each ran alone" if place.size > 1 else ""
        say_in_one_write(f"warning: {script_of(words)} never imported Horovod{alone}")


def say_in_one_write(line: str) -> None:
    """Print a line in one write: with PYTHONUNBUFFERED, `print` takes two. The script's streams stay as they are."""
    put_line(sys.stderr, f"{COMMAND_NAME}: {line}\n")


if __name__ == "__main__":
    main()
