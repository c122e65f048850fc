"""Who hangs, and who asked to stop: a thread on every rank, and a TCP connection from each to rank 0.

Ranks train in step, so where one hangs, all stand still. Hence no heartbeats: the connections stay silent until something is
wrong. Each thread looks once a second whether its own main thread still makes steps. When rank 0's has made none for the
time-out, its thread asks every rank where it stands. Who does not answer is stopped or cut off; who stands outside a
collective keeps the others waiting. Rank 0 says so, and all end. Where rank 0 itself does not answer, the others end alone.
A rank that wants to run and gets no core does not hang: the answers say for how long, and so much longer is waited.

Threads run while the main thread waits inside Horovod, MPI or Gloo, which release Python's lock; no engine is called here.
"""

import contextlib
import faulthandler
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from hvdtrain import engines
from hvdtrain.engines.base import Engine
from hvdtrain.training.resilience.control_channel import Link, accept, own_address_towards, say_hello

LOOK_SECONDS = 1.0  # between two looks at the main thread
REPLY_SECONDS = 3.0  # to answer where one stands
GRACE_SECONDS = 3.0  # for launcher and engine to end a job with a dead rank in their own way
FIRST_STEP_SECONDS = 600.0  # compiling, a cold file system, ...; or ten times the time-out, if that is more
LEAST_SECONDS, TIMES_LONGEST = 30.0, 20.0  # the automatic time-out follows the longest time between two steps so far
TIMES_LONGEST_ASKED = 3.0  # and so does one that was asked for, where steps turn out to take about so long
MOST_STARVED = 9.0  # time-outs that are added at most for the time in which a rank was ready to run and had no core
TURNS = 20.0  # a second on a core: who comes on more often is not kept from running
STACK_FRAMES = 6
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ENGINE_FILES = str(Path(engines.__file__).parent)
PACKAGE_FILES = str(Path(engines.__file__).parent.parent)


class Running(NamedTuple):
    """How a thread runs. turns: how often it has come on a core."""

    ready: bool  # it runs, or would if there were a core
    cpu_seconds: float
    turns: int


class Watchdog:
    """Made by every rank at once: a collective. `failed(headline)` is called on rank 0, in the thread, before all end.

    step_timeout: seconds; None: 30, or more if steps take long; 0: a hung rank is waited for.
    """

    def __init__(self, engine: Engine, step_timeout: float | None, failed: Callable[[str], None]):
        self.rank, self.size = engine.rank, engine.size
        self.step_timeout = step_timeout
        self.stop_reason: str | None = None  # who asked all to stop: known to rank 0 (without links: to who was asked)
        self.stop_at: int | None = None  # the step after which all stop
        self.step = 0
        self.ticks = 0  # any progress of the main thread
        self.off: str | None = None  # why there are no links, where there are none
        self._world, self._failed = engine, failed
        self._links: dict[int, Link] = {}
        self._hosts = engine.all_gather_object(socket.gethostname(), "watchdog.hosts")
        self._gone: dict[int, tuple[float, str]] = {}  # by rank: since when, and what is known
        self._acknowledged: set[int] = set()
        self._all_acknowledged = threading.Event()
        self._stands: dict[int, dict] = {}
        self._asked_at: float | None = None
        self._seen_ticks, self._stalled, self._longest, self._looked_at = 0, 0.0, 0.0, time.monotonic()
        self._counted_at = 0.0  # when `_without_core` last looked
        self._threads: dict[int, Running] = {}  # what it saw then
        self._starved = 0.0  # seconds of this standstill in which threads of this rank wanted to run and had no core
        self._excused = 0.0  # seconds that rank 0 has added to the time-out for such times, of all ranks
        self._interrupts = 0
        self._closing = False
        self._connect(engine)
        self._listen_to_signals()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._signals)
        for rank, link in self._links.items():
            self._selector.register(link.socket, selectors.EVENT_READ, (rank, link))
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    # ---- the links

    def _connect(self, engine: Engine) -> None:
        secret = torch.frombuffer(bytearray(secrets.token_bytes(32)), dtype=torch.uint8)
        engine.broadcast_(secret, "watchdog.secret")
        key = bytes(secret.tolist())
        listener, where, error = None, None, None
        if self.rank == 0 and self.size > 1:
            with contextlib.suppress(OSError):
                addresses = {host: own_address_towards(host, self._hosts[0]) for host in set(self._hosts)}
                # Only where the other ranks are; every interface only if they are on several.
                one = next(iter(set(addresses.values()))) if len(set(addresses.values())) == 1 else ""
                listener = socket.create_server((one, 0), backlog=self.size)
                where = [addresses, listener.getsockname()[1]]
        where = engine.broadcast_object(where, "watchdog.where")
        if where is not None:
            try:
                if listener is not None:
                    self._links = accept(listener, key, self.size)
                else:
                    address = (where[0][self._hosts[self.rank]], where[1])
                    self._links = {0: Link(say_hello(address, key, self.rank))}
            except OSError as problem:
                error = f"rank {self.rank} on {self._hosts[self.rank]}: {problem}"
        if listener is not None:
            listener.close()
        errors = [error for error in engine.all_gather_object(error, "watchdog.errors") if error]
        if errors or (where is None and self.size > 1):
            self._links = {}
            self.off = (errors or ["rank 0 cannot listen"])[0]

    def _send_all(self, **message: object) -> None:
        for link in list(self._links.values()):
            link.send(**message)

    # ---- signals: C writes their number to a socket whatever the main thread is doing

    def _listen_to_signals(self) -> None:
        self._wakeup, self._wake = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self._handlers.items():
            if handler != signal.SIG_IGN:  # as nohup has it: not ours to change
                signal.signal(number, lambda number, frame: None)
        # A forked child (a loader's worker) must not report its own signals as ours, nor survive them.
        os.register_at_fork(after_in_child=self._restore_signals)

    def _restore_signals(self) -> None:
        if self._handlers:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}

    def _signals(self) -> None:
        for number in self._wakeup.recv(4096):
            if number not in STOP_SIGNALS:
                continue
            self._interrupts += number == signal.SIGINT
            if self._interrupts > 1:
                os._exit(130)
            reason = f"{signal.Signals(number).name} on rank {self.rank} ({self._hosts[self.rank]})"
            if self.rank == 0 or self.off:
                self.stop_reason = self.stop_reason or reason
            else:
                self._links[0].send(stop=reason)

    # ---- for the main thread

    def host(self, rank: int) -> str:
        return self._hosts[rank]

    def heartbeat(self) -> None:
        self.ticks += 1

    def announce_stop(self, step: int) -> None:
        """On rank 0, before it takes part in `step`: tell all ranks to stop after it, and wait until each knows.

        None of them can finish that step without rank 0, so none can miss it.
        """
        self._send_all(stop_at=step, reason=self.stop_reason)
        if self._links:
            self._all_acknowledged.wait()  # a rank that cannot answer ends us all: see `_look`
        self.stop_at = step

    def close(self, failure: str | None = None) -> None:
        """Take leave of the others, with what went wrong here if this rank leaves them alone."""
        if self._closing:
            return
        if failure is not None:
            time.sleep(0.2)  # what failed here may be that another rank has just died
            for rank in self._gone:
                sys.stderr.write(f"hvdtrain: error: rank {rank} on {self._hosts[rank]} {self._gone[rank][1]}\n")
        self._closing = True
        self._send_all(**({"bye": True} if failure is None else {"failed": failure}))
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join()
        self._restore_signals()
        for link in self._links.values():
            link.socket.close()
        self._selector.close()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(LOOK_SECONDS):
                if key.data == self._signals:
                    self._signals()
                else:
                    self._receive(*key.data)
            self._look()

    def _receive(self, rank: int, link: Link) -> None:
        messages = link.receive()
        for message in messages or []:
            if "where" in message:
                link.send(stand=self._stand())
            if "stand" in message:
                self._stands[rank] = message["stand"]
            if "stop" in message:
                self.stop_reason = self.stop_reason or message["stop"]
            if "stop_at" in message:
                self.stop_at, self.stop_reason = message["stop_at"], message["reason"]
                link.send(acknowledged=True)
            if "acknowledged" in message:
                self._acknowledged.add(rank)
                if len(self._acknowledged) == self.size - 1:
                    self._all_acknowledged.set()
            if "failed" in message:
                self._gone[rank] = time.monotonic(), f"failed: {message['failed']}"
            if "verdict" in message:
                time.sleep(1.0)  # a launcher may end all at the first that goes: rank 0 still speaks
                os._exit(1)
            if "bye" in message:
                messages = None
                self._gone[rank] = float("inf"), "left"
        if messages is None:
            self._selector.unregister(link.socket)
            self._links.pop(rank, None)
            self._gone.setdefault(rank, (time.monotonic(), "died: its connection closed without a word"))

    def _look(self) -> None:
        now = time.monotonic()
        # Only time in which this thread ran counts: a job that was suspended as a whole has not hung.
        elapsed, self._looked_at = min(now - self._looked_at, 2 * LOOK_SECONDS), now
        for rank, (since, what) in list(self._gone.items()):
            if now - since > GRACE_SECONDS + (rank == 0):
                self._end(f"rank {rank} on {self._hosts[rank]} {what}")
        starved = self._without_core()
        if self.ticks != self._seen_ticks:
            if self._seen_ticks:
                self._longest = max(self._longest, self._stalled - max(starved, self._excused))
            self._seen_ticks, self._stalled, self._asked_at, self._stands = self.ticks, 0.0, None, {}
            self._starved = self._excused = 0.0
            return
        self._stalled += elapsed
        late = self._excused if self.rank == 0 else 3 * REPLY_SECONDS  # rank 0 judges first, if it can
        if not self._links or self.step_timeout == 0 or self._stalled < self._limit() + late:
            return
        if self._asked_at is None:
            self._asked_at, self._stands = now, {self.rank: self._stand()}
            self._send_all(where=True)
            return
        # Where this rank lacks a core, its neighbours may too.
        silent = now - self._asked_at > REPLY_SECONDS + min(starved, MOST_STARVED * REPLY_SECONDS)
        if self.rank == 0 and (silent or len(self._stands) == self.size):
            self._judge()
        elif self.rank != 0 and 0 in self._stands:
            self._stalled, self._asked_at = 0.0, None  # it lives, and will judge
        elif self.rank != 0 and silent:
            self._end(f"rank 0 on {self._hosts[0]} does not answer (stopped, spinning outside Python, or cut off)")

    def _limit(self) -> float:
        """Return how many seconds may pass without a step while every rank has a core."""
        least, times = (self.step_timeout, TIMES_LONGEST_ASKED) if self.step_timeout else (LEAST_SECONDS, TIMES_LONGEST)
        limit = max(least, times * self._longest)
        return limit if self._seen_ticks else max(FIRST_STEP_SECONDS, 10 * limit)

    def _stand(self) -> dict:
        """Return where this rank's main thread stands, and whether that is inside a collective."""
        stack = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
        waits = any(frame.filename.startswith(ENGINE_FILES) for frame in stack)
        waits |= self._world.waits() and any(frame.name == "backward" for frame in stack)
        ours = [frame for frame in stack if frame.filename.startswith(PACKAGE_FILES)] or stack
        at = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}, {ours[-1].name}" if ours else "nowhere"
        telling = [frame for frame in stack if not frame.filename.endswith("contextlib.py")]
        return {"step": self.step, "waits": waits, "at": at, "stack": traceback.format_list(telling[-STACK_FRAMES:]),
                "starved": self._without_core()}  # fmt: skip

    def _without_core(self) -> float:
        """Return for how many seconds of this standstill threads of this rank wanted to run and had no core, added up.

        Looked at once a second and when asked: what a thread that is ready to run, and hardly comes on, has not run since.
        Not the loops in which MPI waits: there may be more of them than cores, but each yields, and comes on again.
        """
        now, threads = time.monotonic(), other_threads()
        elapsed = now - self._counted_at
        for thread, running in threads.items():
            before = self._threads.get(thread)
            if before and running.ready and running.turns - before.turns < TURNS * elapsed:
                self._starved += elapsed - (running.cpu_seconds - before.cpu_seconds)
        self._counted_at, self._threads = now, threads
        return max(0.0, self._starved)

    def _judge(self) -> None:
        """End the job, unless a rank was only kept from running: then wait for so much longer, and ask again."""
        self._stands[self.rank] = self._stand()
        starved = sum(stand["starved"] for stand in self._stands.values())  # one may have waited for the other
        self._excused = min(starved, MOST_STARVED * self._limit())
        if self._stalled < self._limit() + self._excused:
            self._asked_at = None
            return

        def named(ranks: list[int]) -> str:
            return " and ".join(f"rank {rank} on {self._hosts[rank]}" for rank in ranks)

        silent = [rank for rank in range(self.size) if rank not in self._stands]
        outside = [rank for rank, stand in self._stands.items() if not stand["waits"]]
        behind = min(stand["step"] for stand in self._stands.values())
        last = [rank for rank, stand in self._stands.items() if stand["step"] == behind]
        if silent:
            blame = f"{named(silent)} does not answer (stopped, spinning outside Python, or cut off)"
        elif outside:
            blame = f"{named(outside)} keeps the others waiting, at {self._stands[outside[0]]['at']}"
        elif len(last) < self.size:
            blame = f"{named(last)} is behind, at {self._stands[last[0]]['at']}"
        else:
            blame = "all ranks wait in a collective: look at the network between them"
        self._end(f"{blame}; no step for {self._stalled:.0f} s after step {self.step}")

    def _end(self, headline: str) -> None:
        """End this process, and on rank 0 all others, saying why."""
        if self._closing:
            return
        lines = [f"hvdtrain: error: {headline}\n"]
        for rank, stand in sorted(self._stands.items()):
            state = "waits" if stand["waits"] else "stands"
            lines.append(f"  rank {rank} on {self._hosts[rank]}: step {stand['step']}, {state} at {stand['at']}\n")
            lines += stand["stack"]
        sys.stderr.write("".join(lines))
        if not self._stands:
            faulthandler.dump_traceback()
        sys.stderr.flush()
        if self.rank == 0:
            self._send_all(verdict=headline)
            self._failed(headline)
            time.sleep(0.5)
        os._exit(1)


def other_threads(tasks: Path = Path("/proc/self/task")) -> dict[int, Running]:
    """Return the threads of this process other than the caller's, by number; empty where the kernel does not count turns.

    Source: stat and schedstat in /proc/PID/task/TID. (schedstat has the wait for a core, too, but only once it is over.)
    """
    threads = {}
    for task in tasks.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended just now; another kernel's words
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            nanoseconds, _, turns = map(int, (task / "schedstat").read_text().split())
            if turns:  # else none are counted: whoever exists has come on a core once
                threads[int(task.name)] = Running(state == "R", nanoseconds / 1e9, turns)
    threads.pop(threading.get_native_id(), None)
    return threads
