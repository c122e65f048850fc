"""The library for your own training programs: `from hvdtrain import training`. See docs/training.md."""
# ruff: noqa: E402

from hvdtrain.launching import import_timeout

import_timeout.report_start()
import_timeout.import_torch()

from hvdtrain.cli import count, fraction, non_negative, positive, positive_int
from hvdtrain.cli import training_parser as parser
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.launching.exit_codes import run_command as main
from hvdtrain.loop.run import Run
from hvdtrain.loop.start import start
from hvdtrain.output.metric_names import Metric

__all__ = [
    "Failure", "Metric", "Run", "UserError", "count", "fraction", "main", "non_negative", "parser", "positive",
    "positive_int", "start",
]  # fmt: skip
