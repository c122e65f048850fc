"""What the doctor has found, on one rank and on all, as text and as JSON."""

import contextlib
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partialmethod

from hvdtrain.engines.errors import UserError, one_line
from hvdtrain.engines.lines import result

LEVELS = ("ok", "warning", "problem")
Finding = dict[str, str]


@dataclass
class Here:
    """What one check needs of another: the flags; versions, which must be the same on all ranks; this host's address."""

    flags: Namespace
    versions: dict[str, str] = field(default_factory=dict)
    address: str = ""  # "" if its name does not resolve
    gpus: bool = False  # torch sees some


class Findings:
    """The findings of this rank. Each entry can be serialized as JSON."""

    def __init__(self) -> None:
        self.all: list[Finding] = []

    def add(self, level: str, what: str, why: str = "", do: str = "") -> None:
        self.all.append(dict(level=level, what=what, why=why, do=do))

    ok, warning, problem = partialmethod(add, "ok"), partialmethod(add, "warning"), partialmethod(add, "problem")

    def worst(self) -> str:
        """Return the highest level among the findings."""
        return max((finding["level"] for finding in self.all), key=LEVELS.index, default="ok")

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Turn an exception inside into a finding: a check that fails must not hide the others."""
        try:
            yield
        except UserError as error:
            what, _, do = str(error).rpartition(": ")
            self.problem(what, "training would refuse to start", do)
        except Exception as error:
            self.problem(f"{name}: {type(error).__name__}: {error}", "training would fail here too", "see the message")


def merged(rows: list[list[Finding]], first: int = 0) -> list[dict[str, object]]:
    """Return each finding once, with its ranks, and the worst last, where a terminal shows it."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, findings in enumerate(rows, first):
        for finding in findings:
            ranks.setdefault(tuple(finding.values()), []).append(rank)
    ordered = sorted(ranks.items(), key=lambda item: LEVELS.index(item[0][0]))
    return [dict(level=level, what=what, why=why, do=do, ranks=who) for (level, what, why, do), who in ordered]


def show(findings: list[dict[str, object]], size: int, as_json: bool) -> None:
    """Print the findings of `size` ranks, as text or as JSON."""
    counts = Counter(finding["level"] for finding in findings)
    if as_json:
        levels = {level: counts[level] for level in LEVELS}
        result(json.dumps({"world_size": size, **levels, "findings": findings}, indent=2))
        return
    text = []
    for finding in findings:
        ranks = finding["ranks"]
        where = "" if ranks == list(range(size)) else f"  (rank {str(ranks)[1:-1]})"
        text.append(f"{finding['level']:8} {one_line(finding['what'])}{where}")
        text += [f"         {label + ':':4} {one_line(finding[label])}" for label in ("why", "do") if finding[label]]
    text.append(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['problem']} problems")
    result("\n".join(text))
