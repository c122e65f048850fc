"""--virtual-ranks: the same bits on any number of processes, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdtrain import training
from hvdtrain.engines import tree, turns, virtual
from hvdtrain.engines.choice import cores_of_rank
from hvdtrain.engines.errors import UserError
from hvdtrain.features import virtual_ranks
from tests.single.training import small


@pytest.fixture(scope="module")
def server():
    """Trains: see virtual_server.py."""
    program = Path(__file__).with_name("virtual_server.py")
    process = subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def hash_of(server, ranks, case, processes, flags=(), kills=()):
    """Return a hash of all that is to be the same. processes: of each attempt. kills: after which step each but the last."""
    words = ["--virtual-ranks", str(ranks), "--case", ",".join(case), "--checkpoint-steps", "2", *flags]
    attempts = [(count, [*words, "--kill", str(kill)]) for count, kill in zip(processes, kills, strict=False)]
    server.stdin.write(json.dumps([*attempts, (processes[-1], words)]) + "\n")
    server.stdin.flush()
    codes, digest = json.loads(server.stdout.readline())
    expected = [*([9] * count for count in processes[:-1]), [0] * processes[-1]]
    assert codes == expected
    assert digest is not None
    return digest


CASES = [
    (3, ["norm", "loader", "batched", "count", "share"], [], [2, 3]),
    pytest.param(
        5, ["norm", "channels_last", "average", "sampler", "batched", "share"], [], [2, 3, 1], marks=pytest.mark.slow
    ),
    pytest.param(4, ["norm", "count", "two"], ["--accumulate", "2"], [2, 3, 4], marks=pytest.mark.slow),
    pytest.param(6, ["norm", "unused", "average"], ["--amp", "bf16"], [1, 4, 5], marks=pytest.mark.slow),
    (3, ["grows", "loader", "two", "frozen", "empty"], [], [2, 3]),
    pytest.param(3, ["batches"], ["--reduction", "sum"], [3, 2, 1], marks=pytest.mark.slow),
    pytest.param(8, ["norm"], [], [8, 3, 3], marks=pytest.mark.slow),
    pytest.param(2, ["two", "unused"], [], [2, 1, 2], marks=pytest.mark.slow),
    pytest.param(3, ["norm", "several", "gather"], ["--accumulate", "2"], [2, 1, 3], marks=pytest.mark.slow),
    pytest.param(3, ["norm", "stream", "batched", "workers"], [], [2, 3, 1], marks=pytest.mark.slow),
    pytest.param(5, ["stream", "gather", "count", "two"], [], [3, 1, 2], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "case", "flags", "processes"), CASES)
def test_bits_do_not_depend_on_the_processes_nor_on_kills(ranks, case, flags, processes, server):
    kills = [3, 6][: len(processes) - 1]
    assert hash_of(server, ranks, case, processes, flags, kills) == hash_of(server, ranks, case, [1], flags)


WORDS = ["norm", "channels_last", "two", "average", "count", "share", "unused", "batched", "gather"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a training of each example on one process, and two on others
@given(
    ranks=st.integers(2, 8), case=st.sets(st.sampled_from(WORDS)), kill=st.integers(2, 4), other=st.integers(2, 8),
    data=st.sampled_from(["", "loader", "sampler", "batches", "several", "stream"]), accumulate=st.sampled_from(["1", "2"]),
    amp=st.sampled_from(["off", "bf16"]),
)  # fmt: skip
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bits_of_any_program(server, ranks, case, kill, other, data, accumulate, amp):
    flags, words = ["--accumulate", accumulate, "--amp", amp], sorted({*case, data} - {""})
    whole = hash_of(server, ranks, words, [1], flags)
    assert hash_of(server, ranks, words, [min(other, ranks, 4), 1 + other % min(ranks, 3)], flags, [kill]) == whole


@given(ranks=st.integers(1, 40), processes=st.integers(1, 40), seed=st.integers(0, 99))
def test_the_tree_does_not_depend_on_the_processes(ranks, processes, seed):
    processes = min(processes, ranks)
    values = torch.randn(ranks, 3, generator=torch.Generator().manual_seed(seed)) * 1e3
    nodes = {}
    for process in range(processes):
        own = tree.owned(process, processes, ranks)
        sums = tree.Sums(own[0])
        for rank in own:
            sums.add([values[rank].clone()])
        assert [node for node, _ in sums.nodes] == tree.nodes_of(own)
        assert len(sums.nodes) <= 2 * ranks.bit_length()
        nodes |= dict(sums.nodes)
    (total,) = tree.root_of(nodes, ranks)
    parts = list(values)  # the tree, level by level
    while len(parts) > 1:
        pairs = zip(parts[::2], [*parts[1::2], None], strict=False)
        parts = [one if other is None else one + other for one, other in pairs]
    assert torch.equal(total, parts[0])


@pytest.mark.parametrize(("first", "then"), [(0.0, 1.0), (float("nan"), 1.0), (1.0, float("nan")), (0.0, -0.0)])
def test_each_rank_keeps_its_buffers_whatever_is_in_them(first, then):
    """Also beside a sparse one, such as a graph, which stays as it is."""
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    model.running_mean.fill_(first)
    buffers = turns.BuffersOfRanks(SimpleNamespace(own=(0, 1), processes=SimpleNamespace(size=1)))
    buffers.watch(model)
    for changes in (True, False):
        buffers.begin()
        for rank in (0, 1):
            buffers.enter(rank)
            if changes:
                model.running_mean[rank] = then
            own = [then if place == rank else first for place in (0, 1)]
            assert repr(model.running_mean.tolist()) == repr(own)
            buffers.leave(rank)
        buffers.share_first()


def test_a_buffer_that_a_rank_deletes_is_gone_for_that_rank_alone():
    model = torch.nn.Module()
    model.register_buffer("one", torch.ones(1))
    buffers = turns.BuffersOfRanks(SimpleNamespace(own=(0, 1), processes=SimpleNamespace(size=1)))
    buffers.watch(model)
    seen = []
    for _ in range(3):
        buffers.begin()
        for rank in (0, 1):
            buffers.enter(rank)
            seen.append("one" in model._buffers)
            model._buffers.pop("one", None) if rank else None
            buffers.leave(rank)
        buffers.share_first()
    assert seen == [True, True, True, False, True, False]
    del model.one  # outside of turns: for all
    buffers.begin()
    assert [buffers.enter(rank) or "one" in model._buffers for rank in (0, 1)] == [False, False]


def train(loss_of=None, model=None, data=(small.X, small.Y), **registered):
    with training.start(small.flags_for("--virtual-ranks", "2")) as run:
        net, _ = run.prepare(model := model or small.network(), torch.optim.SGD(model.parameters(), 0.1))
        run.register(**registered)
        small.fit(run, data, loss_of or (lambda step, x, y: (net(x) - y).square().mean()))


class Extra(torch.nn.Linear):
    def get_extra_state(self):
        return 1


class Fixed(torch.utils.data.IterableDataset):
    """Takes no part by its rank."""

    def __iter__(self):
        return iter(zip(small.X, small.Y, strict=True))


class File(Fixed):
    def __init__(self):
        self.lines = (line for line in "abc")  # as an open file, it cannot be copied


def test_programs_that_cannot_hold_are_refused():
    with pytest.raises(UserError, match=r"cannot go with run.register\(dice=...\), a generator: draw from torch's own"):
        train(dice=torch.Generator())
    with pytest.raises(
        UserError, match="cannot go with a model, which has a get_extra_state: keep its state in buffers"
    ):
        train(model=Extra(3, 1))
    with pytest.raises(UserError, match=r"cannot copy File for each rank \(.*\): open files in its __iter__"):
        train(data=(torch.utils.data.DataLoader(File(), batch_size=8),))
    turns = pytest.raises(UserError, match=r"cannot go with run.gather\(\) elsewhere: call it in step.batches\(\)")
    with turns, training.start(small.flags_for("--virtual-ranks", "2")) as run:
        run.gather(small.X)


def test_ranks_that_read_the_same_samples_of_a_stream_are_refused():
    data = torch.utils.data.DataLoader(Fixed(), batch_size=8)
    with pytest.raises(
        UserError, match=r"ranks 0 and 1 read the same samples .* by run.rank and run.size, read in its"
    ):
        train(data=(data,))


def test_an_evaluation_within_a_turn_is_one_line():
    def loss(t, x, y):
        with t.run.evaluating(4) as mine:
            t.run.record(error=t.model(small.X[mine]).sum())

    with pytest.raises(UserError, match=r"run.evaluating\(\) inside of step.batches\(\): call it after the loop"):
        small.Trained("--virtual-ranks", "2", loss=loss)


def trained_on_gathered_rows(*argv, batch_size):
    """Return the weights after steps whose loss compares the rows of all ranks with each other."""
    with training.start(small.flags_for(*argv, batch_size=batch_size)) as run:
        torch.manual_seed(1)
        net = torch.nn.Linear(3, 2)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        for _ in run.epochs(2):
            for step in run.steps(small.X[:38]):
                for (x,) in step.batches():
                    rows = run.gather(model(x))
                    own = slice(step.batch.first, step.batch.first + len(x))
                    step.backward((model(x) @ rows.T).square().mean() + (rows[own] - rows.mean(0)).abs().mean())
                step.update()
        return net.weight.detach().clone()


def test_a_loss_over_the_rows_of_all_ranks_is_that_of_one_rank_with_all_samples():
    alone = trained_on_gathered_rows(batch_size=32)
    torch.testing.assert_close(trained_on_gathered_rows("--virtual-ranks", "4", batch_size=8), alone)


def test_torch_threads_are_a_share_of_the_cores_for_each_rank(monkeypatch, capsys):
    monkeypatch.setattr(virtual_ranks, "cores_here", lambda *_: 8)
    threads = torch.get_num_threads()
    flags = training.parser("test", None).parse(["--engine", "serial", "--virtual-ranks", "4", "--no-progress"])
    try:
        with training.start(flags) as run:
            run.prepare(net := torch.nn.Linear(3, 1), torch.optim.SGD(net.parameters(), 0.1))
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert "virtual ones on 1 process, serial, cpu, 2 torch threads per rank" in capsys.readouterr().out


class TwoProcesses:
    """What the second of two processes knows, which has rank 2 of 4 first."""

    size, rank = 2, 2
    processes = SimpleNamespace(rank=1)

    def all_gather_object(self, value, name):
        return [value, value]


def test_the_share_of_the_cores_is_that_of_the_process():
    assert cores_of_rank(TwoProcesses()) >= 1


def test_more_processes_than_ranks_are_refused():
    with pytest.raises(UserError, match="--virtual-ranks 1 on 2 processes: start at most 1 process"):
        virtual.VirtualRanks(TwoProcesses(), 1)
