"""The DataLoader workers that load batches: how they are started, how they end, and how many fit."""

import atexit
import functools
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.inputs import fork_server, leftovers
from hvdtrain.inputs.packing import Packed, Travels, main_cannot_be_imported

PREFETCH = 2  # batches that each worker keeps ready
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_begun: weakref.WeakSet[_MultiProcessingDataLoaderIter] = weakref.WeakSet()
IMAGE_MODULES = ("hvdtrain.datasets.images", "torchvision.transforms.v2", "PIL.JpegImagePlugin", "simplejpeg")


def start_workers_early(preload: Sequence[str] = IMAGE_MODULES) -> None:
    """Start the fork server of the DataLoader workers, with the modules in `preload` and the rank's program imported. If
    possible, call it before the engine starts.

    With InfiniBand, a fork of the rank itself would also send old data. The fork server is started by exec, and has none of
    the rank's state. Since it has already imported torch, it forks a worker within hundredths of a second.
    """
    leftovers.sweep_leftovers()
    leftovers.claim()
    if main_cannot_be_imported():  # Python would try it, in each worker
        vars(sys.modules["__main__"]).pop("__file__", None)
    # A rank must not fork while MPI or NCCL run:
    # the child has locks that nobody releases, and registered pages become copy-on-write.
    context = multiprocessing.get_context("forkserver")
    # The second name is no module. torch: a notebook has no program that would import it.
    context.set_forkserver_preload(["hvdtrain.inputs.fork_server", fork_server.wanted([*preload, "torch"])])
    # Ignored signals stay ignored across exec and fork. Launchers and Ctrl-C send them to every process of a job, but the
    # rank decides when to stop. When the rank has ended, its workers exit, and then the server.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED_SIGNALS}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    atexit.unregister(_end_workers)  # of an earlier training in this process
    atexit.register(_end_workers)


def _end_workers() -> None:
    """Kill remaining workers at exit. multiprocessing would send a signal that they ignore, and wait."""
    for worker in multiprocessing.active_children():
        worker.kill()


def end_workers(of: DataLoader[Any] | None = None) -> None:
    """End the workers of iterators that were not read to their end, as where a training has failed. of: those of this
    loader, which are persistent.

    The garbage collector would find these later, in a process that goes on.
    """
    # The garbage collector closes the queues first:
    # torch then waits ten seconds for each worker, which ignores its SIGTERM.
    for batches in [each for each in _begun if not each._shutdown and (of is None or of._iterator is each)]:
        for worker in batches._workers:
            worker.terminate = worker.kill  # type: ignore[method-assign] # they ignore SIGTERM
            # Not beside a thread that pins memory, for which torch waits: it may need a lock that this worker holds.
            if not batches._pin_memory:
                worker.kill()
        batches._shutdown_workers()


def default_workers(cores: int, device: torch.device) -> int:
    """Return the number of DataLoader workers for a rank with `cores` cores: cores - 1 with a GPU, cores / 4 without."""
    return max(1, cores - 1 if device.type == "cuda" else cores // 4)


def loader(
    dataset: Dataset[Any], workers: int, device: torch.device, jobs: Iterable[Any] | None = None,
    *, given: DataLoader[Any] | None = None, seed: int | None = None, persistent: bool = False,
) -> DataLoader[Any]:  # fmt: skip
    """Return a DataLoader whose items are complete batches: `dataset[job]`, or the items of an iterable dataset.

    Iterating over it raises Failure if a worker ends. given: the author's, whose options for workers are used. seed: of what
    torch seeds the workers with. persistent: workers are used again.
    """
    generator = torch.Generator()  # otherwise each iteration advances the global generator, which dropout uses
    if seed is not None:
        generator.manual_seed(seed)
    options: dict[str, Any] = {}
    if workers:
        options = {"persistent_workers": persistent, "prefetch_factor": PREFETCH} | worker_options(given)
    return _Batches(
        dataset,
        batch_size=None,
        sampler=jobs,
        num_workers=workers,
        pin_memory=device.type != "cpu",
        collate_fn=as_it_is,  # by default, torch would make lists of tuples
        generator=generator,
        **options,
    )


def worker_options(given: DataLoader[Any] | None) -> dict[str, Any]:
    """Start the fork server, and return options of a DataLoader for workers that it forks, and that end with their rank."""
    start_workers_early([])
    own: Any = None if given is None else given.worker_init_fn
    if own is not None:
        own = Packed(own)  # it is the function again in a worker
    # The server may have been started while mpirun's binding to one core was in effect.
    init = functools.partial(_begin_worker, os.sched_getaffinity(0), own)
    options: dict[str, Any] = {"multiprocessing_context": "forkserver", "worker_init_fn": init}
    return options if given is None else options | {"timeout": given.timeout, "prefetch_factor": given.prefetch_factor}


def as_it_is(batch: Any) -> Any:
    return batch


class _Batches(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # torch names its own class
        if self.num_workers and not os.access(SHARED_MEMORY, os.W_OK):
            remedy = f"{LARGER.replace('larger', 'writable')}, or use num_workers=0"
            raise UserError(f"{SHARED_MEMORY}, which DataLoader workers need, cannot be written: {remedy}")
        batches = super().__iter__()
        return while_workers_live(batches) if self.num_workers else batches


def while_workers_live(batches: Iterator[Any]) -> Iterator[Any]:
    """Return what yields from an iterator of a DataLoader, and raises Failure if a worker ends."""
    if isinstance(batches, _MultiProcessingDataLoaderIter):
        _begun.add(batches)
    return _while_workers_live(batches)


def _while_workers_live(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from batches
    except (RuntimeError, EOFError, OSError) as error:
        # The last two while a batch is handed over, and its memory or its socket is gone. What the data set raised in a
        # worker begins with "Caught".
        message = str(error)
        ended = re.match(r"DataLoader worker .*(exited unexpectedly|is killed)", message)
        if message.startswith("Caught ") or (isinstance(error, RuntimeError) and not ended):
            raise
        remedy = "if the kernel killed it for memory, use fewer workers or a smaller batch"
        raise Failure(
            f"a DataLoader worker has ended ({message or type(error).__name__}): {remedy}", everywhere=False
        ) from error


def _begin_worker(cores: set[int], worker_init: Callable[[int], None] | None, worker: int) -> None:
    # torch's check for a dead parent does not work here: the parent is the server, which lives as long as its workers.
    threading.Thread(target=_end_with_rank, daemon=True).start()
    os.sched_setaffinity(0, cores)
    for number in IGNORED_SIGNALS:  # torch installs a handler for SIGTERM
        signal.signal(number, signal.SIG_IGN)
    show_own_dataset(worker_init, worker)


def show_own_dataset(worker_init: Callable[[int], None] | None, worker: int) -> None:
    """Let `get_worker_info().dataset` be the program's own, in a worker, and call its worker_init_fn."""
    info: Any = get_worker_info()
    if isinstance(batches := getattr(info, "dataset", None), Travels):
        object.__setattr__(info, "dataset", batches.dataset)  # its attributes are read-only
    if worker_init is not None:
        worker_init(worker)


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        leftovers.remove_sockets()
        os._exit(1)


# Batches reach their rank through it. Where they do not fit, the kernel ends a worker with SIGBUS ("bus error").
SHARED_MEMORY = Path("/dev/shm")
LARGER = "make it larger (docker run --shm-size or --ipc=host; Kubernetes: emptyDir with medium: Memory)"


def needed(workers: int, batch_bytes: int, ranks: int) -> int:
    """Return the bytes that may be in /dev/shm at once: each worker's batches that are ready, and one on its way."""
    return ranks * (workers * PREFETCH + 1) * batch_bytes if workers else 0


def workers_that_fit(
    asked: int | None, automatic: int, batch_bytes: int, ranks: int, directory: Path = SHARED_MEMORY
) -> tuple[int, str | None]:
    """Return how many workers each of `ranks` ranks on this host has, and a line where /dev/shm allows fewer than
    `automatic`. asked: with --workers. Raises UserError where as many, or a single one, do not fit."""
    workers = automatic if asked is None else asked
    try:
        free = shutil.disk_usage(directory).free
    except OSError:  # none here: torch takes files elsewhere
        return workers, None
    if needed(workers, batch_bytes, ranks) <= free:
        return workers, None
    fit = (free // (ranks * batch_bytes) - 1) // PREFETCH
    has = f"/dev/shm has {free / 2**20:,.0f} MiB left"
    if asked is None and fit >= 1:
        wanted = needed(automatic, batch_bytes, ranks) / 2**20
        return fit, f"{fit} DataLoader workers instead of {automatic}, which need {wanted:,.0f} MiB: {has}: {LARGER}"
    wanted = needed(workers if asked is not None else 1, batch_bytes, ranks) / 2**20
    count = f"{asked if asked is not None else 1} DataLoader worker{'s'[: asked is not None and asked > 1]}"
    less = f", or take --workers {max(0, fit)}" if asked is not None else ", or take --workers 0"
    each = f" of each of {ranks} ranks" if ranks > 1 else ""
    raise UserError(f"{has}, and the batches of {count}{each} need {wanted:,.0f} MiB: {LARGER}{less}")
