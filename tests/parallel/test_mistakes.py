"""The record of mistakes, put together from any number of ranks, is that of one process over the whole test set."""

import base64
import json
from dataclasses import asdict

import torch
import torch.nn.functional as F

from hvdtrain.data.sharding import shard
from hvdtrain.training.records.misclassified import FILE, KEPT, record_mistakes

N, CLASSES = 301, 10


def test_the_record_does_not_depend_on_the_number_of_ranks(engine, tmp_path_factory):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(N, CLASSES, generator=generator)
    labels = torch.randint(CLASSES, (N,), generator=generator)
    images = torch.randint(256, (N, 1, 3, 5), generator=generator).byte()
    directory = tmp_path_factory.mktemp("record")

    worst = record_mistakes(engine, logits[shard(N, engine.rank, engine.size)], images, labels, directory)
    if engine.rank != 0:
        assert worst == []
        assert not (directory / FILE).exists()
        return

    predicted, losses = logits.argmax(1), F.cross_entropy(logits, labels, reduction="none")
    record = json.loads((directory / FILE).read_text())
    confusion = [[int(((labels == a) & (predicted == b)).sum()) for b in range(CLASSES)] for a in range(CLASSES)]
    assert record["confusion"] == confusion
    wrong = sorted((predicted != labels).nonzero()[:, 0].tolist(), key=lambda i: -losses[i].item())[:KEPT]
    assert len(wrong) == KEPT
    assert [m["index"] for m in record["mistakes"]] == wrong
    assert [asdict(mistake) for mistake in worst] == [
        {key: value for key, value in m.items() if key != "pixels"} for m in record["mistakes"]
    ]
    for m in record["mistakes"]:
        assert (m["label"], m["predicted"]) == (labels[m["index"]], predicted[m["index"]])
        assert list(base64.b64decode(m["pixels"])) == images[m["index"]].flatten().tolist()
    assert record["shape"] == [3, 5]
