"""Records of runs as a test writes them, and what a browser would make of their page."""

import json
from html.parser import HTMLParser

import pytest

HOSTILE = "<script>alert(1)</script>\"'&$\\frac{$"


def start(time: float, **more) -> dict:
    config = {"batch_size": 64, "lr": 0.01, "compression": "none", "output_dir": str(time)} | more.pop("config", {})
    ranks = [{"rank": 0, "host": "a", "pid": 1, "device": "cpu"}]
    return {"event": "start", "time": time, "world_size": 2, "engine": "horovod", "dataset": "digits", "config": config,
            "versions": {"torch": "2.15"}, "ranks": ranks} | more  # fmt: skip


def step(time: float, number: int, loss: float = 1.0, **more) -> dict:
    return {"event": "train", "time": time, "epoch": 1, "step": number, "samples": 64 * number, "loss": loss,
            "samples_per_second": 100.0, "loading_seconds": 1e-3, "compute_seconds": 6e-3,
            "communication_seconds": 3e-3} | more  # fmt: skip


def evaluation(time: float, accuracy: float = 0.9) -> dict:
    return {"event": "evaluate", "time": time, "epoch": 1, "loss": 0.4, "accuracy": accuracy, "count": 382}


END = {"event": "end", "time": 110.0, "test_accuracy": 0.9, "test_loss": 0.4, "test_count": 382, "samples": 256,
       "train_seconds": 5.0, "total_seconds": 9.0, "samples_per_second": 51.2}  # fmt: skip
WHOLE = [start(100.0), *(step(100.0 + n, n) for n in range(1, 5)), evaluation(105.0), END]


@pytest.fixture
def leave(tmp_path):
    """Write a run's metrics.jsonl, events or raw lines, and return its directory."""

    def write(name: str, *lines):
        directory = tmp_path / name
        directory.mkdir()
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (directory / "metrics.jsonl").write_text("\n".join(texts) + "\n")
        return directory

    return write


class Page(HTMLParser):
    """What a browser would make of a page: tags, where they point, text."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.sources, self.handlers, self.text = set(), [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.sources += [v for k, v in attributes if k in ("src", "href", "xlink:href", "action", "data")]
        self.handlers += [k for k, _ in attributes if k.startswith("on")]

    def handle_data(self, data):
        self.text += data
