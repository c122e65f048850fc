"""What became of an attack, and the one table of all of them."""

from dataclasses import dataclass


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


HEAD = ("attack", "number", "survived", "bits equal", "lost", "repeated", "leftovers", "detected in s: median, worst",
        "seconds lost: median, worst")  # fmt: skip


def spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 2]:.1f}, {ordered[-1]:.1f}" if ordered else "-"


def table(outcomes: list[Outcome]) -> str:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.kind, []).append(outcome)
    for form, told in (
        ("(of {})", lambda o: o.program), ("(under {})", lambda o: o.launcher), ("({} ranks)", lambda o: o.ranks),
    ):  # fmt: skip
        if len({told(outcome) for outcome in outcomes if told(outcome)}) > 1:
            for outcome in outcomes:
                if told(outcome):
                    groups.setdefault(form.format(told(outcome)), []).append(outcome)
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for name, some in [*sorted(groups.items()), ("all", outcomes)]:
        cells = (
            name, len(some), sum(o.survived for o in some), sum(o.equal for o in some), sum(o.lost for o in some),
            sum(o.repeated for o in some), sum(o.leftovers for o in some),
            spread([o.detected for o in some if o.detected is not None]),
            spread([o.seconds_lost for o in some if o.seconds_lost is not None]),
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
