"""--track mlflow: records a run's flags, metrics and report with MLflow.

A thread sends the data to the server from a queue, so that steps are never blocked. A resumed run continues its MLflow run,
whose ID is in --output-dir/mlflow-run.json. Nothing is sent over the network unless MLFLOW_TRACKING_URI names a server.
"""

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.data import leftovers
from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import without_launcher
from hvdtrain.training.records.named import number, recorded_metrics, tagged_values
from hvdtrain.training.state import Metric

ID_FILE = "mlflow-run.json"
BATCH_SECONDS = 2.0  # between two requests; events in between are sent together
RETRY_SECONDS = 10.0  # between two attempts to reach a server that did not answer
QUEUE_EVENTS = 10_000  # maximum number of waiting events; further ones are dropped
END_SECONDS, STOP_SECONDS = 60.0, 5.0  # to send waiting events at the end of a run; after a stop or a failure
REPORT_SECONDS = 40.0  # time limit to create the report
AT_ONCE = {"metrics": 1000, "params": 100, "tags": 100}  # MLflow's limits for one request
GONE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # error codes for a deleted run
SETTINGS = {
    # Time limit for a server that does not answer. MLflow's defaults add up to 15 minutes.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # otherwise MLflow sends usage data
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class Event(NamedTuple):
    """An event of metrics.jsonl, with its Unix time in milliseconds."""

    time_ms: int
    name: str
    fields: dict[str, Any]


class Tracker:
    """Receives the events of metrics.jsonl on rank 0. The constructor raises UserError if the package is missing."""

    def __init__(self, directory: Path, experiment: str, continued: bool):
        """directory: --output-dir. experiment: default if MLFLOW_EXPERIMENT_NAME is not set. continued: whether the run in
        `directory` is resumed."""
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            import mlflow  # takes 2 s with MlflowClient
        except ImportError as error:
            raise UserError(f"--track needs a package: pip install 'hvdtrain[track]' ({error})") from error
        self._record = Record(mlflow, directory, experiment, continued)
        self._queue: queue.Queue[Event] = queue.Queue(QUEUE_EVENTS)
        self._left_out = 0
        self._closing = threading.Event()
        self._last = ""  # the event that shows how the run has ended: "end", "stop" or ""
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Queue an event. Does not block."""
        if name in ("end", "stop"):
            self._last = name
        try:
            self._queue.put_nowait(Event(round(time.time() * 1000), name, dict(fields)))
        except queue.Full:
            self._left_out += 1

    def close(self) -> None:
        """Wait until all events are sent, for a limited time."""
        self._closing.set()
        self._thread.join(END_SECONDS if self._last == "end" else STOP_SECONDS)
        left = self._left_out + self._record.waiting + self._queue.qsize()
        if self._thread.is_alive() or left:
            print(
                f"warning: --track: the record in {self._record.place} is incomplete; metrics.jsonl has all of it",
                file=sys.stderr,
                flush=True,
            )

    def _work(self) -> None:
        pause = BATCH_SECONDS
        while not self._closing.is_set():
            self._closing.wait(pause)
            pause = BATCH_SECONDS if self._send() else RETRY_SECONDS
        if self._send():
            status = {"end": "FINISHED", "stop": "KILLED"}.get(self._last, "FAILED")
            self._record.guarded(lambda: self._record.finish(status))

    def _send(self) -> bool:
        """Send all queued events. Return whether the server has accepted them."""
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while len(events) + self._record.waiting < QUEUE_EVENTS:
                events.append(self._queue.get_nowait())
        return self._record.add(events)


class Record:
    """One MLflow run. Used by one thread. Errors of the client are printed as one line; unsent events are kept."""

    def __init__(self, mlflow: Any, directory: Path, experiment: str, continued: bool):
        self._mlflow, self._directory, self._continued = mlflow, directory, continued
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or (directory / "mlflow").absolute().as_uri()
        if self._uri.startswith("file:"):
            # The file store needs no database. MLflow requires this variable because it prefers a database, whose first use
            # takes 7 s.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.place = without_password(self._uri)
        self._client: Any = None
        self._run = ""
        self._metrics: dict[str, Metric] = {}
        self._step = 0
        self._sent_to: dict[str, int] = {}  # last step of each metric in the MLflow run
        self._waiting: list[Event] = []
        self._warned = False

    @property
    def waiting(self) -> int:
        """The number of unsent events."""
        return len(self._waiting)

    def add(self, events: Sequence[Event]) -> bool:
        """Send `events` and all unsent events. Return whether all were sent."""
        self._waiting += events
        return not self._waiting or self.guarded(self._send)

    def guarded(self, send: Any) -> bool:
        """Call `send` and return whether it succeeded. The first of several consecutive errors is printed."""
        try:
            send()
        except Exception as error:  # any error of requests, urllib3, the server or the disk must not end the run
            if not self._warned:
                why = " ".join(str(error).split())[:200] or type(error).__name__
                said = (
                    f"warning: --track: {self.place} does not accept this run at the moment ({without_password(why)})"
                )
                print(said, file=sys.stderr, flush=True)
            self._warned = True
            return False
        self._warned = False
        return True

    def _send(self) -> None:
        if not self._run:
            self._open(next((e.fields for e in self._waiting if e.name == "start"), {}))
        step, metrics, points = self._step, self._metrics, []
        for event in self._waiting:
            if event.name == "start":
                metrics = recorded_metrics(event.fields) or {}
                self._describe(event.fields)
            step = int(number(event.fields.get("step")) or step)
            for name, value in tagged_values(event.name, event.fields, metrics).items():
                if step > self._reached(name):
                    points.append(self._mlflow.entities.Metric(name, value, event.time_ms, step))
            if event.name == "end":
                self._tag({name: event.fields[name] for name in ("parameters_sha256",) if name in event.fields})
        for part in parts_of(points, AT_ONCE["metrics"]):
            self._client.log_batch(self._run, metrics=part)
            self._sent_to |= {point.key: max(point.step, self._sent_to.get(point.key, -1)) for point in part}
        self._step, self._metrics, self._waiting = step, metrics, []

    def _open(self, start: Mapping[str, Any]) -> None:
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
        with files.replacing(self._directory / ID_FILE) as file:
            file.write(json.dumps({"run_id": self._run, "tracking_uri": self.place}) + "\n")

    def _told(self) -> str | None:
        """Return the ID of the MLflow run to resume; None if there is none at this tracking URI."""
        try:
            told = json.loads(files.read_text(self._directory / ID_FILE))
            return str(told["run_id"]) if told["tracking_uri"] == self.place else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _describe(self, start: Mapping[str, Any]) -> None:
        """Record flags as parameters, and the environment as tags. MLflow's parameters are immutable, so changed flags are
        tags."""
        config = {name: str(value) for name, value in dict(start.get("config") or {}).items()}
        known = self._client.get_run(self._run).data.params if self._continued else {}
        Param = self._mlflow.entities.Param
        for part in parts_of(
            [Param(name, value) for name, value in config.items() if name not in known], AT_ONCE["params"]
        ):
            self._client.log_batch(self._run, params=part)
        changed = {n: f"{known[n]} -> {v}" for n, v in config.items() if known.get(n, v) != v}
        ranks = list(start.get("ranks") or [])
        tags = {name: start.get(name) for name in ("world_size", "engine", "dataset")}
        tags |= {"hosts": ", ".join(dict.fromkeys(str(rank.get("host")) for rank in ranks))}
        tags |= {"devices": ", ".join(dict.fromkeys(str(rank.get("device")) for rank in ranks))}
        tags |= {f"version.{name}": value for name, value in dict(start.get("versions") or {}).items()}
        self._tag(tags | {f"changed.{name}": value for name, value in changed.items()})

    def _tag(self, tags: Mapping[str, Any]) -> None:
        made = [self._mlflow.entities.RunTag(name, str(value)) for name, value in tags.items() if value is not None]
        for part in parts_of(made, AT_ONCE["tags"]):
            self._client.log_batch(self._run, tags=part)

    def _reached(self, name: str) -> int:
        """Return the last step for which the MLflow run has this metric, because a resumed run repeats some steps."""
        if name not in self._sent_to:
            history = self._client.get_metric_history(self._run, name) if self._continued else []
            self._sent_to[name] = max((point.step for point in history), default=-1)
        return self._sent_to[name]

    def finish(self, status: str) -> None:
        """Store summary.json and the report of a finished run, then set its status."""
        if not self._run:
            return
        if status == "FINISHED":
            with leftovers.scratch("report") as scratch:
                for path in (self._directory / "summary.json", self._report(Path(scratch))):
                    if path is not None and path.exists():
                        self._client.log_artifact(self._run, str(path))
        self._client.set_terminated(self._run, status)

    def _report(self, scratch: Path) -> Path | None:
        """Create the report in a subprocess, to avoid importing matplotlib here. Return its path; None if that failed."""
        # Modules are found as in this process: not in the working directory, unless it is in sys.path here.
        command = [sys.executable, "-P", "-m", "hvdtrain.report", str(self._directory), "--output-dir", str(scratch)]
        environment = without_launcher() | {"PYTHONPATH": os.pathsep.join(sys.path)}
        try:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=REPORT_SECONDS
            )
            why = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1] if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if why:
            print(f"warning: --track: the run is recorded without the report ({why})", file=sys.stderr, flush=True)
        return None if why else scratch / "report.html"


def parts_of(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """Return an iterator over parts of `items` with at most `most` items each."""
    return (items[first : first + most] for first in range(0, len(items), most))


def without_password(text: str) -> str:
    """Return `text` with user names and passwords removed from URLs.

    A password may contain any character, even if it should be encoded, so everything up to the last @ is removed.
    """
    start, *urls = re.split(r"(?<=://)", text)
    # In each part but the last, the next URL's scheme is at the end.
    return start + "".join(url.rpartition("@")[2] for url in urls)
