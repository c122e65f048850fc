"""--track: records a run's flags, metrics and summary with MLflow; `wandb_tracking.py` has the same for Weights & Biases.

A thread sends the data to the server from a queue, so that steps are never blocked. A resumed run continues its MLflow run,
whose ID is in --output-dir/mlflow-run.json. Nothing is sent over the network unless MLFLOW_TRACKING_URI names a server.
"""

import json
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.engines import files, lines
from hvdtrain.engines.errors import UserError
from hvdtrain.output.metric_names import Metric, number, recorded_metrics, tagged_values

ID_FILE = "mlflow-run.json"
BATCH_SECONDS = 2.0  # between two requests; events in between are sent together
RETRY_SECONDS = 10.0  # between two attempts to reach a server that did not answer
QUEUE_EVENTS = 10_000  # maximum number of waiting events; further ones are dropped
END_SECONDS, STOP_SECONDS = 60.0, 5.0  # to send waiting events at the end of a run; after a stop or a failure
AT_ONCE = {"metrics": 1000, "params": 100, "tags": 100}  # MLflow's limits for one request
GONE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # error codes for a deleted run
STATUS = {"end": "FINISHED", "stop": "KILLED"}  # by the last of these events; else FAILED
SETTINGS = {
    # Time limit for a server that does not answer. MLflow's defaults add up to 15 minutes.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # otherwise MLflow sends usage data
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class Event(NamedTuple):
    """An event of metrics.jsonl."""

    time_ms: int  # Unix time
    name: str
    step: int
    values: dict[str, float]  # its numbers, see `tagged_values`
    fields: Mapping[str, Any]


class Sender(ABC):
    """Receives the events of metrics.jsonl on rank 0, and sends them from a thread.

    Everything but the constructor, `event` and `close` runs in that thread. Errors of the client are printed as one line,
    and unsent events are kept.
    """

    ID_FILE: str  # in --output-dir: which record is that of this run

    def __init__(self, directory: Path, place: str, continued: bool):
        """directory: --output-dir. place: of the record, for messages. continued: the run in `directory` is resumed."""
        self._directory, self._place, self._continued = directory, place, continued
        self._run = ""  # ID of the record
        self._metrics: dict[str, Metric] = {}
        self._step = 0
        self._waiting: deque[Event] = deque()  # not sent yet
        self._dropped = 0
        self._warned = False
        self._last = ""  # the last event in STATUS
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    @abstractmethod
    def _record(self, events: Sequence[Event]) -> None:
        """Send events. Called again with the same ones, and more, after an exception."""

    @abstractmethod
    def _finish(self) -> None:
        """Set the state of the record after the last event."""

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Queue an event. Does not block."""
        self._last = name if name in STATUS else self._last
        if name == "start":
            self._metrics = recorded_metrics(fields)
        self._step = int(number(fields.get("step")) or self._step)
        if len(self._waiting) >= QUEUE_EVENTS:
            self._dropped += 1
            return
        values = tagged_values(name, fields, self._metrics)
        self._waiting.append(Event(round(time.time() * 1000), name, self._step, values, fields))

    def close(self) -> None:
        """Wait until all events are sent, for a limited time."""
        self._closing.set()
        self._thread.join(END_SECONDS if self._last == "end" else STOP_SECONDS)
        if self._thread.is_alive() or self._dropped or self._waiting:
            lines.warn(f"--track: the record in {self._place} is incomplete; metrics.jsonl has all of it")

    def _work(self) -> None:
        pause = BATCH_SECONDS
        while not self._closing.wait(pause):
            pause = BATCH_SECONDS if self._send() else RETRY_SECONDS
        self._send(finish=True)

    def _send(self, finish: bool = False) -> bool:
        """Send all waiting events; finish: and set the run's status. Return whether the server has accepted them."""
        try:
            if events := list(self._waiting):
                self._record(events)
                for _ in events:
                    self._waiting.popleft()
            if finish and self._run:
                self._finish()
        except Exception as error:  # any error of requests, urllib3, the server or the disk must not end the run
            if not self._warned:  # only the first of several consecutive errors
                why = without_password(" ".join(str(error).split())[:200] or type(error).__name__)
                lines.warn(f"--track: {self._place} does not accept this run at the moment ({why})")
            self._warned = True
            return False
        self._warned = False
        return True

    def _told(self) -> str | None:
        """Return the ID of the record to continue; None if there is none at this place."""
        try:
            told = json.loads(files.read_text(self._directory / self.ID_FILE))
            return str(told["run_id"]) if told["tracking_uri"] == self._place else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _note(self) -> None:
        """Write down which record is that of this run."""
        told = json.dumps({"run_id": self._run, "tracking_uri": self._place})
        files.write(self._directory / self.ID_FILE, told + "\n", sync=False)


class MlflowTracker(Sender):
    """Records with MLflow. The constructor raises UserError if the package is missing."""

    ID_FILE = ID_FILE

    def __init__(self, directory: Path, experiment: str, continued: bool):
        """directory: --output-dir. experiment: default if MLFLOW_EXPERIMENT_NAME is not set. continued: whether the run in
        `directory` is resumed."""
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            import mlflow  # takes 2 s with MlflowClient
        except ImportError as error:
            raise UserError(f"--track needs a package: pip install 'hvdtrain[track]' ({error})") from error
        self._mlflow = mlflow
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or (directory / "mlflow").absolute().as_uri()
        if self._uri.startswith("file:"):
            # MLflow requires this for the file store, because it prefers a database, whose first use takes 7 s.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client: Any = None
        self._sent_to: dict[str, int] = {}  # last step of each metric in the MLflow run
        super().__init__(directory, without_password(self._uri), continued)

    def _record(self, events: Sequence[Event]) -> None:
        if not self._run:
            self._open()
        entities = self._mlflow.entities
        points = []
        for event in events:
            if event.name == "start":
                self._describe(event.fields)
            for name, value in event.values.items():
                if event.step > self._reached(name):
                    points.append(entities.Metric(name, value, event.time_ms, event.step))
            if event.name == "end" and "parameters_sha256" in event.fields:
                self._log("tags", [entities.RunTag("parameters_sha256", event.fields["parameters_sha256"])])
        self._log("metrics", points)

    def _log(self, kind: str, items: Sequence[Any]) -> None:
        """Send metrics, params or tags, as many in one request as MLflow allows."""
        most = AT_ONCE[kind]
        for first in range(0, len(items), most):
            part = items[first : first + most]
            self._client.log_batch(self._run, **{kind: part})
            if kind == "metrics":  # noted at once: if the next request fails, these are not sent again
                for point in part:
                    self._sent_to[point.key] = max(point.step, self._sent_to.get(point.key, -1))

    def _open(self) -> None:
        """Resume the MLflow run of `directory`, or create one."""
        client = self._client = self._client or self._mlflow.MlflowClient(tracking_uri=self._uri)
        if self._continued and (run := self._told()):
            try:
                client.update_run(run, status="RUNNING")
                self._run = run
                return
            except Exception as error:
                if getattr(error, "error_code", "") not in GONE:
                    raise
        found = client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found is not None else client.create_experiment(self._experiment)
        self._run = client.create_run(experiment, run_name=self._directory.absolute().name).info.run_id
        self._continued = False
        self._note()

    def _describe(self, start: Mapping[str, Any]) -> None:
        """Record flags as parameters, and the environment as tags. MLflow's parameters are immutable, so changed flags are
        tags."""
        entities = self._mlflow.entities
        config = {name: str(value) for name, value in dict(start.get("config") or {}).items()}
        known = self._client.get_run(self._run).data.params if self._continued else {}
        self._log("params", [entities.Param(name, value) for name, value in config.items() if name not in known])
        tags = {name: start.get(name) for name in ("world_size", "engine", "dataset")}
        for key in ("host", "device"):
            tags[f"{key}s"] = ", ".join(dict.fromkeys(str(rank.get(key)) for rank in start.get("ranks") or []))
        tags |= {f"version.{name}": value for name, value in dict(start.get("versions") or {}).items()}
        tags |= {f"changed.{n}": f"{known[n]} -> {v}" for n, v in config.items() if known.get(n, v) != v}
        self._log("tags", [entities.RunTag(name, str(value)) for name, value in tags.items() if value is not None])

    def _reached(self, name: str) -> int:
        """Return the last step for which the MLflow run has this metric, because a resumed run repeats some steps."""
        if name not in self._sent_to:
            history = self._client.get_metric_history(self._run, name) if self._continued else []
            self._sent_to[name] = max((point.step for point in history), default=-1)
        return self._sent_to[name]

    def _finish(self) -> None:
        """Store summary.json of a finished run, and set the run's status."""
        summary = self._directory / "summary.json"
        if self._last == "end" and summary.exists():
            self._client.log_artifact(self._run, str(summary))
        self._client.set_terminated(self._run, STATUS.get(self._last, "FAILED"))


def without_password(text: str) -> str:
    """Return `text` with user names and passwords removed from URLs.

    A password may contain any character, even if it should be encoded, so everything up to the last @ is removed.
    """
    start, *urls = re.split(r"(?<=://)", text)
    # In each part but the last, the next URL's scheme is at the end.
    return start + "".join(url.rpartition("@")[2] for url in urls)


def tracker(kind: str, experiment: str, directory: Path, continued: bool) -> Sender:
    """Return the tracker for --track KIND. Raises UserError if its package is missing."""
    if kind == "wandb":
        from hvdtrain.output.wandb_tracking import WandbTracker

        return WandbTracker(directory, experiment, continued)
    return MlflowTracker(directory, experiment, continued)
