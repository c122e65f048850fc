"""Streams: killed and resumed to the sample and the bit, with workers and without; what is lost without a state."""

import io
import itertools
import random
import re
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.sameness import batch_hash
from hvdtrain.inputs.streams import opened_stream
from tests.e2e.launchers import events
from tests.single.training import small

pytestmark = pytest.mark.usefixtures("worker_server")
N = 50  # not a multiple of batches and workers: the workers' streams end at different times


class Numbers(IterableDataset):
    """This worker's share of 0 to N - 1 in another order each epoch, with noise of the global generators."""

    epoch, n = 0, N

    def set_epoch(self, epoch):
        self.epoch = epoch

    def share(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        info = get_worker_info()
        return order if info is None else order[info.id :: info.num_workers]

    def __iter__(self):
        return map(noisy, self.share())


def noisy(index):
    return torch.tensor([float(index)]), torch.rand(1) + random.random() + np.random.rand()


class Stateful(Numbers):
    """Its position is its own, as that of Hugging Face's. It keeps a tensor and a tuple, as JSON does not."""

    at = 0

    def __iter__(self):
        share = self.share()
        while self.at < len(share):
            self.at += 1
            yield noisy(share[self.at - 1])
        self.at = 0

    def state_dict(self):
        return {"at": (torch.tensor(self.at), 1)}

    def load_state_dict(self, state):
        at, one = state["at"]
        assert one == 1
        self.at = int(at)


class Counting(Stateful):
    """It counts its epochs itself, and draws its order by that number."""

    epoch = own = 0

    def set_epoch(self, epoch):
        self.epoch = self.own

    def __iter__(self):
        self.epoch = self.own
        yield from super().__iter__()
        self.own += 1

    def state_dict(self):
        return super().state_dict() | {"own": self.own}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.own = state["own"]


class WholeBatches(Counting):
    n = 48


class Anew(Stateful):
    """Where its state is that of its end, it begins anew."""

    n = 48

    def __iter__(self):
        share = self.share()
        self.at %= len(share)
        while self.at < len(share):
            self.at += 1
            yield noisy(share[self.at - 1])


class Exhausted(Stateful):
    """At its end, its state is that after the last sample, as that of Hugging Face's."""

    begin = 0

    def __iter__(self):
        self.at, self.begin = self.begin, 0
        while self.at < N:
            self.at += 1
            yield noisy(self.share()[self.at - 1])

    def load_state_dict(self, state):
        self.begin = int(state["at"][0])


class CountingLoader:
    """A loader that is no DataLoader, and counts its epochs itself."""

    def __init__(self):
        self.dataset, self.at = Counting(), 0

    def __iter__(self):
        yield from DataLoader(self.dataset, 4)

    def state_dict(self):
        return self.dataset.state_dict()

    def load_state_dict(self, state):
        self.dataset.load_state_dict(state)


class Iterator:
    def __init__(self, share):
        self.share, self.at = share, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.share):
            raise StopIteration
        self.at += 1
        return noisy(self.share[self.at - 1])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class OfIterator(Numbers):
    """Its iterator has the state, as torchdata allows."""

    def __iter__(self):
        return Iterator(self.share())


class Batched(Stateful):
    """Yields batches, as webdataset's `batched` does."""

    def __iter__(self):
        while self.at < N:
            some = self.share()[self.at : self.at + 4]
            self.at += len(some)
            yield {"x": torch.tensor(some).float().unsqueeze(1), "noise": torch.rand(len(some), 1)}
        self.at = 0


class StatefulLoader:
    """A loader that is no DataLoader, with a state of its own."""

    def __init__(self):
        self.dataset, self.at, self.begin = Numbers(), 0, 0

    def __iter__(self):
        share = self.dataset.share()
        self.at, self.begin = self.begin, 0
        while self.at < N:
            some = [noisy(index) for index in share[self.at : self.at + 4]]
            self.at += 4
            yield [torch.stack(part) for part in zip(*some, strict=True)]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"]


class AnewLoader(StatefulLoader):
    def __init__(self):
        super().__init__()
        self.dataset.n = 48

    def __iter__(self):
        share, self.at = self.dataset.share(), self.begin % 48
        while self.at < 48:
            self.at += 4
            yield [torch.stack(part) for part in zip(*map(noisy, share[self.at - 4 : self.at]), strict=True)]
        self.begin = 0


LOADERS = {
    "stateful": lambda: DataLoader(Stateful(), 4),
    "stateful, 2 workers": lambda: DataLoader(Stateful(), 4, num_workers=2),
    "a stateful iterator": lambda: DataLoader(OfIterator(), 4),
    "a stateful iterator, 2 workers": lambda: DataLoader(OfIterator(), 4, num_workers=2),
    "complete batches": lambda: DataLoader(Batched(), None),
    "a stateful loader": StatefulLoader,
}


def train(loader, *argv, epochs=2, **how):
    """Return the samples by epoch, and the weights."""
    seen = {}

    def loss(t, *parts):
        x, noise = t.batch.values() if isinstance(t.batch, dict) else parts
        assert t.step.batch.count == len(x)
        seen.setdefault(t.run.state.epoch, []).extend(x[:, 0].int().tolist())
        return (t.model(x / N) - noise).square().mean()

    how |= dict(net=lambda: nn.Linear(1, 1), optimizer=lambda p: torch.optim.Adam(p, lr=0.1), seed=5, loss=loss)
    return seen, small.Trained(*argv, data=[loader], epochs=epochs, batch_size=4, **how).weights().tolist()


def resumed_at(directory):
    return events(directory, "resume")[0]["taken"]


def killed_and_continued(make, tmp_path):
    program = lambda out, kill: train(make(), *small.saving(kill), out=out, kill=kill)  # noqa: E731
    (seen, weights), (rest, after) = small.resumed(program, tmp_path, 19)  # of 26 steps
    assert [sorted(seen[epoch]) for epoch in (0, 1)] == [list(range(N))] * 2
    taken = resumed_at(tmp_path / "apart")
    assert 0 < taken < N
    assert rest == {1: seen[1][taken:]}
    assert after == weights
    return seen


@pytest.mark.parametrize("kind", LOADERS)
def test_a_killed_run_continues_at_the_very_sample(kind, tmp_path):
    seen = killed_and_continued(LOADERS[kind], tmp_path)
    assert seen[0] != seen[1]


def test_a_stop_in_an_evaluation_before_the_steps_keeps_the_position(tmp_path, monkeypatch):
    """A resumed run that is stopped there has read nothing yet, and saves."""

    def evaluate(t):
        with t.run.evaluating(1) as mine:
            t.run.record(loss=torch.zeros(1)[mine])

    make, how = LOADERS["stateful"], dict(out=tmp_path, before=evaluate)
    seen, weights = train(make(), before=evaluate)
    small.killed(train, make(), *small.saving(19), **how, kill=19)
    with monkeypatch.context() as patch:
        patch.setattr("hvdtrain.loop.stopping.Stopping.is_asked_anywhere", lambda self: True)
        assert train(make(), **how)[0] == {}
    rest, after = train(make(), **how)
    assert rest == {1: seen[1][resumed_at(tmp_path) :]}
    assert after == weights


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if "workers" not in kind])
def test_a_rank_that_has_not_read_since_a_resume_is_where_it_was(kind):
    """Where a step has fewer batches than ranks. Its stream began anew at the next resume."""
    alone = SimpleNamespace(rank=0)
    begun = opened_stream(alone, LOADERS[kind](), 1, 0, None, keeps=True)
    begun.draw()
    held = begun.position()
    again = opened_stream(alone, LOADERS[kind](), 1, 0, held, keeps=True)
    assert again.position() == held
    assert batch_hash(again.draw()) == batch_hash(begun.draw())


def test_more_steps_continue_at_the_very_sample(tmp_path):
    seen, weights = train(LOADERS["stateful"](), steps=20)
    parts = [train(LOADERS["stateful"](), out=tmp_path, steps=steps) for steps in (5, 13, 20)]
    assert [[i for part, _ in parts for i in part.get(epoch, [])] for epoch in (0, 1)] == [seen[0], seen[1]]
    assert parts[-1][1] == weights


AT_AN_END = {
    "counts its epochs": lambda: DataLoader(Counting(), 4),
    "counts its epochs, a loader": CountingLoader,
    "counts its epochs, persistent workers": lambda: DataLoader(Counting(), 4, num_workers=2, persistent_workers=True),
    "counts its epochs, workers": lambda: DataLoader(Counting(), 4, num_workers=2),
    "a state after the last sample": lambda: DataLoader(Exhausted(), 4),
    "a stateful iterator": LOADERS["a stateful iterator"],
    "a stateful loader": StatefulLoader,
}


@pytest.mark.parametrize("kind", AT_AN_END)
def test_a_run_that_ended_with_an_epoch_goes_on_as_if_it_had_not(kind, tmp_path):
    """A number of epochs that a stream counts itself began again."""
    make = AT_AN_END[kind]
    whole, weights = train(make(), epochs=3)
    assert (whole[0] != whole[1]) == (kind != "counts its epochs, workers")  # others in each epoch, as in torch
    parts = [train(make(), out=tmp_path, epochs=epochs) for epochs in (1, 2, 3)]
    assert [part for seen, _ in parts for part in seen.items()] == list(whole.items())
    assert parts[-1][1] == weights


LAST = {
    "begins anew": lambda: DataLoader(Anew(), 4),
    "begins anew, 2 workers": lambda: DataLoader(Anew(), 4, num_workers=2),
    "begins anew, persistent workers": lambda: DataLoader(Anew(), 4, num_workers=2, persistent_workers=True),
    "begins anew, a loader": AnewLoader,
    "counts its epochs": lambda: DataLoader(WholeBatches(), 4),
}


@pytest.mark.parametrize("kind", LAST)
def test_an_epoch_is_over_after_a_checkpoint_of_its_last_batch(kind, tmp_path):
    """Such an epoch was trained once more."""
    whole, weights = train(LAST[kind](), steps=26)
    parts = [train(LAST[kind](), out=tmp_path, steps=steps) for steps in (12, 24, 26)]
    assert [len(seen) for seen in whole.values()] == [48, 48, 8]
    assert [part for seen, _ in parts for part in seen.items()] == list(whole.items())
    assert parts[-1][1] == weights


def test_a_checkpoint_reads_no_further_in_a_stream_without_a_state(tmp_path):
    """It may wait for what never comes."""
    read, seen = [], []

    class Waiting(IterableDataset):
        def __iter__(self):
            for number in range(N):
                read.append(number)
                yield noisy(number)

    train(
        DataLoader(Waiting(), 4),
        "--checkpoint-steps",
        "1",
        out=tmp_path,
        steps=3,
        each=lambda t: seen.append(len(read)),
    )
    assert [*seen, len(read)] == [4, 8, 12, 12]


class Late(Anew):
    def __iter__(self):
        yield from itertools.islice(super().__iter__(), 20)
        raise OSError("gone")


def test_a_batch_that_cannot_be_read_ends_the_step_that_reads_it_and_not_the_checkpoint_before(tmp_path):
    with pytest.raises(OSError, match="gone"):
        train(DataLoader(Late(), 4), "--checkpoint-steps", "1", out=tmp_path)
    train(DataLoader(Anew(), 4), "--checkpoint-steps", "1", out=tmp_path)
    assert resumed_at(tmp_path) == 20


ANEW = {
    "no state": (lambda: DataLoader(Numbers(), 4), None, "Numbers has no state_dict"),
    "no state, workers": (lambda: DataLoader(Numbers(), 4, num_workers=2), None, "Numbers has no state_dict"),
    "other workers": (LOADERS["stateful, 2 workers"], LOADERS["stateful"],
        "it was saved with num_workers=2, which is 0 now"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ANEW)
def test_without_a_position_the_epoch_begins_anew_and_says_so(kind, tmp_path, capsys):
    make, make_again, why = ANEW[kind]
    small.killed(train, make(), *small.saving(5), out=tmp_path, kill=5)
    said = capsys.readouterr().out
    lost = "Numbers has no state_dict and load_state_dict: a resumed run begins the epoch of this stream anew"
    assert (lost in said) == (make_again is None)
    rest, _ = train((make_again or make)(), out=tmp_path)
    assert sorted(rest[0]) == list(range(N))
    taken = resumed_at(tmp_path)
    assert f"epoch 1 of the stream begins anew, after {taken} samples: {why}" in capsys.readouterr().out


class Odd(Stateful):
    def state_dict(self):
        return {"at": object()}


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(1), torch.ones(1)


class Empty(IterableDataset):
    def __iter__(self):
        return iter(())


class Quiet(IterableDataset):
    def __iter__(self):
        return ((torch.tensor([float(i)]), torch.zeros(1)) for i in range(N))


REFUSED = {
    "workers that read the same": (lambda: DataLoader(Quiet(), 4, num_workers=2), "the workers of rank 0 read"),
    "workers that read the same, without an end": (lambda: DataLoader(Endless(), 4, num_workers=2), "the workers of rank 0"),
    "no samples": (lambda: DataLoader(Empty(), 4), "the stream of rank 0 has no samples in epoch 1"),
    "a state of objects": (lambda: DataLoader(Odd(), 4), "the state_dict of Odd cannot be saved .it holds a object"),
    "a state of objects, of workers": (lambda: DataLoader(Odd(), 4, num_workers=1), "the state_dict of Odd cannot be saved"),
    "another batch": (lambda: DataLoader(Numbers(), 5), "batch_size=5, --batch-size is 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_wrong_is_refused_in_one_line(case, tmp_path):
    make, complaint = REFUSED[case]
    with pytest.raises(UserError, match=f"^.{{0,20}}{complaint}") as caught:
        train(make(), out=tmp_path)
    assert len(str(caught.value)) < 200


def test_a_stream_has_no_length_and_no_other_beside_it():
    with pytest.raises(UserError, match="the length of a stream is not known"):
        train(DataLoader(Numbers(), 4), before=lambda t: t.run.total_steps(DataLoader(Numbers(), 4), 2))
    with pytest.raises(UserError, match="'b' is a stream, and goes with other"):
        train({"a": small.X, "b": DataLoader(Numbers(), 4)})


@pytest.mark.parametrize("kind", LOADERS)
def test_a_stream_is_evaluated(kind):
    def evaluate(t):
        with t.run.evaluating(LOADERS[kind]()) as batches:
            for batch in batches:
                t.run.record(x=(batch["x"] if isinstance(batch, dict) else batch[0]).sum())
        assert t.run.evaluation == {"x": (N - 1) / 2, "count": N}

    train(LOADERS[kind](), epochs=0, before=evaluate)


# ---- streams of other libraries, as docs/data.md shows them: pip install datasets torchdata webdataset

PAGE = Path(__file__).resolve().parents[3] / "docs" / "data.md"
SHARDS = 8
ALONE = SimpleNamespace(rank=0, size=1)


def shown(comment: str) -> str:
    """Return the line of the page that ends with this comment."""
    (line,) = re.findall(rf"^.*# {comment}.*$", PAGE.read_text(), re.M)
    return line


def rows(shards):
    for shard in shards:
        for number in range(N)[shard::SHARDS]:
            yield f"{shard}-{number}", {"a": number}


def collate(samples):
    numbers = torch.tensor([[float(sample["a"])] for sample in samples])
    return numbers, torch.zeros_like(numbers)


def hugging_face(shuffles=None):
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face's datasets: pip install datasets")
    from datasets.distributed import split_dataset_by_node

    examples = datasets.iterable_dataset.ExamplesIterable(rows, {"shards": list(range(SHARDS))})
    ds = datasets.IterableDataset(examples)
    if shuffles is not None:
        ds = ds.shuffle(seed=3, buffer_size=1, **shuffles)
    scope = dict(ds=ds, run=ALONE, split_dataset_by_node=split_dataset_by_node)
    exec(shown("Hugging Face datasets"), scope)
    return scope["ds"]


def stateful(ds, workers=0):
    pytest.importorskip("torchdata", reason="needs torchdata: pip install torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(ds, 4, collate_fn=collate, num_workers=workers)


RESUMED = {
    "datasets": lambda: DataLoader(hugging_face(), 4, collate_fn=collate),
    "datasets, shuffled": lambda: DataLoader(hugging_face({}), 4, collate_fn=collate),
    "datasets, 2 workers": lambda: DataLoader(hugging_face(), 4, collate_fn=collate, num_workers=2),
    "datasets, shuffled one by one, 2 workers": lambda: DataLoader(hugging_face({"max_buffer_input_shards": 1}), 4,
        collate_fn=collate, num_workers=2),
    "torchdata": lambda: stateful(hugging_face({})),
    "torchdata, shuffled one by one, 2 workers": lambda: stateful(hugging_face({"max_buffer_input_shards": 1}), 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", RESUMED)
def test_a_killed_run_on_a_librarys_stream_continues_at_the_very_sample(kind, tmp_path):
    killed_and_continued(RESUMED[kind], tmp_path)


def test_datasets_still_mistakes_the_state_of_a_worker_for_that_of_the_rank(tmp_path):
    """Of shards that `shuffle` interleaves: _iter_pytorch loads the state before it has divided the shards among workers.

    Once this fails, the page need not say how to avoid it.
    """

    def loader():
        return DataLoader(hugging_face({}), 4, collate_fn=collate, num_workers=2)

    small.killed(train, loader(), *small.saving(5), out=tmp_path, kill=5)
    with pytest.raises(IndexError, match="list index out of range"):
        train(loader(), out=tmp_path)


def number_of(sample):
    return {"a": int(sample["txt"])}


def tar_shards(directory: Path) -> list[str]:
    for shard in range(SHARDS):
        with tarfile.open(directory / f"{shard}.tar", "w") as file:
            for _, row in rows([shard]):
                text = str(row["a"]).encode()
                member = tarfile.TarInfo(f"{row['a']:05}.txt")
                member.size = len(text)
                file.addfile(member, io.BytesIO(text))
    return [str(directory / f"{shard}.tar") for shard in range(SHARDS)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_on_a_webdataset_begins_its_epoch_anew_and_says_so(workers, tmp_path, capsys):
    wds = pytest.importorskip("webdataset", reason="needs webdataset: pip install webdataset")
    urls = tar_shards(tmp_path)

    def loader():
        scope = dict(wds=wds, urls=urls, run=ALONE)
        exec(shown("webdataset"), scope)
        return DataLoader(scope["ds"].decode().map(number_of), 4, collate_fn=collate, num_workers=workers)

    seen, _ = train(loader())
    assert [sorted(seen[epoch]) for epoch in (0, 1)] == [list(range(N))] * 2
    small.killed(train, loader(), *small.saving(19), out=tmp_path / "out", kill=19)
    lost = "WebDataset has no state_dict and load_state_dict: a resumed run begins the epoch of this stream anew"
    assert lost in capsys.readouterr().out
    rest, _ = train(loader(), out=tmp_path / "out")
    assert rest == {1: seen[1]}
    taken = resumed_at(tmp_path / "out")
    assert (
        f"epoch 2 of the stream begins anew, after {taken} samples: WebDataset has no state" in capsys.readouterr().out
    )


def test_your_own_stream():
    numbers = list(range(N))
    parts = [eval(shown("your own; ").partition("#")[0], dict(numbers=numbers, run=SimpleNamespace(rank=rank, size=3)))
             for rank in range(3)]  # fmt: skip
    assert sorted(itertools.chain(*parts)) == numbers
