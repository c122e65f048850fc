"""Tar shards by index: one order on any ranks and workers, exact resumption, and what of shards and indexes that changed."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hvdtrain.datasets import make_shards, shard_index, shards
from hvdtrain.datasets.shard_index import obtain, save, scan
from hvdtrain.engines import atomic
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.single import SerialEngine
from hvdtrain.inputs import loading, sharding
from tests import image_set
from tests.single.examples import little_memory, one_line, spoilt, tried

pytestmark = image_set.needs_torchvision
TRAIN, TEST = 48, 31


class Numbered:
    """In place of `Prepare`: the image that comes out is the sample's number, as pixels."""

    side = 1

    def __init__(self, *arguments, **options):
        pass

    def __call__(self, content: bytes, epoch: int, name: str) -> torch.Tensor:
        assert content[:2] == b"\xff\xd8"  # a JPEG file, from its first byte
        return torch.tensor(list(int(name).to_bytes(3)), dtype=torch.uint8).view(3, 1, 1)


@pytest.fixture(scope="module")
def tars(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    folder = image_set.write(root / "folder", train=TRAIN, test=TEST)
    make_shards.make(folder / "train", root / "train", per_shard=7, seed=1)
    make_shards.make(folder / "val", root / "val", per_shard=11, seed=1)
    return root


@pytest.fixture
def own(tars, tmp_path) -> Path:
    """A copy that a test may damage, with its times and so with valid indexes."""
    for split in ("train", "val"):
        shutil.copytree(tars / split, tmp_path / "own" / split)
    return tmp_path / "own"


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")


@pytest.fixture
def numbered(monkeypatch):
    monkeypatch.setattr(shards, "Prepare", Numbered)


def open_them(directory: Path, workers: int = 0) -> tuple[loading.Source, SerialEngine]:
    engine = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
    engine.device = torch.device("cpu")
    options = dict(side=32, seed=1, workers=workers, classes=None)
    return shards.open_shards(engine, directory, (None, None), **options), engine


def numbers(batch: loading.Loaded) -> list[int]:
    return [int.from_bytes(bytes(image.flatten().tolist())) for image in batch.images[: batch.samples]]


def plan_of(rank: int, size: int, epochs: int = 1, **options) -> loading.Plan:
    return loading.Plan(TRAIN, TRAIN, 1, epochs, rank, size, 12 // size, **options)


def steps_taken(source: loading.Source, size: int, **options) -> list[list[int]]:
    """The samples of each step in the order of positions: rank r has every size-th from r."""
    ranks = [map(numbers, source.train(plan_of(rank, size, **options))) for rank in range(size)]
    steps = []
    for parts in zip(*ranks, strict=True):
        turns = itertools.zip_longest(*parts)
        steps.append([number for turn in turns for number in turn if number is not None])
    return steps


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 0), (3, 0), (4, 0), (1, 3)])
def test_one_order_on_any_number_of_ranks_and_workers(size, workers, tars, numbered, worker_server):
    source, _ = open_them(tars, workers)
    steps = steps_taken(source, size, epochs=2)
    orders = [sharding.epoch_order(TRAIN, 1, epoch) for epoch in range(2)]  # as of a folder
    assert steps == [some.tolist() for order in orders for some in order.split(12)]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 2)])
def test_resumed_inside_an_epoch_on_other_ranks_with_exactly_the_rest(before, after, tars, numbered):
    source, _ = open_them(tars)
    whole = steps_taken(source, before, epochs=2)
    rest = steps_taken(source, after, epochs=2, first_epoch=0, taken=24, global_batch=12)
    assert whole[:2] + rest == whole


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_each_test_image_once_over_all_ranks(size, tars, monkeypatch, numbered):
    seen = []
    for rank in range(size):
        source, engine = open_them(tars)
        monkeypatch.setattr(engine, "rank", rank)
        monkeypatch.setattr(engine, "size", size)
        seen += [number for batch in source.test() for number in numbers(batch)]
    assert sorted(seen) == list(range(TEST))


def test_labels_are_those_of_the_folder(tars, engine):
    source, _ = open_them(tars)
    labels = torch.cat([batch.labels for batch in source.train(plan_of(0, 1))])
    assert sorted(labels.tolist()) == sorted(list(range(6)) * 8)
    keys = []
    for path in sorted((tars / "train").glob("*.tar")):
        with tarfile.open(path) as tar:
            keys += [name.removesuffix(".jpg") for name in tar.getnames() if name.endswith(".jpg")]
    names = shards.find("train", None, tars)
    dataset = shards.ShardBatches(shards.open_indexed(engine, names, [None] * len(names))[0], Numbered(), 6)
    assert [dataset.name(index).rpartition(": ")[2] for index in range(TRAIN)] == keys


def test_each_kind_of_image_that_a_folder_may_have_is_read_from_its_shards(tmp_path):
    from torchvision.datasets.folder import IMG_EXTENSIONS

    for split in ("train", "val"):
        (tmp_path / "folder" / split / "a").mkdir(parents=True)
        for ending in IMG_EXTENSIONS:
            Image.new("L", (8, 8), 99).save(tmp_path / "folder" / split / "a" / f"x{ending}")
        make_shards.make(tmp_path / "folder" / split, tmp_path / split, per_shard=99, seed=1)
    count = len(IMG_EXTENSIONS)
    (batch,) = open_them(tmp_path)[0].train(loading.Plan(count, count, 1, 1, 0, 1, count))
    assert (batch.samples, batch.corrupt) == (count, [])


def test_few_open_files_change_nothing(tars, monkeypatch, numbered):
    source, _ = open_them(tars)
    whole = steps_taken(source, 2)
    monkeypatch.setattr(shards, "OPEN_FILES", 1)
    assert steps_taken(source, 2) == whole


def test_files_are_closed(tars, numbered):
    before = len(list(Path("/proc/self/fd").iterdir()))
    source, _ = open_them(tars)
    list(source.train(plan_of(0, 1)))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_shard_is_read_once_and_again_only_if_it_changed(own, monkeypatch):
    first, engine = open_them(own)
    assert engine.notes == []  # make_shards wrote the indexes
    read = []
    monkeypatch.setattr(shard_index, "scan", lambda path: read.append(path.name) or scan(path))
    copy = Path(shutil.copytree(own, own.parent / "elsewhere"))
    os.utime(copy / "train" / "000002.tar", (1, 1))
    again, engine = open_them(copy)
    assert read == ["000002.tar"]
    assert engine.notes == ["1 of 7 shards indexed now, for this and later runs"]
    assert again.facts == first.facts  # only copied: the same data, wherever it lies
    open_them(copy)
    assert read == ["000002.tar"]


def test_an_index_goes_to_the_cache_where_the_shards_cannot_be_written(own, monkeypatch, tmp_path):
    for path in own.rglob("*.index"):
        path.unlink()
    real = atomic.write

    def write(path: Path, content: bytes) -> None:
        if own in path.parents:
            raise PermissionError(13, "Permission denied")
        real(path, content)

    monkeypatch.setattr(atomic, "write", write)
    expected, _ = open_them(own)  # neither there nor in a cache: in memory
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert open_them(own)[0].facts == expected.facts
    monkeypatch.setattr(shard_index, "scan", lambda path: pytest.fail("read again"))
    found, engine = open_them(own)
    assert (found.facts, engine.notes) == (expected.facts, [])
    assert not list(own.rglob("*.index"))
    assert not list(own.rglob("*.partial"))


def cut(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def cut_between_samples(path: Path) -> None:
    with tarfile.open(path) as tar:
        offset = tar.getmembers()[8].offset
    os.truncate(path, offset)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def middle_of_an_image(path: Path) -> int:
    row = scan(path).table[2].tolist()
    return row[0] + row[1] // 2


# What is done to the third shard, of 7 samples; how many are left; what is said of it.
DAMAGES = {
    "cut": (lambda path: cut(path, 0.5), None, "unexpected end of data"),
    "cut between samples": (cut_between_samples, 3, "unexpected end of data"),  # the last one might go on
    "a header damaged": (lambda path: flip(path, scan(path).table[4, 0].item() - 512), None, "no tar header at byte"),
    "no tar": (lambda path: path.write_bytes(b"x" * 4000), 0, ""),
    "another shard": (lambda path: shutil.copy(path.with_name("000003.tar"), path), 7, None),
    "one bit of an image": (lambda path: flip(path, middle_of_an_image(path)), 7, None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_shard_that_changed_between_two_runs_is_named_before_training(damage, own):
    first, _ = open_them(own)
    path = own / "train" / "000002.tar"
    spoil, left, reason = DAMAGES[damage]
    spoil(path)
    second, engine = open_them(own)
    differ = {name for name in first.facts | second.facts if first.facts.get(name) != second.facts.get(name)}
    assert differ == {"000002.tar"}
    assert engine.notes == ["1 of 7 shards indexed now, for this and later runs"]
    lost = TRAIN - second.train_count
    assert left is None or lost == 7 - left
    # A new run on what is left: every sample is there or accounted for.
    batches = list(second.train(loading.Plan(second.train_count, second.train_count, 1, 1, 0, 1, 10)))
    assert sum(batch.samples for batch in batches) == second.train_count
    assert [each for batch in batches for each in batch.corrupt] == []
    if reason is None:
        assert second.damaged == []
    else:
        (told,) = second.damaged
        assert (told.name, told.lost) == (str(path), lost)
        assert reason in told.why


def test_a_shard_that_is_gone_is_named(own):
    (own / "train" / "000002.tar").unlink()
    with pytest.raises(
        UserError, match=r"train/sizes.json names '000002.tar', which does not exist: restore it"
    ) as error:
        open_them(own)
    one_line(error.value)
    (own / "train" / "sizes.json").unlink()
    assert "000002.tar" not in open_them(own)[0].facts


def test_content_that_changed_behind_an_index_is_skipped_and_named(own, numbered):
    path = own / "train" / "000002.tar"
    stat = path.stat()
    flip(path, middle_of_an_image(path))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a disk does it
    source, engine = open_them(own)
    assert engine.notes == []
    batches = list(source.train(plan_of(0, 1)))
    (told,) = [each for batch in batches for each in batch.corrupt]
    assert told.name.startswith(f"{path}: 0000")
    assert told.why == "has changed since it was indexed"
    assert sum(batch.samples for batch in batches) == TRAIN - 1


def test_an_index_that_points_elsewhere_costs_its_samples(own, numbered):
    """An index with a right digest, of other positions: what is read there does not have its CRC-32."""
    path = own / "train" / "000002.tar"
    index = scan(path)
    for row, change in enumerate(((0, 2**40), (1, 2**27), (0, -512), (0, 0), (1, 2**62))):
        index.table[row, change[0]] = change[1]
    save(path, index)
    batches = list(open_them(own)[0].train(plan_of(0, 1)))
    assert sum(batch.samples for batch in batches) == TRAIN - 5
    assert len([each for batch in batches for each in batch.corrupt]) == 5


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_shard_lost_during_training_costs_its_samples(how, own, numbered):
    source, _ = open_them(own)
    path = own / "train" / "000002.tar"
    path.unlink() if how == "gone" else cut(path, 0)
    batches = list(source.train(plan_of(0, 1)))
    corrupt = [each for batch in batches for each in batch.corrupt]
    assert sum(batch.samples for batch in batches) == TRAIN - 7
    assert sorted(each.name for each in corrupt) == [f"{path}: sample {number}" for number in range(7)]
    reason = "No such file or directory" if how == "gone" else "has changed since it was indexed"
    assert {each.why for each in corrupt} == {reason}


def tar_of(path: Path, files: dict[str, bytes], kind: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_samples_are_those_that_webdataset_finds(kind, tmp_path):
    long = "d" * 90 + "/" + "e" * 60
    files = {
        "a.JPG": b"A", "a.jpg": b"second", "a.cls": b" 1\n", "b.cls": b"1", "c.jpg": b"C", "__x__": b"?",
        "d/e.f.jpg": b"D",
    }  # fmt: skip
    files |= {"d/e.cls": b"2", "n": b"", "g.png": b"G", "g.jpg": b"J", "g.cls": b"cat", f"{long}.jpg": b"L" * 600}
    files |= {f"{long}.cls": b"3", "h.jpg": b"", "h.cls": b"-4", "i.jpg": b"I", "i.cls": b"9" * 19}
    path = tar_of(tmp_path / "odd.tar", files, kind)
    index, content = scan(path), path.read_bytes()
    expected = [(b"A", 1), (None, 1), (b"C", -1), (None, 2), (b"J", -1), (b"L" * 600, 3), (b"", -1), (b"I", -1)]
    found = [(content[offset : offset + size] if size >= 0 else None, label)
             for offset, size, label, _ in index.table.tolist()]  # fmt: skip
    assert found == expected
    assert index.problem is None


def written(path: Path, *archives: list[tuple[str, bytes, bytes]]) -> Path:
    """Write tar files one after the other, of members as (name, content, type). A link's content is where it leads."""
    with path.open("wb") as file:
        for archive in archives:
            with tarfile.open(fileobj=file, mode="w") as tar:
                for name, content, kind in archive:
                    info = tarfile.TarInfo(name)
                    info.type = kind
                    if kind == tarfile.REGTYPE:
                        info.size = len(content)
                    else:
                        info.linkname = content.decode()
                    tar.addfile(info, io.BytesIO(content))
    return path


PLAIN, HARD, SYMBOLIC = tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE
PAIR = [("a.jpg", b"A", PLAIN), ("a.cls", b"1", PLAIN)]


@pytest.mark.parametrize(
    ("archives", "samples", "problem"),
    [
        ([PAIR * 24], 1, "a.jpg is in it twice in a row: give each sample its own name"),
        ([PAIR, PAIR], 1, "more follows the end of the archive: join tar files with tar --concatenate"),
        ([[*PAIR, ("b.jpg", b"a.jpg", HARD), ("b.cls", b"2", PLAIN)]], 2,
         "b.jpg is a link: create it with tar --hard-dereference -h"),
        ([[*PAIR, ("b.jpg", b"B", PLAIN), ("b.cls", b"a.cls", SYMBOLIC)]], 2,
         "b.cls is a link: create it with tar --hard-dereference -h"),
        ([[("latest.txt", b"a.txt", SYMBOLIC), *PAIR]], 1, None),
    ],
)  # fmt: skip
def test_samples_that_are_in_a_shard_and_cannot_be_used_are_said(archives, samples, problem, tmp_path):
    """They were left out in silence: webdataset raises an error for a name that comes twice."""
    index = scan(written(tmp_path / "odd.tar", *archives))
    assert (len(index.table), index.problem) == (samples, problem)


def test_a_sparse_member_is_no_image(tmp_path):
    """A few bytes may say that they are any number."""
    info = tarfile.TarInfo("a.jpg")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % 2**20  # size when expanded
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(header + bytes(1024))
    index = scan(tmp_path / "a.tar")
    assert (len(index.table), index.problem) == (0, None)


def test_samples_without_image_or_class_are_named(engine, tmp_path):
    jpeg = b"\xff\xd8 as far as anybody looks here"
    files = {"a.jpg": jpeg, "a.cls": b"1", "b.cls": b"1", "c.jpg": jpeg, "d.jpg": jpeg, "d.cls": b"6"}
    path = tar_of(tmp_path / "odd.tar", files | {"e.jpg": jpeg, "e.cls": b"cat"})
    opened, _ = shards.open_indexed(engine, [str(path)], [None])
    batch = shards.ShardBatches(opened, Numbered(), 6)[0, [0, 1, 2, 3, 4]]
    assert numbers(batch) == [0]
    assert {each.name: each.why[:10] for each in batch.corrupt} == {
        f"{path}: b": "no image i", f"{path}: c": "no class (", f"{path}: d": "class 6 of", f"{path}: e": "no class (",
    }  # fmt: skip


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_shards_are_refused(compress, tmp_path):
    path = tar_of(tmp_path / "a.tar", {"a.jpg": b"1"})
    path.write_bytes(compress(path.read_bytes()))
    with pytest.raises(UserError, match=r"a.tar is compressed: unpack it") as error:
        scan(path)
    one_line(error.value)


# Indexes as nobody should leave them.

SMALL = {f"{number}.{kind}": b"\xff\xd8" if kind == "jpg" else b"1" for number in range(5) for kind in ("jpg", "cls")}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, bytes]:
    path = tar_of(tmp_path_factory.mktemp("small") / "a.tar", SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", "/dev/null/none")
        obtain(path)
    return path, path.with_name("a.tar.index").read_bytes()


@tried(60)
@given(data=st.data())
def test_any_index_is_right_or_made_again(small, data):
    path, sound = small
    beside = path.with_name("a.tar.index")
    content = data.draw(spoilt(sound))
    beside.write_bytes(content)
    with little_memory():
        index, made = obtain(path)
    assert torch.equal(index.table, scan(path).table)
    assert made or content == sound
    assert beside.read_bytes() == sound


def test_an_index_of_a_billion_samples_takes_no_memory(small):
    path, sound = small
    beside = path.with_name("a.tar.index")
    os.truncate(beside, 32 * 10**9)  # sparse
    with little_memory():
        index, made = obtain(path)
    assert (len(index.table), made) == (5, True)
    assert beside.read_bytes() == sound


@pytest.mark.parametrize("said", [None, 5, 6, 10**9])
def test_samples_that_a_shard_has_lost_are_counted(said, tmp_path):
    source, _ = open_them(with_sizes(tmp_path, said))
    assert source.train_count == 5
    lost = [(each.lost, each.why) for each in source.damaged]
    assert lost == ([(said - 5, f"5 samples of {said}")] if said and said > 5 else [])


@pytest.mark.parametrize("said", [3, -1, "5", 5.0, True])
def test_an_impossible_number_of_samples_is_refused(said, tmp_path):
    with pytest.raises(
        UserError, match=r"sizes.json gives .*a.tar .* samples.*: create it again, or remove it"
    ) as error:
        open_them(with_sizes(tmp_path, said))
    one_line(error.value)


def with_sizes(directory: Path, said: object) -> Path:
    """Write shards of five samples, of which sizes.json says that they have `said`."""
    for split in ("train", "val"):
        (directory / split).mkdir()
        tar_of(directory / split / "a.tar", SMALL)
    (directory / "train" / "sizes.json").write_text(json.dumps({"a.tar": said}))
    return directory


def test_a_class_may_follow_a_byte_order_mark():
    assert shard_index.class_in("\ufeff7\n".encode()) == 7
    assert shard_index.class_in("\ufeffcat".encode()) == shard_index.NO_CLASS
