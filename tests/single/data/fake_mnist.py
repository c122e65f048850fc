"""A published dataset of 30 images, files of it, and a mirror that counts: what the data tests share."""

import gzip
import hashlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hvdtrain.datasets.mnist_data import File, Published

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(shape: tuple[int, ...], body: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape) + body


def contents(seed: int) -> dict[str, bytes]:
    """Name -> uncompressed content of the four files: 20 training and 10 test images."""
    draw = random.Random(seed)
    files = {}
    for name in NAMES:
        count = 20 if name.startswith("train") else 10
        images = "images" in name
        body = draw.randbytes(count * 784) if images else bytes(draw.randrange(10) for _ in range(count))
        files[name] = idx((count, 28, 28) if images else (count,), body)
    return files


MNIST, FASHION = contents(1), contents(2)


def published(name: str, mirrors: tuple[str, ...] = ()) -> Published:
    title, folder, contents = {
        "mnist": ("MNIST", "MNIST", MNIST),
        "fashion-mnist": ("Fashion-MNIST", "FashionMNIST", FASHION),
    }[name]
    files = [
        File(file, 20 if file.startswith("train") else 10, hashlib.sha256(content).hexdigest())
        for file, content in contents.items()
    ]
    return Published(name, title, folder, mirrors, tuple(files))


def write(directory: Path, files: dict[str, bytes] = MNIST, compressed: bool = False) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = directory / (name + ".gz" * compressed)
        path.write_bytes(gzip.compress(content) if compressed else content)
    return directory


@contextmanager
def mirror(
    answer: Callable[[BaseHTTPRequestHandler], object] | None = None,
) -> Iterator[tuple[str, Counter[str]]]:
    """A server on this machine: its URL, and how often each path was asked for. By default it serves MNIST."""
    asked: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path] += 1
            with suppress(OSError):  # the other side was killed, or had enough
                (answer or serve)(self)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    server.handle_error = lambda *args: None  # a client that hangs up is what many tests want
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", asked
    finally:
        server.shutdown()
        server.server_close()


def serve(request: BaseHTTPRequestHandler) -> None:
    send(request, gzip.compress(MNIST[request.path.strip("/").removesuffix(".gz")]))


def send(request: BaseHTTPRequestHandler, body: bytes, length: int | None = None) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(body) if length is None else length))
    request.end_headers()
    request.wfile.write(body)
