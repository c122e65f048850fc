"""Writes a model's wrong predictions to `--output-dir`/mistakes.json: a confusion matrix and the worst mistakes with images.

time          when the file was written (Unix time); if before the start of a run, it belongs to an earlier run
confusion     [classes][classes]: number of samples by true class (row) and predicted class (column), over all ranks
shape         [height, width] of an image
mistakes      highest losses first: index in the test set, label, predicted, loss, pixels (base64, one byte each)
"""

import base64
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hvdtrain.data.sharding import shard
from hvdtrain.engines import files
from hvdtrain.engines.base import Engine

FILE = "mistakes.json"
KEPT = 24  # mistakes in the file; each rank contributes as many
MOST = torch.finfo(torch.float32).max  # replaces a loss that is not finite, which JSON cannot represent


@dataclass(frozen=True, order=True)
class Mistake:
    """A wrong prediction. Sorted by loss, the first field."""

    loss: float
    index: int  # in the test set
    label: int
    predicted: int


def record_mistakes(engine: Engine, logits: Tensor, images: Tensor, labels: Tensor, directory: Path) -> list[Mistake]:
    """Gather the mistakes of all ranks. Rank 0 writes the file and returns the worst mistakes, highest losses first; other
    ranks return []. A collective. If the file cannot be written, a warning is printed.

    logits: [m, classes], for this rank's shard. images, labels: uint8 [n, 1, height, width], int64 [n], the whole test set.
    """
    mine = torch.arange(len(images))[shard(len(images), engine.rank, engine.size)]  # indices in the test set
    logits, truth = logits.float().cpu(), labels.cpu()[mine]
    classes, predicted = logits.shape[1], logits.argmax(1)
    counts = torch.bincount(truth * classes + predicted, minlength=classes**2).view(classes, classes)
    counts = engine.sum(counts, "mistakes.confusion")

    wrong = (predicted != truth).nonzero()[:, 0]
    losses = F.cross_entropy(logits[wrong], truth[wrong], reduction="none").nan_to_num(nan=MOST, posinf=MOST)
    losses, order = losses.sort(descending=True)
    worst = wrong[order[:KEPT]]
    found = [losses[:KEPT], mine[worst], truth[worst], predicted[worst]]
    everyone = engine.all_gather_object(
        list(zip(*(values.tolist() for values in found), strict=True)), "mistakes.worst"
    )
    if engine.rank != 0:
        return []
    together = sorted((Mistake(*mistake) for theirs in everyone for mistake in theirs), reverse=True)[:KEPT]
    mistakes = [
        asdict(mistake) | dict(pixels=base64.b64encode(bytes(images[mistake.index].flatten().tolist())).decode())
        for mistake in together
    ]
    record = dict(time=time.time(), confusion=counts.tolist(), shape=list(images.shape[-2:]), mistakes=mistakes)
    try:
        with files.replacing(directory / FILE) as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        print(f"warning: {directory}/{FILE} not written ({error.strerror})", file=sys.stderr, flush=True)
    return together
