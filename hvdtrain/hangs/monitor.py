"""The monitor's thread on each rank. It runs while the main thread waits inside Horovod, MPI or Gloo, which release the GIL.

It calls neither an engine nor torch. Ranks train in lockstep: if one hangs, all make no progress. Therefore no messages are
sent in normal operation. Each thread checks once a second whether its own main thread makes progress. If rank 0 has made
none for the time limit of a step, its thread asks every rank for a report, and decides what to do (diagnosis.py). If rank 0
does not answer, each other rank ends by itself. A stop request on one rank is forwarded to all ranks at once.
"""

import contextlib
import os
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hvdtrain.engines.base import Engine
from hvdtrain.engines.lines import WRITE_SECONDS, say_within, within
from hvdtrain.hangs import leaving
from hvdtrain.hangs.activity import BETWEEN, STEP, UPDATED, Activity
from hvdtrain.hangs.appointment import Appointment
from hvdtrain.hangs.channel import Channel
from hvdtrain.hangs.diagnosis import MOST_STARVED, Report, diagnose_hang
from hvdtrain.hangs.leaving import Leaving
from hvdtrain.hangs.messages import Appoint, Ask, Bye, End, Fail, Know, Message, Stand, Stop
from hvdtrain.hangs.peers import Peer, connect, peers_of
from hvdtrain.hangs.signals import StopSignals
from hvdtrain.hangs.stacks import stack_of, where, worth_printing
from hvdtrain.hangs.timeouts import TIMES_STEP, HangTimeouts
from hvdtrain.hangs.work import Starvation, Work
from hvdtrain.launching import processes
from hvdtrain.launching.exit_codes import FAILED, STOPPED

MOST_TRACEBACKS = 3  # printed for internal errors of the thread
LOST = "died: its connection closed unexpectedly"
LEFT = "left"


class Timing(NamedTuple):
    """Time limits and intervals, in seconds."""

    look: float = 1.0  # between two checks of the main thread
    reply: float = 3.0  # for a rank to send its report
    grace: float = 3.0  # for launcher and engine to end a job with a dead rank themselves
    leave: float = 3.0  # for the main thread to stop before the first step is finished, when there is nothing to save


TIMING = Timing()


class Monitor:
    """The monitor of a rank. Call `start` once, and `close` at the end. For the main thread: `stop_reason`, `stop`, `save`.

    failed, stopped: called on rank 0, in the thread, with the reason, before all ranks end. off: why the ranks could not be
    connected. watched: the thread to monitor (default: the main thread). leave: exits the process. guest: the program does
    not use hvdtrain; its signals and launchers are not monitored, and our frames not printed.
    """

    def __init__(
        self, rank: int, peers: Sequence[Peer], activity: Activity, timeouts: HangTimeouts,
        channels: Mapping[int, Channel], off: str | None = None, failed: Callable[[str], None] = lambda headline: None,
        stopped: Callable[[str], None] = lambda reason: None, guest: bool = False, timing: Timing = TIMING,
        watched: int | None = None, leave: Callable[[int], None] = os._exit,
    ):  # fmt: skip
        self.rank, self.peers, self.activity, self.timeouts = rank, list(peers), activity, timeouts
        self.channels, self.off = dict(channels), off
        self.failed, self.stopped, self.guest = failed, stopped, guest
        self.timing, self.leave = timing, leave
        self.watched = threading.main_thread().ident if watched is None else watched
        self.stop_reason: str | None = None  # what requested the stop
        self.stop = Appointment("stop", activity, self._appoint)
        self.save = Appointment("save", activity, self._appoint)
        self.gone: dict[int, tuple[float, str]] = {}  # disconnected ranks: since when, and the reason
        self.leaving: Leaving | None = None  # once all other ranks have left
        self.signals = StopSignals()
        self.launchers: list[processes.Process] = []  # launchers of this rank; if one ends, the job stops
        self._reports: dict[int, Stand] = {}  # by rank
        self._asked_at: float | None = None
        self._ask_again = 0.0
        self._seen, self._stalled, self._longest, self._looked_at = 0, 0.0, 0.0, time.monotonic()
        self._phase = activity.phase  # phase in which the main thread made its last progress
        self._starvation = Starvation()
        self._work, self._idle = Work(), 0.0  # seconds since this rank was last seen at work; counted in UPDATED only
        self._excused = 0.0  # seconds without progress that a lack of CPU cores on any rank explains
        self._stop_known_at = 0.0
        self._asked_to_stop: tuple[float, str] | None = None  # when this rank asked rank 0, and why
        self._warned = False
        self._interrupts = 0
        self._errors = 0
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> None:
        """Start the thread. From then on, stop signals are requests."""
        if not self.guest:
            self.launchers = processes.launchers()
            self.signals.listen()
        self._selector.register(self.signals.socket, selectors.EVENT_READ)
        for rank, channel in self.channels.items():
            self._selector.register(channel.socket, selectors.EVENT_READ, (rank, channel))
        self._thread.start()

    def name(self, rank: int) -> str:
        """Return "rank N on HOST"."""
        return f"rank {rank} on {self.peers[rank].host}"

    def send_all(self, message: Message) -> None:
        """Send a message over all connections."""
        for channel in list(self.channels.values()):
            channel.send(message)

    def _appoint(self, what: str, step: int) -> int:
        """Tell all ranks the step after which to do `what`. Return how many must confirm it."""
        self.send_all(Appoint(what, step, self.stop_reason))
        return len(self.channels)

    def close(self, failure: str | None = None) -> None:
        """Disconnect from the others, with what went wrong here if this rank leaves them alone."""
        if self._closing:
            return
        if failure is not None:
            time.sleep(0.2)  # another rank that has just died may be the cause
            for rank in list(self.gone):
                say_within(f"hvdtrain: error: {self.name(rank)} {self._fate(rank)}\n")
        self._closing = True
        self.send_all(Bye() if failure is None else Fail(failure))
        self.signals.wake()
        self._thread.join()
        for channel in self.channels.values():
            channel.socket.close()
        self._selector.close()
        self.signals.close()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            ready: list[tuple[selectors.SelectorKey, int]] = []
            with self._lives_on():
                ready = self._selector.select(self.timing.look)
            for key, _ in ready:
                with self._lives_on():
                    if key.data is None:
                        self._hear_signals()
                    else:
                        self._receive(*key.data)
            with self._lives_on():
                self._look()

    @contextlib.contextmanager
    def _lives_on(self) -> Iterator[None]:
        """Context manager that prints exceptions and continues, so that the thread keeps handling signals and messages."""
        try:
            yield
        except Exception:
            self._errors += 1
            if self._errors <= MOST_TRACEBACKS and not self._closing:
                said = f"warning: the watchdog of {self.name(self.rank)} continues after an internal error:\n"
                say_within(said + traceback.format_exc())
            time.sleep(0.1)

    def _hear_signals(self) -> None:
        for number in self.signals.received():
            self._interrupts += number == signal.SIGINT
            if self._interrupts > 1:
                self.leave(130)
            if self.gone.get(0, (0.0, ""))[1] == LEFT:
                # All ranks have finished their last collective: there is nothing to agree on or to save.
                self.leave(128 + number)
            self.request_stop(f"{number.name} on rank {self.rank} ({self.peers[self.rank].host})")

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to stop; rank 0 decides when."""
        if self.rank == 0 or self.off is not None:
            self._learn_stop(reason)
        elif 0 in self.channels:
            self._asked_to_stop = self._asked_to_stop or (time.monotonic(), reason)
            self.channels[0].send(Stop(reason))

    def _miss_answer(self, now: float) -> None:
        """Warn once if rank 0 has not answered a stop request: its connection may be cut while the engine's is not."""
        asked = self._asked_to_stop
        if (
            asked is not None
            and self.stop_reason is None
            and not self._warned
            and now - asked[0] > 2 * self.timing.reply
        ):
            self._warned = True
            how = "training goes on; look at the network between them"
            say_within(f"warning: {self.name(0)} has not answered the request to stop ({asked[1]}): {how}\n")

    def _learn_stop(self, reason: str) -> None:
        if self.stop_reason is None:
            self.stop_reason, self._stop_known_at = reason, time.monotonic()
            self.activity.asked = True
            if self.rank == 0:
                self.send_all(Stop(reason))

    def _receive(self, rank: int, channel: Channel) -> None:
        messages = channel.receive()
        for message in messages or []:
            self._handle(message, rank, channel)
        if messages is None or any(isinstance(message, Bye) for message in messages):
            self._selector.unregister(channel.socket)
            self.channels.pop(rank, None)
            self.gone.setdefault(rank, (time.monotonic(), LOST if channel.error is None else str(channel.error)))
            if not self.channels and all(what == LEFT for _, what in self.gone.values()):
                self.leaving = self.make_leaving()

    def _handle(self, message: Message, rank: int, channel: Channel) -> None:
        match message:
            case Ask():
                channel.send(self._report())
            case Stand():
                self._reports[rank] = message
            case Stop(reason):
                self._learn_stop(reason)
            case Appoint(what, step, reason):
                self.stop_reason = self.stop_reason or reason
                (self.stop if what == "stop" else self.save).step = step
                self.activity.asked = True
                channel.send(Know(what))
            case Know(what):
                (self.stop if what == "stop" else self.save).confirm(rank)
            case Fail(error):
                self.gone[rank] = time.monotonic(), f"failed: {error}"
            case End(exit_code):
                time.sleep(self.timing.look)  # a launcher may end the job at the first exit: let rank 0 print first
                self.leave(exit_code)
            case Bye():
                self.gone[rank] = float("inf"), LEFT

    def _look(self) -> None:
        now = time.monotonic()
        # Count only time in which this thread ran: a job that was suspended as a whole is not hung.
        elapsed, self._looked_at = min(now - self._looked_at, 2 * self.timing.look), now
        for rank, (since, _) in list(self.gone.items()):
            if now - since > self.timing.grace + (rank == 0):
                self._end(f"{self.name(rank)} {self._fate(rank)}")
        self.activity.hear_of_compilations()
        self._miss_launcher()
        self._miss_answer(now)
        self._leave_before_the_first_step(now)
        starved = self._starvation.seconds()
        moves, phase = self.activity.moves, self.activity.phase
        if moves != self._seen:
            # Other phases do not count for the longest step, nor does waiting for a rank in one.
            took = self._stalled - max(starved, self._excused)
            if self._phase == STEP and took < self.timeouts.step(self._longest):
                self._longest = max(self._longest, took)
            self._seen, self._stalled, self._phase, self._idle = moves, 0.0, phase, 0.0
            self._asked_at, self._ask_again, self._excused, self._reports = None, 0.0, 0.0, {}
            self._starvation.reset()
            if self.leaving is not None:
                self.leaving.heartbeat()
            return
        self._phase = phase
        self._stalled += elapsed
        if phase is UPDATED:
            self._idle = 0.0 if self._work.seen() else self._idle + elapsed
        if self.leaving is not None:
            self.leaving.look(elapsed)
        self._ask(now, starved)

    def _ask(self, now: float, starved: float) -> None:
        limit = self.timeouts.step(self._longest)
        if not self.channels or self.timeouts.off or self._stalled < limit or now < self._ask_again:
            return
        # Rank 0 decides first, if it can.
        late = 0.0 if self.rank == 0 or self._is_stopped(0) else 2 * self.timing.reply
        if self._stalled < limit + late:
            return
        if self._asked_at is None:
            self._asked_at, self._reports = now, {self.rank: self._report()}
            self.send_all(Ask())
            return
        # If this rank lacks a core, other ranks on its host may lack one, too.
        silent = now - self._asked_at > self.timing.reply + min(starved, MOST_STARVED * self.timing.reply)
        if self.rank == 0 and (silent or len(self._reports) == len(self.peers)):
            self._judge(now)
        elif self.rank != 0 and 0 in self._reports:
            self._asked_at, self._ask_again = None, now + limit  # rank 0 is alive, and will decide
        elif self.rank != 0 and silent:
            # Ranks go through the phases together: rank 0 may be in a phase in which it cannot answer.
            if (
                self._is_stopped(0)
                or self._stalled
                >= self.timeouts.phase(STEP if self._phase is BETWEEN else self._phase, self._longest) + late
            ):
                self._end(f"{self.name(0)} does not answer (stopped, spinning outside Python, or cut off)")
            self._asked_at, self._ask_again = None, now + self.timing.reply

    def _judge(self, now: float) -> None:
        """End the job, unless the reports show a reason for the delay; then ask again later."""
        self._reports[self.rank] = self._report()
        names = [self.name(rank) for rank in range(len(self.peers))]
        silent = [rank for rank in range(len(self.peers)) if rank not in self._reports]
        stopped = [rank for rank in silent if self._is_stopped(rank)]
        reports = {rank: stand.report for rank, stand in self._reports.items()}
        announce = None if self.guest else "`with run.alone():`"
        diagnosis = diagnose_hang(reports, names, self.rank, stopped, announce)
        if diagnosis.headline is not None:
            self._end(diagnosis.headline)
        self._excused = diagnosis.excused
        # At the latest after the limit of a step: a rank in a long phase may hang in a step by then.
        limit = self.timeouts.step(self._longest)
        self._asked_at, self._ask_again = None, now + max(min(diagnosis.wait, limit), self.timing.look / 2)

    def _is_stopped(self, rank: int) -> bool:
        """Return whether `rank` is known to be stopped by a signal. Only ranks on this host can be checked."""
        mine, theirs = self.peers[self.rank], self.peers[rank]
        return mine.place == theirs.place and processes.is_stopped(theirs.pid)

    def _report(self) -> Stand:
        """Return a report about the main thread, and the innermost frames of its stack."""
        stack, activity = stack_of(self.watched), self.activity
        phase, stalled = activity.phase, 0.0 if activity.moves != self._seen else self._stalled
        allowed = self.timeouts.phase(phase, self._longest)
        if phase is UPDATED:
            step = self.timeouts.step(self._longest)
            allowed = stalled + min(step - self._idle, TIMES_STEP * step - stalled)
        starved = self._starvation.seconds()
        report = Report(activity.step, phase.name, allowed, stalled, starved, activity.collective, where(stack))
        return Stand(report, traceback.format_list(worth_printing(stack, self.guest)))

    def make_leaving(self) -> Leaving:
        """Return the limit of this rank's own end, for when no other rank waits for it."""
        limit = self.timeouts.leaving(self._longest)
        return Leaving(self.name(self.rank), limit, self.watched, self.leave, self.guest)

    def _fate(self, rank: int) -> str:
        """Return what became of a rank whose connection is gone."""
        mine, theirs, what = self.peers[self.rank], self.peers[rank], self.gone[rank][1]
        if what.startswith("failed: ") or what == LEFT:
            return what
        if mine.place == theirs.place and processes.runs(theirs.pid):
            return "is cut off: its connection was lost, but its process runs"
        if mine.place == theirs.place or what == LOST:
            return LOST
        return f"died or is cut off: its connection was lost ({what})"

    def _miss_launcher(self) -> None:
        """Request a stop if one of the launchers of this rank has ended."""
        for process in self.launchers:
            if not processes.lives(process):
                self.launchers = []
                me = f"rank {self.rank} ({self.peers[self.rank].host})"
                self.request_stop(f"the end of {process.name} (pid {process.pid}), which started {me}")
                return

    def _leave_before_the_first_step(self, now: float) -> None:
        """On rank 0: end the job after a stop request if the main thread is still in start-up or in the first step."""
        if self.rank != 0 or self.stop_reason is None or self.activity.finished or self.stop.step is not None:
            return
        if self._closing or now - self._stop_known_at < self.timing.leave:
            return
        reason = self.stop_reason
        self.send_all(End(STOPPED))
        within(WRITE_SECONDS, lambda: self.stopped(reason))
        time.sleep(self.timing.look / 2)
        self.leave(STOPPED)

    def _end(self, headline: str) -> None:
        """Print the reason and all stacks, and end this process; on rank 0, also the other ranks."""
        if self._closing:
            return
        lines = [f"hvdtrain: error: {headline}\n"]
        for rank, (report, stack) in sorted(self._reports.items()):
            state, what = ("waits", f"; for others, in {report.collective}") if report.collective else ("stands", "")
            during = "" if report.phase == STEP.name else f", {report.phase}"
            lines.append(f"  {self.name(rank)}: step {report.step}{during}, {state} at {report.at}{what}\n")
            lines += stack
        if not self._reports:
            stack = traceback.format_list(worth_printing(stack_of(self.watched), self.guest))
            lines += [f"  {self.name(self.rank)}:\n", *stack]
        say_within("".join(lines))
        self._kill_silent()
        if self.rank == 0:
            self.send_all(End(FAILED))
            within(WRITE_SECONDS, lambda: self.failed(headline))
            time.sleep(self.timing.look / 2)
        self.leave(FAILED)

    def _kill_silent(self) -> None:
        """Under torchrun, which waits 30 s until a rank obeys SIGTERM, kill the ranks of this host that did not answer.

        Their connections are still open, so their pids are valid. Other launchers wait for seconds only.
        """
        if self._asked_at is None or not any("torch" in process.name for process in self.launchers):
            return
        for rank in set(self.channels) - set(self._reports):
            if self.peers[rank].place == self.peers[self.rank].place:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.peers[rank].pid, signal.SIGKILL)


def monitor_ranks(
    engine: Engine, timeouts: HangTimeouts, failed: Callable[[str], None] = lambda headline: None,
    stopped: Callable[[str], None] = lambda reason: None, guest: bool = False,
) -> Monitor:  # fmt: skip
    """Connect all ranks and monitor them from now on. A collective. See `Monitor`."""
    leaving.stop()  # of a training before this one
    peers = peers_of(engine)
    channels, off = connect(engine, [peer.host for peer in peers]) if engine.size > 1 else ({}, None)
    monitor = Monitor(engine.rank, peers, engine.activity, timeouts, channels, off, failed, stopped, guest)
    monitor.start()
    return monitor
