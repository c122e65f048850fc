"""What became of attacks: a file of JSON lines that several sittings may extend, and the one table of all of them."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.commit import commit


@dataclass
class Outcome:
    kind: str  # its row in the table
    attack: str
    survived: bool  # it came to its end, with no hang and no code but those promised; of a damage: rejected
    equal: bool  # to the bit; where the number of ranks changed, within float tolerance
    lost: int = 0  # samples
    repeated: int = 0  # samples
    detected: float | None = None  # seconds from the fault to the end of the launcher; None where the run went on
    seconds_lost: float | None = None  # of training that was done again: from the checkpoint taken to the fault
    leftovers: int = 0
    note: str = ""
    program: str = ""
    launcher: str = ""
    ranks: int = 0

    @property
    def good(self) -> bool:
        return self.survived and self.equal and not (self.lost or self.repeated or self.leftovers)

    def __str__(self) -> str:
        detected = "-" if self.detected is None else f"{self.detected:.1f} s"
        return f"{'ok  ' if self.good else 'FAIL'} {detected:>7}  {self.attack}  {self.note}"


class Outcomes:
    """All outcomes, in the order in which they were made; with a path, those of earlier sittings, too.

    A line of the file is {"seed", "number", "date", "commit", "outcome"}. None is ever removed: an attack that failed is
    made again by the next sitting, and then has two. What undisturbed runs end with is not in the file: another commit, or
    another kind of processor, may have other bits. Raises ValueError for a file of something else. The end of an
    interrupted line is left out.
    """

    def __init__(self, path: Path | None = None):
        self._path = path
        self._made = {"date": time.strftime("%Y-%m-%d"), "commit": commit() if path is not None else ""}
        self.all: list[tuple[tuple[int, int], Outcome]] = []  # with seed and number
        text = path.read_text() if path is not None and path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text and path is not None:
            path.write_text(whole)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                said = json.loads(line)
                self.all.append(((said["seed"], said["number"]), Outcome(**said["outcome"])))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: not the outcome of an attack ({error})") from None

    def add(self, seed: int, number: int, outcome: Outcome) -> None:
        """Add the outcome of attack `number` of `seed`."""
        self.all.append(((seed, number), outcome))
        if self._path is not None:
            line = dict(seed=seed, number=number, **self._made, outcome=asdict(outcome))
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def last(self) -> dict[tuple[int, int], Outcome]:
        """Return the last outcome of each attack."""
        return dict(self.all)

    def survived(self, seed: int, number: int) -> bool:
        """Return whether this attack was made, and passed the last time."""
        outcome = self.last().get((seed, number))
        return outcome is not None and outcome.good

    def failed_before(self) -> list[Outcome]:
        """Return outcomes that failed, of attacks that were made again."""
        last = self.last()
        return [outcome for key, outcome in self.all if not outcome.good and outcome is not last[key]]


HEAD = ("fault", "number", "survived", "equal bits", "samples lost", "samples repeated", "left over",
        "detected in s: median, worst", "training repeated in s: median, worst")  # fmt: skip


def spread(seconds: Iterable[float | None]) -> str:
    ordered = sorted(value for value in seconds if value is not None)
    return f"{ordered[len(ordered) // 2]:.1f}, {ordered[-1]:.1f}" if ordered else "-"


def table(outcomes: list[Outcome]) -> str:
    groups: dict[str, list[Outcome]] = {}
    for form, of in (("{}", "kind"), ("under {}", "launcher"), ("of {}", "program"), ("{} ranks", "ranks")):
        told = [(getattr(outcome, of), outcome) for outcome in outcomes if getattr(outcome, of)]
        if of == "kind" or len({value for value, _ in told}) > 1:
            for value, outcome in sorted(told, key=lambda one: one[0]):
                groups.setdefault(form.format(value), []).append(outcome)
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for name, some in [*groups.items(), ("all", outcomes)]:
        sums = [
            sum(getattr(o, field) for o in some) for field in ("survived", "equal", "lost", "repeated", "leftovers")
        ]
        cells = (name, len(some), *sums, spread(o.detected for o in some), spread(o.seconds_lost for o in some))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def report(outcomes: list[Outcome], failed_before: list[Outcome]) -> int:
    """Print the table and every outcome that failed. Return the exit code: 1 if the last one of an attack failed."""
    print(table(outcomes))
    again = len({(o.attack, o.program, o.launcher, o.ranks) for o in failed_before})
    passed = sum(outcome.good for outcome in outcomes)
    print(f"\n{passed} of {len(outcomes)} passed; {again} are recorded as failed at first, and were made again")
    failed = [outcome for outcome in outcomes if not outcome.good]
    for title, some in (("failed", failed), ("failed at first, and made again", failed_before)):
        if some:
            print(f"\n{title}: {len(some)}", *(f"    {outcome!r}" for outcome in some), sep="\n")
    return int(bool(failed))
