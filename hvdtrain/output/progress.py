"""The progress display of rank 0: a bar on a terminal, or a line now and then; the slowest rank, and hints.

The pure functions below determine what is shown, from the times of all ranks (`clock.Window`).
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from hvdtrain.engines import lines
from hvdtrain.output import terminal
from hvdtrain.output.metric_names import PHASES
from hvdtrain.output.rank_times import RankTimes, Window, added, shares

PLAIN_LINE_SECONDS = 10.0  # without a terminal: minimum number of seconds between two lines
KNOWN_SECONDS = 2.0  # measured time before the time left is estimated
BAR = 10  # characters
WIDE = 80  # minimum number of columns to show a bar
SLOWER = 0.1  # a rank is reported as slow if it computes longer by more than this fraction
ENOUGH_STEPS, ENOUGH_SECONDS = 20, 5.0  # measured before a hint is given, without the first window
LATELY_STEPS, LATELY_SECONDS = 10, 1.0  # measured in one window before a rank is reported as slow
TOO_MUCH = {"loading": 0.3, "communication": 0.4}  # a hint is given above these shares of the time
WITHOUT_CORE = 0.25  # above this share of time without a core, the hint is about cores


def slowest(ranks: Sequence[RankTimes]) -> tuple[int, float] | None:
    """Return the rank with the longest compute time and its relative excess over the usual one; None if below 10 %.

    The usual time is the median; of two ranks, that of the faster.
    """
    usual = statistics.median_low(rank.compute for rank in ranks)
    rank = max(range(len(ranks)), key=lambda rank: ranks[rank].compute)
    excess = ranks[rank].compute / max(usual, 1e-9) - 1
    return (rank, excess) if excess > SLOWER else None


def remedies(config: Mapping[str, object], hosts: int, device: str) -> dict[str, str]:
    """Return, by phase, what to try if it takes too long. Only mentions flags that this script has (`config`)."""
    found = {}
    if config.get("workers") is not None and config.get("dataset") != "synthetic":
        found["loading"] = f"try more --workers (now {config['workers']}), or storage nearer to this host"
    # Within a host, casting costs more than it saves (docs/choosing.md), unless a GPU does it.
    casting_pays = hosts > 1 or device == "cuda"
    fp16 = "--compression fp16 or " if casting_pays and config.get("compression") == "none" else ""
    threads = "" if config.get("threads") == 1 or device != "cpu" else "--threads 1, "
    found["cores"] = f"try {threads}fewer ranks, or another host"
    found["communication"] = f"try {fp16}a larger --batch-size"
    return found


def hint(ranks: Sequence[RankTimes], steps: int, remedies: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a phase that takes too long, and a line that says what to do; None if there is none, or not enough data."""
    if steps < ENOUGH_STEPS or ranks[0].elapsed < ENOUGH_SECONDS:
        return None
    waited = sum(rank.without_core for rank in ranks) / sum(rank.elapsed for rank in ranks)
    if waited > WITHOUT_CORE and "cores" in remedies:
        message = f"ranks waited for a core {waited:.0%} of the time: this host runs more threads than it has cores"
        return "cores", f"{message}: {remedies['cores']}"
    share = {phase: shares(ranks)[f"{phase}_share"] for phase in TOO_MUCH if phase in remedies}
    over = {phase: share[phase] - TOO_MUCH[phase] for phase in share if share[phase] > TOO_MUCH[phase]}
    if not over:
        return None
    phase = max(over, key=lambda phase: over[phase])
    what = f"{phase} {share[phase]:.0%} of the time"
    late = slowest(ranks)
    if phase == "communication" and late is not None:
        # The slowest rank does not wait for others. Communication time beyond its own is waiting, not transfer.
        waiting = sum(rank.communication for rank in ranks) / len(ranks) - ranks[late[0]].communication
        if waiting > share[phase] * ranks[0].elapsed / 2:
            return phase, f"{what}, most of it waiting for rank {late[0]}: see what slows that one down"
    return phase, f"{what}: {remedies[phase]}"


def fitting(text: str, width: int) -> str:
    """Return the longest part of `text` that fits into `width` columns, cut between figures (two blanks apart)."""
    if len(text) <= width:
        return text
    end = text.rfind("  ", 0, width + 2)
    return text[: end if end > 0 else width]


def line(figures: Sequence[str], window: Window, left_seconds: float | None, hosts: Sequence[str]) -> str:
    """Return the progress line, most important figures first, because a narrow terminal shows only the first ones.

    figures: training metrics, such as "loss 0.3136". hosts: by rank.
    """
    share = shares(window.ranks)
    parts = [*figures[:1]]
    if left_seconds is not None:
        parts.append(f"{timedelta(seconds=round(left_seconds))} left")
    parts += [*figures[1:], f"{window.rates['samples_per_second']:,.0f} samples/s"]
    parts += [f"{phase} {share[f'{phase}_share']:.0%}" for phase in PHASES]
    parts.append(f"{max(rank.resident_bytes for rank in window.ranks) / 1e9:.1f} GB/rank")
    if cuda_bytes := max(rank.cuda_bytes for rank in window.ranks):
        parts.append(f"GPU {cuda_bytes / 1e9:.1f} GB")
    measured = window.steps >= LATELY_STEPS and window.ranks[0].elapsed >= LATELY_SECONDS
    if measured and (late := slowest(window.ranks)):
        rank, excess = late
        parts.append(f"slowest: rank {rank} on {hosts[rank]}, computes {excess:.0%} longer")
    return "  ".join(parts)


class Display:
    """Shows the progress: a bar on a terminal, otherwise a line every 10 s. Each hint is shown once. say: prints a line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.hosts: list[str] = []  # by rank
        self.remedies: dict[str, str] = {}
        self._say = say
        self._screen = terminal.find()
        self._bar = ""  # content of the terminal's last line
        self._since: tuple[float, int] | None = None  # time and step of the first report: the start-up ends there
        self._last_line = time.monotonic()
        self._totals: list[RankTimes] = []
        self._first = True
        self._steps = 0

    def show(self, epoch: str, step: int, steps: int, figures: Sequence[str], window: Window) -> None:
        """Show the progress. steps: total number of steps. figures: see `line`."""
        now = time.monotonic()
        if self._first:  # this window includes start-up
            self._first = False
        else:
            self._totals = added(self._totals, window.ranks)
            self._steps += window.steps
            if found := hint(self._totals, self._steps, self.remedies):
                phase, text = found
                del self.remedies[phase]
                self._say(f"hint: {text}")
        began, first_step = self._since = self._since or (now, step)
        left = (now - began) / max(step - first_step, 1) * (steps - step) if now - began >= KNOWN_SECONDS else None
        text = line(figures, window, left, self.hosts)
        if self._screen is not None:
            full = BAR * step // max(steps, 1)
            bar = f" [{'#' * full}{'.' * (BAR - full)}]" if self._screen.width() >= WIDE else ""
            self._bar = f"{epoch} {step / max(steps, 1):4.0%}{bar} {step}/{steps}  {text}"
            self.draw()
        elif now - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_line = now
            self._say(f"{epoch}  step {step}/{steps}  {text}")

    def draw(self) -> None:
        """Draw the bar, if there is one, on the current line."""
        if self._bar and self._screen is not None:
            # Leave the last column empty, or the terminal may wrap the line.
            self._write("\r" + fitting(self._bar, self._screen.width() - 1) + "\x1b[K")

    def clear(self) -> None:
        """Clear the bar, to print a line."""
        if self._bar:
            self._write("\r\x1b[K")

    def close(self) -> None:
        """Remove the bar."""
        self.clear()
        self._bar = ""

    def _write(self, text: str) -> None:
        assert self._screen is not None
        lines.put(self._screen.stream, text)
