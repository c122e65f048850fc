"""Streams of other libraries, as docs/data.md shows them: killed and resumed, with workers and without.

The libraries are not installed by `make setup`: pip install datasets torchdata webdataset.
"""

import io
import itertools
import re
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from tests.single.training import test_streams
from tests.single.training.small import killed
from tests.single.training.test_streams import SAVED, N, resumed_at, train

pytestmark = pytest.mark.usefixtures("worker_server")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "data.md"
SHARDS = 8
ALONE = SimpleNamespace(rank=0, size=1)


def shown(comment: str) -> str:
    """Return the line of the page that ends with this comment."""
    (line,) = re.findall(rf"^.*# {comment}.*$", PAGE.read_text(), re.M)
    return line


def rows(shards):
    for shard in shards:
        for number in range(N)[shard::SHARDS]:
            yield f"{shard}-{number}", {"a": number}


def collate(samples):
    numbers = torch.tensor([[float(sample["a"])] for sample in samples])
    return numbers, torch.zeros_like(numbers)


def hugging_face(shuffles=None):
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face's datasets: pip install datasets")
    from datasets.distributed import split_dataset_by_node

    examples = datasets.iterable_dataset.ExamplesIterable(rows, {"shards": list(range(SHARDS))})
    ds = datasets.IterableDataset(examples)
    if shuffles is not None:
        ds = ds.shuffle(seed=3, buffer_size=1, **shuffles)
    scope = dict(ds=ds, run=ALONE, split_dataset_by_node=split_dataset_by_node)
    exec(shown("Hugging Face datasets"), scope)
    return scope["ds"]


def stateful(ds, workers=0):
    pytest.importorskip("torchdata", reason="needs torchdata: pip install torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(ds, 4, collate_fn=collate, num_workers=workers)


RESUMED = {
    "datasets": lambda: DataLoader(hugging_face(), 4, collate_fn=collate),
    "datasets, shuffled": lambda: DataLoader(hugging_face({}), 4, collate_fn=collate),
    "datasets, 2 workers": lambda: DataLoader(hugging_face(), 4, collate_fn=collate, num_workers=2),
    "datasets, shuffled one by one, 2 workers": lambda: DataLoader(hugging_face({"max_buffer_input_shards": 1}), 4,
        collate_fn=collate, num_workers=2),
    "torchdata": lambda: stateful(hugging_face({})),
    "torchdata, shuffled one by one, 2 workers": lambda: stateful(hugging_face({"max_buffer_input_shards": 1}), 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", RESUMED)
def test_a_killed_run_continues_at_the_very_sample(kind, tmp_path):
    test_streams.killed_and_continued(RESUMED[kind], tmp_path)


def test_datasets_still_mistakes_the_state_of_a_worker_for_that_of_the_rank(tmp_path):
    """Of shards that `shuffle` interleaves: _iter_pytorch loads the state before it has divided the shards among workers.

    Once this fails, the page need not say how to avoid it.
    """

    def loader():
        return DataLoader(hugging_face({}), 4, collate_fn=collate, num_workers=2)

    killed(train, loader(), *SAVED, out=tmp_path, kill=5)
    with pytest.raises(IndexError, match="list index out of range"):
        train(loader(), *SAVED, out=tmp_path)


def number_of(sample):
    return {"a": int(sample["txt"])}


def tar_shards(directory: Path) -> list[str]:
    for shard in range(SHARDS):
        with tarfile.open(directory / f"{shard}.tar", "w") as file:
            for _, row in rows([shard]):
                text = str(row["a"]).encode()
                member = tarfile.TarInfo(f"{row['a']:05}.txt")
                member.size = len(text)
                file.addfile(member, io.BytesIO(text))
    return [str(directory / f"{shard}.tar") for shard in range(SHARDS)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_on_a_webdataset_begins_its_epoch_anew_and_says_so(workers, tmp_path, capsys):
    wds = pytest.importorskip("webdataset", reason="needs webdataset: pip install webdataset")
    urls = tar_shards(tmp_path)

    def loader():
        scope = dict(wds=wds, urls=urls, run=ALONE)
        exec(shown("webdataset"), scope)
        return DataLoader(scope["ds"].decode().map(number_of), 4, collate_fn=collate, num_workers=workers)

    seen, _ = train(loader())
    assert [sorted(seen[epoch]) for epoch in (0, 1)] == [list(range(N))] * 2
    killed(train, loader(), *SAVED, out=tmp_path / "out", kill=19)
    lost = "WebDataset has no state_dict and load_state_dict: a resumed run begins the epoch of this stream anew"
    assert lost in capsys.readouterr().out
    rest, _ = train(loader(), *SAVED, out=tmp_path / "out")
    assert rest == {1: seen[1]}
    taken = resumed_at(tmp_path / "out")
    assert (
        f"epoch 2 of the stream begins anew, after {taken} samples: WebDataset has no state" in capsys.readouterr().out
    )


def test_your_own_stream():
    numbers = list(range(N))
    parts = [eval(shown("your own; ").partition("#")[0], dict(numbers=numbers, run=SimpleNamespace(rank=rank, size=3)))
             for rank in range(3)]  # fmt: skip
    assert sorted(itertools.chain(*parts)) == numbers
