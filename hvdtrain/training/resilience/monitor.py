"""The watchdog's thread on each rank, and the messages between ranks. It uses neither an engine nor torch.

Ranks train in step, so where one hangs, all stand still. Hence the connections stay silent until something is wrong. Each
thread looks once a second whether its own main thread still makes progress. When rank 0's has made none for a step's limit,
its thread asks every rank where it stands, and judges (verdict.py). Where rank 0 does not answer, the others end alone.
A stop that one rank is asked for is known to all at once.
"""

import contextlib
import faulthandler
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hvdtrain.engines import processes
from hvdtrain.engines.exit_codes import STOPPED
from hvdtrain.training.resilience.control_channel import Channel
from hvdtrain.training.resilience.progress import STEP, Progress, phase_limit, step_limit
from hvdtrain.training.resilience.starvation import Starvation
from hvdtrain.training.resilience.stop_signals import StopSignals
from hvdtrain.training.resilience.verdict import MOST_STARVED, Report, judge

STACK_FRAMES = 6
MOST_TRACEBACKS = 3  # of the thread's own errors
PACKAGE = str(Path(__file__).resolve().parents[2])


Stack = list[traceback.FrameSummary]
# Of a stack, outermost frame first: the program's own frames, and those worth showing.
Frames = Callable[[Stack], tuple[Stack, Stack]]


class Timing(NamedTuple):
    """In seconds."""

    look: float = 1.0  # between two looks at the main thread
    reply: float = 3.0  # to answer where one stands
    grace: float = 3.0  # for launcher and engine to end a job with a dead rank in their own way
    leave: float = (
        3.0  # for the main thread to obey a stop before the first step is over; then there is nothing to save
    )


TIMING = Timing()


class Peer(NamedTuple):
    """A rank's process. place: the host and what makes its pids ours, so that equal places can look at each other's."""

    host: str
    place: str
    pid: int


class Monitor:
    """`start` it, then leave it alone; `close` it at the end.

    waits_in: the collective in which the main thread is, if it is in one. failed, stopped: called on rank 0, in the thread,
    with the reason, before all ranks end. watched: the main thread. leave: ends this process.
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
        self.stop_reason: str | None = None  # who asked all to stop
        self.stop_at: int | None = None  # the step after which all stop
        self.channels: dict[int, Channel] = {}
        self.alone = False  # there are other ranks, but no connections to them
        self.gone: dict[int, tuple[float, str]] = {}  # by rank: since when, and what is known
        self.signals = StopSignals()
        self.launchers: list[processes.Process] = []  # whose end is missed
        self.each_look: Callable[[], None] = lambda: None
        self.frames: Frames = package_frames
        self.save_at: int | None = None  # the step after which all save a checkpoint
        self._know_of_saving: set[int] = set()
        self._all_know_of_saving = threading.Event()
        self._acknowledged: set[int] = set()
        self._all_acknowledged = threading.Event()
        self._announces = False
        self._reports: dict[int, tuple[Report, list[str]]] = {}  # with the stack's innermost frames
        self._asked_at: float | None = None
        self._ask_again = 0.0
        self._seen, self._stalled, self._longest, self._looked_at = 0, 0.0, 0.0, time.monotonic()
        self._phase = progress.phase  # of this standstill
        self._starvation = Starvation()
        self._excused = 0.0  # seconds of this standstill for which a lack of cores, on any rank, is the reason
        self._stop_known_at = 0.0
        self._interrupts = 0
        self._errors = 0
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self, channels: dict[int, Channel]) -> None:
        self.channels = dict(channels)
        self._selector.register(self.signals.socket, selectors.EVENT_READ)
        for rank, channel in channels.items():
            self._selector.register(channel.socket, selectors.EVENT_READ, (rank, channel))
        self._thread.start()

    def name(self, rank: int) -> str:
        return f"rank {rank} on {self.peers[rank].host}"

    def send_all(self, **message: object) -> None:
        for channel in list(self.channels.values()):
            channel.send(**message)

    # ---- for the main thread

    def announce_stop(self, step: int) -> None:
        """On rank 0, before it takes part in `step`: tell all ranks to stop after it, and wait until each knows.

        None of them can finish that step without rank 0, so none can miss it.
        """
        self._announces = True
        self.send_all(stop_at=step, reason=self.stop_reason)
        if self.channels:
            self._all_acknowledged.wait()  # a rank that cannot answer ends us all: see `_look`
        self.stop_at, self._announces = step, False

    def propose_save(self, step: int) -> None:
        """On rank 0, before it takes part in `step`: tell all ranks to save after it; `confirm_save` follows.

        `save_at` is taken back by the main thread, on every rank before that of rank 0 goes on: saving is a collective.
        """
        self._know_of_saving.clear()
        self._all_know_of_saving.clear()
        self.save_at = step
        self.send_all(save_at=step)

    def confirm_save(self) -> None:
        """On rank 0, before it takes part in the step `save_at`: return once each rank knows of it."""
        if self.channels and not self._all_know_of_saving.is_set():
            self._announces = True
            self._all_know_of_saving.wait()
            self._announces = False

    def close(self, failure: str | None = None) -> None:
        """Disconnect from the others, with what went wrong here if this rank leaves them alone."""
        if self._closing:
            return
        if failure is not None:
            time.sleep(0.2)  # what failed here may be that another rank has just died
            for rank, (_, what) in list(self.gone.items()):
                sys.stderr.write(f"hvdtrain: error: {self.name(rank)} {what}\n")
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
        """Whatever goes wrong in here must not make this rank deaf to signals and to the others."""
        try:
            yield
        except Exception:
            self._errors += 1
            if self._errors <= MOST_TRACEBACKS and not self._closing:
                said = f"warning: the watchdog of {self.name(self.rank)} continues after an internal error:\n"
                sys.stderr.write(said + traceback.format_exc())
            time.sleep(0.1)

    def _hear_signals(self) -> None:
        for number in self.signals.received():
            self._interrupts += number == signal.SIGINT
            if self._interrupts > 1:
                self.leave(130)
            if self.gone.get(0, (0.0, ""))[1] == "left":
                # All ranks are past their last collective: nothing is left to agree about, nor to save.
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
                time.sleep(self.timing.look)  # a launcher may end all at the first that goes: rank 0 still speaks
                self.leave(1 if "verdict" in message else STOPPED)
            if "bye" in message:
                messages = None
                self.gone[rank] = float("inf"), "left"
        if messages is None:
            self._selector.unregister(channel.socket)
            self.channels.pop(rank, None)
            self.gone.setdefault(rank, (time.monotonic(), "died: its connection closed unexpectedly"))

    def _look(self) -> None:
        now = time.monotonic()
        # Only time in which this thread ran counts: a job that was suspended as a whole has not hung.
        elapsed, self._looked_at = min(now - self._looked_at, 2 * self.timing.look), now
        for rank, (since, what) in list(self.gone.items()):
            if now - since > self.timing.grace + (rank == 0):
                self._end(f"{self.name(rank)} {what}")
        self.each_look()
        self._miss_launcher()
        self._leave_before_the_first_step(now)
        starved = self._starvation.seconds()
        moves, phase = self.progress.moves, self.progress.phase
        if moves != self._seen:
            if self._phase == STEP:  # what was known to be long says nothing about a step
                self._longest = max(self._longest, self._stalled - max(starved, self._excused))
            self._seen, self._stalled, self._phase = moves, 0.0, phase
            self._asked_at, self._ask_again, self._excused, self._reports = None, 0.0, 0.0, {}
            self._starvation.reset()
            return
        self._phase = phase
        self._stalled += elapsed
        self._ask(now, starved)

    def _ask(self, now: float, starved: float) -> None:
        late = 3 * self.timing.reply * (self.rank != 0)  # rank 0 judges first, if it can
        limit = step_limit(self.step_timeout, self._longest)
        if not self.channels or self.step_timeout == 0 or self._stalled < limit + late or now < self._ask_again:
            return
        if self._asked_at is None:
            self._asked_at, self._reports = now, {self.rank: self._report()}
            self.send_all(where=True)
            return
        # Where this rank lacks a core, its neighbours may too.
        silent = now - self._asked_at > self.timing.reply + min(starved, MOST_STARVED * self.timing.reply)
        if self.rank == 0 and (silent or len(self._reports) == len(self.peers)):
            self._judge(now)
        elif self.rank != 0 and 0 in self._reports:
            self._asked_at, self._ask_again = None, now + limit  # it lives, and will judge
        elif self.rank != 0 and silent:
            # Ranks go through the phases together: rank 0 may be in one in which it does not answer.
            if self._is_stopped(0) or self._stalled >= phase_limit(self._phase, limit) + late:
                self._end(f"{self.name(0)} does not answer (stopped, spinning outside Python, or cut off)")
            self._asked_at, self._ask_again = None, now + self.timing.reply

    def _judge(self, now: float) -> None:
        """End the job, unless somebody has a reason to take so long: then wait for it, and ask again."""
        self._reports[self.rank] = self._report()
        names = [self.name(rank) for rank in range(len(self.peers))]
        silent = [rank for rank in range(len(self.peers)) if rank not in self._reports]
        stopped = [rank for rank in silent if self._is_stopped(rank)]
        reports = {rank: report for rank, (report, _) in sorted(self._reports.items())}
        verdict = judge(reports, names, self.rank, stopped)
        if verdict.headline is not None:
            self._end(verdict.headline)
        self._excused = verdict.excused
        # Not later than a step's limit: who was in a long phase may hang in a step by then.
        limit = step_limit(self.step_timeout, self._longest)
        self._asked_at, self._ask_again = None, now + max(min(verdict.wait, limit), self.timing.look / 2)

    def _is_stopped(self, rank: int) -> bool:
        """Tell whether `rank` is known to be stopped by a signal: only ranks of this host can be looked at."""
        mine, theirs = self.peers[self.rank], self.peers[rank]
        return mine.place == theirs.place and processes.is_stopped(theirs.pid)

    def _report(self) -> tuple[Report, list[str]]:
        """Return where the main thread stands, and the innermost frames of its stack."""
        stack = traceback.extract_stack(sys._current_frames().get(self.watched or 0))
        ours, telling = self.frames(stack)
        ours = ours or stack
        at = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}, {ours[-1].name}" if ours else "nowhere"
        phase, limit = self.progress.phase, step_limit(self.step_timeout, self._longest)
        waits_in = "the other ranks to agree on the step to stop at or to save" if self._announces else self.waits_in()
        stalled = 0.0 if self.progress.moves != self._seen else self._stalled
        report = Report(
            self.progress.step, phase.name, phase_limit(phase, limit), stalled, self._starvation.seconds(), waits_in, at
        )
        return report, traceback.format_list(telling[-STACK_FRAMES:])

    def _miss_launcher(self) -> None:
        """Stop if one of the processes that started this rank has ended: the rank would be an orphan."""
        for process in self.launchers:
            if not processes.lives(process):
                self.launchers = []
                me = f"rank {self.rank} ({self.peers[self.rank].host})"
                self.request_stop(f"the end of {process.name} (pid {process.pid}), which had started {me}")
                return

    def _leave_before_the_first_step(self, now: float) -> None:
        """On rank 0: end all where a stop is asked for, and the main thread is busy with start-up or the first step."""
        if self.rank != 0 or self.stop_reason is None or self.progress.finished or self.stop_at is not None:
            return
        if self._closing or now - self._stop_known_at < self.timing.leave:
            return
        self.send_all(leave=True)
        self.stopped(self.stop_reason)
        time.sleep(self.timing.look / 2)
        self.leave(STOPPED)

    def _end(self, headline: str) -> None:
        """End this process, and on rank 0 all others, saying why."""
        if self._closing:
            return
        lines = [f"hvdtrain: error: {headline}\n"]
        for rank, (report, stack) in sorted(self._reports.items()):
            state, what = ("waits", f"; for others, in {report.waits_in}") if report.waits_in else ("stands", "")
            during = "" if report.phase == STEP.name else f", {report.phase}"
            lines.append(f"  {self.name(rank)}: step {report.step}{during}, {state} at {report.at}{what}\n")
            lines += stack
        with contextlib.suppress(OSError):  # the reader may be gone
            sys.stderr.write("".join(lines))
            if not self._reports:
                faulthandler.dump_traceback()
            sys.stderr.flush()
        if self.rank == 0:
            self.send_all(verdict=headline)
            with contextlib.suppress(Exception):
                self.failed(headline)
            time.sleep(self.timing.look / 2)
        self.leave(1)


def package_frames(stack: Stack) -> tuple[Stack, Stack]:
    ours = [frame for frame in stack if frame.filename.startswith(PACKAGE)]
    return ours, [f for f in stack if not f.filename.endswith("contextlib.py") and f.name != "marked"]
