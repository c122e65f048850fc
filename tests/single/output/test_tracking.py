"""--track mlflow, against a client that only remembers: what is sent, that a step never waits, how a run goes on."""

import os
import sys
import threading
import types
from collections import namedtuple

import pytest

from hvdtrain.engines.errors import UserError
from hvdtrain.output import tracking

CONFIG = {"epochs": 2, "lr": None, "output_dir": "out"}
START = dict(
    config=CONFIG, metrics={"error": {"direction": "min"}}, world_size=2, engine="horovod", dataset="sine",
    versions={"torch": "2.15"}, ranks=[{"host": "a", "device": "cpu"}, {"host": "b", "device": "cpu"}],
)  # fmt: skip
Point = namedtuple("Point", "key value timestamp step")
Pair = namedtuple("Pair", "key value")


class Server:
    """What an MLflow server keeps, and the client to it. `down`: every call fails."""

    def __init__(self):
        self.runs, self.down, self.calls, self.output = {}, False, 0, None

    def client(self, tracking_uri):
        self.uri = tracking_uri
        return self

    def __getattribute__(self, name):
        if name.startswith(("log_", "get_", "create_", "update_", "set_")):
            self.calls += 1
            if self.down:
                raise ConnectionError("https://me:secret@host/ said nothing")
        return object.__getattribute__(self, name)

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return f"experiment {name}"

    def create_run(self, experiment, run_name):
        run = f"run-{len(self.runs)}"
        self.runs[run] = dict(experiment=experiment, name=run_name, metrics=[], params={}, tags={})
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run))

    def get_run(self, run):
        return types.SimpleNamespace(data=types.SimpleNamespace(params=dict(self.runs[run]["params"])))

    def update_run(self, run, status):
        self.runs[run]["status"] = status

    def get_metric_history(self, run, key):
        return [point for point in self.runs[run]["metrics"] if point.key == key]

    def log_batch(self, run, metrics=(), params=(), tags=()):
        held = self.runs[run]
        held["metrics"] += metrics
        for param in params:
            assert held["params"].setdefault(param.key, param.value) == param.value, "MLflow's parameters never change"
        held["tags"] |= dict(tags)

    def set_tag(self, run, key, value):
        self.runs[run]["tags"][key] = value

    def set_terminated(self, run, status):
        self.runs[run]["status"] = status


@pytest.fixture
def server(monkeypatch):
    """An mlflow package whose client remembers; what a process of MLflow's would read from the environment is restored."""
    for name in [*os.environ, *tracking.SETTINGS]:
        if name.startswith("MLFLOW_"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
    made = Server()
    entities = types.SimpleNamespace(Metric=Point, Param=Pair, RunTag=Pair)
    package = types.SimpleNamespace(MlflowClient=made.client, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    return made


def track(directory, *events, kind="mlflow", continued=False):
    tracker = tracking.Tracker(kind, "sine", directory, continued)
    for name, fields in events:
        tracker.event(name, fields)
    tracker.close()


def points(run):
    return [(point.key, point.value, point.step) for point in run["metrics"]]


TRAIN = [("train", dict(step=step, samples=8 * step, loss=1 / step, learning_rate=0.1)) for step in (1, 2, 3, 4)]


def test_flags_metrics_and_tags(server, tmp_path):
    evaluated = ("evaluate", dict(step=2, error=0.25, count=40, prefix="test"))
    end = ("end", dict(dataset="sine", test_error=0.25, parameters_sha256="ab"))
    track(tmp_path, ("start", START), *TRAIN[:2], evaluated, end)
    (run,) = server.runs.values()
    assert run["params"] == {"epochs": "2", "lr": "None", "output_dir": "out"}
    assert run["tags"] == {"world_size": "2", "engine": "horovod", "dataset": "sine", "versions": "{'torch': '2.15'}",
                           "parameters_sha256": "ab"}  # fmt: skip
    assert points(run) == [("train/loss", 1.0, 1), ("run/learning_rate", 0.1, 1), ("train/loss", 0.5, 2),
                           ("run/learning_rate", 0.1, 2), ("test/error", 0.25, 2),
                           ("summary/test_error", 0.25, 2)]  # fmt: skip
    assert (run["experiment"], run["name"]) == ("experiment sine", tmp_path.name)
    assert run["status"] == "FINISHED"
    assert server.uri == (tmp_path / "mlflow").as_uri(), "nothing leaves the machine unless asked"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_a_run_goes_on_in_the_same_record_and_no_step_is_there_twice(server, tmp_path):
    track(tmp_path, ("start", START), *TRAIN[:3])  # killed after step 3; its checkpoint is of step 2
    assert server.runs["run-0"]["status"] == "FAILED"
    changed = {**START, "config": {**CONFIG, "epochs": 3, "threads": 1}, "world_size": 3}
    track(tmp_path, ("start", changed), ("resume", dict(step=2)), *TRAIN[2:], continued=True)
    (run,) = server.runs.values()
    assert [step for key, _, step in points(run) if key == "train/loss"] == [1, 2, 3, 4]
    assert run["params"] == {"epochs": "2", "lr": "None", "output_dir": "out", "threads": "1"}
    assert (run["tags"]["changed.epochs"], run["tags"]["world_size"]) == ("2 -> 3", "3")


@pytest.mark.parametrize("case", ["not continued", "another server"])
def test_another_run_gets_a_record_of_its_own(server, tmp_path, case, monkeypatch):
    track(tmp_path, ("start", START))
    if case == "another server":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other")
    track(tmp_path, ("start", START), continued=case != "not continued")
    assert len(server.runs) == 2


def test_a_stopped_run_is_not_finished(server, tmp_path):
    track(tmp_path, ("start", START), ("stop", dict(reason="SIGTERM", step=2)))
    assert server.runs["run-0"]["status"] == "KILLED"


def test_a_server_that_fails_is_one_line_and_gets_nothing_more(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@host:5000")
    server.down = True
    track(tmp_path, ("start", START), *TRAIN)
    said = capsys.readouterr().err
    assert said.count("\n") == server.calls == 1
    assert "the record in https://host:5000 ends here (https://host/ said nothing): metrics.jsonl has all of it" in said
    server.down = False
    track(tmp_path, ("start", START), *TRAIN, continued=True)
    assert len(points(server.runs["run-0"])) == 8


def test_no_event_waits_for_a_server_that_is_silent(server, tmp_path, capsys, monkeypatch):
    silent = threading.Event()
    monkeypatch.setattr(Server, "create_experiment", lambda *_: silent.wait(60))
    monkeypatch.setattr(tracking, "STOP_SECONDS", 0.0)
    track(tmp_path, ("start", START), *TRAIN)
    silent.set()
    assert "ends here (not all was sent in time)" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "extra"), [("mlflow", "track"), ("wandb", "wandb")])
def test_what_cannot_be_recorded_is_one_line(kind, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(UserError, match=rf"--track needs a package: pip install 'hvdtrain\[{extra}\]'"):
        tracking.Tracker(kind, "sine", tmp_path, False)
    (tmp_path / kind).symlink_to(tmp_path)
    with pytest.raises(UserError, match=f"{kind} is a symbolic link, which is not followed"):
        tracking.Tracker(kind, "sine", tmp_path, False)


# ---- Weights & Biases


class Wandb(types.ModuleType):
    """A wandb package that remembers. `down`: `init` fails."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace()
        self.inits, self.logged, self.config, self.summary, self.ended, self.down = [], [], {}, {}, [], False

    def Settings(self, **settings):
        return settings

    def init(self, **named):
        if self.down:
            raise ConnectionError("https://me:secret@host/ said nothing")
        self.inits.append(named)
        config = types.SimpleNamespace(update=lambda values, allow_val_change: self.config.update(values))
        return types.SimpleNamespace(
            config=config, summary=self.summary, log=lambda values, step: self.logged.append((step, values)),
            finish=lambda exit_code: self.ended.append(exit_code),
        )  # fmt: skip


@pytest.fixture
def wandb(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "wandb", made := Wandb())
    return made


def track_with_wandb(*what, **how):
    track(*what, kind="wandb", **how)


def test_wandb_gets_flags_metrics_and_summary_and_a_resumed_run_continues_its_record(wandb, tmp_path):
    track_with_wandb(tmp_path, ("start", START), *TRAIN[:2])
    end = ("end", dict(test_error=0.25, parameters_sha256="ab"))
    track_with_wandb(
        tmp_path, ("start", START), TRAIN[2], ("evaluate", dict(step=3, error=0.25, prefix="test")), end, continued=True
    )
    track_with_wandb(tmp_path, ("start", START))
    first, second, another = wandb.inits
    assert first["id"] == second["id"] != another["id"]
    assert (first["mode"], first["project"], first["resume"]) == (
        "offline",
        "sine",
        "allow",
    )  # nothing leaves the machine
    assert wandb.config["epochs"] == 2
    assert wandb.config["run"]["world_size"] == 2
    assert wandb.logged[0] == (1, {"train/loss": 1.0, "run/learning_rate": 0.1})
    assert wandb.logged[-1] == (3, {"test/error": 0.25})
    assert wandb.summary["parameters_sha256"] == "ab"
    assert wandb.ended == [1, 0, 1]


def test_wandb_is_asked_for_a_network_where_the_environment_says_so_and_may_fail(wandb, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "k")
    track_with_wandb(tmp_path, ("start", START))
    assert wandb.inits[0]["mode"] == "online"
    wandb.down = True
    track_with_wandb(tmp_path, ("start", START), *TRAIN)
    said = capsys.readouterr().err
    assert said.count("Weights & Biases ends here (https://host/ said nothing): metrics.jsonl has all of it") == 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:secret@host:5000/a", "https://host:5000/a"),
        ("'https://me:secret@host:5000'", "'https://host:5000'"),
        ("https://me:se/cret@host", "https://host"),
        ("https://me:se#cret@host", "https://host"),
        ("https://me:a se?cret@host", "https://host"),
        ("https://me:secr@et@host", "https://host"),
        ("no https://host/a and (http://me:secret@b)", "no https://host/a and (http://b)"),
        ("mail me@host", "mail me@host"),
    ],
)
def test_no_password_is_shown(url, shown):
    assert tracking.without_password(url) == shown
