"""Writes metrics.jsonl for a script that does not use hvdtrain, from its optimizer steps, collectives and DataLoaders."""

import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.engines.foreign import ForeignEngine, Listener
from hvdtrain.output.clock import PHASES, Clock, RankTimes, added, by_rank, shares
from hvdtrain.output.run_output import RunOutput, versions

STEPS, FIRST_STEPS = 50, 10  # steps between two reports of all ranks; steps until the first report


class PendingTimes(NamedTuple):
    """A report of all ranks on its way."""

    handle: int  # Horovod's
    rows: Tensor  # float64 [ranks, 8]: each rank's RankTimes and samples
    step: int
    steps: int  # since the previous report


class Recorder(Listener):
    """Writes metrics.jsonl to `output_dir` on rank 0. script: its command line. automatic: the settings that were made.

    The times of all ranks are collected with an asynchronous all-reduce. A rank that has called `hvd.join` takes part
    automatically; if a rank is missing, the all-reduce does not complete, and training is not blocked.
    """

    def __init__(self, output_dir: Path, script: str, automatic: str):
        self.output_dir, self.script, self.automatic = output_dir, script, automatic
        self.dataset = Path(script.split()[-1]).name  # the name of the data in the report
        self.output: RunOutput | None = None
        self.steps = 0
        self._main = threading.get_ident()
        self._samples = 0  # over all ranks, reported so far
        self._pending: PendingTimes | None = None
        self._totals: list[RankTimes] = []
        self._began = time.perf_counter()
        self._clock = Clock()
        self._open_window()

    def _open_window(self) -> None:
        self._clock.restart()
        self._window_step = self.steps
        self._own_samples = 0

    def started(self, engine: ForeignEngine) -> None:
        self.engine = engine
        self._pending = None
        with engine.raising_together("output"):
            if self.output is None:  # else it is an elastic job that was restarted
                self.output = RunOutput(engine, self.output_dir, progress=False)
                self.output.open(continued=False)
        facts = {"rank": engine.rank, "host": socket.gethostname(), "device": "?"}
        ranks = engine.all_gather_object(facts, "tuned.ranks")
        assert self.output is not None
        self._write_ranks()  # of the same number of ranks
        self.output.event(
            "start", world_size=engine.size, engine="horovod", dataset=self.dataset,
            reason=f"whatever {self.script} reads", config={"script": " ".join(sys.argv)}, versions=versions(), ranks=ranks,
            automatic=[engine.description, *self.automatic.split("; ")],
            metrics={"seconds_per_step": {"direction": "min"}},
        )  # fmt: skip
        self._open_window()

    def waited(self, began: float, ended: float) -> None:
        if threading.get_ident() == self._main:
            self._clock.mark("compute", began)
            self._clock.mark("communication", ended)

    def loaded(self, began: float, ended: float, batch: object) -> None:
        if threading.get_ident() == self._main:
            self._clock.mark("compute", began)
            self._clock.mark("loading", ended)
            if torch.is_grad_enabled():  # otherwise, this is an evaluation
                self._own_samples += leading(batch)

    def stepped(self, optimizer: Any) -> None:
        self.steps += 1
        self._collect()
        if (self.steps == FIRST_STEPS or self.steps % STEPS == 0) and self._pending is None:
            self._send()

    def _send(self) -> None:
        """Start an all-reduce with this rank's times, in its own row."""
        engine = self.engine
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._clock.mark("compute")
        times = self._clock.times(torch.device("cuda" if on_gpu else "cpu"))
        rows = torch.zeros(engine.size, len(times) + 1, dtype=torch.float64)
        rows[engine.rank] = torch.tensor([*times, self._own_samples], dtype=torch.float64)
        handle = engine.hvd.allreduce_async_(rows, op=engine.hvd.Sum, name=f"tuned.times.{self.steps}")
        self._pending = PendingTimes(handle, rows, self.steps, self.steps - self._window_step)
        self._open_window()

    def _collect(self) -> None:
        """Record the times of all ranks, if the all-reduce is complete."""
        report = self._pending
        if report is None or not self.engine.hvd.poll(report.handle):
            return
        self._pending = None
        self.engine.hvd.synchronize(report.handle)
        if self.output is None or self.engine.rank != 0:
            return
        *columns, samples = zip(*report.rows.tolist(), strict=True)
        ranks = [RankTimes(*times) for times in zip(*columns, strict=True)]
        self._totals = added(self._totals, ranks)
        counted = int(sum(samples))
        self._samples += counted
        own = int(samples[0]) or report.steps  # without a DataLoader, seconds are per step
        seconds = {f"{phase}_seconds": getattr(ranks[0], phase) / own for phase in PHASES}
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].loading + ranks[rank].compute)
        self.output.event(
            "train", step=report.step, samples=self._samples or None, loss=None,
            seconds_per_step=ranks[0].elapsed / report.steps,
            samples_per_second=counted / ranks[0].elapsed if counted else None, **seconds, **shares(ranks),
            slowest_rank=slowest, resident_bytes=max(rank.resident_bytes for rank in ranks),
        )  # fmt: skip

    def _write_ranks(self) -> None:
        """Record the time of each rank in each phase, and begin to add them up again."""
        if self.output is not None and self._totals:
            self.output.event("ranks", **by_rank(self._totals))
        self._totals = []

    def hung(self, headline: str) -> None:
        if self.output is not None:
            self.output.event("error", kind="watchdog", message=headline)

    def end(self, error: BaseException | None, exit_code: object) -> None:
        """Write the summary at the end of the script. Without collectives, because other ranks may have exited."""
        if self.output is None:
            return
        self._write_ranks()
        if error is not None:
            self.output.event("error", kind="script", message=f"{type(error).__name__}: {error}")
        else:
            summary: dict[str, object] = dict(dataset=self.dataset, engine="horovod", world_size=self.engine.size)
            summary |= dict(steps=self.steps, samples=self._samples or None, exit_code=exit_code)
            summary["total_seconds"] = round(time.perf_counter() - self._began, 3)
            self.output.end(summary)
        self.output.close()


def leading(batch: object) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    return leading(batch[0]) if isinstance(batch, list | tuple) and batch else 0
