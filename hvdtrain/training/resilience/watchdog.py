"""Detects hung ranks, dead launchers and stop requests, with a thread on every rank and a TCP connection to rank 0.

This file connects the ranks; the threads are in monitor.py. They run while the main thread waits inside Horovod, MPI or
Gloo, which release the GIL. They never call the engine.
"""

import contextlib
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hvdtrain.engines.base import Engine
from hvdtrain.launching import processes
from hvdtrain.training.resilience.control_channel import Channel, accept, listen, say_hello
from hvdtrain.training.resilience.monitor import Monitor, Peer
from hvdtrain.training.resilience.progress import Progress


class Watchdog:
    """The watchdog of this rank. Creating it is a collective. From then on, stop signals are handled as requests.

    step_timeout: in seconds; None: 30 s, or more if steps take long; 0: no limit. failed(headline): called on rank 0, in the
    thread, before the job is ended. stopped(reason): the same for a stop before the first step is finished. guest: the
    program does not use hvdtrain: its signals and launchers are not monitored.
    """

    def __init__(
        self, engine: Engine, step_timeout: float | None, failed: Callable[[str], None] = lambda headline: None,
        stopped: Callable[[str], None] = lambda reason: None, guest: bool = False,
    ):  # fmt: skip
        self.rank, self.size = engine.rank, engine.size
        self.off: str | None = None  # why the ranks could not be connected; None if they are connected
        self._engine = engine
        self._progress = Progress()
        self._hears_of_compilations = False
        place = f"{socket.gethostname()} {pid_namespace()}"
        told = engine.all_gather_object([socket.gethostname(), place, os.getpid()], "watchdog.peers")
        peers = [Peer(*peer) for peer in told]
        self._monitor = Monitor(self.rank, peers, self._progress, step_timeout, self._waits_in, failed, stopped)
        self._monitor.each_look = self._hear_of_compilations
        channels = self._connect([peer.host for peer in peers]) if self.size > 1 else {}
        self._monitor.alone = self.off is not None
        self._monitor.guest = guest
        if not guest:
            self._monitor.announce = "`with run.alone():`"
            self._monitor.launchers = processes.launchers()
            self._monitor.signals.listen()
        self._monitor.start(channels)

    def _waits_in(self) -> str | None:
        if self._engine.waiting_in is None and self._engine.waits() and inside("backward"):
            return "backward"
        return self._engine.waiting_in

    def _connect(self, hosts: list[str]) -> dict[int, Channel]:
        secret = torch.frombuffer(bytearray(secrets.token_bytes(32)), dtype=torch.uint8)
        self._engine.broadcast_(secret, "watchdog.secret")
        key = bytes(secret.tolist())
        listeners: list[socket.socket] = []
        channels: dict[int, Channel] = {}
        where, error = None, None
        if self.rank == 0:
            try:
                listeners, where = listen(hosts)
            except OSError as problem:
                error = f"rank 0 cannot listen: {problem}"
        where = self._engine.broadcast_object(where, "watchdog.where")
        if where is not None:
            try:
                if self.rank == 0:
                    channels = accept(listeners, key, self.size)
                else:
                    host, port = where[hosts[self.rank]]
                    channels = {0: say_hello((host, port), key, self.rank)}
            except OSError as problem:
                error = f"rank {self.rank} on {hosts[self.rank]}: {problem}"
        for listener in listeners:
            listener.close()
        errors = [error for error in self._engine.all_gather_object(error, "watchdog.errors") if error]
        if errors:
            self.off = errors[0]
            for channel in channels.values():
                channel.socket.close()
            return {}
        return channels

    def _hear_of_compilations(self) -> None:
        """Register callbacks for torch.compile, which may take minutes at the first step and at each new shape.

        The thread calls this repeatedly until torch._dynamo is imported; importing it here would take seconds.
        """
        handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if self._hears_of_compilations or not hasattr(handler, "register_start_callback"):
            return
        self._hears_of_compilations = True
        handler.register_start_callback(lambda *_: self._progress.begin_compilation())
        handler.register_end_callback(lambda *_: self._progress.end_compilation())

    # ---- for the main thread

    @property
    def stop_reason(self) -> str | None:
        """What requested the stop, such as a signal on a rank; None if this rank knows of no request."""
        return self._monitor.stop_reason

    @property
    def stop_at(self) -> int | None:
        """The step after which all ranks stop."""
        return self._monitor.stop_at

    @stop_at.setter
    def stop_at(self, step: int) -> None:
        self._monitor.stop_at = step

    @property
    def save_at(self) -> int | None:
        """The step after which all ranks save a checkpoint."""
        return self._monitor.save_at

    @save_at.setter
    def save_at(self, step: int | None) -> None:
        self._monitor.save_at = step

    def propose_save(self, step: int) -> None:
        """On rank 0: tell all ranks to save after `step`. See `Monitor.propose_save`."""
        self._monitor.propose_save(step)

    def confirm_save(self) -> None:
        """On rank 0: wait until all ranks know when to save. See `Monitor.confirm_save`."""
        self._monitor.confirm_save()

    def host(self, rank: int) -> str:
        """Return the host name of `rank`."""
        return self._monitor.peers[rank].host

    def heartbeat(self) -> None:
        """Report progress; the time limit restarts."""
        self._progress.heartbeat()

    def begin_step(self, step: int) -> None:
        """Report the beginning of a step. step: number of finished steps."""
        self._progress.begin_step(step)

    def finish_step(self, step: int) -> None:
        """Report the end of a step. step: number of finished steps."""
        self._progress.finish_step(step)

    def compute(self) -> None:
        """Report that the step computes gradients, perhaps again after an update."""
        self._progress.compute()

    def update(self) -> None:
        """Report that the step has updated the weights."""
        self._progress.update()

    def leave_steps(self) -> None:
        """Report the end of the loop over steps."""
        self._progress.leave_steps()

    def phase(self, name: str, seconds: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a phase with its own time limit. See `Progress.during`."""
        return self._progress.during(name, seconds)

    def announce_stop(self, step: int) -> None:
        """On rank 0: tell all ranks to stop after `step`. See `Monitor.announce_stop`."""
        self._monitor.announce_stop(step)

    def close(self, failure: str | None = None) -> None:
        """Disconnect from the other ranks. failure: the error on this rank, if it leaves the job alone.

        From then on, the program has a time limit for its end.
        """
        self._monitor.close(failure)
        self._monitor.make_leaving().start()


def inside(function: str) -> bool:
    """Return whether a function of this name is on the main thread's stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def pid_namespace() -> str:
    """Return an identifier of this process's pid namespace; unique to this process if it is not known."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return f"of {os.getpid()} alone"
