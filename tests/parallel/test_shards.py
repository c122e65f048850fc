"""Ranks share the work of indexing tar shards, and all have the whole index afterwards."""

import io
import shutil
import tarfile
from pathlib import Path

import pytest

from hvdtrain.datasets import tar_shards
from hvdtrain.datasets.tar_shards import obtain, scan
from hvdtrain.engines.errors import UserError

SIZES = (3, 0, 7, 1, 5)  # samples


@pytest.fixture
def directory(engine, tmp_path_factory):
    """Shards without an index, in a place that all ranks know."""
    place = Path(engine.broadcast_object(str(tmp_path_factory.mktemp("shards")), "place"))
    if engine.rank == 0:
        for number, size in enumerate(SIZES):
            with tarfile.open(place / f"{number}.tar", "w") as tar:
                for sample in range(size):
                    for kind, content in (("cls", b"1"), ("jpg", b"J" * (100 * number + sample))):
                        info = tarfile.TarInfo(f"{sample}.{kind}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
    engine.barrier()
    yield place
    engine.barrier()
    if engine.rank == 0:
        shutil.rmtree(place)


def test_every_rank_has_the_index_and_one_made_each_part(engine, directory, monkeypatch):
    made = []
    monkeypatch.setattr(tar_shards, "obtain", lambda path: made.append(path.name) or obtain(path))

    names = [str(directory / f"{number}.tar") for number in range(len(SIZES))]
    engine.notes.clear()
    indexes = tar_shards.indexed(engine, names)
    assert [len(index.table) for index in indexes] == list(SIZES)
    assert [index.digest() for index in indexes] == [scan(Path(name)).digest() for name in names]
    assert made == [Path(name).name for name in names[engine.rank :: engine.size]]
    if engine.rank == 0:
        assert engine.notes == ["5 of 5 shards indexed now, for this and later runs"]
        assert len(list(directory.glob("*.tar.index"))) == len(SIZES)
    again = tar_shards.indexed(engine, names)
    assert [index.digest() for index in again] == [index.digest() for index in indexes]


def test_what_one_rank_cannot_read_every_rank_reports(engine, directory):
    names = [str(directory / f"{number}.tar") for number in range(len(SIZES))]
    if engine.rank == 0:
        Path(names[-1]).unlink()
    engine.barrier()
    with pytest.raises(UserError, match=r"4\.tar cannot be read \(No such file or directory\): check it"):
        tar_shards.indexed(engine, names)
