"""Progress for Kubeflow Trainer, posted to a server of HTTPS on this host."""

import http.server
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from hvdtrain import training
from hvdtrain.features import kubeflow
from tests.single.training.small import N, X, Y, flags_for, network
from tests.waiting import wait_for

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/mine/status"


class Server(http.server.ThreadingHTTPServer):
    """Keeps each post: path, authorization and status. answer: the code of its answers. held: they wait for it."""

    def __init__(self):
        self.posts: list[tuple[str, str | None, dict]] = []
        self.answer, self.held = 200, threading.Event()
        self.held.set()
        super().__init__(("127.0.0.1", 0), Answers)


class Answers(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts.append((self.path, self.headers["Authorization"], json.loads(body)["trainerStatus"]))
        self.server.held.wait(60)
        self.send_response(self.server.answer)
        if self.server.answer == 307:
            self.send_header("Location", f"https://127.0.0.1:{self.server.server_port}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """A certificate of this host, which is its own authority, and its key."""
    place = tmp_path_factory.mktemp("tls")
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=trainer -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*words.split(), "-keyout", place / "key", "-out", place / "ca.crt"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return place


@pytest.fixture
def server(signed, tmp_path, monkeypatch) -> Iterator[Server]:
    with Server() as made:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(signed / "ca.crt", signed / "key")
        made.socket = context.wrap_socket(made.socket, server_side=True)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        (tmp_path / "token").write_text("first\n")
        for limit in ("ANSWER_SECONDS", "END_SECONDS"):  # a busy host
            monkeypatch.setattr(kubeflow, limit, 60.0)
        monkeypatch.setenv(kubeflow.URL, f"https://127.0.0.1:{made.server_port}{PATH}")
        monkeypatch.setenv(kubeflow.CERTIFICATE, str(signed / "ca.crt"))
        monkeypatch.setenv(kubeflow.TOKEN, str(tmp_path / "token"))
        yield made
        made.held.set()
        made.shutdown()


def train(each=lambda step: None) -> None:
    with training.start(flags_for("--log-steps", "1"), metrics={"loss": "min"}) as run:
        net = network()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(2):
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x), y))
                step.update()
                each(step)
            with run.evaluating(N) as mine:
                run.record(loss=(model(X[mine]) - Y[mine]).square().flatten())


def test_progress_and_metrics_are_posted_with_the_newest_token(server, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(kubeflow, "POST_SECONDS", 0.05)

    def each(step):
        if step.number == 3:
            wait_for(lambda: server.posts, "no post")
            (tmp_path / "token").write_text("second\n")  # as Kubernetes replaces it

    train(each)
    path, authorization, first = server.posts[0]
    assert (path, authorization) == (PATH, "Bearer first")
    _, authorization, last = server.posts[-1]
    assert authorization == "Bearer second"
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert 0 < first["progressPercentage"] < 100
    time.strptime(last["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ")
    metrics = {metric["name"]: metric["value"] for metric in last["metrics"]}
    assert metrics["currentEpoch"] == metrics["totalEpochs"] == "2"
    assert min(float(metrics["loss"]), float(metrics["eval_loss"])) > 0
    assert metrics["eval_count"] == "40"
    assert "Kubeflow" not in capfd.readouterr().err


def test_a_server_that_does_not_answer_delays_no_step(server, monkeypatch, capfd):
    """All steps are done while the first post is unanswered; the end of the run waits for a limited time."""
    monkeypatch.setattr(kubeflow, "END_SECONDS", 0.2)
    server.held.clear()
    done = []
    train(lambda step: (step.number == 2 and wait_for(lambda: server.posts, "no post"), done.append(len(server.posts))))
    assert done[1:] == [1] * 9


@pytest.mark.parametrize("answer", [403, 500, 307])
def test_an_outage_costs_one_warning_and_a_redirect_gets_no_token(answer, server, monkeypatch, capfd):
    monkeypatch.setattr(kubeflow, "POST_SECONDS", 0.01)
    server.answer = answer
    train(
        lambda step: wait_for(lambda: len(server.posts) >= min(step.number - 1, 3), "too few posts")
    )  # each is told after the step
    said = capfd.readouterr().err
    assert said.count("does not take the progress at the moment (HTTP Error") == 1, said
    assert {path for path, _, _ in server.posts} == {PATH}
    assert "first" not in said


def test_no_server_and_another_authority_are_a_warning_each(server, monkeypatch, capfd):
    monkeypatch.delenv(kubeflow.CERTIFICATE)  # then this host's authorities count, none of which has signed this
    train()
    monkeypatch.setenv(kubeflow.URL, "https://127.0.0.1:9/none")
    train()
    said = capfd.readouterr().err
    assert "CERTIFICATE_VERIFY_FAILED" in said
    assert "Connection refused" in said
    assert said.count("training continues") == 2
    assert not server.posts
