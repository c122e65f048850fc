"""--track mlflow and wandb under a real launcher, with the real clients and a store of their own."""

import importlib.util
import shlex
import sys

import pytest

from tests.e2e.launchers import events, launch, several

pytestmark = pytest.mark.slow  # tests/single/output/test_tracking.py has the logic
without_mlflow = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="no mlflow: launch/setup --with track"
)
without_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="no wandb: launch/setup --with wandb"
)


@pytest.fixture
def store(tmp_path, monkeypatch) -> str:
    """The URI of a store of MLflow's."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "store").as_uri()


@without_mlflow
def test_a_run_that_was_stopped_goes_on_in_its_record(store, tmp_path):
    flags = "--dataset digits --epochs 2 --train-samples 640 --log-steps 1 --batch-size 32 --no-progress --track mlflow"
    flags += f" --checkpoint-steps 5 --output-dir {tmp_path / 'out'}"
    named = dict(MLFLOW_TRACKING_URI=store, MLFLOW_EXPERIMENT_NAME="stopped")
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

    client = mlflow.MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name("stopped").experiment_id])
    assert (run.data.params["dataset"], run.data.params["epochs"]) == ("digits", "2")
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(steps) == list(range(1, 21))
    tags = run.data.tags["world_size"], run.data.tags["changed.accumulate"]
    assert (run.info.status, *tags) == ("FINISHED", "1", "1 -> 2")
    losses = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "train/loss")}
    assert losses == {event["step"]: event["loss"] for event in events(tmp_path / "out", "train")}


@without_mlflow
def test_without_a_server_the_record_is_in_the_output_folder_or_the_run_goes_on_without(tmp_path):
    flags = "--dataset digits --epochs 1 --train-samples 320 --no-progress --track mlflow"
    runs = {
        "local": f"{flags} --output-dir {tmp_path / 'local'}",
        "down": f"MLFLOW_TRACKING_URI=http://127.0.0.1:9 {flags} --output-dir {tmp_path / 'down'}",
    }
    done = several("mpirun", 2, tmp_path / "runs", runs)
    assert done["local"].code == done["down"].code == 0, done
    assert "warning" not in done["local"].stderr
    assert "warning: --track: the record in http://127.0.0.1:9 ends here (" in done["down"].stderr
    assert len(list((tmp_path / "local" / "mlflow").glob("*/*/metrics/summary/test_accuracy"))) == 1


@without_wandb
def test_wandb_offline_is_in_the_output_folder_under_one_id(tmp_path):
    flags = "--dataset digits --train-samples 320 --no-progress --track wandb"
    flags += f" --output-dir {tmp_path / 'out'}"
    for epochs in (1, 2):
        run = f"mpirun --oversubscribe -np 2 {shlex.quote(sys.executable)} -m hvdtrain.mnist {flags} --epochs {epochs}"
        done = launch(run, WANDB_MODE="offline")
        assert done.code == 0, done
        assert "warning" not in done.stderr
    records = sorted((tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(records) == 2  # of rank 0 alone, one for each start
    assert len({record.name for record in records}) == 1  # `wandb sync` makes one run of them
