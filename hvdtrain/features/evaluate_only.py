"""--evaluate: the evaluations of a program are repeated with the model of a run, without steps. And --predict FILE: what the
model says about each sample of a test set, in the order of the data set."""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.engines import atomic, files
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.loop.evaluation import Evaluation
from hvdtrain.loop.run import Run
from hvdtrain.loop.state import Length, Stage
from hvdtrain.loop.step import Step
from hvdtrain.models.weights import write_tensors

RESULT_NAME = re.compile(r"\w[^\x00-\x1f\x7f-\x9f]*")
Rows = tuple[Tensor, dict[str, Tensor]]  # indices, int64 [n]; by name, the samples' values, [n, ...]


class Predictions:
    """This rank's predictions in one evaluation. whole: the script has one part of a number of samples, not batches."""

    def __init__(self, *, whole: bool):
        self._whole = whole
        self._indices: dict[str, list[Tensor]] = {}
        self._values: dict[str, list[Tensor]] = {}

    def add(self, indices: Tensor, values: Mapping[str, Tensor]) -> None:
        """Add a row for each of `indices`; of a whole part, the next rows of it. Raises UserError."""
        if not values:
            raise UserError("run.predict() got nothing: write run.predict(predicted=...)")
        for name, value in values.items():
            if name == "index":
                raise UserError("run.predict(index=...): the file's own column has this name: give another one")
            # In the file, a program for tables would take "=cmd" for a formula.
            if not RESULT_NAME.fullmatch(name):
                remedy = "begin with a letter or a digit, and use no control characters"
                raise UserError(f"run.predict() got a value named {name!r}: {remedy}")
            if not isinstance(value, Tensor) or not value.ndim:
                raise UserError(f"run.predict({name}=...): give a tensor with a row for each sample")
            rows = self._indices.setdefault(name, [])
            done = sum(map(len, rows)) if self._whole else 0
            rows.append(indices[done : done + len(value)] if self._whole else indices)
            if len(value) != len(rows[-1]):
                message = f"has {len(value)} rows for {len(rows[-1])} samples"
                raise UserError(f"run.predict({name}=...) {message}: give a row for each sample of the batch")
            own = value.detach().cpu()
            if own.dtype in (torch.float16, torch.bfloat16):
                own = own.float()
            elif own.dtype is torch.bool:
                own = own.byte()
            self._values.setdefault(name, []).append(own)

    def of_all(self, engine: Engine) -> Rows | None:
        """Return the predictions of all ranks, in the order of the data set; None if there are none. A collective."""
        mine = {name: torch.cat(parts) for name, parts in self._values.items()}
        indices = {name: torch.cat(parts) for name, parts in self._indices.items()}
        first = next(iter(indices.values()), torch.zeros(0, dtype=torch.int64))
        unlike = next((name for name, those in indices.items() if not torch.equal(those, first)), None)
        shapes = {
            name: [list(value.shape[1:]), str(value.dtype).removeprefix("torch.")] for name, value in mine.items()
        }
        everyone = engine.all_gather_object([len(first), shapes, unlike], "predict.shapes")
        known = next((theirs for _, theirs, _ in everyone if theirs), None)
        if known is None:
            return None
        if name := next((name for _, _, name in everyone if name), None):
            remedy = "give each value in every batch"
            raise UserError(
                f"run.predict({name}=...) is not for the samples of the other values: {remedy}", everywhere=True
            )
        if any(theirs not in ({}, known) for _, theirs, _ in everyone):
            raise UserError(
                "run.predict() got other names, shapes or types on another rank: give the same", everywhere=True
            )
        counts = [count for count, *_ in everyone]
        order = torch.cat(engine.all_gather_rows(first, counts, "predict.indices"))
        # Samples that a sampler draws several times keep the order of the ranks.
        place = order.argsort(stable=True)
        values = {}
        for name, (shape, dtype) in known.items():
            own = mine.get(name, torch.zeros(0, *shape, dtype=getattr(torch, dtype)))
            values[name] = torch.cat(engine.all_gather_rows(own, counts, f"predict.{name}"))[place]
        return order[place], values


def write_predictions(path: Path, indices: Tensor, values: Mapping[str, Tensor]) -> None:
    """Write them: .safetensors has `index` and a tensor for each name; .csv a line for each sample. Raises UserError or
    Failure."""
    try:
        if path.suffix == ".safetensors":
            with atomic.replacing(path, "wb") as file:
                write_tensors(file, {"index": indices, **values})
            return
        flat = {name: value.reshape(len(value), -1) for name, value in values.items()}
        head = [
            name if values[name].ndim == 1 else f"{name}_{i}" for name, v in flat.items() for i in range(v.shape[1])
        ]
        with atomic.replacing(path) as text:
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(["index", *head])
            for row, index in enumerate(indices.tolist()):
                writer.writerow([index, *(shown_item(item) for value in flat.values() for item in value[row].tolist())])
    except OSError as error:
        raise files.unwritten(path, error, "--predict") from error


def shown_item(item: float) -> float | str:
    """Return a float as text, and others as they are."""
    # Nine digits tell every float32 from its neighbours.
    return f"{item:.9g}" if isinstance(item, float) else item


class EvaluationRun(Run):
    """A run that only evaluates."""

    shares_buffers = False  # a checkpoint has buffers that are the same on all ranks
    _evaluated = _predicted = False  # whether there was an evaluation, with predictions
    _predictions: Predictions | None = None  # of the current evaluation, with --predict

    def epochs(
        self, count: int | None = None, *, steps: int | None = None, stop_at: Mapping[str, float | None] | None = None
    ) -> Iterator[int]:
        """Yield the epoch of the checkpoint once, without steps: its evaluations are repeated. stop_at: what they should
        reach; else, the exit code is 3."""
        self.prepared("run.epochs()")
        self.length = Length(goals={name: goal for name, goal in (stop_at or {}).items() if goal is not None})
        self.metrics_logger.only_evaluates, self.stage = True, Stage.HEAD
        yield self.metrics_logger.number() - 1
        self.stage = Stage.OUTSIDE
        self.metrics_logger.evaluation()
        self.say(self.metrics_logger.epoch())

    def steps(self, *data: Any, changes: bool = False, restart: bool = False) -> Iterator[Step]:
        self.require_head()
        self.stage = Stage.TAIL
        return iter(())

    def predict(self, **values: Tensor) -> None:
        super().predict(**values)
        if self.flags.predict is None:
            return
        evaluation = self._evaluation
        assert evaluation is not None  # else `super` has raised
        self._predictions = self._predictions or Predictions(whole=evaluation.whole)
        self._predictions.add(evaluation.rows(), values)

    def note_evaluation(self, evaluation: Evaluation) -> None:
        super().note_evaluation(evaluation)
        self._evaluated = True
        if self.flags.predict is not None:
            predictions, self._predictions = self._predictions or Predictions(whole=evaluation.whole), None
            self._write(predictions)

    def _write(self, predictions: Predictions) -> None:
        """Write the predictions of all ranks. A collective."""
        rows = predictions.of_all(self.engine)
        if rows is None:  # of another evaluation, such as that of the training set
            return
        if self._predicted:
            remedy = "call run.predict in one of them"
            raise UserError(
                f"--predict: two evaluations have predicted, and there is one file: {remedy}", everywhere=True
            )
        self._predicted = True
        with self.raising_together("predictions"), self.alone():
            if self.rank == 0:
                write_predictions(self.flags.predict, *rows)
        self.say(f"{self.flags.predict}: {len(rows[0]):,} samples")

    def finish(self, warn_of: Iterable[str] = ()) -> None:
        if not self._evaluated:
            remedy = "write `with run.evaluating(...):` in the loop over run.epochs, or after it"
            raise UserError(f"--evaluate: this program has evaluated nothing: {remedy}", everywhere=True)
        if self.flags.predict is not None and not self._predicted:
            remedy = "write run.predict(predicted=...) beside run.record in its evaluation"
            raise UserError(f"--predict: this program has predicted nothing: {remedy}", everywhere=True)
        super().finish(warn_of)

    def leave_loop(self) -> None:
        self.metrics_logger.evaluation()
