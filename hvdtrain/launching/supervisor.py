"""The starter while its ranks run: it forwards signals, ends all ranks when one has failed, and returns the exit code."""

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Collection, Container

from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.lines import say_within
from hvdtrain.launching.exit_codes import FAILED as EXIT_FAILED
from hvdtrain.launching.exit_codes import STOPPED, TARGET_MISSED, WRONG_INPUT
from hvdtrain.launching.fork_client import HANDED_ON, fork_request, send
from hvdtrain.launching.forker import FAILED, REFUSED, Forker
from hvdtrain.launching.meeting import FAILURE_SECONDS, Meeting
from hvdtrain.launching.processes import runs
from hvdtrain.launching.signal_socket import SignalSocket
from hvdtrain.launching.startup import EXIT_CODE_OF_SIGNAL

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
MOST_REQUESTS = 3  # after so many of these signals, the ranks are killed
# Seconds that the other ranks have to exit by themselves, by the first exit code other than 0. With these codes, all ranks
# exit together. If a rank was killed or failed alone, the others would wait for it: they get no time.
BY_THEMSELVES = {STOPPED: 60.0, TARGET_MISSED: 60.0, WRONG_INPUT: 5.0}
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL


class Supervisor:
    """Supervises the ranks of one host, from their import to their exit.

    words: their program. ranks: their number. meeting: with the other hosts; the ranks begin once all are ready.
    """

    def __init__(self, forker: Forker, words: list[str], ranks: int, meeting: Meeting):
        self._forker, self._words, self._ranks, self._meeting = forker, words, ranks, meeting
        self._met = False
        self._error: UserError | Failure | None = None  # of the rendezvous
        # To the forker, by local rank. Empty until it is asked for the ranks.
        self._connections: list[socket.socket] = []
        self._unread = [b""] * ranks  # incomplete lines of the forker, by local rank
        self._pids: dict[int, int] = {}  # local rank -> pid, of running ranks
        self._exited: dict[int, int] = {}  # local rank -> exit code; negative: a signal
        self._forker_runs = True
        self._code = 0  # the first exit code other than 0
        self._requests = 0
        self._pressed = False  # the other ranks were sent SIGTERM
        # Local ranks whose program has failed and whose exit handlers run, and their exit codes.
        self._failing: dict[int, int] = {}
        self._handed_on: set[signal.Signals] = set()  # signals forwarded so far
        self._until: float | None = None  # time at which the other ranks are ended (time.monotonic)
        self._signals = SignalSocket()

    def run(self) -> int:
        """Return the exit code once all ranks have exited. Raises UserError or Failure if the rendezvous failed."""
        heard = (*HANDED_ON, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCHLD)
        # Ignored signals stay ignored (nohup).
        self._signals.listen(number for number in heard if signal.getsignal(number) != signal.SIG_IGN)
        threading.Thread(target=self._meet, name="meeting", daemon=True).start()
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._signals.socket, selectors.EVENT_READ)
                while self._forker_runs and len(self._exited) < self._ranks:
                    before = set(self._exited)
                    limit = None if self._until is None else max(0.0, self._until - time.monotonic())
                    for ready, _ in selector.select(limit):
                        if ready.fileobj is self._signals.socket:
                            self._hear_signals()
                        elif not self._hear_forker(ready.data):
                            selector.unregister(ready.fileobj)
                    self._ranks_exited(set(self._exited) - before)
                    self._ranks_fail()
                    self._reap_forker()
                    if self._error is not None and self._code == 0:
                        raise self._error
                    if self._met and not self._connections:
                        self._ask_for_ranks(selector)
                    if self._until is not None and time.monotonic() >= self._until:
                        self._press()
        except BaseException:
            self._code = self._code or EXIT_FAILED
            raise
        finally:
            if self._code:
                self._kill()
            if self._forker_runs:
                os.kill(self._forker.pid, signal.SIGKILL)
                os.waitpid(self._forker.pid, 0)
        return self._code

    def _meet(self) -> None:
        """Thread: connect to the other hosts, then check regularly whether one of them has failed."""
        try:
            self._meeting.come(self._ranks)
            if not os.read(self._forker.imported, 1):  # the import has failed
                return
            self._meeting.wait()
            self._met = True
            self._signals.wake()
            while self._meeting.size > 1:
                time.sleep(FAILURE_SECONDS)
                if reason := self._meeting.failure():
                    raise Failure(reason)
        except (UserError, Failure) as error:
            self._error = error
        except Exception as error:
            self._error = Failure(f"the meeting failed: {type(error).__name__}: {error}")
        self._signals.wake()

    def _ask_for_ranks(self, selector: selectors.BaseSelector) -> None:
        null = os.open(os.devnull, os.O_RDONLY)
        for local_rank in range(self._ranks):
            self._connections.append(connection := socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            rank = self._meeting.first + local_rank
            variables = dict(os.environ) | self._meeting.environment(rank)
            for name, value in (("RANK", rank), ("WORLD_SIZE", len(self._meeting.hosts)), ("LOCAL_RANK", local_rank)):
                if name in variables:  # until now they counted hosts
                    variables[name] = str(value)
            # A background process group cannot read from the terminal.
            typed = null if local_rank > 0 or os.isatty(0) else 0
            with contextlib.suppress(OSError):  # the forker has ended
                connection.connect(self._forker.address)
                send(connection, fork_request(self._words, variables, proxy=False), (typed, 1, 2))
                selector.register(connection, selectors.EVENT_READ, local_rank)
        os.close(null)

    def _hear_forker(self, local_rank: int) -> bool:
        """Read what the forker says of a rank. Return whether there may be more."""
        try:
            part = self._connections[local_rank].recv(65536)
        except ConnectionError:
            return False
        *lines, self._unread[local_rank] = (self._unread[local_rank] + part).split(b"\n")
        for line in lines:
            kind, _, rest = line.partition(b" ")
            if kind == REFUSED:
                remedy = "allow this user more processes (ulimit -u), or use fewer ranks"
                which = f"rank {local_rank} of {self._ranks} of this host ({rest.decode()})"
                raise UserError(f"cannot start {which}: {remedy}")
            elif kind == FAILED:
                self._failing[local_rank] = int(rest)
            elif local_rank not in self._pids:
                self._pids[local_rank] = int(line)
                for number in self._handed_on:  # to the other ranks, before this pid was read
                    self._send_all(number, but=self._pids.keys() - {local_rank})
            else:
                del self._pids[local_rank]
                self._exited[local_rank] = int(line)
        return bool(part)

    def _hear_signals(self) -> None:
        for number in self._signals.received():
            # Ranks are process groups of their own, in the background of the terminal, which Ctrl-Z does not reach.
            if number == signal.SIGTSTP:  # Ctrl-Z
                self._send_all(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number in (*HANDED_ON, signal.SIGWINCH):
                self._hand_on(signal.Signals(number))

    def _hand_on(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP and self._pids:  # a closed terminal; torch's handler in the ranks does nothing
            number = signal.SIGTERM
        self._handed_on.add(number)
        self._requests += number in ENDING_SIGNALS
        # Before there are ranks there is nothing to save.
        unstarted = not self._pids and number in (*ENDING_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
        if unstarted or self._requests >= MOST_REQUESTS:
            self._code = self._code or EXIT_CODE_OF_SIGNAL.get(number, 128 + number)
            self._kill()
        else:
            self._send_all(number)

    def _send_all(self, number: signal.Signals, but: Container[int] = ()) -> None:
        for local_rank, pid in self._pids.items():
            if local_rank not in but:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _kill(self) -> None:
        """Kill the forker, all ranks and their child processes."""
        for pid in (self._forker.pid, *self._pids.values()) if self._forker_runs else self._pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _press(self) -> None:
        """End the remaining ranks: send SIGTERM, and kill them at the next call."""
        if not self._pressed:
            self._pressed = True
            self._send_all(signal.SIGTERM, but=self._failing)
            self._send_all(signal.SIGCONT)  # a stopped process handles no other signal
            self._until = time.monotonic() + GRACE_SECONDS
        else:
            self._kill()
            self._until = None

    def _reap_forker(self) -> None:
        done, status = os.waitpid(self._forker.pid, os.WNOHANG)
        if done:
            self._forker_runs = False
            code = os.waitstatus_to_exitcode(status)
            if self._code == 0 and len(self._exited) < self._ranks:
                self._code = code if code > 0 else 128 - code
                what = "process that forks ranks" if self._connections else "import"
                if code < 0:
                    say_at_end(f"error: the {what} was killed by {signal.Signals(-code).name}{memory(-code)}")
                self._meeting.fail(f"its {what} ended with code {self._code}")

    def _ranks_exited(self, local_ranks: Collection[int]) -> None:
        """Of ranks that exited at the same time, report one that was killed first, then one that failed."""
        ends = [(self._exited[local_rank], local_rank) for local_rank in local_ranks]
        for code, local_rank in sorted(ends, key=lambda end: (end[0] >= 0, end[0] != EXIT_FAILED, end[1])):
            if code != 0:
                self._rank_failed(local_rank, code)

    def _ranks_fail(self) -> None:
        """Report a rank whose program has failed. If another one has ended, that may be why: the forker tells how soon."""
        for local_rank, code in self._failing.items():
            if all(runs(pid) for other, pid in self._pids.items() if other not in self._failing):
                self._rank_failed(local_rank, code)

    def _rank_failed(self, local_rank: int, code: int) -> None:
        if self._code != 0:
            return
        self._code = code if code > 0 else 128 - code
        rank = self._meeting.first + local_rank
        by = (
            f"was killed by {signal.Signals(-code).name}{memory(-code)}" if code < 0 else f"ended with exit code {code}"
        )
        if self._code not in BY_THEMSELVES and self._code - 128 not in self._handed_on:
            others = ": ending the other ranks" if any(other != local_rank for other in self._pids) else ""
            say_at_end(f"error: rank {rank} on {socket.gethostname()} {by}{others}")
            self._meeting.fail(f"rank {rank} {by}")
        self._until = time.monotonic() + BY_THEMSELVES.get(self._code, 0.0)


def memory(number: int) -> str:
    """Return a hint if the signal is SIGKILL, which the kernel sends when memory runs out."""
    return " (out of memory?)" if number == signal.SIGKILL else ""


def say_at_end(line: str) -> None:
    """Print a line on stderr, within a limit: the ranks wait for their end."""
    say_within(f"hvdtrain.starter: {line}\n")
