"""--track: records a run's flags, metrics and summary with MLflow or Weights & Biases.

A thread of rank 0 talks to the client, so that no step waits for it. A resumed run continues its record, whose ID is in
--output-dir, and sends no step twice. Nothing leaves this machine unless MLFLOW_TRACKING_URI names a server, or
WANDB_API_KEY or WANDB_MODE=online asks for it. After the first error nothing more is sent: metrics.jsonl has all.
"""

import importlib.util
import json
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.engines import atomic, files, lines
from hvdtrain.engines.errors import UserError
from hvdtrain.output.metric_names import Metric, finite_or_not, recorded_metrics, tagged_values

END_SECONDS, STOP_SECONDS = 60.0, 5.0  # to send waiting events at the end of a run; after a stop or a failure
SETTINGS = {  # MLflow's own would wait 15 minutes for a server that does not answer, and send usage data
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # it prefers a database, whose first use takes 7 s
}  # fmt: skip
OF_RUN = ("world_size", "engine", "dataset", "versions")  # fields of "start" that are recorded


class Event(NamedTuple):
    """An event of metrics.jsonl. values: its numbers, see `tagged_values`."""

    time_ms: int
    name: str
    step: int
    values: dict[str, float]
    fields: Mapping[str, Any]


class Tracker:
    """Receives the events of metrics.jsonl on rank 0, and sends them from a thread, in their order."""

    def __init__(self, kind: str, experiment: str, directory: Path, continued: bool):
        """directory: --output-dir. continued: the run in it is resumed. Raises UserError if the package is missing."""
        with files.output_to(directory):
            files.require_no_link(directory / kind)
        self._record: Mlflow | Wandb = (Wandb if kind == "wandb" else Mlflow)(experiment, directory, continued)
        self._metrics: dict[str, Metric] = {}
        self._step, self._last = 0, ""  # the last of "end" and "stop"
        self._waiting: queue.Queue[Event | None] = queue.Queue()
        self._failed = False
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Queue an event. Does not block."""
        self._last = name if name in ("end", "stop") else self._last
        if name == "start":
            self._metrics = recorded_metrics(fields)
        self._step = int(finite_or_not(fields.get("step")) or self._step)
        if not self._failed:
            values = tagged_values(name, fields, self._metrics)
            self._waiting.put(Event(round(time.time() * 1000), name, self._step, values, fields))

    def close(self) -> None:
        """Wait until all events are sent, for a limited time."""
        self._waiting.put(None)
        self._thread.join(END_SECONDS if self._last == "end" else STOP_SECONDS)
        if self._thread.is_alive():
            self._incomplete("not all was sent in time")

    def _work(self) -> None:
        try:
            while (event := self._waiting.get()) is not None:
                self._record.send(event)
            self._record.finish(self._last)
        except Exception as error:  # any error of requests, urllib3, the server or the disk must not end the run
            self._failed = True
            self._incomplete(" ".join(str(error).split())[:200] or type(error).__name__)

    def _incomplete(self, why: str) -> None:
        place = self._record.place
        lines.warn(f"--track: the record in {place} ends here ({without_password(why)}): metrics.jsonl has all of it")


class Record:
    """The record of this run at `place`; `run`: its ID, which is also in --output-dir."""

    def __init__(self, directory: Path, kind: str, place: str, continued: bool):
        self.directory, self.place, self.continued = directory, without_password(place), continued
        self._id_file, self.run = directory / f"{kind}-run.json", ""

    def known_id(self) -> str:
        """Return the ID of the record to continue; "" if there is none at this place."""
        try:
            held = json.loads(files.read_text(self._id_file)) if self.continued else {}
            return str(held["run_id"]) if held["tracking_uri"] == self.place else ""
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def note(self) -> None:
        """Write down which record is that of this run."""
        held = json.dumps({"run_id": self.run, "tracking_uri": self.place})
        atomic.write_atomically(self._id_file, held + "\n", sync=False)


class Mlflow(Record):
    """Records with MLflow."""

    def __init__(self, experiment: str, directory: Path, continued: bool):
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            import mlflow  # takes 2 s with MlflowClient
        except ImportError as error:
            raise UserError(f"--track needs a package: pip install 'hvdtrain[track]' ({error})") from error
        self._mlflow, self._experiment = mlflow, os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or (directory / "mlflow").absolute().as_uri()
        self._client: Any = None
        self._reached: dict[str, int] = {}  # by metric: the last step that the continued record has
        super().__init__(directory, "mlflow", self._uri, continued)

    def send(self, event: Event) -> None:
        """Send one event."""
        client, entities = self._client or self._open(), self._mlflow.entities
        if event.name == "start":
            config = {name: str(value) for name, value in dict(event.fields.get("config") or {}).items()}
            known = client.get_run(self.run).data.params if self.continued else {}  # parameters never change
            new = [entities.Param(name, value) for name, value in config.items() if name not in known]
            for first in range(0, len(new), 100):  # MLflow's limit for one request
                client.log_batch(self.run, params=new[first : first + 100])
            tags = {name: event.fields.get(name) for name in OF_RUN}
            tags |= {f"changed.{n}": f"{known[n]} -> {v}" for n, v in config.items() if known.get(n, v) != v}
            client.log_batch(self.run, tags=[entities.RunTag(name, str(value)) for name, value in tags.items()])
        if "parameters_sha256" in event.fields:
            client.set_tag(self.run, "parameters_sha256", event.fields["parameters_sha256"])
        for name in event.values if self.continued else ():  # a resumed run repeats some steps
            if name not in self._reached:
                points = client.get_metric_history(self.run, name)
                self._reached[name] = max((point.step for point in points), default=-1)
        fresh = [name for name in event.values if event.step > self._reached.get(name, -1)]
        if fresh:
            values = [entities.Metric(name, event.values[name], event.time_ms, event.step) for name in fresh]
            client.log_batch(self.run, metrics=values)

    def _open(self) -> Any:
        """Continue the MLflow run of this run, or create one. Return the client."""
        client = self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        self.run = self.known_id()
        if self.run:
            client.update_run(self.run, status="RUNNING")
            return client
        found = client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found is not None else client.create_experiment(self._experiment)
        self.run = client.create_run(experiment, run_name=self.directory.absolute().name).info.run_id
        self.continued = False
        self.note()
        return client

    def finish(self, last: str) -> None:
        """Set the run's status."""
        if self.run:
            self._client.set_terminated(self.run, {"end": "FINISHED", "stop": "KILLED"}.get(last, "FAILED"))


class Wandb(Record):
    """Records with Weights & Biases. `wandb sync` sends what is in --output-dir/wandb."""

    def __init__(self, project: str, directory: Path, continued: bool):
        if importlib.util.find_spec("wandb") is None:  # its import takes 2 s: in the thread
            raise UserError("--track needs a package: pip install 'hvdtrain[wandb]' (No module named 'wandb')")
        self._mode: Any = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._project = os.environ.get("WANDB_PROJECT") or project
        self._wandb_run: Any = None
        place = str(directory / "wandb") if self._mode == "offline" else "Weights & Biases"
        super().__init__(directory, "wandb", place, continued)

    def send(self, event: Event) -> None:
        """Give one event to wandb, which has a queue of its own."""
        if self._wandb_run is None:
            import wandb

            self.run = self.known_id() or secrets.token_hex(4)
            settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
            self._wandb_run = wandb.init(
                project=self._project, id=self.run, resume="allow", dir=str(self.directory), mode=self._mode,
                name=self.directory.absolute().name, settings=settings,
            )  # fmt: skip
            self.note()
        if event.name == "start":
            facts = {name: event.fields.get(name) for name in (*OF_RUN, "ranks")}
            self._wandb_run.config.update({**event.fields.get("config", {}), "run": facts}, allow_val_change=True)
        if event.name == "end":
            self._wandb_run.summary.update(event.fields)
        elif event.values:
            self._wandb_run.log(event.values, step=event.step)  # wandb leaves out the steps that a resumed run repeats

    def finish(self, last: str) -> None:
        """Set the state of the record."""
        if self._wandb_run is not None:
            self._wandb_run.finish(exit_code=int(last != "end"))


def without_password(text: str) -> str:
    """Return `text` without user names and passwords in URLs.

    "s3://me:p@ss@host, or file://there" is split after each "://", and becomes "s3://host, or file://there".
    """
    start, *urls = re.split(r"(?<=://)", text)
    # All up to the last @, as a password may hold any character.
    return start + "".join(url.rpartition("@")[2] for url in urls)
