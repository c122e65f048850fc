"""--sync-within host: the ranks of a host average their gradients in every step, and are one worker between exchanges.

The hosts are played: `parts.host` tells each rank the name of one, a letter of `HOSTS`.
"""

from functools import partial

import pytest
import torch
from torch import nn

from hvdtrain.engines import parts
from hvdtrain.engines.errors import Failure, UserError
from tests.parallel.test_local_steps import LOCAL, MEANS, mean_of_workers, plain, train
from tests.parallel.test_loop import N, X, trained

pytestmark = pytest.mark.slow
HOSTS = ("aab", "aba")  # of each rank, its host; of two ranks, the first two letters
FAR = (*MEANS, "--sync-within", "host")


@pytest.fixture
def live_on(engine, monkeypatch):
    def live_on(hosts: str) -> list[int]:
        """Play these hosts. Return the ranks on this rank's one."""
        monkeypatch.setattr(parts, "host", lambda: hosts[engine.rank])
        return [rank for rank in range(engine.size) if hosts[rank] == hosts[engine.rank]]

    return live_on


@pytest.mark.parametrize("hosts", HOSTS)
def test_each_host_trains_as_one_process_with_the_samples_of_its_ranks(engine, hosts, live_on):
    """With an uneven last step. The exchange is the mean over ranks, so a host counts as often as it has ranks."""
    members = live_on(hosts)

    def look(t):
        weights = engine.all_gather_object(t.net.weight.flatten().tolist(), "weights")
        assert all((weights[rank] == weights[engine.rank]) == (rank in members) for rank in range(engine.size))

    net = trained(engine, *FAR, epochs=1, seed=5, each=look).net
    workers = [[rank for rank in range(engine.size) if hosts[rank] == name] for name in hosts[: engine.size]]
    torch.testing.assert_close(net.weight.detach(), mean_of_workers(engine, workers), rtol=1e-4, atol=1e-6)


def test_a_single_host_trains_as_without_the_flag(engine, live_on):
    """To the bit, until the exchange that ends the epoch. Horovod may add the gradients of three ranks in another order."""
    live_on("aaa")
    curves = []
    for argv in ((), FAR):
        curve: list = []
        train(engine, *argv, each=lambda t, curve=curve: curve.append(t.net[0].weight.detach().clone()))
        curves.append(torch.stack(curve[: -(-N // (4 * engine.size))]))
    exact = engine.name == "ddp" or engine.size < 3
    torch.testing.assert_close(*curves, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5)


def test_a_run_that_was_stopped_ends_with_the_same_bits(engine, live_on, shared_directory):
    live_on("aba")

    def ask(t):
        if t.step.number == 4 and engine.rank == 0:
            t.run.stopping.watch.request_stop("the test")

    argv = (*LOCAL, "--sync-within", "host")
    whole = train(engine, *argv)
    train(engine, *argv, "--output-dir", shared_directory, each=ask)
    assert train(engine, *argv, "--output-dir", shared_directory) == whole
    optimizers = engine.all_gather_object(whole[1], "optimizers")
    assert [one == optimizers[0] for one in optimizers] == [True, False, True][: engine.size]


def test_on_other_hosts_each_rank_begins_with_the_optimizer_of_rank_0(engine, live_on, shared_directory, capsys):
    kept = []
    for epochs, hosts in ((1, "aab"), (2, "aba"), (3, "aba")):
        live_on(hosts)

        def before(t):
            t.begun = engine.all_gather_object(plain(t), "begun")
            t.said = "begins with the optimizer state of rank 0" in capsys.readouterr().out

        t = trained(engine, *LOCAL, "--sync-within", "host", out=shared_directory, epochs=epochs, before=before,
                    optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9))  # fmt: skip
        kept.append((t.begun, engine.all_gather_object(plain(t), "ended"), t.said))
    (_, first, _), (begun, ended, said), (again, _, repeated) = kept
    if engine.size == 1:
        assert (begun, again) == (first, ended)
        return
    assert begun == [first[0]] * engine.size
    assert ended[1] != ended[0] == ended[-1 if engine.size == 3 else 0]
    assert again == ended
    assert (said, repeated) == (engine.rank == 0, False)


def test_a_host_whose_ranks_do_not_meet_ends_the_run_on_every_rank(engine, live_on, monkeypatch):
    """Of three ranks, the last is on a host where nothing is wrong."""
    if engine.size == 1 or engine.name != "horovod":
        pytest.skip("two ranks of a host meet beside Horovod: needs two ranks, and Horovod")
    live_on("aab")

    def refused(*given, **options):
        raise RuntimeError("connection refused")

    if engine.rank == 1:
        monkeypatch.setattr(torch.distributed, "TCPStore", refused)
    with pytest.raises(UserError, match=r"^rank 1 on .*: the ranks of .* did not meet: connection refused") as raised:
        train(engine, *FAR)
    assert raised.value.everywhere


def test_hosts_of_one_name_are_told_apart(monkeypatch):
    """By their running kernel."""
    names = set()
    for boot in ("one", "other"):
        monkeypatch.setattr(parts, "boot_id", lambda boot=boot: boot)
        names.add(parts.host())
    assert len(names) == 2


def test_a_mean_over_tokens_weighs_every_token_of_a_host_alike(engine, live_on):
    """Within a host, gradients are not compressed: float16 would round this one."""
    members = live_on("aba")
    net = trained(engine, *FAR, "--compression", "fp16", steps=1, net=nn.Linear(1, 1, bias=False), count=engine.rank + 1,
                  data=[torch.ones(4 * engine.size, 1)],
                  loss=lambda t, x: t.model(x).mean() * (engine.rank + 1) / 3).net  # fmt: skip
    counts = [rank + 1 for rank in members]
    assert net.weight.grad.item() == pytest.approx(sum(count * count for count in counts) / sum(counts) / 3, rel=1e-6)


def with_nan_on(engine, culprit, steps) -> list[int]:
    """Train with a loss that is NaN on one rank. Return the number of skipped steps before each, as this rank knows it."""
    skipped = []
    trained(engine, *FAR, "--max-skipped", "9", steps=steps, data=[X.repeat(engine.size, 1)],
            at_step=lambda t: skipped.append(t.run.state.skipped),
            loss=lambda t, x: t.model(x).mean() * (float("nan") if engine.rank == culprit else 1.0))  # fmt: skip
    return skipped


def test_gradients_that_are_not_finite_are_named_and_skipped_by_their_host(engine, live_on, capsys):
    members, culprit = live_on("aab"), min(engine.size - 1, 1)
    assert with_nan_on(engine, culprit, steps=3) == ([0, 1, 2] if culprit in members else [0, 0, 0])
    said = capsys.readouterr()
    assert (f"rank {culprit}" in said.out) == (engine.rank == 0), said
    assert "warning" not in said.err  # rank 0 has said it


def test_the_first_rank_of_another_host_names_what_is_not_finite(engine, live_on, capsys):
    if engine.size < 3:
        pytest.skip("a host with two ranks beside another: needs three ranks")
    live_on("abb")
    with_nan_on(engine, 2, steps=1)
    said = capsys.readouterr()
    assert [said.err.count("rank 2"), said.out.count("rank 2")] == [int(engine.rank == 1), 0], said


@pytest.mark.parametrize(("every", "compared", "spoilt_at"), [(100, 1, 1), (2, 2, 2)])
def test_replicas_of_a_host_are_compared_between_exchanges(engine, every, compared, spoilt_at, live_on):
    """And before an exchange, which would make them equal."""
    if engine.size == 1:
        pytest.skip("one rank has nothing to be compared with")
    live_on("aaa")

    def spoil(t):
        if t.step.number == spoilt_at and engine.rank == engine.size - 1:
            with torch.no_grad():
                t.net[0].weight[0] += 1.0

    flags = f"--sync-within host --sync-every {every} --check-steps {compared}".split()
    with pytest.raises(Failure, match=f"between steps {spoilt_at - 1} and {spoilt_at}") as raised:
        train(engine, *flags, each=spoil)
    assert raised.value.everywhere
    assert f"rank {engine.size - 1}" in str(raised.value)
