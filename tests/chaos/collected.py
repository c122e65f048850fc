"""The outcomes of attacks in a file of JSON lines, so that many can be collected in several sittings (`--results`)."""

import json
import time
from dataclasses import asdict
from pathlib import Path

from tests.chaos.outcome import Outcome
from tests.commit import commit


class Results:
    """The file, or only memory. A line is {"seed", "number", "date", "commit", "outcome"}.

    What undisturbed runs end with is not in it: another commit, or another kind of processor, may have other bits.
    Raises ValueError for a file of something else. The end of an interrupted line is left out.
    """

    def __init__(self, path: Path | None = None):
        self._path = path
        self.outcomes: dict[tuple[int, int], Outcome] = {}  # by seed and number
        self._made = {"date": time.strftime("%Y-%m-%d"), "commit": commit() if path is not None else ""}
        text = path.read_text() if path is not None and path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text and path is not None:
            path.write_text(whole)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                said = json.loads(line)
                self.outcomes[said["seed"], said["number"]] = Outcome(**said["outcome"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: not the outcome of an attack ({error})") from None

    def add(self, seed: int, number: int, outcome: Outcome) -> None:
        """Add the outcome of attack `number` of `seed`."""
        self.outcomes[seed, number] = outcome
        if self._path is not None:
            line = dict(seed=seed, number=number, **self._made, outcome=asdict(outcome))
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
