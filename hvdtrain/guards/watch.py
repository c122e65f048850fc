"""The watch of a rank: a thread that runs while the main thread waits inside Horovod, MPI or Gloo, which release the GIL.

It calls neither an engine nor torch. Ranks train in lockstep: if one hangs, all make no progress. Therefore no messages are
sent in normal operation. Once a second, the thread looks at

- stop signals: a request on one rank is forwarded to all at once, and all stop after the same step (`Appointment`)
- the main thread: whether it makes progress (detector.py)
- the other ranks and the launchers of this one: whether they have ended
"""

import contextlib
import errno
import os
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.engines.base import Engine
from hvdtrain.engines.launchers import OPEN_MPI_NAME, announced
from hvdtrain.engines.lines import WRITE_SECONDS, say_within, within
from hvdtrain.guards import limits
from hvdtrain.guards.activity import STEP, Activity
from hvdtrain.guards.connection import Channel, Fail, LostRank, Peers, connect_all
from hvdtrain.guards.detector import Detector
from hvdtrain.guards.evidence import main_stack, shown_frames, write_collectives
from hvdtrain.guards.judge import HangTimeouts, Report
from hvdtrain.guards.limits import Leaving
from hvdtrain.launching import processes
from hvdtrain.launching.exit_codes import FAILED, INTERRUPTED, STOPPED, stop_requests
from hvdtrain.launching.signal_socket import SignalSocket

# A closed terminal sends SIGHUP, a batch system's limit on processor time SIGXCPU.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU)
# Open MPI's mpirun kills a job with SIGCONT, SIGTERM and SIGKILL, a second apart (orte/mca/odls/base in its source).
KILL_SECONDS = 5.0  # from SIGCONT to SIGTERM, at most, where cores are busy
MOST_TRACEBACKS = 3  # printed for internal errors of the thread
_ignored: set[signal.Signals] = set()  # from the start, such as SIGHUP by nohup
# By what has started this process: read here, before the program may block more.
_blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
_listening: list[SignalSocket] = []  # that of the current training


def remember_ignored() -> None:
    """Note which stop signals this process ignores. Call it before Horovod is imported, whose library handles SIGHUP."""
    _ignored.update(number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_IGN)


class WatchSettings(NamedTuple):
    """How a watch behaves, and whom it tells. failed, stopped: called on rank 0, in its thread, with the reason, before all
    ranks end. guest: the program does not use hvdtrain: its signals and launchers are not watched, and our frames not
    printed. leave: exits the process."""

    timeouts: HangTimeouts
    failed: Callable[[str], None] = lambda headline: None
    stopped: Callable[[str], None] = lambda reason: None
    guest: bool = False
    leave: Callable[[int], None] = os._exit
    # In seconds:
    look: float = 1.0  # between two looks at the main thread
    reply: float = 3.0  # for a rank to send its report
    grace: float = 3.0  # for launcher and engine to end a job with a dead rank themselves
    begin: float = 3.0  # for the main thread to stop before the first step is finished, when there is nothing to save


def _restore_signals() -> None:
    """Let signals be a process's own that this one has forked, such as a DataLoader's worker."""
    for one in _listening:
        one.restore()


os.register_at_fork(after_in_child=_restore_signals)  # once for all trainings of a process: a hook cannot be removed


class Appointment:
    """The next step after which all ranks do `what`, if there is one: `step`, which whoever has done it resets to None."""

    def __init__(self, what: str, watch: "Watch"):
        self.what, self._watch = what, watch
        self.step: int | None = None
        self._ignorant: set[int] = set()  # ranks that have not confirmed yet
        self._agreed = threading.Event()

    def make(self, step: int) -> None:
        """On rank 0, before it takes part in `step`: tell all ranks. `wait` before the end of that step."""
        self._agreed.clear()
        # No rank can finish a step without rank 0, which has not taken part in this one yet: so none can miss it.
        self._ignorant = set(self._watch.peers.channels)
        self.step = step
        self._watch.peers.send_all("appoint", self.what, step, self._watch.stop_reason)
        self.confirm(self._watch.rank)

    def wait(self) -> None:
        """On rank 0: wait until all ranks know of it. If one does not answer, the watch ends the job."""
        if not self._agreed.is_set():
            with self._watch.activity.waiting(f"the other ranks to agree on the step to {self.what} at"):
                self._agreed.wait()

    def confirm(self, rank: int) -> None:
        """`rank` knows of it."""
        self._ignorant.discard(rank)
        if not self._ignorant:
            self._agreed.set()


class Watch:
    """The watch of a rank. Call `start` once, and `close` at the end. For the main thread: `stop_reason`, `stop`, `save`.

    peers: all ranks. off: why they are not connected.
    """

    def __init__(self, peers: Peers, off: str | None, activity: Activity, settings: WatchSettings):
        self.rank, self.peers, self.off, self.activity, self.settings = peers.me, peers, off, activity, settings
        self.stop_reason: str | None = None  # what requested the stop
        self.recordings: Path | None = None  # where a rank that is ended writes the last collectives of its GPU
        self.stop, self.save = Appointment("stop", self), Appointment("save", self)
        self.leaving: Leaving | None = None  # once all other ranks have left
        self.signals = SignalSocket()
        self.launchers: list[processes.Process] = []  # launchers of this rank; if one ends, the job stops
        self.detector = Detector(peers, activity, settings.timeouts, settings.reply, settings.guest)
        self._looked_at = time.monotonic()
        self._stop_known_at = 0.0
        self._continued_at = float("-inf")  # the last SIGCONT
        self._killed = False  # SIGTERM has followed
        self._interrupts = self._errors = 0
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread. From then on, stop signals are requests."""
        if not self.settings.guest:
            self.launchers = processes.launchers()
            heard = {number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN} - _ignored
            # A SIGTERM that follows SIGCONT is mpirun's, which will not answer MPI_Finalize any more.
            if announced().launcher == OPEN_MPI_NAME and signal.getsignal(signal.SIGCONT) == signal.SIG_DFL:
                heard.add(signal.SIGCONT)
            self.signals.listen(heard)
            # The mask is inherited: of a launcher that blocks SIGTERM, the rank would never get it.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, heard & _blocked)
            _listening[:] = [self.signals]
        self._selector.register(self.signals.socket, selectors.EVENT_READ)
        for rank, channel in self.peers.channels.items():
            self._selector.register(channel.socket, selectors.EVENT_READ, (rank, channel))
        self._thread.start()

    @property
    def warning(self) -> str | None:
        """What to say at the start if the ranks could not be connected."""
        if self.off is None:
            return None
        remedy = "let the ranks of every host connect to that of rank 0"
        return f"warning: hung ranks will not be noticed: the ranks cannot connect ({self.off}): {remedy}"

    def close(self, failure: Fail | None = None) -> None:
        """Disconnect from the others, with what went wrong here if this rank leaves them alone."""
        if self._closing:
            return
        last_words = ("bye",) if failure is None else ("fail", *failure)
        if failure is not None:
            if failure.mistake:  # the others may have made the same: say it once
                self.peers.send_all(*last_words)
            if self.peers.channels:
                time.sleep(0.2)  # another rank that has just died may be the cause
            for rank in [rank for rank in self.peers.gone if not self.peers.failed_alike(rank, failure)]:
                say_within(f"hvdtrain: error: {self.peers.name(rank)} {self.peers.fate(rank)}\n")
        self._closing = True
        stop_requests.extend([self.stop_reason or ""] * (self.stop_reason is not None))  # before Python handles Ctrl-C
        self.peers.send_all(*last_words)
        self.signals.wake()
        self._thread.join()
        self._select(0)
        for channel in self.peers.channels.values():
            channel.socket.close()
        self._selector.close()
        self.signals.close()
        _listening.clear()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            ready: list[tuple[selectors.SelectorKey, int]] = []
            with self._lives_on():
                ready = self._select(self.settings.look)
            for key, _ in ready:
                with self._lives_on():
                    if key.data is None:
                        self._hear_signals()
                    else:
                        self._receive(*key.data)
            if not self._closing:
                with self._lives_on():
                    self._look()

    def _select(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what can be read within `seconds`. Ends this process if the program has closed the selector."""
        try:
            return self._selector.select(seconds)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.EINVAL):  # EINVAL: another file has its number by now
                raise
        message = f"{self.peers.name(self.rank)}: the program has closed files that it did not open (os.closerange?)"
        say_within(f"hvdtrain: error: {message}: let it close its own\n")
        self.settings.leave(FAILED)  # at once: files are lost, and the engine's shutdown may wait for ever
        return []

    @contextlib.contextmanager
    def _lives_on(self) -> Iterator[None]:
        """Context manager that prints exceptions and continues, so that the thread keeps handling signals and messages."""
        try:
            yield
        except Exception:
            self._errors += 1
            if self._errors <= MOST_TRACEBACKS and not self._closing:
                message = f"warning: the watchdog of {self.peers.name(self.rank)} continues after an internal error:\n"
                say_within(message + traceback.format_exc())
            # Else an error that comes back at once, as of a closed selector, keeps this thread busy for ever.
            time.sleep(0.1)

    def _look(self) -> None:
        now = time.monotonic()
        # Count only time in which this thread ran: a job that was suspended as a whole is not hung.
        elapsed, self._looked_at = min(now - self._looked_at, 2 * self.settings.look), now
        for rank, gone in list(self.peers.gone.items()):
            if now - gone.since > self.settings.grace + (rank == 0):
                self._end(f"{self.peers.name(rank)} {self.peers.fate(rank)}")
        self.activity.hear_of_compilations()
        if self.signals.lost():
            self.activity.asked = True  # the main thread can install handlers
        self._miss_launcher()
        self._leave_before_the_first_step(now)
        seen = self.detector.look(now, elapsed, connected=bool(self.peers.channels))
        if seen.ask:
            self.peers.send_all("ask")
        if seen.end is not None:
            self._end(seen.end)
        if self.leaving is not None and seen.moved:
            self.leaving.heartbeat()
        elif self.leaving is not None:
            self.leaving.look(elapsed)

    # ---- stops

    def _hear_signals(self) -> None:
        now = time.monotonic()
        for heard in self.signals.received():
            if heard == signal.SIGCONT:
                self._continued_at = now
            if heard not in STOP_SIGNALS:
                continue
            number = signal.Signals(heard)
            self._killed |= number == signal.SIGTERM and now < self._continued_at + KILL_SECONDS
            self._interrupts += number == signal.SIGINT
            # The first Ctrl-C asks to save and stop. Who presses it again does not wait for that.
            if self._interrupts > 1:
                self.settings.leave(INTERRUPTED)
            if self.peers.has_left(0):
                # All ranks have finished their last collective: there is nothing to agree on or to save.
                self.settings.leave(128 + number)
            self.request_stop(f"{number.name} on rank {self.rank} ({self.peers.all[self.rank].host})")

    def _miss_launcher(self) -> None:
        """Request a stop if one of the launchers of this rank has ended."""
        if ended := next((each for each in self.launchers if not processes.runs(each.pid, each.started)), None):
            self.launchers = []
            me = f"rank {self.rank} ({self.peers.all[self.rank].host})"
            self.request_stop(f"the end of {ended.name} (pid {ended.pid}), which started {me}")

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to stop; rank 0 decides when."""
        if self.rank == 0 or self.off is not None:
            self._learn_stop(reason)
        elif 0 in self.peers.channels:
            self.peers.channels[0].send("stop", reason)

    def _learn_stop(self, reason: str) -> None:
        if self.stop_reason is None:
            self.stop_reason, self._stop_known_at = reason, time.monotonic()
            self.activity.asked = True
            if self.rank == 0:
                self.peers.send_all("stop", reason)

    def _leave_before_the_first_step(self, now: float) -> None:
        """On rank 0: end the job after a stop request if the main thread is still in start-up or in the first step."""
        if self.rank != 0 or self.stop_reason is None or self.activity.finished or self.stop.step is not None:
            return
        if self._closing or now - self._stop_known_at < self.settings.begin:
            return
        reason = self.stop_reason
        self.peers.send_all("end", STOPPED)
        within(WRITE_SECONDS, lambda: self.settings.stopped(reason))
        time.sleep(self.settings.look / 2)
        self.settings.leave(STOPPED)

    # ---- messages

    def _receive(self, rank: int, channel: Channel) -> None:
        messages = channel.receive()
        for message in messages or []:
            self._handle(message, rank, channel)
        if messages is None or ["bye"] in messages:
            self._selector.unregister(channel.socket)
            self.peers.channels.pop(rank, None)
            self.peers.gone.setdefault(rank, LostRank(time.monotonic(), None, str(channel.error or "")))
            if self.peers.all_have_left():
                self.leaving = self.make_leaving()

    def _handle(self, message: list[Any], rank: int, channel: Channel) -> None:
        match message:
            case ["ask"]:
                channel.send("stand", self.detector.report())
            case ["stand", fields]:
                self.detector.reports[rank] = Report(*fields)
            case ["stop", reason]:
                self._learn_stop(reason)
            case ["appoint", "stop" | "save" as what, step, reason]:
                self.stop_reason = self.stop_reason or reason
                (self.stop if what == "stop" else self.save).step = step
                self.activity.asked = True
                channel.send("know", what)
            case ["know", "stop" | "save" as what]:
                (self.stop if what == "stop" else self.save).confirm(rank)
            case ["fail", str() as error, mistake]:
                self.peers.gone[rank] = LostRank(time.monotonic(), Fail(error, mistake))
            case ["bye"]:
                self.peers.gone[rank] = LostRank(float("inf"))
            case ["end", int() as exit_code]:
                if exit_code == FAILED:
                    self._show_state()
                time.sleep(self.settings.look)  # a launcher may end the job at the first exit: let rank 0 print first
                self.settings.leave(exit_code)
            case _:
                raise ValueError(f"no message: {message!r:.80}")

    # ---- ends

    def make_leaving(self) -> Leaving:
        """Return the limit of this rank's own end, for when no other rank waits for it. A single rank has none."""
        settings = self.settings
        limit = settings.timeouts.leaving(self.detector.longest) if len(self.peers.all) > 1 else float("inf")
        return Leaving(self.peers.name(self.rank), limit, settings.leave, settings.guest, self._killed)

    def _end(self, headline: str) -> None:
        """Print the reason and where all ranks are, and end this process; on rank 0, also the other ranks."""
        if self._closing:
            return
        lines = [f"hvdtrain: error: {headline}\n"]
        for rank, report in sorted(self.detector.reports.items()):
            state, what = ("waits", f"; for others, in {report.collective}") if report.collective else ("stands", "")
            during = "" if report.phase == STEP.name else f", {report.phase}"
            lines.append(f"  {self.peers.name(rank)}: step {report.step}{during}, {state} at {report.at}{what}\n")
        say_within("".join(lines))
        self._kill_silent()
        if self.rank == 0:
            self.peers.send_all("end", FAILED)
            within(WRITE_SECONDS, lambda: self.settings.failed(headline))
        self._show_state()
        if self.rank == 0:
            time.sleep(self.settings.look / 2)
        self.settings.leave(FAILED)

    def _show_state(self) -> None:
        """Print the stack of this rank, and write the last collectives of its GPU."""
        say_within(f"{self.peers.name(self.rank)}:\n{shown_frames(main_stack(), self.settings.guest)}")
        if (directory := self.recordings) is not None:
            within(WRITE_SECONDS, lambda: write_collectives(directory, self.rank))

    def _kill_silent(self) -> None:
        """Under torchrun, kill the ranks of this host that did not answer."""
        if self.detector.asked_at is None or not any("torch" in process.name for process in self.launchers):
            return
        # torchrun waits 30 s until a rank obeys SIGTERM, others for seconds only.
        # An open connection says that the pid is still its.
        for rank in set(self.peers.channels) - set(self.detector.reports):
            if self.peers.is_here(rank):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.peers.all[rank].pid, signal.SIGKILL)


def watch_ranks(
    engine: Engine, timeouts: HangTimeouts, failed: Callable[[str], None] = lambda headline: None,
    stopped: Callable[[str], None] = lambda reason: None, guest: bool = False,
) -> Watch:  # fmt: skip
    """Connect all ranks and watch them from now on. A collective. See `WatchSettings`."""
    limits.stop()  # of a training before this one
    peers, off = connect_all(engine)
    watch = Watch(peers, off, engine.activity, WatchSettings(timeouts, failed, stopped, guest))
    watch.start()
    return watch
