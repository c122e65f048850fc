"""Of the ranks of a host, one downloads, and all have the same."""

from hvdtrain import mnist
from hvdtrain.datasets import mnist_data as mnist_files
from hvdtrain.loop.start import started
from hvdtrain.models import compile_cache
from tests.single.data import fake_mnist


def test_one_rank_of_a_host_downloads(engine, shared_directory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", f"{shared_directory}/cache")
    for name in compile_cache.VARIABLES:  # read when torch imports its compiler: this place is gone then
        monkeypatch.setenv(name, f"{shared_directory}/code")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with fake_mnist.mirror() as (mine, asked):
        url = engine.broadcast_object(mine, "url")
        monkeypatch.setitem(mnist_files.PUBLISHED, "mnist", fake_mnist.published("mnist", (url,)))
        flags = mnist.parse(["--engine", engine.name, "--dataset", "auto", "--batch-size", "2", "--no-progress"])
        with started(engine, flags, mnist.METRICS) as run:
            data = mnist.load_images(flags, run)
        engine.barrier()
    assert data.name == "mnist"
    assert bytes(data.train_labels.tolist()) == fake_mnist.MNIST["train-labels-idx1-ubyte"][8:]
    assert asked.total() == (4 if engine.rank == 0 else 0)
