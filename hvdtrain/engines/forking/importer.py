"""The process that imports all modules once and forks the ranks. `start` starts it, and also returns in each rank."""

import contextlib
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


class Importer(NamedTuple):
    """The starter's handle of the importer."""

    pid: int  # also the ID of its process group, to which the ranks belong
    orders: int  # file descriptor to write `Orders` to, as a line of JSON
    news: int  # file descriptor to read from: a line "imported", then a line of JSON with the ranks' pids
    reports: int  # file descriptor to read from: a line of JSON per failed rank, with local rank and exit code


class Orders(NamedTuple):
    """The result of the rendezvous, which determines the ranks of this host."""

    hosts: list[str]  # host name of every rank
    first: int  # the first rank of this host
    address: str
    port: int
    interface: str


class Rank(NamedTuple):
    """What a forked rank needs to run its program."""

    program: program.Program
    shared: frozenset[str]  # modules that were imported before the fork
    local_rank: int
    reports: int  # file descriptor to write to: the other end of `Importer.reports`


def start(words: list[str], ranks: int, asked: Sequence[str], oversubscribe: bool) -> Importer | Rank:
    """Fork the importer. Returns an Importer in the starter, and a Rank in each rank.

    words: the program, see `program.find`. asked: modules to import in addition to those found in the program.
    Raises UserError in the importer if there is no such program, or there are more ranks than GPUs.
    """
    # The ranks become children of this process when the importer exits.
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
    (orders, orders_end), (news_end, news), (reports_end, reports) = os.pipe(), os.pipe(), os.pipe()
    starter = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no signals until the importer is set up
    pid = os.fork()
    if pid != 0:
        with contextlib.suppress(OSError):  # the child may have done this itself, and may have exited
            os.setpgid(pid, pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(orders)
        os.close(news)
        os.close(reports)
        return Importer(pid, orders_end, news_end, reports_end)
    # A separate process group: signals from the terminal reach only the starter, which forwards them to the ranks once.
    os.setpgid(0, 0)
    processes.end_with_parent(starter, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(orders_end)
    os.close(news_end)
    os.close(reports_end)
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
    gc.freeze()  # otherwise the garbage collector writes to memory pages that the ranks share
    os.write(news, b"imported\n")
    with os.fdopen(orders) as file:
        line = file.readline()
    if not line:  # the starter has exited
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
    while os.getppid() == importer:  # the importer is about to exit
        time.sleep(0.001)
    # SIGTERM when the starter is killed: a program that handles it can still save a checkpoint.
    processes.end_with_parent(starter, signal.SIGTERM)
    if local_rank > 0 or os.isatty(0):  # a background process group cannot read from the terminal
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    rank = told.first + local_rank
    os.environ.update(environment(rank, told.hosts, told.address, told.port, told.interface))
    for name, value in (("RANK", rank), ("WORLD_SIZE", len(told.hosts)), ("LOCAL_RANK", local_rank)):
        if name in os.environ:  # until now they counted hosts
            os.environ[name] = str(value)
    processes.STARTERS[:] = [starter]
    preload.fresh_generators()
    gc.enable()


def reduces_on_gpus() -> bool:
    """Return whether torch and Horovod are built for GPUs. Does not initialize CUDA."""
    torch, hvd = sys.modules.get("torch"), sys.modules.get("horovod.torch")
    return torch is not None and torch.version.cuda is not None and hvd is not None and bool(hvd.nccl_built())
