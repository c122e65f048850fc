"""Downloads of hvdtrain.datasets.mnist_data: bounded, verified before they have a name. (Once per host: tests/parallel.)"""

import gzip
import os
import re
import threading
import time
from collections.abc import Callable

import pytest

from hvdtrain.datasets import mnist_data
from hvdtrain.engines import atomic
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.files import cache_directory
from tests.single.data import fake_mnist as fake

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
IMAGES = fake.NAMES[0]
PACKED = sorted(f"{name}.gz" for name in fake.NAMES)
DEAD = "http://127.0.0.1:1/"
Mirrors = Callable[..., None]


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """An empty cache and working directory, no proxies."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path / "d")


@pytest.fixture
def mirrors(monkeypatch):
    """Takes URLs: the small dataset is published there."""
    return lambda *urls: monkeypatch.setitem(mnist_data.PUBLISHED, "mnist", fake.published("mnist", urls))


@pytest.fixture
def over():
    """For mirrors that never answer: set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def good(directory):
    return all(gzip.decompress((directory / f"{name}.gz").read_bytes()) == fake.MNIST[name] for name in fake.NAMES)


def failed(directory):
    with pytest.raises(UserError) as caught:
        mnist_data.load_dataset("mnist", directory)
    assert "\n" not in str(caught.value)
    assert "and the download failed (" in str(caught.value)
    return str(caught.value)


def names(directory):
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


def test_into_the_named_directory_where_torchvision_has_it(tmp_path, mirrors):
    said: list[str] = []
    with fake.mirror() as (url, asked):
        mirrors(url)
        assert mnist_data.load_dataset("auto", tmp_path / "d", say=said.append).name == "mnist"
        assert said == [f"no MNIST in {tmp_path}/d: downloading it to {tmp_path}/d/MNIST/raw, one process per host"]
        assert good(tmp_path / "d/MNIST/raw")
        assert names(tmp_path / "d") == PACKED
        (tmp_path / "d/MNIST/raw" / f"{IMAGES}.gz").unlink()
        mnist_data.load_dataset("mnist", tmp_path / "d")  # only what is missing
    assert asked == {f"/{name}.gz": 1 + (name == IMAGES) for name in fake.NAMES}
    mnist_data.load_dataset("mnist", tmp_path / "d")  # nothing


def test_into_the_cache_when_no_directory_is_named(tmp_path, mirrors):
    with fake.mirror() as (url, asked):
        mirrors(url)
        for _ in range(2):
            assert "datasets/mnist (content verified)" in mnist_data.load_dataset("auto").reason
    assert good(cache_directory("mnist"))
    assert list((tmp_path / "d").iterdir()) == []
    assert asked.total() == 4


def test_without_a_cache(tmp_path, mirrors, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    with fake.mirror() as (url, _):
        mirrors(url)
        assert "no directory to download to" in mnist_data.load_dataset("auto").reason
        mnist_data.load_dataset("mnist", tmp_path / "d")
        assert good(tmp_path / "d/MNIST/raw")


def test_a_target_that_cannot_be_written(tmp_path, mirrors):
    with fake.mirror() as (url, asked):
        mirrors(url)
        (tmp_path / "d/MNIST").touch()
        with pytest.raises(
            UserError, match=r"no MNIST in .*, and .*/d/MNIST/raw cannot be written \(Not a directory\)"
        ):
            mnist_data.load_dataset("mnist", tmp_path / "d")
    assert not asked


def test_the_next_mirror_is_taken(tmp_path, mirrors):
    with fake.mirror(lambda request: request.send_error(404)) as (bad, asked_bad), fake.mirror() as (url, asked):
        mirrors(DEAD, bad, url)
        mnist_data.load_dataset("mnist", tmp_path / "d")
        assert good(tmp_path / "d/MNIST/raw")
        assert asked_bad.total() == 1  # not again for every file
        assert asked.total() == 4


def damaged_chunk(request):
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    request.wfile.write(b"zzz\r\n")


def sent(body):
    return lambda request: fake.send(request, body)


BAD = {
    "damaged": (sent(gzip.compress(fake.MNIST[IMAGES][:-1] + b"\xaa")), "but 15,696 bytes, of 15,696, with sha256"),
    "endless": (sent(bytes(10 << 20)), "sent more than the"),
    "a damaged chunk": (damaged_chunk, "IncompleteRead"),
    "a redirect": (lambda request: request.send_error(302), "HTTP Error 302"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_content_never_gets_its_name(tmp_path, mirrors, case):
    answer, expected = BAD[case]
    with fake.mirror(answer) as (url, asked):
        mirrors(DEAD, url)
        message = failed(tmp_path / "d")
    assert "127.0.0.1:1: <urlopen error [Errno 111] Connection refused>; 127.0.0.1:" in message
    assert expected in message
    assert asked.total() == 1
    assert names(tmp_path / "d") == []


def test_the_mirrors_have_https():
    for name in ("mnist", "fashion-mnist"):
        assert all(url.startswith("https://") and url.endswith("/") for url in mnist_data.PUBLISHED[name].mirrors)
        assert len(mnist_data.PUBLISHED[name].mirrors) == 2


# Bounded in time


def test_a_silent_name_server_is_left(mirrors, monkeypatch, over):
    monkeypatch.setattr(mnist_data, "DOWNLOAD_SILENCE_SECONDS", 0.2)
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **named: over.wait(60))  # knows no time limit
    mirrors("http://mirror.invalid/")
    began = time.monotonic()
    assert "mirror.invalid: no answer in 0.2 seconds" in failed(None)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("limit", "pause", "expected"),
    [("DOWNLOAD_SILENCE_SECONDS", 60, "no answer in|timed out"), ("TOTAL_SECONDS", 0.02, "not done after")],
)
def test_a_stalled_or_dripping_transfer_is_left(limit, pause, expected, mirrors, monkeypatch, over):
    monkeypatch.setattr(mnist_data, limit, 0.4)

    def answer(request):
        fake.send(request, b"", length=10000)
        while not over.wait(pause):
            request.wfile.write(b"x")

    with fake.mirror(answer) as (url, _):
        mirrors(url)
        began = time.monotonic()
        assert re.search(expected, failed(None))
        assert time.monotonic() - began < 30


def test_a_later_start_tries_again_and_removes_what_a_killed_download_has_left(tmp_path, mirrors):
    with fake.mirror(lambda request: request.send_error(503)) as (url, _):
        mirrors(url)
        failed(tmp_path / "d")
    leftover = tmp_path / "d" / "MNIST" / "raw" / f".left{atomic.PARTIAL}"
    leftover.touch()
    os.utime(leftover, (4e9, 4e9))  # a clock may have jumped
    with fake.mirror() as (url, _):
        mirrors(url)
        assert mnist_data.load_dataset("mnist", tmp_path / "d").name == "mnist"
    assert not leftover.exists()
