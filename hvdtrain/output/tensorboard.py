"""--tensorboard: writes the numbers of events as scalars over samples."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError
from hvdtrain.output.metric_names import Metric, finite_or_not, recorded_metrics, tagged_values

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Board:
    """Writes TensorBoard files to `directory`. If `continued`, existing files are kept; otherwise an existing directory is
    renamed.

    Raises UserError if the package is missing, and OSError.
    """

    def __init__(self, directory: Path, continued: bool):
        try:
            # Optional: neither torch nor hvdtrain depends on tensorboard.
            from torch.utils import tensorboard
        except ImportError as error:
            raise UserError(f"--tensorboard needs a package: pip install tensorboard ({error})") from error
        try:
            str(directory).encode()
        except UnicodeEncodeError as error:
            remedy = "name another --output-dir"
            raise UserError(f"--tensorboard cannot write to {directory}: the path is not UTF-8: {remedy}") from error
        if os.path.lexists(directory) and not (continued and directory.is_dir() and not directory.is_symlink()):
            directory.rename(files.unused_name(directory))  # of an earlier run, or a file or a link
        files.make_directory(directory)
        self._make, self._directory, self._continued = tensorboard.SummaryWriter, directory, continued
        self._writer: SummaryWriter | None = None
        # The x axis: samples since the beginning of training, or steps if samples are not counted.
        self._at = 0
        self._metrics: dict[str, Metric] = {}

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Write the numbers of a `train` or `evaluate` event. A `resume` event hides what was written after its position."""
        if name == "start":
            self._metrics = recorded_metrics(fields)
        if name in ("resume", "train"):
            at = finite_or_not(fields.get("samples"))
            at = finite_or_not(fields.get("step")) if at is None else at
            self._at = self._at if at is None else int(at)
        if name in ("resume", "train", "evaluate"):
            if self._writer is None:
                # TensorBoard hides what an earlier attempt wrote after the position to which this one has gone back.
                purge = (self._at + 1) * (name == "resume") if self._continued else None
                self._writer = self._make(str(self._directory), purge_step=purge, flush_secs=10)
            for tag, value in tagged_values(name, fields, self._metrics).items():
                self._writer.add_scalar(tag, value, self._at)

    def close(self) -> None:
        """Close the files. Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
