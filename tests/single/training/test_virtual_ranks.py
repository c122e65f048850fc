"""--virtual-ranks: the same bits on any number of processes, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdtrain import training
from hvdtrain.engines import virtual
from hvdtrain.engines.errors import UserError
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
    (3, ["norm", "loader", "batched"], [], [2, 1, 3]),
    pytest.param(
        5, ["norm", "channels_last", "average", "sampler", "batched", "share"], [], [2, 3, 1], marks=pytest.mark.slow
    ),
    pytest.param(4, ["norm", "count", "two"], ["--accumulate", "2"], [3, 1, 4], marks=pytest.mark.slow),
    pytest.param(6, ["norm", "unused", "average"], ["--amp", "bf16"], [1, 4, 5], marks=pytest.mark.slow),
    pytest.param(3, ["batches"], ["--reduction", "sum"], [3, 2, 1], marks=pytest.mark.slow),
    pytest.param(8, ["norm"], [], [8, 3, 3], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "case", "flags", "processes"), CASES)
def test_bits_do_not_depend_on_the_processes_nor_on_kills(ranks, case, flags, processes, server):
    alone = hash_of(server, ranks, case, [1], flags)
    assert hash_of(server, ranks, case, processes[:1], flags) == alone
    assert hash_of(server, ranks, case, processes, flags, kills=[3, 6]) == alone


WORDS = ["norm", "channels_last", "two", "average", "count", "share", "unused", "batched"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a training of each example on one process, and two on others
@given(
    ranks=st.integers(2, 8), case=st.sets(st.sampled_from(WORDS)), kill=st.integers(2, 4), other=st.integers(2, 8),
    data=st.sampled_from(["", "loader", "sampler", "batches"]), accumulate=st.sampled_from(["1", "2"]),
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
        own = virtual.owned(process, processes, ranks)
        sums = virtual.Sums(own[0])
        for rank in own:
            sums.add([values[rank].clone()])
        assert [node for node, _ in sums.nodes] == virtual.nodes_of(own)
        assert len(sums.nodes) <= 2 * ranks.bit_length()
        nodes |= dict(sums.nodes)
    (total,) = virtual.root_of(nodes, ranks)
    parts = list(values)  # the tree, level by level
    while len(parts) > 1:
        pairs = zip(parts[::2], [*parts[1::2], None], strict=False)
        parts = [one if other is None else one + other for one, other in pairs]
    assert torch.equal(total, parts[0])


REFUSED = [
    (
        ["--engine", "dataparallel"],
        "--virtual-ranks 2 cannot go with --engine dataparallel: use --engine horovod, ddp or",
    ),
    (
        ["--engine", "ddp", "--sync-every", "2"],
        "--virtual-ranks 2 cannot go with --sync-every 2: leave one of them out",
    ),
    (["--engine", "ddp", "--compression", "fp16"], "--virtual-ranks 2 cannot go with --compression fp16: leave one of"),
    (["--evaluate", "x"], "--virtual-ranks 2 cannot go with --evaluate: leave --virtual-ranks out"),
]


@pytest.mark.parametrize(("argv", "line"), REFUSED)
def test_flags_that_cannot_hold_are_refused(argv, line):
    with pytest.raises(UserError, match=line):
        training.parser("test", None).parse(["--virtual-ranks", "2", *argv])


def train(loss_of=None, model=None, data=(small.X, small.Y), **registered):
    with training.start(small.flags_for("--virtual-ranks", "2")) as run:
        net, _ = run.prepare(model := model or small.network(), torch.optim.SGD(model.parameters(), 0.1))
        run.register(**registered)
        small.fit(run, data, loss_of or (lambda step, x, y: (net(x) - y).square().mean()))


class Extra(torch.nn.Linear):
    def get_extra_state(self):
        return 1


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.randn(8, 3))


def test_programs_that_cannot_hold_are_refused(monkeypatch):
    with pytest.raises(UserError, match=r"cannot go with run.register\(dice=...\), a generator: draw from torch's own"):
        train(dice=torch.Generator())
    with pytest.raises(
        UserError, match="cannot go with a model, which has a get_extra_state: keep its state in buffers"
    ):
        train(model=Extra(3, 1))
    with pytest.raises(UserError, match="cannot go with a stream: leave it out, or give"):
        train(data=(torch.utils.data.DataLoader(Numbers(), batch_size=8),))
    with pytest.raises(UserError, match="cannot go with several data sets in a step: leave"):
        train(data=({"a": (small.X,), "b": (small.Y,)},))
    turns = pytest.raises(UserError, match=r"cannot go with run.gather\(\), as ranks take turns")
    with turns, training.start(small.flags_for("--virtual-ranks", "2")) as run:
        run.gather(small.X)


class TwoProcesses:
    size = 2


def test_more_processes_than_ranks_are_refused():
    with pytest.raises(UserError, match="--virtual-ranks 1 on 2 processes: start at most 1 process"):
        virtual.VirtualRanks(TwoProcesses(), 1)
