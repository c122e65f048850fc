"""The starter while its ranks run: it forwards signals, ends all ranks when one has failed, and returns the exit code."""

import contextlib
import json
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path

from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.exit_codes import FAILED, STOPPED, TARGET_MISSED, WRONG_INPUT
from hvdtrain.engines.forking.importer import Importer, Orders
from hvdtrain.engines.lines import say_within
from hvdtrain.engines.meeting import FAILURE_SECONDS

HANDED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
    signal.SIGWINCH,
)  # fmt: skip
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
MOST_REQUESTS = 3  # after so many of these signals, the ranks are killed
# Seconds that the other ranks have to exit by themselves, by the first exit code other than 0. With these codes, all ranks
# exit together. If a rank was killed or failed alone, the others would wait for it: they get no time.
BY_THEMSELVES = {STOPPED: 60.0, TARGET_MISSED: 60.0, WRONG_INPUT: 5.0}
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL


class Supervisor:
    """Supervises the ranks of one host, from their import to their exit.

    meet: called in a thread at the start, with an event that is set after the import; returns the Orders once all hosts have
    connected. failed(): returns how another host's ranks have failed, or None. told(reason): tells the other hosts that
    ranks of this host have failed. import_seconds: time limit of the import; 0: none.
    """

    def __init__(
        self, importer: Importer, meet: Callable[[threading.Event], Orders],
        failed: Callable[[], str | None] | None = None, told: Callable[[str], None] = lambda reason: None,
        import_seconds: float = 0.0,
    ):  # fmt: skip
        self._importer, self._meet, self._failed, self._told = importer, meet, failed, told
        self._imported = threading.Event()
        self._import_seconds = import_seconds
        self._import_until = time.monotonic() + (import_seconds or float("inf"))
        self._orders: Orders | None = None
        self._error: UserError | Failure | None = None  # of the rendezvous
        self._news = b""
        self._ranks: dict[int, int] = {}  # pid -> rank, of running ranks
        self._importing = True  # the importer has not exited yet
        self._code = 0  # the first exit code other than 0
        self._said_all = False  # the importer's pipe was read to the end
        self._requests = 0
        self._pressed = False  # the other ranks were sent SIGTERM
        self._leaving: set[int] = set()  # ranks whose program has failed and whose exit handlers run
        self._handed_on: set[int] = set()  # signals forwarded so far
        self._until: float | None = None  # time at which the other ranks are ended (time.monotonic)
        self._wake, self._wake_end = socket.socketpair()
        self._wake.setblocking(False)
        self._wake_end.setblocking(False)

    def run(self) -> int:
        """Return the exit code once all ranks have exited. Raises UserError or Failure if the rendezvous failed."""
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        for number in (*HANDED_ON, signal.SIGTSTP, signal.SIGCHLD):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored signals stay ignored (nohup)
                signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._meet_others, name="meeting", daemon=True).start()
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ)
                selector.register(self._importer.news, selectors.EVENT_READ)
                selector.register(self._importer.reports, selectors.EVENT_READ)
                while self._importing or self._ranks:
                    for ready, _ in selector.select(self._timeout()):
                        if ready.fileobj is self._wake:
                            self._hear_signals()
                        elif ready.fileobj == self._importer.reports:
                            if not self._hear_ranks():
                                selector.unregister(self._importer.reports)
                        elif not self._hear_importer():
                            selector.unregister(self._importer.news)
                    self._reap()
                    self._limit_import()
                    if self._error is not None and self._code == 0:
                        raise self._error
                    if self._until is not None and time.monotonic() >= self._until:
                        self._press()
        except BaseException:
            self._code = self._code or FAILED
            raise
        finally:
            if self._code:
                self._kill()  # also ends input workers whose rank has died
        return self._code

    def _timeout(self) -> float | None:
        """Return the time in seconds until something must be done; None: wait for events only."""
        import_until = float("inf") if self._imported.is_set() else self._import_until
        until = min(float("inf") if self._until is None else self._until, import_until)
        return None if until == float("inf") else max(0.0, until - time.monotonic())

    def _limit_import(self) -> None:
        """Raise Failure if the import takes longer than its limit."""
        if self._importing and not self._imported.is_set() and time.monotonic() >= self._import_until:
            how = "look at the file system that Python is on, or raise --start-timeout"
            raise Failure(f"the program's modules were not imported within {self._import_seconds:.0f} s: {how}")

    def _meet_others(self) -> None:
        """Thread: connect to the other hosts, then check regularly whether one of them has failed."""
        try:
            self._orders = self._meet(self._imported)
            os.write(self._importer.orders, json.dumps(self._orders).encode() + b"\n")
            while self._failed is not None:
                time.sleep(FAILURE_SECONDS)
                if reason := self._failed():
                    raise Failure(reason)
        except (UserError, Failure) as error:
            self._error = error
        except OSError:  # the importer has exited
            return
        except Exception as error:
            self._error = Failure(f"the meeting failed: {type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            self._wake_end.send(b"\0")

    def _hear_importer(self) -> bool:
        """Read messages of the importer. Return whether there may be more."""
        part = os.read(self._importer.news, 65536)
        *lines, self._news = (self._news + part).split(b"\n")
        for line in lines:
            if line == b"imported":
                self._imported.set()
            else:
                first = self._orders.first if self._orders is not None else 0
                self._ranks = {pid: first + local_rank for local_rank, pid in enumerate(json.loads(line))}
        self._said_all = not part
        return bool(part)

    def _hear_ranks(self) -> bool:
        """Read reports of failed ranks. Return whether there may be more. Each line is one write."""
        if self._importing and not self._ranks:  # read the importer's message with their pids first
            return True
        part = os.read(self._importer.reports, 65536)
        first = self._orders.first if self._orders is not None else 0
        for line in part.splitlines():
            local_rank, code = json.loads(line)
            self._leaving.add(first + local_rank)
            self._rank_failed(first + local_rank, code)
        return bool(part)

    def _hear_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._wake.recv(4096):
                if number == signal.SIGTSTP:  # Ctrl-Z
                    self._send_all(signal.SIGSTOP)
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif number in HANDED_ON:
                    self._hand_on(signal.Signals(number))

    def _hand_on(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP and self._ranks:  # a closed terminal; torch's handler in the ranks does nothing
            number = signal.SIGTERM
        self._handed_on.add(number)
        self._requests += number in ENDING
        # Before there are ranks there is nothing to save. (With them, the importer may still be about to exit.)
        unstarted = self._importing and not self._ranks and number in (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
        if unstarted or self._requests >= MOST_REQUESTS:
            self._code = self._code or 128 + number
            self._kill()
        else:
            self._send_all(number)

    def _send_all(self, number: signal.Signals, but: Container[int] = ()) -> None:
        for pid, rank in self._ranks.items():
            if rank not in but:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _kill(self) -> None:
        """Kill all ranks and their child processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._importer.pid, signal.SIGKILL)

    def _press(self) -> None:
        """End the remaining ranks: send SIGTERM, and kill them at the next call."""
        if not self._pressed:
            self._pressed = True
            self._send_all(signal.SIGTERM, but=self._leaving)
            self._send_all(signal.SIGCONT)  # a stopped process handles no other signal
            self._until = time.monotonic() + GRACE_SECONDS
        else:
            self._kill()
            self._until = None

    def _reap(self) -> None:
        if self._importing and self._said_all:
            # WNOWAIT leaves a zombie, so that its pid, which is also the ranks' process group, is not reused.
            left = os.waitid(os.P_PID, self._importer.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if left is not None:
                self._importing = False
                code = left.si_status if left.si_code == os.CLD_EXITED else -left.si_status
                if code != 0:
                    self._importer_failed(code)
        ended = []
        for pid, rank in list(self._ranks.items()):
            with contextlib.suppress(ChildProcessError):  # it is still a child of the importer
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended.append((rank, os.waitstatus_to_exitcode(status)))
                    del self._ranks[pid]
        if not self._importing:
            self._reap_orphans()
        # Of ranks that exited at the same time, report one that was killed first, then one that failed.
        for rank, code in sorted(ended, key=lambda end: (end[1] >= 0, end[1] != FAILED, end[0])):
            if code != 0:
                self._rank_failed(rank, code)

    def _reap_orphans(self) -> None:
        """Reap child processes of ranks that have exited: the starter is their subreaper."""
        with contextlib.suppress(OSError, ValueError):
            for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
                if pid != self._importer.pid and pid not in self._ranks:
                    os.waitpid(pid, os.WNOHANG)

    def _importer_failed(self, code: int) -> None:
        if self._code == 0:
            self._code = code if code > 0 else 128 - code
            if code < 0:
                say(f"error: the import was killed by {signal.Signals(-code).name}{memory(-code)}")
            self._told(f"its import ended with code {self._code}")

    def _rank_failed(self, rank: int, code: int) -> None:
        if self._code != 0:
            return
        self._code = code if code > 0 else 128 - code
        by = (
            f"was killed by {signal.Signals(-code).name}{memory(-code)}" if code < 0 else f"ended with exit code {code}"
        )
        if self._code not in BY_THEMSELVES and self._code - 128 not in self._handed_on:
            others = ": ending the other ranks" if any(other != rank for other in self._ranks.values()) else ""
            say(f"error: rank {rank} on {socket.gethostname()} {by}{others}")
            self._told(f"rank {rank} {by}")
        self._until = time.monotonic() + BY_THEMSELVES.get(self._code, 0.0)


def memory(number: int) -> str:
    """Return a hint if the signal is SIGKILL, which the kernel sends when memory runs out."""
    return " (out of memory?)" if number == signal.SIGKILL else ""


def say(line: str) -> None:
    """Print a line on stderr, within a limit: the ranks wait for their end."""
    say_within(f"hvdtrain.starter: {line}\n")
