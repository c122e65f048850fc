"""What rank 0 shows while training goes on: one bar or a plain line now and then, the slowest rank, a hint.

What is shown, and when, follows from all ranks' times (`clock.Window`) by the pure functions below.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from hvdtrain.training.records.clock import Clock, RankTimes, Window, added, shares

if TYPE_CHECKING:
    import tqdm

PLAIN_LINE_SECONDS = 10.0  # without a terminal: at most one line of progress in so many seconds
SLOWER = 0.1  # ranks that differ by more than this share in compute time are worth a word
ENOUGH_STEPS, ENOUGH_SECONDS = 20, 5.0  # before a hint; the first window, which starts everything up, left out
LATELY_STEPS, LATELY_SECONDS = 10, 1.0  # in one window, before a rank is called slow
TOO_MUCH = {"loading": 0.3, "communication": 0.4}  # shares of the time from which on a hint is given


def slowest(ranks: list[RankTimes]) -> tuple[int, float] | None:
    """Return the rank that computes longest and by which share longer than the usual one, if by more than a tenth.

    Usual is the median; of two ranks it is the faster.
    """
    usual = statistics.median_low(rank.compute for rank in ranks)
    rank = max(range(len(ranks)), key=lambda rank: ranks[rank].compute)
    excess = ranks[rank].compute / max(usual, 1e-9) - 1
    return (rank, excess) if excess > SLOWER else None


def remedies(config: Mapping[str, object], hosts: int, device: str) -> dict[str, str]:
    """Return what to try, by phase, where that phase takes too much: only flags that this script has (`config`)."""
    found = {}
    if config.get("workers") is not None and config.get("dataset") != "synthetic":
        found["loading"] = f"try more --workers (now {config['workers']}), or storage nearer to this host"
    # Within a host, casting costs more than it saves (docs/results.md), unless a GPU does it.
    casting_pays = hosts > 1 or device == "cuda"
    fp16 = "--compression fp16 or " if casting_pays and config.get("compression") == "none" else ""
    found["communication"] = f"try {fp16}a larger --batch-size"
    return found


def hint(ranks: list[RankTimes], steps: int, remedies: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the phase that is out of proportion and one line that says what to do; None where there is none, or too
    little was measured to know."""
    if steps < ENOUGH_STEPS or ranks[0].elapsed < ENOUGH_SECONDS:
        return None
    share = shares(ranks)
    over = {phase: share[phase] - limit for phase, limit in TOO_MUCH.items() if share[phase] > limit}
    over = {phase: excess for phase, excess in over.items() if phase in remedies}
    if not over:
        return None
    phase = max(over, key=lambda phase: over[phase])
    what = f"{phase} {share[phase]:.0%} of the time"
    late = slowest(ranks)
    if phase == "communication" and late is not None:
        # Who computes longest waits for nobody: what the others spend beyond that rank's own is waiting, not the wire.
        waiting = sum(rank.communication for rank in ranks) / len(ranks) - ranks[late[0]].communication
        if waiting > share[phase] * ranks[0].elapsed / 2:
            return phase, f"{what}, most of it waiting for rank {late[0]}: see what slows that one down"
    return phase, f"{what}: {remedies[phase]}"


def line(figures: Sequence[str], window: Window, left_seconds: float | None, hosts: list[str]) -> str:
    """Return one line, the most wanted first: a narrow terminal cuts off its end.

    figures: of the training itself, such as "loss 0.3136". hosts: by rank.
    """
    share = shares(window.ranks)
    parts = [*figures, f"{window.rates['samples_per_second']:,.0f} samples/s"]
    if left_seconds is not None:
        parts.append(f"{timedelta(seconds=round(left_seconds))} left")
    parts.append("  ".join(f"{phase} {share[phase]:.0%}" for phase in Clock.PHASES))
    parts.append(f"{max(rank.resident_bytes for rank in window.ranks) / 1e9:.1f} GB/rank")
    if cuda_bytes := max(rank.cuda_bytes for rank in window.ranks):
        parts.append(f"GPU {cuda_bytes / 1e9:.1f} GB")
    measured = window.steps >= LATELY_STEPS and window.ranks[0].elapsed >= LATELY_SECONDS
    if measured and (late := slowest(window.ranks)):
        rank, excess = late
        parts.append(f"slowest: rank {rank} on {hosts[rank]}, computes {excess:.0%} longer")
    return "  ".join(parts)


class Display:
    """One bar on a terminal, elsewhere a plain line at most every ten seconds; each hint once. say: prints one line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.hosts: list[str] = []  # by rank
        self.remedies: dict[str, str] = {}
        self._say = say
        self._bar: tqdm.tqdm | None = None
        self._first: tuple[float, int] | None = None  # when the first window closed, and at which step
        self._last_line = time.monotonic()
        self._totals: list[RankTimes] = []
        self._steps = 0

    def show(self, epoch: str, step: int, steps: int, figures: Sequence[str], window: Window) -> None:
        """Show where training stands: `step` of `steps` in all; figures: as `line` takes them."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, step
        else:
            self._totals = added(self._totals, window.ranks)
            self._steps += window.steps
            if found := hint(self._totals, self._steps, self.remedies):
                phase, text = found
                del self.remedies[phase]
                self._say(f"hint: {text}")
        began, first_step = self._first
        left = (now - began) / (step - first_step) * (steps - step) if step > first_step else None
        text = line(figures, window, left, self.hosts)
        if sys.stderr.isatty():
            self._draw(epoch, step, steps, text)
        elif now - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_line = now
            self._say(f"{epoch}  step {step}/{steps}  {text}")

    def _draw(self, epoch: str, step: int, steps: int, text: str) -> None:
        if self._bar is None:
            import tqdm

            layout = "{desc} {percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt}{postfix}"
            self._bar = tqdm.tqdm(
                total=steps, initial=step, unit="step", leave=False, dynamic_ncols=True, bar_format=layout
            )
        self._bar.set_description_str(epoch, refresh=False)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.n = step
        self._bar.refresh()

    def clear(self) -> None:
        """Make room for a line; the bar comes back with the next step that is shown."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
