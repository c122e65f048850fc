"""hvdtrain.data.idx: MNIST files found, verified, named when wrong; what the ranks of a host share."""

import gzip
import os
import resource
import shutil
import time
import tracemalloc
import warnings
from pathlib import Path

import pytest
import torch

from hvdtrain.data import cache, idx, published
from hvdtrain.engines.errors import UserError
from tests.single.data import fake_mnist as fake

IMAGES, LABELS, TEST_IMAGES, TEST_LABELS = fake.NAMES


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The small datasets, an empty cache and working directory, and no mirrors."""
    for name in published.PUBLISHED:
        monkeypatch.setitem(published.PUBLISHED, name, fake.published(name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read and hashed, as it happens."""
    names: list[str] = []
    original = idx.content_of

    def counted(dataset: published.Published, file: published.File, path: Path) -> tuple[bytes, os.stat_result]:
        names.append(path.name)
        return original(dataset, file, path)

    monkeypatch.setattr(idx, "content_of", counted)
    return names


def check(data: idx.Dataset, files: dict[str, bytes] = fake.MNIST) -> None:
    assert data.train_images.shape == (20, 1, 28, 28)
    assert data.test_images.shape == (10, 1, 28, 28)
    assert data.train_images.dtype == data.test_images.dtype == torch.uint8
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64
    assert bytes(data.train_images.flatten().tolist()) == files[IMAGES][16:]
    assert data.train_labels.tolist() == list(files[LABELS][8:])
    assert bytes(data.test_images.flatten().tolist()) == files[TEST_IMAGES][16:]
    assert data.test_labels.tolist() == list(files[TEST_LABELS][8:])
    assert "\n" not in data.reason


# Found


@pytest.mark.parametrize("folder", ["", "MNIST/raw"])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("cached", [True, False])
def test_found_in_both_layouts(
    tmp_path: Path, folder: str, compressed: bool, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cached:
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    directory = fake.write(tmp_path / "d" / folder, compressed=compressed)
    with warnings.catch_warnings(action="error"):  # torch warns of read-only buffers
        for _ in range(2):
            data = idx.load("mnist", tmp_path / "d")
            check(data)
            assert data.name == "mnist"
            assert data.reason == f"MNIST from {directory} (content verified)"
    assert sorted(path.name.removesuffix(".gz") for path in directory.iterdir()) == sorted(fake.NAMES)  # and no more


def test_files_may_be_mixed_and_gzip_files_may_have_several_members(tmp_path: Path) -> None:
    fake.write(tmp_path)
    content = (tmp_path / IMAGES).read_bytes()
    (tmp_path / IMAGES).unlink()
    (tmp_path / f"{IMAGES}.gz").write_bytes(gzip.compress(content[:1000]) + gzip.compress(content[1000:]))
    check(idx.load("mnist", tmp_path))


def test_without_a_directory_data_then_the_cache(tmp_path: Path) -> None:
    assert idx.locate("auto", download=False).name == "digits"
    fake.write(tmp_path / "named", compressed=True)
    assert "named" in idx.load("auto", tmp_path / "named", download=False).reason
    assert "cache" in idx.load("auto", download=False).reason  # the unpacked copies
    fake.write(Path("data/MNIST/raw"))
    data = idx.load("auto", download=False)
    assert data.reason == "MNIST from data/MNIST/raw (content verified)"
    check(data)


def test_digits_when_asked_and_when_nothing_else_can_be_had(tmp_path: Path) -> None:
    data = idx.load("digits")
    assert data.name == "digits"
    assert data.reason.endswith("as asked")
    data = idx.load("auto", download=False)
    assert data.name == "digits"
    assert data.reason.endswith("because MNIST is missing: no MNIST in ./data or the cache, and downloads are off")
    fake.write(tmp_path / "part", {IMAGES: fake.MNIST[IMAGES]})
    assert "lacks" in idx.load("auto", tmp_path / "part", download=False).reason


# Refused


def refused(name: str, directory: Path | str | None) -> str:
    with pytest.raises(UserError) as caught:
        idx.load(name, directory, download=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["auto", "mnist", "digits"])
def test_a_data_directory_that_is_not_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert f"--data-dir: {tmp_path / 'file'} is not a directory" in refused(name, tmp_path / "file")
    assert f"--data-dir: {tmp_path / 'no'} does not exist" in refused(name, tmp_path / "no")
    assert "--data-dir is empty" in refused(name, "")
    assert "'a\\nb' does not exist" in refused(name, "a\nb")


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert f"no MNIST in {tmp_path}, and downloads are off" in refused("mnist", tmp_path)
    fake.write(tmp_path)
    (tmp_path / LABELS).unlink()
    (tmp_path / TEST_LABELS).unlink()
    os.mkfifo(tmp_path / TEST_LABELS)  # opening it would hang
    message = refused("mnist", tmp_path)
    assert f"{tmp_path} lacks {LABELS}, {TEST_LABELS} (plain or .gz" in message
    assert "--data-dir" in message


WRONG = {
    "empty": (IMAGES, b"", "is empty"),
    "page": (IMAGES, b"<!DOCTYPE html>", f"is not MNIST's {IMAGES}: 15 bytes, not 15,696"),
    "short": (IMAGES, fake.MNIST[IMAGES][:-1], f"is not MNIST's {IMAGES}: 15,695 bytes, not 15,696"),
    "long": (LABELS, fake.MNIST[LABELS] + b"\0", f"is not MNIST's {LABELS}: more bytes, not 28"),
    "test for training": (IMAGES, fake.MNIST[TEST_IMAGES], f"is MNIST's {TEST_IMAGES}, not MNIST's {IMAGES}"),
    "labels for images": (IMAGES, fake.MNIST[LABELS], f"is MNIST's {LABELS}"),
    "fashion": (TEST_IMAGES, fake.FASHION[TEST_IMAGES], f"is Fashion-MNIST's {TEST_IMAGES}, not MNIST's"),
    "huge": (IMAGES, fake.idx((2**32 - 1,) * 3, b"x"), f"is not MNIST's {IMAGES}: 17 bytes, not 15,696"),
    "one bit": (IMAGES, fake.MNIST[IMAGES][:-1] + b"\0", "is damaged or changed: its content has sha256 "),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, case: str, compressed: bool) -> None:
    name, content, expected = WRONG[case]
    fake.write(tmp_path, compressed=compressed)
    fake.write(tmp_path, {name: content}, compressed=compressed)
    for dataset in ("mnist", "auto"):  # the user named the directory: no digits instead
        message = refused(dataset, tmp_path)
        assert message.startswith(f"{tmp_path / name}{'.gz' * compressed} {expected}")
        assert message.endswith(f": replace it by MNIST's {name}, or remove it")


def test_a_wrong_gzip_file_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(fake.MNIST[IMAGES])
    fake.write(tmp_path)
    (tmp_path / IMAGES).unlink()
    path = tmp_path / f"{IMAGES}.gz"
    for content, expected in {
        b"": "is empty",
        fake.MNIST[IMAGES]: "is damaged: not a valid gzip file",
        packed[:-2]: "is truncated: the gzip file ends too early",
        packed[:500]: "is truncated: the gzip file ends too early",
        packed[:-8] + b"\0" * 8: "is damaged: not a valid gzip file",
        packed + b"tail": "is damaged: not a valid gzip file",
        packed + packed: f"is not MNIST's {IMAGES}: more bytes, not 15,696",
    }.items():
        path.write_bytes(content)
        assert refused("mnist", tmp_path).startswith(f"{path} {expected}")
    path.write_bytes(packed)
    path.rename(tmp_path / IMAGES)
    assert "is compressed but its name does not end in .gz" in refused("mnist", tmp_path)


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    fake.write(tmp_path, compressed=True)
    bomb = gzip.compress(fake.MNIST[LABELS] + bytes(2 << 20))
    assert len(bomb) < 4096  # short enough to be read whole
    (tmp_path / f"{LABELS}.gz").write_bytes(bomb)
    tracemalloc.start()
    try:
        assert "more bytes, not 28" in refused("mnist", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
    finally:
        tracemalloc.stop()


def test_a_sparse_giant_is_not_read(tmp_path: Path) -> None:
    fake.write(tmp_path)
    os.truncate(tmp_path / IMAGES, 1 << 40)
    assert "more bytes, not 15,696" in refused("mnist", tmp_path)


# Shared through the cache


def test_verified_once(tmp_path: Path, verified: list[str]) -> None:
    fake.write(tmp_path / "plain")
    fake.write(tmp_path / "packed", compressed=True)
    for directory in ("plain", "packed"):
        for _ in range(3):
            check(idx.load("mnist", tmp_path / directory))
        assert len(verified) == 4
        verified.clear()


def test_a_changed_source_is_verified_again(tmp_path: Path, verified: list[str]) -> None:
    for compressed in (False, True):
        path = fake.write(tmp_path / str(compressed), compressed=compressed) / (LABELS + ".gz" * compressed)
        idx.load("mnist", path.parent)
        verified.clear()
        stat, content = path.stat(), bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same mtime
        assert str(path) in refused("mnist", path.parent)
        assert verified == [path.name]


def test_a_damaged_copy_is_made_again(tmp_path: Path) -> None:
    fake.write(tmp_path / "d", compressed=True)
    idx.load("mnist", tmp_path / "d")
    copies = cache.directory("mnist")
    for damage in (lambda path: path.write_bytes(bytes(15696)), os.unlink, lambda path: os.truncate(path, 9)):
        damage(copies / IMAGES)
        check(idx.load("mnist", tmp_path / "d"))
    shutil.rmtree(copies)
    check(idx.load("mnist", tmp_path / "d"))


@pytest.mark.parametrize("notes", ["", '{"a": 1}', "[" * 100_000])
def test_damaged_notes_are_made_again(tmp_path: Path, notes: str, verified: list[str]) -> None:
    fake.write(tmp_path / "d", compressed=True)
    idx.load("mnist", tmp_path / "d")
    (cache.directory("mnist") / cache.NOTES).write_text(notes)
    for _ in range(2):
        check(idx.load("mnist", tmp_path / "d"))
        assert len(verified) == 8


def test_a_full_cache_is_done_without(tmp_path: Path) -> None:
    fake.write(tmp_path / "d", compressed=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as on a full disk, a write fails half-way
    try:
        data = idx.load("mnist", tmp_path / "d")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check(data)
    left = [path.name for path in cache.directory("mnist").iterdir()]
    assert IMAGES not in left
    assert not any("partial" in name for name in left)


def test_a_lock_that_never_comes_free_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.write(tmp_path / "d", compressed=True)
    monkeypatch.setattr(idx, "LOCK_SECONDS", 0.1)
    with cache.locked(cache.directory("mnist"), 1) as problem:
        assert problem == ""
        check(idx.load("mnist", tmp_path / "d"))
        assert [path.name for path in cache.directory("mnist").iterdir()] == [".lock"]  # not ours to write to
    check(idx.load("mnist", tmp_path / "d"))
    with cache.locked(cache.directory("mnist"), 1):
        monkeypatch.setattr(idx, "LOCK_SECONDS", 60)
        monkeypatch.setattr(cache, "locked", None)
        check(idx.load("mnist", tmp_path / "d"))  # what is noted needs no lock


def test_images_are_the_file_itself_and_writing_to_them_is_private(tmp_path: Path) -> None:
    fake.write(tmp_path)
    data = idx.load("mnist", tmp_path)
    assert str(tmp_path / IMAGES) in Path("/proc/self/maps").read_text()
    data.train_images.zero_()
    check(idx.load("mnist", tmp_path))


def test_a_file_shortened_after_it_was_located_is_no_bus_error(tmp_path: Path) -> None:
    for size in (0, 100):
        fake.write(tmp_path)
        located = idx.locate("mnist", tmp_path)
        os.truncate(tmp_path / IMAGES, size)
        with pytest.raises(UserError, match="start again"):
            located.read()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_of_several_processes_one_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.write(tmp_path / "d", compressed=True)
    log, original = tmp_path / "log", idx.content_of

    def logged(dataset: published.Published, file: published.File, path: Path) -> tuple[bytes, os.stat_result]:
        with log.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        time.sleep(0.1)  # so that the others come while it lasts
        return original(dataset, file, path)

    monkeypatch.setattr(idx, "content_of", logged)
    ranks = fake.processes(6, lambda number: idx.locate("mnist", tmp_path / "d"))
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    pids = log.read_text().split()
    assert len(pids) == 4
    assert len(set(pids)) == 1
    check(idx.load("mnist", tmp_path / "d"))


# The real one


def real_mnist() -> Path:
    return Path(os.environ.get("HVDTRAIN_TEST_MNIST", "/nowhere"))


@pytest.mark.skipif(not real_mnist().is_dir(), reason="no MNIST named: HVDTRAIN_TEST_MNIST=DIR")
def test_real_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real checksums
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")  # every file is verified here and now
    data = idx.load("mnist", real_mnist())
    assert torch.bincount(data.train_labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.bincount(data.test_labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert abs(data.train_images.float().mean().item() / 255 - 0.1307) < 1e-4
    assert data.test_labels[:5].tolist() == [7, 2, 1, 0, 4]


def test_a_cache_where_others_write_is_not_used(tmp_path: Path) -> None:
    fake.write(tmp_path / "d", compressed=True)
    shared = cache.directory("mnist")
    shared.chmod(0o777)
    assert cache.directory("mnist") is None
    check(idx.load("mnist", tmp_path / "d"))
    assert not list(shared.iterdir())
    shared.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(shared, 12345, 12345)
        assert cache.directory("mnist") is None
