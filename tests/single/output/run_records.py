"""Records of runs as a test writes them, and what a browser would make of their page."""

import json
from html.parser import HTMLParser

import pytest

HOSTILE = "<script>alert(1)</script>\"'&$\\frac{$"
LOSS = {"loss": {"direction": "min", "percent": False}}
ACCURACY = {"accuracy": {"direction": "max", "percent": True}}


def start(time: float, **more) -> dict:
    config = {"batch_size": 64, "lr": 0.01, "compression": "none", "output_dir": str(time)} | more.pop("config", {})
    ranks = [{"rank": 0, "host": "a", "pid": 1, "device": "cpu"}]
    return {"event": "start", "time": time, "world_size": 2, "engine": "horovod", "dataset": "digits", "config": config,
            "versions": {"torch": "2.15"}, "ranks": ranks, "metrics": ACCURACY | LOSS} | more  # fmt: skip


def step(time: float, number: int, loss: float | None = 1.0, **more) -> dict:
    return {"event": "train", "time": time, "epoch": 1, "step": number, "samples": 64 * number, "loss": loss,
            "samples_per_second": 100.0} | more  # fmt: skip


def steps(count: int = 4, **named) -> list[dict]:
    """`named`: from a step's number to a value."""
    return [step(100.0 + n, n, **{k: of(n) for k, of in named.items()}) for n in range(1, count + 1)]


def evaluation(time: float, epoch: int = 1, prefix: str = "test", **values) -> dict:
    return {"event": "evaluate", "time": time, "epoch": epoch, "prefix": prefix, "count": 500} | values


RANKS = {"event": "ranks", "time": 104.5, "epoch": 1, "loading_seconds": [1, 0], "compute_seconds": [2, 3],
         "communication_seconds": [1, 1], "elapsed_seconds": [5, 4]}  # fmt: skip


def end(**more) -> dict:
    return {"event": "end", "time": 110.0, "samples": 256, "train_seconds": 5.0, "samples_per_second": 51.2} | more


WHOLE = [
    start(100.0), *steps(accuracy=lambda n: n / 5), evaluation(104.5, 1, loss=0.5, accuracy=0.8),
    evaluation(105.0, 2, loss=0.4, accuracy=0.9), RANKS, end(test_accuracy=0.9, test_loss=0.4, test_count=500),
]  # fmt: skip
REGRESSION = [start(100.0, metrics=LOSS), *steps(), evaluation(104.5, 1, loss=0.25), evaluation(105.0, 2, loss=0.5),
              end(test_loss=0.5, test_count=500)]  # fmt: skip
LANGUAGE = [
    start(100.0, metrics=LOSS | {"perplexity": {"direction": "min", "percent": False}}),
    *steps()[:2], evaluation(102.5, 1, "validation", loss=2.0, perplexity=7.389),
    *steps()[2:], evaluation(105.0, 2, "", validation_loss=1.5, perplexity=4.48),
    end(validation_loss=1.5, validation_count=500, perplexity=4.48, tokens_per_second=1e6),
]  # fmt: skip
GAN = [
    start(100.0, metrics=LOSS),
    *steps(loss=lambda n: None, critic_loss=lambda n: 1.5 * n - 4, generator_loss=lambda n: 0.5),
    end(),
]
KINDS = {"classifier": WHOLE, "regression": REGRESSION, "language": LANGUAGE, "gan": GAN}


@pytest.fixture
def leave(tmp_path):
    """Write a run's metrics.jsonl, events or raw lines, and return its directory."""

    def write(name: str, *lines):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        texts = [line if isinstance(line, str) else json.dumps({"elapsed": line.get("time"), **line}) for line in lines]
        (directory / "metrics.jsonl").write_text("\n".join(texts) + "\n")
        return directory

    return write


class Page(HTMLParser):
    """What a browser would make of a page: tags, where they point, text, and the rows of its tables."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.sources, self.handlers, self.text = set(), [], [], ""
        self.rows: list[list[str]] = []
        self.pictures: list[str] = []
        self._cell = False
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.sources += [v for k, v in attributes if k in ("src", "href", "xlink:href", "action", "data")]
        self.handlers += [k for k, _ in attributes if k.startswith("on")]
        if tag == "img":
            self.pictures.append(dict(attributes)["alt"])
        if tag == "tr":
            self.rows.append([])
        self._cell = tag in ("th", "td")
        if self._cell:
            self.rows[-1].append("")

    def handle_data(self, data):
        self.text += data
        if self._cell and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag):
        self._cell = self._cell and tag not in ("th", "td")

    def row(self, name: str) -> list[str]:
        """Return the cells of the first row with this name."""
        return next(row[1:] for row in self.rows if row and row[0] == name)
