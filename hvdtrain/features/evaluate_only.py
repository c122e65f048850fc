"""--evaluate: the evaluations of a program are repeated with the model of a run, without steps. And --predict FILE: what the
model says about each sample of a test set, in the order of the data set."""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.engines import atomic, files
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.portable import name_of_type
from hvdtrain.loop.evaluation import Evaluation
from hvdtrain.loop.gather import kind_of_rows
from hvdtrain.loop.run import Run
from hvdtrain.loop.state import Length, Stage
from hvdtrain.loop.step import Step
from hvdtrain.models.formats import apart
from hvdtrain.models.weights import write_tensors

ROUND_BYTES = 2**22  # of all ranks, when predictions are gathered
NO_ROWS = torch.zeros(0, dtype=torch.int64)
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
            own = apart(value)  # else a part of what a model returns would keep all of that
            if own.dtype in (torch.float16, torch.bfloat16):
                own = own.float()
            elif own.dtype is torch.bool:
                own = own.byte()
            parts = self._values.setdefault(name, [])
            if parts and (kind := kind_of_rows(own)) != kind_of_rows(parts[0]):
                message = f"has rows of {kind} in one batch, and of {kind_of_rows(parts[0])} in others"
                raise UserError(f"run.predict({name}=...) {message}: give the same shape and type in all")
            parts.append(own)

    def of_all(self, engine: Engine) -> Rows | None:
        """Return the predictions of all ranks on rank 0, in the order of the data set, and no rows on others; None if there
        are none. A collective. These are let go meanwhile: outputs may be most of the memory."""
        first = torch.cat(next(iter(self._indices.values()), [NO_ROWS]))
        unlike = next((name for name, rows in self._indices.items() if not torch.equal(torch.cat(rows), first)), None)
        shapes = {name: [list(one.shape[1:]), name_of_type(one.dtype)] for name, (one, *_) in self._values.items()}
        self._indices.clear()
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
        counts, values = [count for count, *_ in everyone], dict[str, Tensor]()
        order = gathered_on_0(engine, [first], NO_ROWS, counts, None, "predict.indices")
        # Samples that a sampler draws several times keep the order of the ranks.
        order, place = order.sort(stable=True)
        places = torch.empty_like(place)
        places[place] = torch.arange(len(place))
        for name, (shape, dtype) in known.items():
            own, none = self._values.pop(name, []), torch.zeros(0, *shape, dtype=getattr(torch, dtype))
            values[name] = gathered_on_0(engine, own, none, counts, places, f"predict.{name}")
        return order, values


def gathered_on_0(
    engine: Engine, parts: list[Tensor], none: Tensor, counts: Sequence[int], places: Tensor | None, name: str
) -> Tensor:
    """Return the rows of all ranks on rank 0, and none on others. A collective, in rounds of some MiB: others need no more.

    parts: of this rank, and empty then. none: no rows of the same kind. counts: of the rows of each rank. places: of each
    row in the result, on rank 0; None: they stay in the order of the ranks.
    """
    round_rows = max(1, ROUND_BYTES // (engine.size * max(1, none.new_empty(1, *none.shape[1:]).nbytes)))
    whole = none.new_empty(sum(counts) if engine.rank == 0 else 0, *none.shape[1:])
    parts.reverse()  # the first one is taken from the end
    for begin in range(0, max(counts), round_rows):
        lengths, own = [max(0, min(count - begin, round_rows)) for count in counts], [none]
        while (left := lengths[engine.rank] - sum(map(len, own))) > 0:
            own.append(parts[-1][:left])
            parts[-1] = parts[-1][left:]
            if not len(parts[-1]):
                parts.pop()
        of_ranks = engine.all_gather_rows(torch.cat(own), lengths, name)
        for rank, rows in enumerate(of_ranks if engine.rank == 0 else ()):
            at = slice(first := sum(counts[:rank]) + begin, first + len(rows))
            whole[at if places is None else places[at]] = rows
    return whole


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
