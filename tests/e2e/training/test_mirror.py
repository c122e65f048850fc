"""--mirror to a server of S3 on this machine: outages, slow answers, half uploads, wrong credentials, a kill."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.launchers import BIN, LAUNCHERS, PYTHON, events, free_port, launch, running, summary
from tests.waiting import wait_for

MISSING = [name for name in ("s3fs", "moto") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: launch/setup --with mirror-test"),
]
HELD, SHUT = "held", "shut"  # what the door does with all that comes
PROGRAM = f"{PYTHON} tests/e2e/training/pausing.py --engine {{engine}} --no-progress --threads 1 --step-timeout 60"


class Door:
    """A TCP proxy in front of the server: `state` lets all pass, holds it, or ends connections."""

    def __init__(self, target: int):
        self.target, self.state = target, ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self.state == SHUT:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.target))
            threading.Thread(target=self._pass, args=(client, server), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with source, sink, contextlib.suppress(OSError):
            while chunk := source.recv(16384):
                while self.state == HELD:
                    time.sleep(0.05)
                if self.state == SHUT:
                    return
                sink.sendall(chunk)
            sink.shutdown(socket.SHUT_WR)


class Store:
    """A server of S3 behind a door, and what is in it, read past the door."""

    def __init__(self, port: int):
        import boto3

        self.url = f"http://127.0.0.1:{port}"
        self.door = Door(port)
        keys = dict(aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1")
        self.client = boto3.client("s3", endpoint_url=self.url, **keys)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.door.port}", "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip

    def steps(self, name: str) -> list[int]:
        """Return the steps of the checkpoints that the manifest names; none without one."""
        try:
            body = self.client.get_object(Bucket="runs", Key=f"{name}/mirror.json")["Body"].read()
        except self.client.exceptions.NoSuchKey:
            return []
        return sorted(int(key[5:13]) for key in json.loads(body)["checkpoints"])

    def keys(self, name: str) -> dict[str, bytes]:
        found = self.client.list_objects_v2(Bucket="runs", Prefix=f"{name}/").get("Contents", [])
        return {
            item["Key"].removeprefix(f"{name}/"): self.client.get_object(Bucket="runs", Key=item["Key"])["Body"].read()
            for item in found
        }

    def require_credentials(self, after: float) -> None:
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.url}/moto-api/reset-auth", str(after).encode(), plain, method="POST")
        urllib.request.urlopen(request, timeout=30).close()


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    port = free_port()
    with subprocess.Popen(
        [BIN / "moto_server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            wait_for(lambda: answers(port), "the server of S3 did not start")
            yield port
        finally:
            process.kill()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.fixture
def store(server) -> Store:
    found = Store(server)
    urllib.request.urlopen(urllib.request.Request(f"{found.url}/moto-api/reset", method="POST"), timeout=30).close()
    found.client.create_bucket(Bucket="runs")
    return found


def command(out: Path, *flags: str, ranks: int = 1) -> str:
    start = LAUNCHERS["mpirun"].format(ranks=ranks) + " " if ranks > 1 else ""
    program = PROGRAM.format(engine="horovod" if ranks > 1 else "serial")
    return f"{start}{program} --checkpoint-steps 5 --output-dir {out} {' '.join(flags)}"


@contextlib.contextmanager
def started(out: Path, *flags: str, ranks: int = 1, **env: str) -> Iterator[subprocess.Popen[str]]:
    with (
        (out.parent / "said").open("w") as said,
        running(command(out, *flags, ranks=ranks), env=env, stdout=said, stderr=subprocess.STDOUT) as (process, _),
    ):
        yield process


def rank_0(out: Path) -> int:
    return events(out, "start")[-1]["ranks"][0]["pid"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_killed_with_its_disk_ends_with_the_same_bits(ranks, store, tmp_path):
    whole = launch(command(tmp_path / "whole", ranks=ranks))
    assert whole.code == 0, whole
    mirror = ["--mirror", "s3://runs/a"]
    pause = ["--pause", "12", "--signs", str(tmp_path)]
    with started(tmp_path / "out", *mirror, *pause, ranks=ranks, **store.environment) as process:
        wait_for((tmp_path / "at-12").exists, "the pause was not reached", 120)
        wait_for(lambda: 10 in store.steps("a"), lambda: (store.steps("a"), (tmp_path / "said").read_text()))
        os.kill(rank_0(tmp_path / "out"), signal.SIGKILL)
        assert process.wait(120) not in (0, 2, 75)
    shutil.rmtree(tmp_path / "out")
    done = launch(command(tmp_path / "out", *mirror, ranks=ranks), **store.environment)
    assert done.code == 0, done
    assert done.left_behind == 0, done
    assert "copied from s3://runs/a" in done.stdout, done
    assert [line["step"] for line in events(tmp_path / "out", "resume")] == [10]
    assert summary(tmp_path / "out")["parameters_sha256"] == summary(tmp_path / "whole")["parameters_sha256"]
    here = {p.name: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file() and p.name[0] != "."}
    there = {name.rpartition("/")[2]: content for name, content in store.keys("a").items()}
    assert there.pop("mirror.json")
    assert sorted(here) == sorted(there)
    assert here == there
    exported = launch(f"{PYTHON} -m hvdtrain.export s3://runs/a --to {tmp_path}/w.pt", **store.environment)
    assert exported.code == 0, exported


def test_an_outage_is_told_once_and_made_good(store, tmp_path):
    flags = ["--mirror", "s3://runs/a", "--pause", "7", "22", "--signs", str(tmp_path)]
    with started(tmp_path / "out", *flags, **store.environment) as process:
        wait_for(lambda: 5 in store.steps("a"), "not copied")
        store.door.state = SHUT
        (tmp_path / "go-7").touch()
        wait_for(lambda: "cannot be written for now" in (tmp_path / "said").read_text(), "no warning", 120)
        wait_for((tmp_path / "at-22").exists, "training waits for the store")
        store.door.state = ""
        wait_for(lambda: 20 in store.steps("a"), "not made good", 120)
        (tmp_path / "go-22").touch()
        assert process.wait(120) == 0
    said = (tmp_path / "said").read_text()
    assert said.count("warning: ") == 1, said
    assert said.count("is there") == 1, said
    assert store.steps("a")[-1] == 120
    assert [line["kind"] for line in events(tmp_path / "out", "error")] == ["mirror"]


def test_a_stop_waits_for_a_store_that_hangs_as_long_as_was_said(store, tmp_path):
    flags = ["--mirror", "s3://runs/a", "--mirror-timeout", "4", "--pause", "7", "--signs", str(tmp_path)]
    with started(tmp_path / "out", *flags, ranks=2, **store.environment) as process:
        wait_for(lambda: 5 in store.steps("a"), "not copied")
        store.door.state = HELD
        os.kill(rank_0(tmp_path / "out"), signal.SIGUSR1)
        (tmp_path / "go-7").touch()
        wait_for(lambda: events(tmp_path / "out", "stop"), "not stopped")
        began = time.monotonic()
        assert process.wait(120) == 75
        assert 2 < time.monotonic() - began < 60
    said = (tmp_path / "said").read_text()
    assert "not all of the run could be copied within 4 s (--mirror-timeout)" in said, said
    store.door.state = ""
    done = launch(command(tmp_path / "out", *flags, ranks=2), **store.environment)
    assert done.code == 0, done
    assert store.steps("a")[-1] == 60


@pytest.mark.parametrize("fault", ["credentials", "bucket", "server", "endless"])
def test_a_store_that_cannot_be_used_ends_the_start_in_one_line(fault, store, tmp_path):
    url = "s3://runs/a" if fault != "bucket" else "s3://misspelt/a"
    flags = ["--mirror" if fault != "endless" else "--resume", url]
    env = dict(store.environment)
    if fault == "server":
        env["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{free_port()}"
    if fault == "credentials":
        store.require_credentials(0)
    try:
        done = launch(command(tmp_path / "out", *flags, ranks=2), **env)
    finally:
        store.require_credentials(1e9)
    assert done.code == 2, done
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert line.startswith("pausing: error: rank 0 on "), done
    assert f": {' '.join(flags)} " in line, done
    assert "Traceback" not in done.stderr, done
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    assert "misspelt" not in [bucket["Name"] for bucket in store.client.list_buckets()["Buckets"]]
