"""Streams of unequal lengths on all ranks: each sample once, the gradient of all, resumed to the bit; equal ones refused."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hvdtrain.engines.errors import UserError
from tests.parallel.test_loop import a_run
from tests.single.training.small import Killed, kill_at

N = 45


class Share(IterableDataset):
    """Of N numbers, rank 0 has the first ten more than the others. Each epoch begins with another one."""

    own = 0  # the epochs that it has ended

    def __init__(self, rank, size, mine=True):
        rest = range(10, N)[rank::size] if mine else range(10, N)
        self.numbers, self.at = [*(range(10) if rank == 0 or not mine else ()), *rest], 0

    def __iter__(self):
        while self.at < len(self.numbers):
            self.at += 1
            yield torch.tensor([self.numbers[self.at - 1 - self.own] / N])
        self.at, self.own = 0, self.own + 1

    def state_dict(self):
        return {"at": self.at, "own": self.own}

    def load_state_dict(self, state):
        self.at, self.own = state["at"], state["own"]


def descend(net, inputs):
    """One step of plain torch with the samples of all ranks."""
    x = torch.tensor(inputs)
    net.zero_grad()
    (net(x) - x).square().mean().backward()
    torch.optim.SGD(net.parameters(), lr=0.5).step()


def train(engine, directory=None, kill=None, mine=True, epochs=2):
    """Return the numbers by epoch that this rank saw, of each step the samples of all ranks, and the weights."""
    seen, counts, reference = {}, [], None
    flags = ("--output-dir", directory, "--checkpoint-steps", "1") if directory else ()
    with a_run(engine, *flags, epochs=epochs) as run:
        torch.manual_seed(5)
        net = nn.Linear(1, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        reference = copy.deepcopy(net)
        loader = DataLoader(Share(engine.rank, engine.size, mine), run.flags.batch_size)
        for epoch in run.epochs(epochs):
            for step in run.steps(loader):
                mine = []
                for x in step.batches():
                    if step.batch.count:
                        assert step.batch.count == len(x)
                        seen.setdefault(epoch, []).extend((x[:, 0] * N).round().int().tolist())
                        mine += x.tolist()
                    step.backward((model(x) - x).square().mean())
                step.update()
                counts.append(step.count)
                descend(reference, [x for rank in engine.all_gather_object(mine, "mine") for x in rank])
                torch.testing.assert_close(net.weight, reference.weight)
                kill_at(kill)(step)
    return seen, counts, [p.tolist() for p in net.parameters()]


def test_each_sample_is_used_once_where_streams_end_at_different_times(engine):
    seen, counts, _ = train(engine, epochs=1)
    everyone = engine.all_gather_object(seen.get(0, []), "seen")
    assert sorted(number for numbers in everyone for number in numbers) == list(range(N))
    assert sum(counts) == N
    assert engine.all_gather_object(counts, "counts") == [counts] * engine.size


@pytest.fixture(scope="module")
def whole(engine):
    """What a run gives that was not killed."""
    return train(engine)


@pytest.mark.parametrize("late", [False, True], ids=["amid", "where some streams have ended"])
def test_a_killed_run_continues_at_the_sample_of_each_rank(engine, late, whole, shared_directory):
    seen, counts, weights = whole
    per_epoch = len(counts) // 2
    kill = per_epoch if late else 2  # the last step saved is the one before
    with pytest.raises(Killed):
        train(engine, shared_directory, kill)
    rest, after, resumed = train(engine, shared_directory)
    assert resumed == weights
    assert after == counts[-len(after) :]
    assert len(after) < len(counts)
    assert rest[1] == seen[1]
    assert rest.get(0, []) == seen[0][len(seen[0]) - len(rest.get(0, [])) :]


def test_ranks_that_read_the_same_are_refused_on_all(engine):
    if engine.size == 1:
        pytest.skip("what ranks do to each other: needs two")
    with pytest.raises(UserError, match=r"^ranks 0 and 1 read the same samples of the stream") as caught:
        train(engine, mine=False)
    assert caught.value.everywhere
