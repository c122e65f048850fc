"""--tensorboard: writes events as scalars over samples, the worst mistakes as images, and the model's graph."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hvdtrain.engines.errors import UserError
from hvdtrain.training.records.misclassified import Mistake
from hvdtrain.training.records.named import number, recorded_metrics, tagged_values
from hvdtrain.training.state import Metric

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch.utils.tensorboard import SummaryWriter

COLUMNS = 8
IMAGE_PIXELS = 84  # maximum length of an enlarged image's longer side; images are scaled by integers
CAPTION_PIXELS = 28  # two lines


class Board:
    """Writes TensorBoard files to `directory`. If `continued`, existing files are kept; otherwise an existing directory is
    renamed.

    Raises UserError if the package is missing.
    """

    def __init__(self, directory: Path, continued: bool):
        try:
            # Optional: neither torch nor hvdtrain depends on tensorboard.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(f"--tensorboard needs a package: pip install tensorboard ({error})") from error
        try:
            str(directory).encode()
        except UnicodeEncodeError as error:
            how = "name another --output-dir"
            raise UserError(f"--tensorboard cannot write to {directory}: the path is not UTF-8: {how}") from error
        if directory.exists() and not continued:
            number = 1
            while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
                number += 1
            directory.rename(aside)
        directory.mkdir(parents=True, exist_ok=True)
        self._make, self._directory = SummaryWriter, directory
        self._writer: SummaryWriter | None = None
        self._continued = continued
        # The x axis: samples since the beginning of training, or steps if samples are not counted.
        self._samples = 0
        self._metrics: dict[str, Metric] = {}

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Write the numbers of a `train` or `evaluate` event. A `resume` event hides what was written after its position."""
        if name == "start":
            self._metrics = recorded_metrics(fields) or {}
        elif name == "resume":
            self._go_to(fields)
            self._open()
        elif name == "train":
            self._go_to(fields)
            self._add(tagged_values(name, fields, self._metrics))
        elif name == "evaluate":
            self._add(tagged_values(name, fields, self._metrics))

    def _go_to(self, fields: Mapping[str, Any]) -> None:
        at = number(fields.get("samples"))
        at = number(fields.get("step")) if at is None else at
        self._samples = self._samples if at is None else int(at)

    def mistakes(self, images: Tensor, mistakes: Sequence[Mistake]) -> None:
        """Write the mistakes as one image. images: uint8 [n, 1, height, width], the whole test set."""
        if mistakes:
            picture = montage(images, mistakes)
            pixels = torch.tensor(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width)
            self._open().add_image("test/mistakes", pixels, self._samples, dataformats="HW")

    def graph(self, model: nn.Module, images: Tensor) -> None:
        """Write the model's graph, traced by running it on `images` in evaluation mode. The model is not changed."""
        if self._continued:  # already written
            return
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # warnings of the tracer
                self._open().add_graph(model, images)
        except Exception as error:  # any error of the tracer must not end the run
            print(f"warning: TensorBoard gets no graph of this model ({error})", file=sys.stderr, flush=True)

    def _open(self) -> "SummaryWriter":
        if self._writer is None:
            purge = self._samples + 1 if self._continued else None
            self._writer = self._make(str(self._directory), purge_step=purge, flush_secs=10)
        return self._writer

    def _add(self, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._open().add_scalar(tag, value, self._samples)

    def close(self) -> None:
        """Close the files. Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def montage(images: Tensor, mistakes: Sequence[Mistake]) -> "Image":
    """Return one grayscale image of the mistakes, in order. Below each are label and prediction ("7 as 2"), and the loss.

    images: uint8 [n, 1, height, width], the whole test set.
    """
    from PIL import Image, ImageDraw  # tensorboard needs it too

    height, width = images.shape[2:]
    scale = max(1, IMAGE_PIXELS // max(height, width))
    across, down = max(width * scale, IMAGE_PIXELS) + 4, height * scale + CAPTION_PIXELS
    picture = Image.new("L", (across * min(COLUMNS, len(mistakes)), down * -(-len(mistakes) // COLUMNS)))
    draw = ImageDraw.Draw(picture)
    for place, mistake in enumerate(mistakes):
        x, y = place % COLUMNS * across, place // COLUMNS * down
        image = Image.frombytes("L", (width, height), bytes(images[mistake.index].flatten().tolist()))
        picture.paste(image.resize((width * scale, height * scale), Image.Resampling.NEAREST), (x, y))
        draw.text((x + 2, y + height * scale + 1), f"{mistake.label} as {mistake.predicted}", fill=255)
        draw.text((x + 2, y + height * scale + 13), f"loss {mistake.loss:.3g}", fill=170)
    return picture
