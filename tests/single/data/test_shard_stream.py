"""Shards from URLs and commands: every reader gets the batches it is asked for, and what is corrupt is named."""

import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("webdataset")

from hvdtrain.data import loading, make_shards, shard_stream
from hvdtrain.data.loading import Source
from hvdtrain.data.shard_stream import StreamBatches
from hvdtrain.engines.single import SerialEngine
from hvdtrain.training.inputs import Images
from hvdtrain.training.state import Initial, TrainState
from tests import image_set


@pytest.fixture(scope="module")
def tars(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    folder = image_set.write(root / "folder", train=48, test=31)
    assert make_shards.make(folder / "train", root / "train", per_shard=12, seed=1) == 4
    assert make_shards.make(folder / "val", root / "val", per_shard=11, seed=1) == 3
    return root


def urls(directory: Path) -> list[str]:
    return [f"pipe:cat {path}" for path in sorted(directory.glob("*.tar"))]


class Names:
    """In place of `Prepare`: notes whose image was asked for, and decodes nothing."""

    side = 1

    def __init__(self):
        self.seen: Counter[str] = Counter()

    def __call__(self, content: bytes, epoch: int, name: str) -> torch.Tensor:
        self.seen[name] += 1
        return torch.zeros(3, 1, 1, dtype=torch.uint8)


def read(directory, rank, size, monkeypatch, *, workers=1, plan=None, prepare=None, classes=6):
    """Return the batches of each worker of one rank, read in this process."""
    prepare = prepare or Names()
    batches = []
    for worker in range(workers):
        monkeypatch.setattr(
            shard_stream, "get_worker_info", lambda w=worker: SimpleNamespace(id=w, num_workers=workers)
        )
        batches += StreamBatches(urls(directory), prepare, classes, 1, rank, size, plan)
    return batches


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_test_sample_of_shards_once_over_all_ranks_and_workers(size, workers, tars, monkeypatch):
    names = Names()
    batches = [read(tars / "val", r, size, monkeypatch, workers=workers, prepare=names) for r in range(size)]
    assert len(names.seen) == 31
    assert set(names.seen.values()) == {1}
    assert sum(batch.samples for each in batches for batch in each) == 31


@pytest.mark.parametrize(("size", "workers"), [(1, 1), (2, 1), (2, 2), (3, 2), (5, 3)])
def test_every_rank_gets_the_training_batches_it_is_asked_for(size, workers, tars, monkeypatch):
    names = Names()
    for rank in range(size):
        plan = loading.Plan(48, 48, 1, epochs=10, rank=rank, size=size, batch_size=6)
        batches = read(tars / "train", rank, size, monkeypatch, workers=workers, plan=plan, prepare=names)
        wanted = Counter(len(batch.indices) for _, batch in plan)
        assert Counter(batch.samples for batch in batches) == wanted
    assert len(names.seen) == 48  # none is left out
    if (size * workers) in (1, 2, 4):  # 4 shards divide evenly: 10 times each, but for what waits to be drawn
        print(names.seen)
        assert all(6 <= times <= 14 for times in names.seen.values())


def test_training_streams_repeat_and_depend_on_the_seed(tars):
    def order(seed: int) -> list[str]:
        names = Names()
        plan = loading.Plan(48, 48, seed, epochs=1, rank=0, size=2, batch_size=6)
        list(StreamBatches(urls(tars / "train"), names, 6, seed, 0, 2, plan))
        return list(names.seen)

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_an_input_worker_of_a_rank_with_a_gpu_does_not_start_cuda(tars, monkeypatch):
    """The plan named the rank's device for its indices: 0.5 GB of GPU memory in each worker."""

    def start() -> None:
        raise AssertionError("CUDA started in an input worker")

    monkeypatch.setattr(torch.cuda, "_lazy_init", start)
    engine = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
    engine.device = torch.device("cuda", 0)
    source = Source("shards", "", 6, 48, lambda plan: [], lambda: [])
    flags = SimpleNamespace(seed=1, batch_size=6, accumulate=1)
    plan = Images(engine, source, None).plan(engine, flags, Initial(1, 6, 1), TrainState(), 1, None)
    dataset = pickle.loads(pickle.dumps(StreamBatches(urls(tars / "train"), Names(), 6, 1, 0, 1, plan)))
    assert sum(batch.samples for batch in dataset) == 48


def test_training_goes_on_where_no_shard_can_be_read():
    nothing = [f"pipe:true {number}" for number in range(4)]
    plan = loading.Plan(48, 48, 1, epochs=1, rank=0, size=2, batch_size=5)
    batches = list(StreamBatches(nothing, Names(), 6, 1, 0, 2, plan))
    assert len(batches) == len(list(plan))
    assert sum(batch.samples for batch in batches) == 0
    assert {each.name for batch in batches for each in batch.corrupt} == set(nothing)


@pytest.mark.parametrize(
    ("command", "samples", "complaint"),
    [
        ("cat {}", 11, None),
        ("cat {}; exit 3", 11, "exit code 3"),
        ("head -c 9000 {}", None, "unexpected end of data"),
        ("cat {}.no 2>/dev/null", 0, ""),
    ],
)
def test_shards_from_a_command(command, samples, complaint, tars):
    names = Names()
    url = f"pipe:{command.format(tars / 'val' / '000000.tar')}"
    batches = list(StreamBatches([url], names, 6, 1, 0, 1, None))
    corrupt = [each for batch in batches for each in batch.corrupt if each.name == url]
    assert samples is None or sum(batch.samples for batch in batches) == samples
    if complaint is None:
        assert corrupt == []
    else:
        assert complaint in corrupt[0].why
