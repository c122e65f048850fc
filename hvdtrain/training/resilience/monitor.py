"""The watchdog's thread on each rank, and the messages between ranks. Uses neither an engine nor torch.

Ranks train in lockstep: if one hangs, all make no progress. Therefore no messages are sent in normal operation. Each thread
checks once a second whether its own main thread makes progress. If rank 0 has made none for the time limit of a step, its
thread asks every rank for a report, and decides what to do (verdict.py). If rank 0 does not answer, each other rank ends by
itself. A stop request on one rank is forwarded to all ranks at once.
"""

import contextlib
import os
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from hvdtrain.engines.lines import WRITE_SECONDS, say_within, within
from hvdtrain.hangs.leaving import Leaving
from hvdtrain.hangs.stacks import stack_of, where, worth_printing
from hvdtrain.hangs.work import Work
from hvdtrain.launching import processes
from hvdtrain.launching.exit_codes import STOPPED
from hvdtrain.training.resilience.control_channel import Channel
from hvdtrain.training.resilience.progress import STEP, TIMES_STEP, UPDATED, Progress, phase_limit, step_limit
from hvdtrain.training.resilience.starvation import Starvation
from hvdtrain.training.resilience.stop_signals import StopSignals
from hvdtrain.training.resilience.verdict import MOST_STARVED, Report, judge

MOST_TRACEBACKS = 3  # printed for internal errors of the thread


LOST = "died: its connection closed unexpectedly"


class Timing(NamedTuple):
    """Time limits and intervals, in seconds."""

    look: float = 1.0  # between two checks of the main thread
    reply: float = 3.0  # for a rank to send its report
    grace: float = 3.0  # for launcher and engine to end a job with a dead rank themselves
    leave: float = 3.0  # for the main thread to stop before the first step is finished, when there is nothing to save


TIMING = Timing()


class Peer(NamedTuple):
    """A rank's process. place: host and pid namespace; ranks with the same place can inspect each other's processes."""

    host: str
    place: str
    pid: int


class Monitor:
    """The monitoring thread of a rank. Call `start` once, and `close` at the end.

    waits_in: returns the collective that the main thread is in, or None. failed, stopped: called on rank 0, in the thread,
    with the reason, before all ranks end. watched: the thread to monitor (default: the main thread). leave: exits the
    process.
    """

    def __init__(
        self, rank: int, peers: list[Peer], progress: Progress, step_timeout: float | None,
        waits_in: Callable[[], str | None] = lambda: None, failed: Callable[[str], None] = lambda headline: None,
        stopped: Callable[[str], None] = lambda reason: None, timing: Timing = TIMING, watched: int | None = None,
        leave: Callable[[int], None] = os._exit,
    ):  # fmt: skip
        self.rank, self.peers, self.progress, self.step_timeout = rank, peers, progress, step_timeout
        self.waits_in, self.failed, self.stopped = waits_in, failed, stopped
        self.timing, self.leave = timing, leave
        self.watched = threading.main_thread().ident if watched is None else watched
        self.stop_reason: str | None = None  # what requested the stop
        self.stop_at: int | None = None  # the step after which all ranks stop
        self.channels: dict[int, Channel] = {}
        self.alone = False  # there are other ranks, but they are not connected
        self.gone: dict[int, tuple[float, str]] = {}  # disconnected ranks: since when, and the reason
        self.leaving: Leaving | None = None  # once all other ranks have left
        self.signals = StopSignals()
        self.launchers: list[processes.Process] = []  # launchers of this rank; if one ends, the job stops
        self.each_look: Callable[[], None] = lambda: None
        self.announce: str | None = None  # how the program announces that a rank works alone
        self.guest = False  # the program does not use hvdtrain: hide our frames
        self.save_at: int | None = None  # the step after which all ranks save a checkpoint
        self._know_of_saving: set[int] = set()
        self._all_know_of_saving = threading.Event()
        self._acknowledged: set[int] = set()
        self._all_acknowledged = threading.Event()
        self._announces = False
        self._reports: dict[int, tuple[Report, list[str]]] = {}  # by rank: report, innermost frames of the stack
        self._asked_at: float | None = None
        self._ask_again = 0.0
        self._seen, self._stalled, self._longest, self._looked_at = 0, 0.0, 0.0, time.monotonic()
        self._phase = progress.phase  # phase in which the main thread made its last progress
        self._starvation = Starvation()
        self._work, self._idle = Work(), 0.0  # seconds since this rank was last seen at work; counted in UPDATED only
        self._excused = 0.0  # seconds without progress that a lack of CPU cores on any rank explains
        self._stop_known_at = 0.0
        self._interrupts = 0
        self._errors = 0
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self, channels: dict[int, Channel]) -> None:
        """Start the thread. channels: connections by rank."""
        self.channels = dict(channels)
        self._selector.register(self.signals.socket, selectors.EVENT_READ)
        for rank, channel in channels.items():
            self._selector.register(channel.socket, selectors.EVENT_READ, (rank, channel))
        self._thread.start()

    def name(self, rank: int) -> str:
        """Return "rank N on HOST"."""
        return f"rank {rank} on {self.peers[rank].host}"

    def send_all(self, **message: object) -> None:
        """Send a message over all connections."""
        for channel in list(self.channels.values()):
            channel.send(**message)

    # ---- for the main thread

    def announce_stop(self, step: int) -> None:
        """On rank 0, before it takes part in `step`: tell all ranks to stop after it, and wait for their acknowledgments.

        No rank can finish that step without rank 0, so no rank can miss it.
        """
        self._announces = True
        self.send_all(stop_at=step, reason=self.stop_reason)
        if self.channels:
            self._all_acknowledged.wait()  # if a rank does not answer, `_look` ends the job
        self.stop_at, self._announces = step, False

    def propose_save(self, step: int) -> None:
        """On rank 0, before it takes part in `step`: tell all ranks to save after it; `confirm_save` follows.

        The main thread of every rank resets `save_at` before rank 0 continues, because saving is a collective.
        """
        self._know_of_saving.clear()
        self._all_know_of_saving.clear()
        self.save_at = step
        self.send_all(save_at=step)

    def confirm_save(self) -> None:
        """On rank 0, before it takes part in the step `save_at`: wait until every rank knows of it."""
        if self.channels and not self._all_know_of_saving.is_set():
            self._announces = True
            self._all_know_of_saving.wait()
            self._announces = False

    def close(self, failure: str | None = None) -> None:
        """Disconnect from the others, with what went wrong here if this rank leaves them alone."""
        if self._closing:
            return
        if failure is not None:
            time.sleep(0.2)  # another rank that has just died may be the cause
            for rank in list(self.gone):
                say_within(f"hvdtrain: error: {self.name(rank)} {self._fate(rank)}\n")
        self._closing = True
        self.send_all(**({"bye": True} if failure is None else {"failed": failure}))
        self.signals.wake()
        self._thread.join()
        for channel in self.channels.values():
            channel.socket.close()
        self._selector.close()
        self.signals.close()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            ready: list = []
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
    def _lives_on(self):
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
            if self.gone.get(0, (0.0, ""))[1] == "left":
                # All ranks have finished their last collective: there is nothing to agree on or to save.
                self.leave(128 + number)
            self.request_stop(f"{number.name} on rank {self.rank} ({self.peers[self.rank].host})")

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to stop; rank 0 decides when."""
        if self.rank == 0 or self.alone:
            self._learn_stop(reason)
        elif 0 in self.channels:
            self.channels[0].send(stop=reason)

    def _learn_stop(self, reason: str) -> None:
        if self.stop_reason is None:
            self.stop_reason, self._stop_known_at = reason, time.monotonic()
            if self.rank == 0:
                self.send_all(stop=reason)

    def _receive(self, rank: int, channel: Channel) -> None:
        messages = channel.receive()
        for message in messages or []:
            if "where" in message:
                report, stack = self._report()
                channel.send(stands=report, stack=stack)
            if "stands" in message:
                self._reports[rank] = Report(*message["stands"]), message["stack"]
            if "stop" in message:
                self._learn_stop(message["stop"])
            if "stop_at" in message:
                self.stop_reason, self.stop_at = message["reason"], message["stop_at"]
                channel.send(acknowledged=True)
            if "acknowledged" in message:
                self._acknowledged.add(rank)
                if len(self._acknowledged) == len(self.peers) - 1:
                    self._all_acknowledged.set()
            if "save_at" in message:
                self.save_at = message["save_at"]
                channel.send(saves=True)
            if "saves" in message:
                self._know_of_saving.add(rank)
                if len(self._know_of_saving) == len(self.peers) - 1:
                    self._all_know_of_saving.set()
            if "failed" in message:
                self.gone[rank] = time.monotonic(), f"failed: {message['failed']}"
            if "verdict" in message or "leave" in message:
                time.sleep(self.timing.look)  # a launcher may end the job at the first exit: let rank 0 print first
                self.leave(1 if "verdict" in message else STOPPED)
            if "bye" in message:
                messages = None
                self.gone[rank] = float("inf"), "left"
        if messages is None:
            self._selector.unregister(channel.socket)
            self.channels.pop(rank, None)
            self.gone.setdefault(rank, (time.monotonic(), LOST if channel.error is None else str(channel.error)))
            if not self.channels and all(what == "left" for _, what in self.gone.values()):
                self.leaving = self.make_leaving()

    def _look(self) -> None:
        now = time.monotonic()
        # Count only time in which this thread ran: a job that was suspended as a whole is not hung.
        elapsed, self._looked_at = min(now - self._looked_at, 2 * self.timing.look), now
        for rank, (since, _) in list(self.gone.items()):
            if now - since > self.timing.grace + (rank == 0):
                self._end(f"{self.name(rank)} {self._fate(rank)}")
        self.each_look()
        self._miss_launcher()
        self._leave_before_the_first_step(now)
        starved = self._starvation.seconds()
        moves, phase = self.progress.moves, self.progress.phase
        if moves != self._seen:
            # Other phases do not count for the longest step, nor does waiting for a rank in one.
            took = self._stalled - max(starved, self._excused)
            if self._phase == STEP and took < step_limit(self.step_timeout, self._longest):
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
        limit = step_limit(self.step_timeout, self._longest)
        if not self.channels or self.step_timeout == 0 or self._stalled < limit or now < self._ask_again:
            return
        # Rank 0 decides first, if it can.
        late = 0.0 if self.rank == 0 or self._is_stopped(0) else 2 * self.timing.reply
        if self._stalled < limit + late:
            return
        if self._asked_at is None:
            self._asked_at, self._reports = now, {self.rank: self._report()}
            self.send_all(where=True)
            return
        # If this rank lacks a core, other ranks on its host may lack one, too.
        silent = now - self._asked_at > self.timing.reply + min(starved, MOST_STARVED * self.timing.reply)
        if self.rank == 0 and (silent or len(self._reports) == len(self.peers)):
            self._judge(now)
        elif self.rank != 0 and 0 in self._reports:
            self._asked_at, self._ask_again = None, now + limit  # rank 0 is alive, and will decide
        elif self.rank != 0 and silent:
            # Ranks go through the phases together: rank 0 may be in a phase in which it cannot answer.
            if self._is_stopped(0) or self._stalled >= phase_limit(self._phase, limit) + late:
                self._end(f"{self.name(0)} does not answer (stopped, spinning outside Python, or cut off)")
            self._asked_at, self._ask_again = None, now + self.timing.reply

    def _judge(self, now: float) -> None:
        """End the job, unless the reports show a reason for the delay; then ask again later."""
        self._reports[self.rank] = self._report()
        names = [self.name(rank) for rank in range(len(self.peers))]
        silent = [rank for rank in range(len(self.peers)) if rank not in self._reports]
        stopped = [rank for rank in silent if self._is_stopped(rank)]
        reports = {rank: report for rank, (report, _) in sorted(self._reports.items())}
        verdict = judge(reports, names, self.rank, stopped, self.announce)
        if verdict.headline is not None:
            self._end(verdict.headline)
        self._excused = verdict.excused
        # At the latest after the limit of a step: a rank in a long phase may hang in a step by then.
        limit = step_limit(self.step_timeout, self._longest)
        self._asked_at, self._ask_again = None, now + max(min(verdict.wait, limit), self.timing.look / 2)

    def _is_stopped(self, rank: int) -> bool:
        """Return whether `rank` is known to be stopped by a signal. Only ranks on this host can be checked."""
        mine, theirs = self.peers[self.rank], self.peers[rank]
        return mine.place == theirs.place and processes.is_stopped(theirs.pid)

    def _report(self) -> tuple[Report, list[str]]:
        """Return a report about the main thread, and the innermost frames of its stack."""
        stack = stack_of(self.watched)
        phase, limit = self.progress.phase, step_limit(self.step_timeout, self._longest)
        waits_in = "the other ranks to agree on the step to stop at or to save" if self._announces else self.waits_in()
        stalled = 0.0 if self.progress.moves != self._seen else self._stalled
        allowed = phase_limit(phase, limit)
        if phase is UPDATED:
            allowed = stalled + min(limit - self._idle, TIMES_STEP * limit - stalled)
        starved = self._starvation.seconds()
        report = Report(self.progress.step, phase.name, allowed, stalled, starved, waits_in, where(stack))
        return report, traceback.format_list(worth_printing(stack, self.guest))

    def make_leaving(self) -> Leaving:
        """Return the limit of this rank's own end, for when no other rank waits for it."""
        limit = TIMES_STEP * step_limit(self.step_timeout, self._longest) if self.step_timeout != 0 else float("inf")
        return Leaving(self.name(self.rank), limit, self.watched, self.leave, self.guest)

    def _fate(self, rank: int) -> str:
        """Return what became of a rank whose connection is gone."""
        mine, theirs, what = self.peers[self.rank], self.peers[rank], self.gone[rank][1]
        if what.startswith("failed: ") or what == "left":
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
        if self.rank != 0 or self.stop_reason is None or self.progress.finished or self.stop_at is not None:
            return
        if self._closing or now - self._stop_known_at < self.timing.leave:
            return
        reason = self.stop_reason
        self.send_all(leave=True)
        within(WRITE_SECONDS, lambda: self.stopped(reason))
        time.sleep(self.timing.look / 2)
        self.leave(STOPPED)

    def _end(self, headline: str) -> None:
        """Print the reason and all stacks, and end this process; on rank 0, also the other ranks."""
        if self._closing:
            return
        lines = [f"hvdtrain: error: {headline}\n"]
        for rank, (report, stack) in sorted(self._reports.items()):
            state, what = ("waits", f"; for others, in {report.waits_in}") if report.waits_in else ("stands", "")
            during = "" if report.phase == STEP.name else f", {report.phase}"
            lines.append(f"  {self.name(rank)}: step {report.step}{during}, {state} at {report.at}{what}\n")
            lines += stack
        if not self._reports:
            stack = traceback.format_list(worth_printing(stack_of(self.watched), self.guest))
            lines += [f"  {self.name(self.rank)}:\n", *stack]
        say_within("".join(lines))
        self._kill_silent()
        if self.rank == 0:
            self.send_all(verdict=headline)
            within(WRITE_SECONDS, lambda: self.failed(headline))
            time.sleep(self.timing.look / 2)
        self.leave(1)

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
