"""Writes metrics.jsonl for a script that does not use hvdtrain, from its optimizer steps, collectives and DataLoaders."""

import resource
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.engines.cores import seconds_without_core
from hvdtrain.engines.foreign import ForeignEngine, Listener
from hvdtrain.training.records.clock import RankTimes, added, shares
from hvdtrain.training.records.telemetry import Telemetry, versions

STEPS, FIRST_STEPS = 50, 10  # steps between two reports of all ranks; steps until the first report
OWN = len(RankTimes._fields)


class Look(NamedTuple):
    """A report of all ranks."""

    step: int
    steps: int  # since the previous report
    elapsed: float  # seconds, on this rank


class Recorder(Listener):
    """Writes metrics.jsonl to `output_dir` on rank 0. script: its command line. automatic: the settings that were made.

    The times of all ranks are collected with an asynchronous all-reduce. A rank that has called `hvd.join` takes part
    automatically; if a rank is missing, the all-reduce does not complete, and training is not blocked.
    """

    def __init__(self, output_dir: Path, script: str, automatic: str):
        self.output_dir, self.script, self.automatic = output_dir, script, automatic
        self.dataset = Path(script.split()[-1]).name  # the name of the data in the report
        self.telemetry: Telemetry | None = None
        self.steps = 0
        self._main = threading.get_ident()
        self._loading = self._communication = 0.0
        self._samples = self._all_samples = 0
        self._handle: tuple[int, Tensor, Look] | None = None  # pending all-reduce: Horovod's handle, a row per rank
        self._looked = 0  # step of the last report
        self._totals: list[RankTimes] = []
        self._began = self._window = time.perf_counter()
        self._without_core = seconds_without_core()

    def started(self, engine: ForeignEngine) -> None:
        self.engine = engine
        self._handle = None
        again = self.telemetry is not None  # an elastic job that was restarted
        with engine.raising_together("output"):
            if not again:
                self.telemetry = Telemetry(engine, self.output_dir, progress=False)
                self.telemetry.open(continued=False)
        facts = {"rank": engine.rank, "host": socket.gethostname(), "device": "?"}
        ranks = engine.all_gather_object(facts, "tuned.ranks")
        assert self.telemetry is not None
        self.telemetry.event(
            "start", world_size=engine.size, engine="horovod", dataset=self.dataset,
            reason=f"whatever {self.script} reads", config={"script": " ".join(sys.argv)}, versions=versions(), ranks=ranks,
            automatic=[engine.description, *self.automatic.split("; ")],
            metrics={"seconds_per_step": {"direction": "min"}},
        )  # fmt: skip
        self._window = time.perf_counter()
        self._without_core = seconds_without_core()
        self._looked = self.steps
        self._loading = self._communication = 0.0

    def waited(self, began: float, ended: float) -> None:
        if threading.get_ident() == self._main:
            self._communication += ended - began

    def loaded(self, began: float, ended: float, batch: object) -> None:
        if threading.get_ident() == self._main:
            self._loading += ended - began
            if torch.is_grad_enabled():  # otherwise, this is an evaluation
                self._samples += leading(batch)

    def stepped(self, optimizer: Any) -> None:
        self.steps += 1
        self._collect()
        if (self.steps == FIRST_STEPS or self.steps % STEPS == 0) and self._handle is None:
            self._send()

    def _send(self) -> None:
        """Start an all-reduce with this rank's times, in its own row."""
        engine = self.engine
        elapsed = time.perf_counter() - self._window
        compute = max(0.0, elapsed - self._loading - self._communication)
        cuda = torch.cuda.max_memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        rows = torch.zeros(engine.size, OWN + 1, dtype=torch.float64)
        without_core = seconds_without_core()
        times = [self._loading, compute, self._communication, elapsed, resident, cuda]
        times += [without_core - self._without_core, self._samples]
        rows[engine.rank] = torch.tensor(times, dtype=torch.float64)
        self._window = time.perf_counter()
        self._without_core = without_core
        self._loading = self._communication = 0.0
        self._samples = 0
        handle = engine.hvd.allreduce_async_(rows, op=engine.hvd.Sum, name=f"tuned.times.{self.steps}")
        self._handle = handle, rows, Look(self.steps, self.steps - self._looked, elapsed)
        self._looked = self.steps

    def _collect(self) -> None:
        """Record the times of all ranks, if the all-reduce is complete."""
        if self._handle is None or not self.engine.hvd.poll(self._handle[0]):
            return
        handle, rows, look = self._handle
        self._handle = None
        waited = self._communication
        self.engine.hvd.synchronize(handle)
        self._communication = waited  # ours, not the script's
        if self.telemetry is None or self.engine.rank != 0:
            return
        ranks = [RankTimes(r[0], r[1], r[2], r[3], int(r[4]), int(r[5]), r[6]) for r in rows.tolist()]
        self._totals = added(self._totals, ranks)
        counted = int(rows[:, OWN].sum())
        self._all_samples += counted
        own = int(rows[0, OWN]) or look.steps  # without a DataLoader, seconds are per step
        share = {f"{phase}_share": value for phase, value in shares(ranks).items()}
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].loading + ranks[rank].compute)
        self.telemetry.event(
            "train", step=look.step, samples=self._all_samples or None, loss=None,
            seconds_per_step=look.elapsed / look.steps, samples_per_second=counted / look.elapsed if counted else None,
            loading_seconds=ranks[0].loading / own, compute_seconds=ranks[0].compute / own,
            communication_seconds=ranks[0].communication / own, **share, slowest_rank=slowest,
            resident_bytes=max(rank.resident_bytes for rank in ranks),
        )  # fmt: skip

    def hung(self, headline: str) -> None:
        if self.telemetry is not None:
            self.telemetry.event("error", kind="watchdog", message=headline)

    def end(self, error: BaseException | None, exit_code: object) -> None:
        """Write the summary at the end of the script. Without collectives, because other ranks may have exited."""
        if self.telemetry is None:
            return
        names = {name: f"{name}_seconds" for name in ("loading", "compute", "communication", "elapsed", "without_core")}
        if self._totals:
            self.telemetry.event(
                "ranks", **{names.get(f, f): [getattr(rank, f) for rank in self._totals] for f in RankTimes._fields}
            )
        if error is not None:
            self.telemetry.event("error", kind="script", message=f"{type(error).__name__}: {error}")
        else:
            summary = dict(dataset=self.dataset, engine="horovod", world_size=self.engine.size, steps=self.steps)
            seconds = round(time.perf_counter() - self._began, 3)
            self.telemetry.end(
                summary | dict(samples=self._all_samples or None, total_seconds=seconds, exit_code=exit_code)
            )
        self.telemetry.close()


def leading(batch: object) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    return leading(batch[0]) if isinstance(batch, list | tuple) and batch else 0
