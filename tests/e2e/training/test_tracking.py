"""--track mlflow under a real launcher, with a real server of MLflow's, and without one."""

import importlib.util
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.e2e.launchers import environment, events, launch, several

pytestmark = [
    pytest.mark.slow,  # tests/single/output/test_tracking.py has the logic
    pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="no mlflow: launch/setup --with track"),
]
SERVER = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("flask", "sqlalchemy")),
    reason="no server in mlflow-skinny: launch/setup --with track-server",
)
SERVER_SECONDS = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Start a server of MLflow's with a database, and return its address."""
    directory = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (
        f"-m mlflow server --host 127.0.0.1 --port {port} --workers 1 --backend-store-uri sqlite:///{directory}/runs.db"
    )
    words = [sys.executable, *shlex.split(command), "--artifacts-destination", str(directory / "files")]
    quiet = dict(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false", TMPDIR=str(directory))
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            words, cwd=directory, env=environment(**quiet), stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + SERVER_SECONDS
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < until, (directory / "log").read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@SERVER
def test_a_run_that_was_stopped_goes_on_in_its_record(server, tmp_path):
    flags = "--dataset digits --epochs 2 --train-samples 640 --log-steps 1 --batch-size 32 --no-progress --track mlflow"
    flags += f" --checkpoint-steps 5 --output-dir {tmp_path / 'out'}"
    named = dict(MLFLOW_TRACKING_URI=server, MLFLOW_EXPERIMENT_NAME="stopped")
    program = (
        "import os, signal, sys; from hvdtrain import mnist; from hvdtrain.output import run_output\n"
        "event = run_output.RunOutput.event\n"
        "def and_stop(self, name, **fields):\n"
        "    event(self, name, **fields)\n"
        "    if fields.get('step') == 12 and self.speaks: os.kill(os.getpid(), signal.SIGTERM)\n"
        "run_output.RunOutput.event = and_stop\n"
        "sys.exit(mnist.main())\n"
    )
    (tmp_path / "stopping.py").write_text(program)
    run = "mpirun --oversubscribe -np 2"
    stopped = launch(f"{run} {shlex.quote(sys.executable)} {tmp_path / 'stopping.py'} {flags}", **named)
    assert stopped.code == 75, stopped
    done = launch(f"{shlex.quote(sys.executable)} -m hvdtrain.mnist {flags} --accumulate 2", **named)
    assert done.code == 0, done
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=server)
    (run,) = client.search_runs([client.get_experiment_by_name("stopped").experiment_id])
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"summary.json"}
    assert (run.data.params["dataset"], run.data.params["epochs"]) == ("digits", "2")
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(steps) == list(range(1, 21))
    tags = run.data.tags["world_size"], run.data.tags["changed.accumulate"]
    assert (run.info.status, *tags) == ("FINISHED", "1", "1 -> 2")
    losses = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "train/loss")}
    assert losses == {event["step"]: event["loss"] for event in events(tmp_path / "out", "train")}


def test_without_a_server_the_record_is_in_the_output_folder_or_the_run_goes_on_without(tmp_path):
    flags = "--dataset digits --epochs 1 --train-samples 320 --no-progress --track mlflow"
    runs = {
        "local": f"{flags} --output-dir {tmp_path / 'local'}",
        "down": f"MLFLOW_TRACKING_URI=http://127.0.0.1:9 {flags} --output-dir {tmp_path / 'down'}",
    }
    done = several("mpirun", 2, tmp_path / "runs", runs)
    assert done["local"].code == done["down"].code == 0, done
    assert "warning" not in done["local"].stderr
    assert "warning: --track: http://127.0.0.1:9 does not accept this run at the moment" in done["down"].stderr
    assert len(list((tmp_path / "local" / "mlflow").glob("*/*/artifacts/report.html"))) == 1
