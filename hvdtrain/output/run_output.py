"""The output of a run: metrics.jsonl, summary.json, TensorBoard, trackers and the progress line.

Only rank 0 writes and prints. On the other ranks the methods do nothing.
"""

import contextlib
import hashlib
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from hvdtrain.engines import atomic, files, lines
from hvdtrain.engines.base import Engine, Setting
from hvdtrain.engines.portable import bytes_of
from hvdtrain.launching import processes
from hvdtrain.output import records
from hvdtrain.output.clock import Window
from hvdtrain.output.metric_names import Metric

if TYPE_CHECKING:
    from hvdtrain.output.progress import Display
    from hvdtrain.output.tensorboard import Board
    from hvdtrain.output.tracking import Tracker


class RunOutput(records.Events):
    """Writes and prints a run's output. Files are written only after `open`; lines are printed at once."""

    def __init__(
        self,
        engine: Engine,
        output_dir: Path | None,
        *,
        progress: bool,
        tensorboard: bool = False,
        track_as: tuple[str, str] | None = None,
    ):
        """track_as: --track, and the name of the experiment or project in which to record the run."""
        super().__init__(began=time.monotonic() - seconds_since_process_start())
        self.speaks = engine.rank == 0
        self.output_dir = output_dir if self.speaks else None
        self._said_once: set[str] = set()
        self._unheard = False  # the last line could not be written to standard output
        self._wants_board, self._track_as = tensorboard, track_as
        self._board: Board | None = None
        self._tracker: Tracker | None = None
        self._display = display(self.say) if progress and self.speaks else None

    def open(self, *, continued: bool) -> None:
        """Open the files on rank 0. Raises UserError if `output_dir` cannot be written.

        continued: append to the metrics.jsonl of the run in `output_dir`; otherwise that file is renamed.
        """
        directory = self.output_dir
        if directory is None:
            return
        with files.output_to(directory):
            directory.mkdir(parents=True, exist_ok=True)
            records.make_room_for_summary(directory / "summary.json")
            self.open_events(directory / "metrics.jsonl", continued=continued)
        if self._wants_board:
            from hvdtrain.output.tensorboard import Board

            try:
                self._board = Board(directory / "tensorboard", continued)
                self.listeners.append(self._to_board)
            except OSError as error:
                lines.warn(f"no TensorBoard output ({error.strerror or error}): training continues")
        if self._track_as is not None:
            from hvdtrain.output.tracking import Tracker

            self._tracker = Tracker(*self._track_as, directory, continued)
            self.listeners.append(self._tracker.event)

    # ---- lines

    def say(self, line: str) -> None:
        """Print a line on rank 0, above the progress bar if there is one. A line that cannot be written is lost."""
        if not self.speaks:
            return
        if self._display is not None:
            self._display.clear()
        error = lines.say(line)
        if error is not None and not self._unheard:
            why = getattr(error, "strerror", None) or error
            lines.warn(f"standard output cannot be written for now ({why}): training continues")
        self._unheard = error is not None
        if self._display is not None:
            self._display.draw()

    def say_once(self, line: str) -> None:
        """Print a line once in this run."""
        if line not in self._said_once:
            self._said_once.add(line)
            self.say(line)

    def progress(self, epoch: str, step: int, steps: int, figures: Sequence[str], window: Window) -> None:
        """Show the progress of training (see `progress.Display.show`)."""
        if self._display is not None:
            self._display.show(epoch, step, steps, figures, window)

    # ---- events

    def _to_board(self, name: str, fields: dict[str, object]) -> None:
        if self._board is not None:
            try:
                self._board.event(name, fields)
            except Exception as error:  # also what tensorboard's own thread has raised
                self._board = None
                lines.warn(f"TensorBoard output stops here ({getattr(error, 'strerror', None) or error})")

    def start(
        self, engine: Engine, dataset: str, reason: str, config: dict[str, object], metrics: Mapping[str, Metric]
    ) -> None:
        """Print and record the data set, the ranks and the automatic choices. A collective."""
        facts = {"rank": engine.rank, "host": socket.gethostname(), "pid": os.getpid(), "device": str(engine.device)}
        ranks = engine.all_gather_object(facts, "ranks")
        hosts, threads = len({rank["host"] for rank in ranks}), torch.get_num_threads()
        self.say(
            f"{engine.size} rank{'s'[: engine.size > 1]} on {hosts} host{'s'[: hosts > 1]}, {engine.description}, "
            f"{engine.device.type}, {threads} torch thread{'s'[: threads > 1]} per rank"
            + (f" (--engine auto: {engine.reason})" if engine.reason else "")
        )
        self.say(f"data: {reason}")
        for line in automatic(engine.notes, bool(config.get("verbose"))):
            self.say(line)
        self.event(
            "start", world_size=engine.size, engine=engine.name, dataset=dataset, reason=reason, config=config,
            versions=versions(), ranks=ranks, automatic=engine.notes,
            metrics={name: metric._asdict() for name, metric in metrics.items()},
        )  # fmt: skip

    def end(self, summary: dict[str, object]) -> None:
        """Write summary.json (atomically) and the `end` event."""
        self.event("end", **summary)
        if self.output_dir is not None:
            try:
                atomic.write_atomically(
                    self.output_dir / "summary.json", records.json_text(summary, indent=2) + "\n", sync=False
                )
            except OSError as error:
                lines.warn(
                    f"{self.output_dir}/summary.json not written ({error.strerror}): {records.json_text(summary)}"
                )

    def close(self) -> None:
        """Close all files. Idempotent."""
        if self._display is not None:
            self._display.close()
        if self._board is not None:
            with contextlib.suppress(Exception):
                self._board.close()
            self._board = None
        self.close_events()
        if self._tracker is not None:  # last, because it reads the files written above
            self._tracker.close()
            self._tracker = None
        self.listeners.clear()

    def __enter__(self) -> "RunOutput":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def display(say: Callable[[str], None]) -> "Display":
    """Return what shows the progress. say: prints a line."""
    from hvdtrain.output.progress import Display

    return Display(say)


def automatic(notes: Sequence[str], verbose: bool) -> list[str]:
    """Return the lines about automatic decisions. Settings for speed are only counted, unless `verbose`."""
    settings = [note for note in notes if isinstance(note, Setting)]
    others = [note for note in notes if note not in settings]
    if settings and not verbose:
        others.insert(0, f"{len(settings)} setting{'s'[: len(settings) > 1]} for speed (-v: which)")
    shown = [*settings, *others] if verbose else others
    return [f"{'' if i else 'automatic:':10} {line}" for i, line in enumerate(shown)]


def versions() -> dict[str, str]:
    """Return the versions of Python and the main packages."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("hvdtrain", "horovod"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def parameters_sha256(*models: nn.Module) -> str:
    """Return the SHA-256 of the parameters' bytes, model by model, in `state_dict` order, without buffers."""
    digest = hashlib.sha256()
    for parameter in (parameter for model in models for parameter in model.parameters()):
        digest.update(bytes_of(parameter).numpy().data)
    return digest.hexdigest()


def seconds_since_process_start() -> float:
    """Return the age of this process in seconds, or of the starter that forked it, so that imports are included."""
    started_ticks = processes.began()
    uptime_seconds = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_seconds - started_ticks / os.sysconf("SC_CLK_TCK")
