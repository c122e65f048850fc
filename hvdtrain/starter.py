"""Start Horovod over Gloo (on GPUs: NCCL) without ssh or MPI: all ranks of a host from one process, or a process per rank.

python -m hvdtrain.starter --local-ranks 8 -m hvdtrain.mnist                                 eight ranks on this machine
srun --ntasks-per-node=1 python -m hvdtrain.starter --local-ranks 8 -m hvdtrain.mnist        eight on each host, by Slurm
MASTER_ADDR=a MASTER_PORT=9000 WORLD_SIZE=2 RANK=0 python -m hvdtrain.starter --local-ranks 8 -m hvdtrain.mnist  on host a
MASTER_ADDR=a MASTER_PORT=9000 WORLD_SIZE=2 RANK=1 python -m hvdtrain.starter --local-ranks 8 -m hvdtrain.mnist  on host b

With --local-ranks, this process imports torch, Horovod and the program's modules once, then forks the ranks; WORLD_SIZE and
RANK count hosts. More ranks than cores or GPUs need --oversubscribe. Signals are forwarded to the ranks. If a rank
fails, the others are ended, and the starter exits with the code of the first that failed.

srun --ntasks 8 python -m hvdtrain.starter -m hvdtrain.mnist                                 a process per rank, by Slurm
MASTER_ADDR=a MASTER_PORT=9000 WORLD_SIZE=2 RANK=0 python -m hvdtrain.starter -m hvdtrain.mnist         on host a

Without it, this process becomes the rank: exit codes and signals are those of the program.
"""

import argparse
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.cli import Parser, non_negative, port, positive, positive_int
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.launchers import GLOO_ALONE, Announced, announced, bound_by_default
from hvdtrain.launching import import_timeout, run_script, startup
from hvdtrain.launching.exit_codes import run_command
from hvdtrain.launching.meeting import Meeting
from hvdtrain.launching.rendezvous import job_secret, meeting_point

BY_HAND = ("torchrun", "Kubeflow")  # whose variables tell each host its number where no launcher starts all of them


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the starter's own options, and the program to run with its arguments. Raises UserError on bad input."""
    parser = Parser("hvdtrain.starter", __doc__)
    parser.usage = "hvdtrain.starter [OPTIONS] (-m MODULE | FILE) ARGUMENTS"
    parser.add_argument(
        "--local-ranks", type=positive_int, metavar="N", help="start N ranks on this host from one import"
    )
    parser.add_argument(
        "--oversubscribe", action="store_true", help="with --local-ranks: allow more ranks than cores or GPUs"
    )
    parser.add_argument(
        "--import", dest="imports", metavar="MODULES", default="",
        help="with --local-ranks: also import these once (a,b.c; they must not start threads, MPI or CUDA)",
    )  # fmt: skip
    parser.add_argument("--interface", help="network interface of the job (default: the one with the route to rank 0)")
    parser.add_argument("--port", type=port, help="port of rank 0 (default: MASTER_PORT, or derived from the job)")
    parser.add_argument("--wait", type=positive, default=120.0, help="seconds to wait for all ranks (default: 120)")
    parser.add_argument(
        "--start-timeout", type=non_negative, default=import_timeout.limit_seconds(), metavar="SECONDS",
        help="with --local-ranks: limit for the import (default: 600; 0: none)",
    )  # fmt: skip
    options, words = parser.parse_own(argv)
    if options.local_ranks is None and (options.oversubscribe or options.imports):
        parser.error("--oversubscribe and --import need --local-ranks")
    if words and re.fullmatch(r"python[0-9.]*", Path(words[0]).name):
        words = words[1:]  # other launchers need the interpreter; here it is this one
    return options, words


def meeting_of(options: argparse.Namespace, place: Announced) -> Meeting:
    """Return the rendezvous of this process with the others of the job. Raises UserError."""
    host, named = meeting_point(os.environ, place.launcher) if place.size > 1 else ("127.0.0.1", 0)
    secret = job_secret(os.environ, place.size)
    return Meeting(place.rank, place.size, host, options.port or named, options.interface, options.wait, secret)


def start_one(options: argparse.Namespace, place: Announced, words: list[str]) -> run_script.Program:
    """Connect to the other ranks, if there are any, and return the program that this process is to run."""
    if place.size > 1:
        meeting = meeting_of(options, place)
        try:
            meeting.come(1)
            meeting.wait()
        except (UserError, Failure) as error:
            error.everywhere = False  # the others may be told something else, or nothing
            raise
        os.environ.update(meeting.environment(place.rank))
    else:
        os.environ.update(GLOO_ALONE)
    return run_script.find_program(words)


def start_all(options: argparse.Namespace, place: Announced, words: list[str]) -> int:
    """Start all ranks of this host, and return their exit code. In a rank, this function does not return."""
    from hvdtrain.engines import cores
    from hvdtrain.launching import forker
    from hvdtrain.launching.supervisor import Supervisor, say_at_end

    ranks = options.local_ranks
    if bound_by_default(os.environ):  # by mpirun, which knows of only one process here
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    cores_here = cores.cores_here(os.environ, place)
    if not options.oversubscribe:
        cores.refuse_too_many_for_cores(ranks, cores_here, place.launcher)
    meeting = meeting_of(options, place)
    meeting.say = say_at_end
    # OpenMP reads this once, when torch is imported, so each rank's share must be set before.
    os.environ.setdefault("OMP_NUM_THREADS", str(cores.share_of_host(ranks, cores_here)[0]))
    imports = [name for name in options.imports.split(",") if name]
    limit = min(options.start_timeout, import_timeout.MOST_SECONDS)
    started = forker.start_forker(words, ranks, imports, options.oversubscribe, limit)
    try:
        return Supervisor(started, words, ranks, meeting).run()
    except (UserError, Failure) as error:
        meeting.fail(str(error))
        if place.rank == 0:
            raise
        # Each host has a log of its own, and its number is none of a rank, as `exit_codes.run_command` would call it.
        say_at_end(f"error: on {socket.gethostname()}, host {place.rank} of {place.size} (from 0): {error}")
        return error.exit_code
    finally:
        meeting.linger()


def main() -> int:
    try:
        return start_ranks()
    except UserError as error:
        if announced().launcher in BY_HAND:
            error.everywhere = False  # its flags may be wrong on this host alone, and its output is not beside rank 0's
        raise


def start_ranks() -> int:
    import_timeout.report_start()
    options, words = parse(sys.argv[1:])
    if not words or words == ["-m"]:
        raise UserError("nothing to run: name a module, as in `-m hvdtrain.mnist`, or a file", everywhere=True)
    place = announced()
    if place.launcher == "horovodrun":
        raise UserError("horovodrun has started Horovod already: leave hvdtrain.starter out", everywhere=True)
    if options.local_ranks is not None:
        return start_all(options, place, words)
    import_timeout.limit_import()
    startup.hear_signals()
    program = start_one(options, place, words)
    startup.leave_signals()
    run_script.run_program(program)
    return 0


if __name__ == "__main__":
    run_command(main)
