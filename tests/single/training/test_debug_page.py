"""--debug-page: torch's page answers at one address of this host, and at no other."""

import socket
import urllib.request

import pytest
import torch
import torch.nn.functional as F

from hvdtrain import training
from hvdtrain.engines.errors import UserError
from hvdtrain.features import debug_page
from tests.e2e.launchers import free_port
from tests.single.training.small import X, Y, fit, flags_for, network

pytestmark = pytest.mark.usefixtures("worker_server")  # the page is served by a process that it forks
pytest.importorskip("tabulate", reason="needs tabulate: pip install 'hvdtrain[debug]'")


def page(host: str, port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=60) as answer:
        return answer.read().decode()


def refused(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) != 0


def this_step_is_seen(step, at: str, others: list[str], port: int) -> None:
    if step.number > 1:
        return
    stacks = page(at, port, "/stacks")
    assert "this_step_is_seen" in stacks
    worker = int(stacks.partition(f"Rank 0: http://{at}:")[2].partition("/")[0])
    assert "Flight" in page(at, port, "/")
    for other in others:  # all of 127.0.0.0/8 is this host: what listens on every interface answers there
        assert refused(other, port)
        assert refused(other, worker)


@pytest.mark.parametrize(("at", "others"), [("127.0.0.1", ["127.0.0.2"]), ("127.0.0.5", ["127.0.0.1", "127.0.0.2"])])
def test_the_page_answers_at_the_address_of_the_job_alone(at, others, monkeypatch, capsys):
    """The second case: a stand-in for another host, which is reached from 127.0.0.5."""
    port = free_port()
    if at != "127.0.0.1":
        monkeypatch.setattr(debug_page, "own_address_towards", lambda host: at)
        monkeypatch.setattr(debug_page, "hosts_of", lambda engine: ["here", "there"])
    with training.start(flags_for("--debug-page", str(port))) as run:
        net = network()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        fit(
            run,
            [X, Y],
            lambda step, x, y: F.mse_loss(model(x), y),
            each=lambda step: this_step_is_seen(step, at, others, port),
        )
    assert f"debug page: http://{at}:{port} (stacks of all ranks" in capsys.readouterr().out
    assert refused(at, port)  # it ends with the run


def test_what_keeps_the_page_from_being_served_is_one_line(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"--debug-page {port}: 127.0.0.1 .*in use\): name another port"):
            training.start(flags_for("--debug-page", str(port))).__enter__()
    from torch.distributed.debug import _frontend

    monkeypatch.delattr(_frontend, "_IPv6HTTPServer")  # a stand-in for another torch: it would listen everywhere
    with pytest.raises(AttributeError, match="_IPv6HTTPServer"):
        debug_page.serve("127.0.0.1", free_port(), [])
