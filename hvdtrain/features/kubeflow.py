"""Progress and metrics for Kubeflow Trainer 2.2, which shows them with `kubectl get trainjob` (its proposal 2779).

Where KUBEFLOW_TRAINER_SERVER_URL is set, rank 0 posts its newest status there, from a thread, at most every five seconds.
A step never waits. A status that the server does not take is lost; the next one follows.
"""

import json
import os
import threading
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdtrain.engines import lines
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step

URL = "KUBEFLOW_TRAINER_SERVER_URL"
CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"  # the file of the authority that signed the server's
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # its file: it is replaced every hour
POST_SECONDS = 5.0  # between two posts, as Kubeflow asks for
ANSWER_SECONDS = 5.0  # for one of them
END_SECONDS = 6.0  # for the last one
LONGEST, MOST = 64, 256  # characters of a metric's name, and metrics: the server refuses more


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows none: it would hand the token to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Progress(Feature):
    """Posts the status of a run at each logged step, and at its end."""

    def prepare(self, run: Run) -> None:
        self._run, self._began = run, time.monotonic()
        self._first = run.state.step
        self._status: dict[str, Any] | None = None  # the newest, if it is not sent yet
        self._new, self._closing, self._warned = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="kubeflow", daemon=True)
        self._thread.start()

    def after_step(self, step: Step) -> None:
        if step.logged:
            self._offer()

    def close(self, *, failed: bool) -> None:
        if hasattr(self, "_thread"):
            self._offer()
            self._closing.set()
            self._thread.join(END_SECONDS)

    def _offer(self) -> None:
        run, state = self._run, self._run.state
        metrics: dict[str, float | None] = {
            **state.train,
            **{f"eval_{name}": value for name, value in state.evaluation.items()},
        }
        epoch, epochs = run.metrics_logger.number(), run.metrics_logger.epochs
        metrics |= {"currentEpoch": min(epoch, epochs or epoch), "totalEpochs": epochs}
        shown = [
            {"name": name[:LONGEST], "value": f"{value:.6g}"} for name, value in metrics.items() if value is not None
        ]
        status: dict[str, Any] = {"progressPercentage": int(100 * run.progress), "metrics": shown[:MOST]}
        planned, done = run.metrics_logger.steps, state.step - self._first
        if planned and done > 0:
            left = (time.monotonic() - self._began) / done * max(0, planned - state.step)
            status["estimatedRemainingSeconds"] = round(left)
        status["lastUpdatedTime"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._status = status
        self._new.set()

    def _work(self) -> None:
        while not self._closing.is_set():
            self._new.wait()
            self._new.clear()
            self._post()
            self._closing.wait(POST_SECONDS)
        self._post()

    def _post(self) -> None:
        status, self._status = self._status, None
        if status is None:
            return
        try:
            send(status)
            self._warned = False
        except Exception as error:  # of files, TLS, the network or the server: none may end the run
            if not self._warned:  # once in an outage
                lines.warn(f"Kubeflow's {URL} does not take the progress at the moment ({error}): training continues")
            self._warned = True


def send(status: dict[str, Any]) -> None:
    """Post a status. Raises OSError or ValueError."""
    import ssl

    url, authority, token = os.environ[URL], os.environ.get(CERTIFICATE), os.environ.get(TOKEN)
    headers = {"Content-Type": "application/json"}
    if token and url.startswith("https:"):
        headers["Authorization"] = f"Bearer {Path(token).read_text().strip()}"
    tls = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=authority))
    request = urllib.request.Request(url, json.dumps({"trainerStatus": status}).encode(), headers)
    urllib.request.build_opener(tls, NoRedirect).open(request, timeout=ANSWER_SECONDS).close()
