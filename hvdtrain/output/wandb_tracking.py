"""--track wandb: records a run's flags, metrics and summary with Weights & Biases.

Nothing is sent over the network unless WANDB_MODE=online or WANDB_API_KEY says so: `wandb sync` sends what is in
--output-dir/wandb. A resumed run continues the record whose ID is in --output-dir/wandb-run.json.
"""

import importlib.util
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.engines.errors import UserError
from hvdtrain.output.tracking import Event, Sender


class WandbTracker(Sender):
    """Records with Weights & Biases. The constructor raises UserError if the package is missing."""

    ID_FILE = "wandb-run.json"

    def __init__(self, directory: Path, project: str, continued: bool):
        """project: default if WANDB_PROJECT is not set. Others: see `Sender`."""
        if importlib.util.find_spec("wandb") is None:  # its import takes 2 s: in the thread
            raise UserError("--track needs a package: pip install 'hvdtrain[wandb]' (No module named 'wandb')")
        self._mode: Any = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._project = os.environ.get("WANDB_PROJECT") or project
        self._record_of_run: Any = None
        place = str(directory / "wandb") if self._mode == "offline" else "Weights & Biases"
        super().__init__(directory, place, continued)

    def _record(self, events: Sequence[Event]) -> None:
        if self._record_of_run is None:
            self._open()
        run = self._record_of_run
        for event in events:
            if event.name == "start":
                facts = {
                    name: event.fields.get(name) for name in ("world_size", "engine", "dataset", "versions", "ranks")
                }
                run.config.update({**event.fields.get("config", {}), "run": facts}, allow_val_change=True)
            if event.name == "end":
                run.summary.update(event.fields)
            elif event.values:
                run.log(event.values, step=event.step)  # steps that a resumed run repeats are left out by wandb

    def _open(self) -> None:
        """Continue the record of this run, or create one."""
        import wandb

        self._run = (self._told() if self._continued else None) or secrets.token_hex(4)
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
        self._record_of_run = wandb.init(
            project=self._project, id=self._run, resume="allow", dir=str(self._directory), mode=self._mode,
            name=self._directory.absolute().name, settings=settings,
        )  # fmt: skip
        self._note()

    def _finish(self) -> None:
        if self._record_of_run is not None:
            self._record_of_run.finish(exit_code=int(self._last != "end"))
