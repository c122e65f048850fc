"""--evaluate: the evaluations of a program are repeated with the model of a run, without steps. And --predict."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from hvdtrain.engines.errors import UserError
from hvdtrain.features.predictions import Predictions, write_predictions
from hvdtrain.loop.evaluation import Evaluation
from hvdtrain.loop.run import Run
from hvdtrain.loop.state import Length, Phase
from hvdtrain.loop.step import Step


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
        self.metrics_logger.only_evaluates, self.phase = True, Phase.HEAD
        yield self.metrics_logger.number() - 1
        self.phase = Phase.OUTSIDE
        self.metrics_logger.evaluation(None)
        self.say(self.metrics_logger.epoch())

    def steps(self, *data: Any, changes: bool = False) -> Iterator[Step]:
        self.require_head()
        self.phase = Phase.TAIL
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
        self.metrics_logger.evaluation(None)
