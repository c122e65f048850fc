"""Tar shards by index: which samples they have, and what of shards and indexes that changed."""

import bz2
import gzip
import io
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

from hvdtrain.datasets import decoding, make_shards, tar_shards
from hvdtrain.datasets.images import UNREADABLE
from hvdtrain.datasets.tar_shards import obtain, save, scan
from hvdtrain.engines import atomic
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.single import SerialEngine
from tests import image_set
from tests.single.examples import little_memory, one_line, spoilt, tried

pytestmark = image_set.needs_torchvision
TRAIN, TEST = 48, 31


@pytest.fixture(scope="module")
def tars(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    folder = image_set.write(root / "folder", train=TRAIN, test=TEST)
    make_shards.make_shards(folder / "train", root / "train", per_shard=7, seed=1)
    make_shards.make_shards(folder / "val", root / "val", per_shard=11, seed=1)
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


def open_them(directory: Path) -> tuple[tar_shards.Opened, SerialEngine]:
    engine = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
    engine.device = torch.device("cpu")
    return tar_shards.open_shards(engine, directory, (None, None), 32, classes=None), engine


def unread(dataset: tar_shards.Shards, capsys) -> dict[str, str]:
    """Read all samples, and return why some could not be, by name."""
    lost = [dataset[index][1] for index in range(len(dataset))].count(UNREADABLE)
    lines = [line.removeprefix("warning: skipped: ") for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == lost
    return {f"{file}: {sample}": why for file, sample, why in (line.split(": ", 2) for line in lines)}


def test_labels_are_those_of_the_folder(tars):
    """In the order of the members, across all files."""
    train, labels = open_them(tars)[0].train, []
    for path in sorted((tars / "train").glob("*.tar")):
        with tarfile.open(path) as tar:
            labels += [int(tar.extractfile(name).read()) for name in tar.getnames() if name.endswith(".cls")]
    assert [train[index][1] for index in range(len(train))] == labels
    assert sorted(labels) == sorted(list(range(6)) * 8)


def test_each_kind_of_image_that_a_folder_may_have_is_read_from_its_shards(tmp_path):
    from torchvision.datasets.folder import IMG_EXTENSIONS

    for split in ("train", "val"):
        (tmp_path / "folder" / split / "a").mkdir(parents=True)
        for ending in IMG_EXTENSIONS:
            Image.new("L", (8, 8), 99).save(tmp_path / "folder" / split / "a" / f"x{ending}")
        make_shards.make_shards(tmp_path / "folder" / split, tmp_path / split, per_shard=99, seed=1)
    count = len(IMG_EXTENSIONS)
    train = open_them(tmp_path)[0].train
    assert [train[index][1] for index in range(len(train))] == [0] * count


def test_files_are_closed(tars, monkeypatch):
    monkeypatch.setattr(tar_shards, "OPEN_FILES", 2)
    before = len(list(Path("/proc/self/fd").iterdir()))
    train = open_them(tars)[0].train
    for index in range(TRAIN):
        assert train.read(index)[0][:2] == b"\xff\xd8"  # a JPEG file, from its first byte
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2
    del train
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_shard_is_read_once_and_again_only_if_it_changed(own, monkeypatch):
    first, engine = open_them(own)
    assert engine.notes == []  # make_shards wrote the indexes
    read = []
    monkeypatch.setattr(tar_shards, "scan", lambda path: read.append(path.name) or scan(path))
    copy = Path(shutil.copytree(own, own.parent / "elsewhere"))
    os.utime(copy / "train" / "000002.tar", (1, 1))
    again, engine = open_them(copy)
    assert read == ["000002.tar"]
    assert engine.notes == ["1 of 10 shards indexed now, for this and later runs"]
    assert again.facts == first.facts  # only copied: the same data, wherever it lies
    open_them(copy)
    assert read == ["000002.tar"]


def test_an_index_goes_to_the_cache_where_the_shards_cannot_be_written(own, monkeypatch, tmp_path):
    for path in own.rglob("*.index"):
        path.unlink()
    real = atomic.write_atomically

    def write(path: Path, content: bytes) -> None:
        if own in path.parents:
            raise PermissionError(13, "Permission denied")
        real(path, content)

    monkeypatch.setattr(atomic, "write_atomically", write)
    expected, _ = open_them(own)  # neither there nor in a cache: in memory
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert open_them(own)[0].facts == expected.facts
    monkeypatch.setattr(tar_shards, "scan", lambda path: pytest.fail("read again"))
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
def test_a_shard_that_changed_between_two_runs_is_named_before_training(damage, own, capsys):
    first, _ = open_them(own)
    path = own / "train" / "000002.tar"
    spoil, left, reason = DAMAGES[damage]
    spoil(path)
    second, engine = open_them(own)
    differ = {name for name in first.facts | second.facts if first.facts.get(name) != second.facts.get(name)}
    assert differ == {"000002.tar"}
    assert engine.notes == ["1 of 10 shards indexed now, for this and later runs"]
    lost = TRAIN - len(second.train)
    assert left is None or lost == 7 - left
    # A new run on what is left: every sample is there or accounted for.
    assert unread(second.train, capsys) == {}
    if reason is None:
        assert second.damaged == []
    else:
        ((told, number),) = second.damaged
        assert number == lost
        assert told.startswith(f"{path}: ")
        assert reason in told


def test_a_shard_that_is_gone_is_named(own):
    (own / "train" / "000002.tar").unlink()
    with pytest.raises(
        UserError, match=r"train/sizes.json names '000002.tar', which does not exist: restore it"
    ) as error:
        open_them(own)
    one_line(error.value)
    (own / "train" / "sizes.json").unlink()
    assert "000002.tar" not in open_them(own)[0].facts


def test_content_that_changed_behind_an_index_is_skipped_and_named(own, capsys):
    path = own / "train" / "000002.tar"
    stat = path.stat()
    flip(path, middle_of_an_image(path))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a disk does it
    opened, engine = open_them(own)
    assert engine.notes == []
    assert unread(opened.train, capsys) == {f"{path}: sample 2": "has changed since it was indexed"}


def test_an_index_that_points_elsewhere_costs_its_samples(own, capsys):
    """An index with a right digest, of other positions: what is read there does not have its CRC-32."""
    path = own / "train" / "000002.tar"
    index = scan(path)
    for row, change in enumerate(((0, 2**40), (1, 2**27), (0, -512), (0, 0), (1, 2**62))):
        index.table[row, change[0]] = change[1]
    save(path, index)
    assert len(unread(open_them(own)[0].train, capsys)) == 5


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_shard_lost_during_training_costs_its_samples(how, own, capsys):
    train = open_them(own)[0].train
    path = own / "train" / "000002.tar"
    path.unlink() if how == "gone" else cut(path, 0)
    reason = "No such file or directory" if how == "gone" else "has changed since it was indexed"
    assert unread(train, capsys) == {f"{path}: sample {number}": reason for number in range(7)}


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


def test_samples_without_image_or_class_are_named(engine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decoding, "decode", lambda content, scale=1: torch.zeros(3, 8, 8, dtype=torch.uint8))
    jpeg = b"\xff\xd8 as far as anybody looks here"
    files = {"a.jpg": jpeg, "a.cls": b"1", "b.cls": b"1", "c.jpg": jpeg, "d.jpg": jpeg, "d.cls": b"6"}
    path = tar_of(tmp_path / "odd.tar", files | {"e.jpg": jpeg, "e.cls": b"cat"})
    dataset = tar_shards.Shards(
        [str(path)], tar_shards.indexed(engine, [str(path)]), decoding.Prepare(8, train=True), 6
    )
    assert {name: why[:10] for name, why in unread(dataset, capsys).items()} == {
        f"{path}: sample 1": "no image i", f"{path}: sample 2": "no class (", f"{path}: sample 3": "class 6 of",
        f"{path}: sample 4": "no class (",
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
    opened, _ = open_them(with_sizes(tmp_path, said))
    assert len(opened.train) == 5
    told = (f"{tmp_path}/train/a.tar: 5 samples of {said}", said - 5) if said and said > 5 else None
    assert opened.damaged == ([told] if told else [])


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
    assert tar_shards.class_in("\ufeff7\n".encode()) == 7
    assert tar_shards.class_in("\ufeffcat".encode()) == tar_shards.NO_CLASS
