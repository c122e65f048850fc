"""The process that imports everything once and forks the ranks: `start` begins it, and each rank returns from there, too."""

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.engines import processes, program
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.forking import fitting, preload
from hvdtrain.engines.meeting import environment

# <sys/prctl.h>
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Importer(NamedTuple):
    """The importer, as the starter has it."""

    pid: int  # and the number of its process group, which is the ranks', too
    orders: int  # file descriptors: `Orders` goes there as a line of JSON
    news: int  # from there come a line "imported", and a line of JSON: the ranks' process numbers
    reports: int  # from there comes a line of JSON for each rank whose program has failed: local rank, exit code


class Orders(NamedTuple):
    """What the meeting has told: where the ranks of this host stand among all."""

    hosts: list[str]  # of every rank
    first: int  # the first rank of this host
    address: str
    port: int
    interface: str


class Rank(NamedTuple):
    """What a rank is to become, once its environment is set."""

    program: program.Program
    shared: frozenset[str]  # modules that were there before the fork
    local_rank: int
    reports: int  # the other end of the importer's


def start(words: list[str], ranks: int, asked: Sequence[str], oversubscribe: bool) -> Importer | Rank:
    """Fork the importer. Return it in the starter, and in each rank what that is.

    words: the program, as `program.find` takes it. asked: modules to import besides those found in the program.
    Raises, in the importer, UserError where there is no such program, or more ranks than GPUs.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # the ranks become ours when the importer ends
    (orders, orders_end), (news_end, news), (reports_end, reports) = os.pipe(), os.pipe(), os.pipe()
    starter = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # none may find the importer half done
    pid = os.fork()
    if pid != 0:
        with contextlib.suppress(OSError):  # it may have done so itself, and ended
            os.setpgid(pid, pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(orders)
        os.close(news)
        os.close(reports)
        return Importer(pid, orders_end, news_end, reports_end)
    # Of its own: what is typed at a terminal goes to the starter, which hands it on, and not twice to the ranks.
    os.setpgid(0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(orders_end)
    os.close(news_end)
    os.close(reports_end)
    if os.getppid() != starter:
        os._exit(1)
    return _import_and_fork(words, ranks, asked, oversubscribe, starter, orders, news, reports)


def _import_and_fork(
    words: list[str],
    ranks: int,
    asked: Sequence[str],
    oversubscribe: bool,
    starter: int,
    orders: int,
    news: int,
    reports: int,
) -> Rank:
    gc.disable()
    found = program.find(words)
    preload.preload(program.source(found), asked)
    if not oversubscribe and reduces_on_gpus():
        fitting.refuse_too_many_for_gpus(ranks, fitting.gpus_here(os.environ))
    preload.forget_finalizers()
    gc.freeze()  # the collector would write into pages that the ranks share
    os.write(news, b"imported\n")
    with os.fdopen(orders) as file:
        line = file.readline()
    if not line:  # the starter has ended
        os._exit(1)
    told = Orders(*json.loads(line))
    sys.stdout.flush()
    sys.stderr.flush()
    importer, shared, pids = os.getpid(), frozenset(sys.modules), []
    for local_rank in range(ranks):
        try:
            pid = os.fork()
        except OSError as error:
            how = "allow this user more processes (ulimit -u), or use fewer ranks"
            raise UserError(
                f"cannot start rank {local_rank} of {ranks} of this host ({error.strerror}): {how}"
            ) from None
        if pid == 0:
            os.close(news)
            _become_rank(told, local_rank, starter, importer)
            return Rank(found, shared, local_rank, reports)
        pids.append(pid)
    os.write(news, json.dumps(pids).encode() + b"\n")
    os._exit(0)


def _become_rank(told: Orders, local_rank: int, starter: int, importer: int) -> None:
    while os.getppid() == importer:  # it ends at once
        time.sleep(0.001)
    # SIGTERM: a program that takes it for a request to stop can save a checkpoint when the starter was killed.
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != starter:
        os._exit(1)
    if local_rank > 0 or os.isatty(0):  # a terminal's input is not for a process group in the background
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    rank = told.first + local_rank
    os.environ.update(environment(rank, told.hosts, told.address, told.port, told.interface))
    for name, value in (("RANK", rank), ("WORLD_SIZE", len(told.hosts)), ("LOCAL_RANK", local_rank)):
        if name in os.environ:  # they counted hosts
            os.environ[name] = str(value)
    processes.STARTERS[:] = [starter]
    preload.fresh_generators()
    gc.enable()


def reduces_on_gpus() -> bool:
    """Tell whether torch and Horovod are built for GPUs, without asking for one."""
    torch, hvd = sys.modules.get("torch"), sys.modules.get("horovod.torch")
    return torch is not None and torch.version.cuda is not None and hvd is not None and bool(hvd.nccl_built())


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
