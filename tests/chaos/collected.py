"""The outcomes of attacks in a file of JSON lines, so that many can be collected in several sittings (`--results`)."""

import json
from dataclasses import asdict
from pathlib import Path

from tests.chaos.outcome import Outcome


class Results:
    """The file, or only memory. A line is {"seed", "number", "outcome"}, or {"undisturbed", "results"}.

    Raises ValueError for a file of something else. The end of an interrupted line is left out.
    """

    def __init__(self, path: Path | None = None):
        self._path = path
        self.outcomes: dict[tuple[int, int], Outcome] = {}  # by seed and number
        self.undisturbed: dict[str, dict] = {}  # what an undisturbed run ends with, by program, transport and ranks
        text = path.read_text() if path is not None and path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text and path is not None:
            path.write_text(whole)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                said = json.loads(line)
                if "outcome" in said:
                    self.outcomes[said["seed"], said["number"]] = Outcome(**said["outcome"])
                else:
                    self.undisturbed[said["undisturbed"]] = said["results"]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: not the outcome of an attack ({error})") from None

    def add(self, seed: int, number: int, outcome: Outcome) -> None:
        """Add the outcome of attack `number` of `seed`."""
        self.outcomes[seed, number] = outcome
        self._write(seed=seed, number=number, outcome=asdict(outcome))

    def add_undisturbed(self, key: str, results: dict) -> None:
        """Add what an undisturbed run ends with."""
        self.undisturbed[key] = results
        self._write(undisturbed=key, results=results)

    def _write(self, **line: object) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
