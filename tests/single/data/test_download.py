"""hvdtrain.data.download: once per host, https only, bounded, verified before it has a name."""

import errno
import gzip
import multiprocessing
import os
import shutil
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from hvdtrain.data import cache, download, idx, published
from hvdtrain.engines.errors import UserError
from tests.single.data import fake_mnist as fake

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
IMAGES = fake.NAMES[0]
DEAD = "http://127.0.0.1:1/"
Mirrors = Callable[..., None]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache and working directory, http from this machine, no proxies."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "SCHEMES", ("http",))
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path / "d")


@pytest.fixture
def mirrors(monkeypatch: pytest.MonkeyPatch) -> Mirrors:
    """Takes URLs: the small dataset is published there."""
    return lambda *urls: monkeypatch.setitem(published.PUBLISHED, "mnist", fake.published("mnist", urls))


def good(directory: Path) -> bool:
    return all((directory / name).read_bytes() == content for name, content in fake.MNIST.items())


def failed(directory: Path | None) -> str:
    with pytest.raises(UserError) as caught:
        idx.locate("mnist", directory)
    assert "\n" not in str(caught.value)
    assert "and the download failed (" in str(caught.value)
    return str(caught.value)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


# Where it goes


def test_into_the_named_directory_as_torchvision_does(tmp_path: Path, mirrors: Mirrors) -> None:
    said: list[str] = []
    with fake.mirror() as (url, asked):
        mirrors(url)
        located = idx.locate("auto", tmp_path / "d", say=said.append)
        assert located.name == "mnist"
        assert len(said) == 1
        assert "downloading" in said[0]
        assert good(tmp_path / "d/MNIST/raw")
        assert names(tmp_path / "d") == sorted(fake.NAMES)
        idx.locate("mnist", tmp_path / "d", say=said.append)
        assert len(said) == 1
        (tmp_path / "d/MNIST/raw" / IMAGES).unlink()
        idx.locate("mnist", tmp_path / "d")  # only what is missing
    assert asked == {f"/{name}.gz": 1 + (name == IMAGES) for name in fake.NAMES}


def test_into_the_cache_when_no_directory_is_named(tmp_path: Path, mirrors: Mirrors) -> None:
    with fake.mirror() as (url, asked):
        mirrors(url)
        idx.locate("auto")
        assert good(cache.directory("mnist"))
        assert list((tmp_path / "d").iterdir()) == []
        (cache.directory("mnist") / IMAGES).write_bytes(b"damaged")
        idx.locate("auto")
        assert good(cache.directory("mnist"))
    assert asked[f"/{IMAGES}.gz"] == 2
    assert asked.total() == 5


def test_without_a_cache_the_lock_is_in_the_named_directory(
    tmp_path: Path, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    with fake.mirror() as (url, _):
        mirrors(url)
        idx.locate("mnist", tmp_path / "d")
        assert good(tmp_path / "d/MNIST/raw")
        assert "no directory to download to" in idx.locate("auto").reason


def test_a_target_that_cannot_be_written(tmp_path: Path, mirrors: Mirrors) -> None:
    with fake.mirror() as (url, asked):
        mirrors(url)
        (tmp_path / "d/MNIST").touch()
        assert f"{tmp_path / 'd/MNIST'} cannot be written" in failed(tmp_path / "d")
    assert not asked


# Mirrors that fail


def test_the_next_mirror_is_taken(tmp_path: Path, mirrors: Mirrors) -> None:
    with fake.mirror(lambda request: request.send_error(404)) as (bad, asked_bad), fake.mirror() as (url, asked):
        mirrors(DEAD, bad, url)
        idx.locate("mnist", tmp_path / "d")
        assert good(tmp_path / "d/MNIST/raw")
        assert asked_bad.total() == 1  # not again for every file
        assert asked.total() == 4


BAD = {
    "damaged": (lambda content: gzip.compress(content[:-1] + b"\xaa"), "is damaged or changed"),
    "truncated": (lambda content: gzip.compress(content)[:-9], "is truncated: the gzip file ends too early"),
    "a log-in page": (lambda content: b"<html>log in</html>", "is damaged: not a valid gzip file"),
    "endless": (lambda content: bytes(10 << 20), "sent more than the"),
    "a bomb": (lambda content: gzip.compress(content + bytes(1 << 20)), "more bytes, not"),
    "the wrong file": (lambda content: gzip.compress(fake.MNIST[fake.NAMES[2]]), f"is MNIST's {fake.NAMES[2]}"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_content_never_gets_its_name(tmp_path: Path, mirrors: Mirrors, case: str) -> None:
    spoil, expected = BAD[case]
    with fake.mirror(lambda request: fake.send(request, spoil(fake.MNIST[IMAGES]))) as (url, asked):
        mirrors(DEAD, url)
        message = failed(tmp_path / "d")
        assert "127.0.0.1:1: Connection refused; 127.0.0.1:" in message
        assert expected in message
    assert asked.total() == 1
    assert not (tmp_path / "d/MNIST").exists()


def test_a_damaged_chunk_is_an_error(tmp_path: Path, mirrors: Mirrors) -> None:
    def damaged(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(b"zzz\r\n")

    with fake.mirror(damaged) as (url, _):
        mirrors(url)
        assert "IncompleteRead" in failed(tmp_path / "d")


def test_only_https_by_default(tmp_path: Path, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "SCHEMES", ("https",))
    for name in ("mnist", "fashion-mnist"):
        assert all(url.startswith("https://") and url.endswith("/") for url in published.PUBLISHED[name].mirrors)
    with fake.mirror() as (url, asked):
        mirrors(url)
        assert f"refused, not https: {url}" in failed(tmp_path / "d")
    assert not asked


@pytest.mark.parametrize("to", ["ftp://127.0.0.1/x", "https://127.0.0.1:1/x", "file:///etc/passwd"])
def test_redirects_keep_the_scheme(tmp_path: Path, mirrors: Mirrors, to: str) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(302)
        request.send_header("Location", to)
        request.end_headers()

    with fake.mirror(answer) as (url, _):
        mirrors(url)
        message = failed(tmp_path / "d")
    assert (
        f"redirects to a URL that is not http: {to}" in message or "not allowed" in message
    )  # urllib's own, for file:


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate with")
def test_https_needs_a_certificate_that_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=127.0.0.1"
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*make.split(), *extra], check=True, capture_output=True)
    monkeypatch.setattr(download, "SCHEMES", ("https",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with fake.mirror(tls=context) as (url, _):
        assert url.startswith("https://")
        with pytest.raises(download.DownloadFailed, match=r"(?i)certificate"):
            download.get(f"{url}{IMAGES}.gz", 1 << 20, time.monotonic() + 60)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        packed = download.get(f"{url}{IMAGES}.gz", 1 << 20, time.monotonic() + 60)
    assert gzip.decompress(packed) == fake.MNIST[IMAGES]


# Bounded in time


def test_a_silent_name_server_likewise(tmp_path: Path, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "ANSWER_SECONDS", 0.2)
    done = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **named: done.wait(60))  # knows no time limit
    mirrors("http://mirror.invalid/")
    began = time.monotonic()
    assert "mirror.invalid: no answer in 0.2 seconds" in failed(tmp_path / "d")
    assert time.monotonic() - began < 30
    done.set()


def test_a_dripping_mirror_is_left_when_the_time_is_up(
    tmp_path: Path, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TOTAL_SECONDS", 0.4)

    def answer(request: BaseHTTPRequestHandler) -> None:
        fake.send(request, b"", length=10000)
        for _ in range(3000):  # a minute
            request.wfile.write(b"x")
            time.sleep(0.02)

    with fake.mirror(answer) as (url, _):
        mirrors(url)
        began = time.monotonic()
        assert "not done after" in failed(tmp_path / "d")
        assert time.monotonic() - began < 30


def test_a_stalled_transfer_is_left(tmp_path: Path, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "SILENCE_SECONDS", 0.2)
    done = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        fake.send(request, b"x", length=10000)
        done.wait(60)

    with fake.mirror(answer) as (url, _):
        mirrors(url)
        assert "timed out" in failed(tmp_path / "d")
        done.set()


# Several processes


def finish(ranks: list[multiprocessing.Process]) -> None:
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0


@pytest.mark.parametrize("named", [True, False])
def test_of_several_processes_one_downloads(tmp_path: Path, mirrors: Mirrors, named: bool) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        time.sleep(0.05)
        fake.serve(request)

    def rank(number: int) -> None:
        assert idx.locate("mnist", tmp_path / "d" if named else None).name == "mnist"

    with fake.mirror(answer) as (url, asked):
        mirrors(url)
        finish(fake.processes(6, rank))
    assert asked == {f"/{name}.gz": 1 for name in fake.NAMES}
    assert good(tmp_path / "d/MNIST/raw" if named else cache.directory("mnist"))


def test_of_several_processes_one_waits_for_a_dead_network(mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "ANSWER_SECONDS", 0.5)
    done = threading.Event()
    together, locked, came = multiprocessing.get_context("fork").Barrier(6), cache.locked, []

    def all_at_once(path: Path, seconds: float) -> AbstractContextManager[str]:
        """However busy the machine is: nobody has the lock before all want it."""
        if not came:
            came.append(together.wait(60))
        return locked(path, seconds)

    monkeypatch.setattr(cache, "locked", all_at_once)

    def rank(number: int) -> None:
        located = idx.locate("auto")
        assert located.name == "digits"
        assert "no answer in" in located.reason

    with fake.mirror(lambda request: done.wait(60)) as (url, asked):
        mirrors(url)
        finish(fake.processes(6, rank))
        assert asked.total() == 1
        done.set()


def test_a_killed_download_frees_the_lock_and_leaves_nothing(tmp_path: Path, mirrors: Mirrors) -> None:
    reached, release = threading.Event(), threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        if reached.is_set():
            return fake.serve(request)
        packed = gzip.compress(fake.MNIST[IMAGES])
        fake.send(request, packed[:1000], length=len(packed))
        reached.set()
        release.wait(60)

    def rank(number: int) -> None:
        idx.locate("mnist", tmp_path / "d")

    with fake.mirror(answer) as (url, _):
        mirrors(url)
        first = fake.processes(1, rank)[0]
        assert reached.wait(60)
        others = fake.processes(2, rank)
        time.sleep(0.2)
        assert all(other.is_alive() for other in others)  # they wait
        assert first.pid
        os.kill(first.pid, signal.SIGKILL)
        finish(others)
        first.join(60)
        assert first.exitcode == -signal.SIGKILL
        release.set()
    assert good(tmp_path / "d/MNIST/raw")
    assert names(tmp_path / "d") == sorted(fake.NAMES)


def test_a_file_system_without_locks_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with cache.locked(tmp_path, 10) as problem:
        assert (
            problem == f"{tmp_path} is on a file system without locks: set XDG_CACHE_HOME to a directory on another one"
        )
