"""Lines of Python that a page shows without naming a program: each block is run, with what it leaves out around it."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from hvdtrain import training
from tests.single.training.small import N, Trained, X, flags_for, train

DOCS = Path(__file__).resolve().parents[3] / "docs"
BLOCKS = [
    (page.name, code)
    for page in sorted(DOCS.glob("*.md"))
    for code in re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.M | re.S)
]
RUN_IN = {  # what a block holds -> the test that runs it
    "split_dataset_by_node": "tests/single/training/test_streams.py",
    "ppo_loss": "test_ppo_learns",
    "states.clear()": "test_parts_of_sequences_carry_the_hidden_state_on",
    "1.1**step.number": "test_a_search_for_the_learning_rate_ends_where_the_loss_explodes",
    "torch.compile": "test_a_compiled_model",
    "run.predict": "test_predictions",
    "wandb.init": "test_weights_and_biases",
    "datasets.ImageFolder": "test_rare_images_are_drawn_as_often_as_others",
    "load_file": "test_exported_weights_are_loaded",
    "run.gather": "test_the_auc_is_that_of_all_samples_and_a_plateau_follows_the_loss",
    "plateau.step": "test_the_auc_is_that_of_all_samples_and_a_plateau_follows_the_loss",
    "class Photos": "test_photos_of_ones_own_are_decoded",
    'reduction="sum"': "test_the_recorded_loss_is_the_mean_over_samples",
}


def block(holds: str) -> str:
    (found,) = [code for _, code in BLOCKS if holds in code]
    return found


@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[f"{page}-{code.split()[0]}" for page, code in BLOCKS])
def test_a_test_runs_each_block(page, code):
    (test,) = [test for holds, test in RUN_IN.items() if holds in code]
    assert (DOCS.parent / test).exists() if "/" in test else test in globals()


# ---- PPO

MOVES = torch.tensor([[-0.5, 0.0], [0.5, 0.0], [0.0, -0.5], [0.0, 0.5]])


def rollout(policy, count):
    """Return the states, moves, log-probabilities and returns of `count` episodes that should end at the origin."""
    at, states, moves, old = 3 * torch.randn(count, 2), [], [], []
    with torch.no_grad():
        for _ in range(12):
            choice = torch.distributions.Categorical(logits=policy(at))
            states.append(at)
            moves.append(choice.sample())
            old.append(choice.log_prob(moves[-1]))
            at = at + MOVES[moves[-1]]
    return torch.stack(states, 1), torch.stack(moves, 1), torch.stack(old, 1), -at.norm(dim=1)


def ppo_loss(logits, moves, old, returns):
    ratio = (torch.distributions.Categorical(logits=logits).log_prob(moves) - old).exp()
    advantage = (returns - returns.mean()).unsqueeze(1)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def test_ppo_learns():
    with training.start(flags_for(epochs=4, batch_size=64)) as run:
        net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4))
        first = rollout(net, 1000)[3].mean()
        policy, _ = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
        scope = dict(run=run, EPISODES=1024, net=net, policy=policy, rollout=rollout, ppo_loss=ppo_loss)
        for _ in run.epochs(4):
            exec(block("ppo_loss"), scope)
        assert run.state.step == 64
        assert rollout(net, 1000)[3].mean() > 0.7 * first  # returns are negative: the distance at the end


# ---- others


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x, hidden=None):
        output, hidden = self.cell(x, hidden)
        return self.out(output), hidden


def test_parts_of_sequences_carry_the_hidden_state_on():
    """The first number of a sequence is asked for at its end, three parts later: it is known by the state alone."""
    first = torch.randint(2, (256, 1))
    x = torch.cat([first, torch.zeros(256, 11)], 1).unsqueeze(2)
    with training.start(flags_for(epochs=30, batch_size=32)) as run:
        net, _ = run.prepare(inner := Recurrent(), torch.optim.Adam(inner.parameters(), lr=0.02))
        train = DataLoader(TensorDataset(x, first.expand(256, 12)), 32, shuffle=True)
        scope = dict(run=run, LENGTH=12, PART=4, net=net, states={}, F=F, train=train)
        for _ in run.epochs(30):
            exec(block("states.clear()"), scope)
        assert run.state.step == 240
    hidden, output = None, torch.empty(0)
    for start in range(0, 12, 4):
        output, hidden = inner(x[:, start : start + 4], hidden)
    assert (output[:, -1].argmax(1) == first[:, 0]).float().mean() > 0.95


def test_a_search_for_the_learning_rate_ends_where_the_loss_explodes():
    with training.start(flags_for(epochs=100, batch_size=16)) as run:
        net, optimizer = run.prepare(inner := nn.Linear(3, 3), torch.optim.SGD(inner.parameters(), lr=1.0))
        train = DataLoader(TensorDataset(X, torch.arange(N) % 3), 16)
        scope = dict(run=run, optimizer=optimizer, net=net, F=F, train=train, lowest=float("inf"))
        for _ in run.epochs(100):
            exec(block("1.1**step.number"), scope)
    assert run.exit_code == 75
    assert 1 < optimizer.param_groups[0]["lr"] < 1e6


@pytest.mark.slow  # it imports torch's compiler
def test_a_compiled_model(monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda net: compiler(net, backend="eager"))  # no C++ compiler
    with training.start(flags_for()) as run:
        net = nn.Linear(3, 1)
        scope = dict(run=run, torch=torch, net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
        exec(block("torch.compile"), scope)
        train(run, scope["net"], epochs=1)
        assert scope["net"] is not net
        assert run.state.samples == N


def classified(*argv, blocks, labels, epochs=1, **how):
    """Train a classifier, with these blocks at the end of each epoch."""
    test = DataLoader(TensorDataset(X, labels), 8)

    def tail(t, epoch):
        for holds in blocks:
            exec(
                block(holds), dict(run=t.run, net=t.model, test=test, torch=torch, F=F, plateau=vars(t).get("plateau"))
            )

    return Trained(*argv, net=nn.Linear(3, 1 + int(labels.max())), data=(X, labels), epochs=epochs, tail=tail,
                   loss=lambda t, x, y: F.cross_entropy(t.model(x), y), **how)  # fmt: skip


def test_predictions(tmp_path):
    labels = torch.arange(N) % 3
    how = dict(blocks=["run.predict"], labels=labels, metrics={"accuracy": "max"})
    accuracy = classified(out=tmp_path / "run", **how).run.evaluation["accuracy"]
    file = tmp_path / "predicted.csv"
    again = classified("--evaluate", str(tmp_path / "run"), "--predict", str(file), **how)
    assert again.run.evaluation["accuracy"] == accuracy
    rows = [line.split(",") for line in file.read_text().splitlines()]
    label, predicted = rows[0].index("label"), rows[0].index("predicted")
    assert [int(row[label]) for row in rows[1:]] == labels.tolist()
    assert sum(row[label] == row[predicted] for row in rows[1:]) / N == pytest.approx(accuracy)


def test_rare_images_are_drawn_as_often_as_others(tmp_path):
    import torchvision  # whose import takes a second
    from PIL import Image

    for label, count in (("common", 9), ("rare", 1)):
        (tmp_path / label).mkdir()
        for number in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / label / f"{number}.png")
    scope = dict(torch=torch, torchvision=torchvision, WeightedRandomSampler=WeightedRandomSampler)
    scope |= dict(root=tmp_path, transform=None)
    exec(block("datasets.ImageFolder"), scope)
    assert scope["sampler"].weights.tolist() == pytest.approx([1 / 9] * 9 + [1])
    assert scope["sampler"].num_samples == len(scope["folder"]) == 10


def test_the_recorded_loss_is_the_mean_over_samples():
    labels = torch.arange(N) % 3
    t = classified(blocks=['reduction="sum"'], labels=labels, metrics={"accuracy": "max", "loss": "min"})
    assert t.run.evaluation["loss"] == pytest.approx(F.cross_entropy(t.net(X), labels).item())


def test_the_auc_is_that_of_all_samples_and_a_plateau_follows_the_loss():
    labels = torch.arange(N) % 2
    t = classified(
        blocks=["plateau.step", "run.gather"], labels=labels, epochs=3, metrics={"auc": "max"}, lr=0.0,
        registered=lambda t: dict(plateau=ReduceLROnPlateau(t.optimizer, patience=0, min_lr=0.0)),
    )  # fmt: skip
    scores = t.net(X)[:, 1]
    above = (scores[labels == 1].unsqueeze(1) > scores[labels == 0]).double().mean()
    assert t.run.evaluation["auc"] == pytest.approx(above.item())
    assert t.plateau.best == pytest.approx(F.cross_entropy(t.net(X), labels).item())
    assert t.plateau.last_epoch == 3


def test_photos_of_ones_own_are_decoded(tmp_path):
    from PIL import Image

    files = [tmp_path / f"{number}.jpg" for number in range(2)]
    for file in files:
        Image.new("RGB", (400, 300), "white").save(file)
    scope = dict(torch=torch, Dataset=Dataset)
    exec(block("class Photos"), scope)
    batch, labels = next(iter(DataLoader(scope["Photos"](files, [3, 5], 32), 2)))
    assert batch.shape == (2, 3, 32, 32)
    assert batch.min() > 0.98
    assert labels.tolist() == [3, 5]


def test_exported_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    net = Trained(net=nn.Linear(3, 1), end=lambda t: t.run.export("runs/weights.safetensors")).net
    fresh = nn.Linear(3, 1)
    exec(block("load_file"), dict(model=fresh))
    assert torch.equal(fresh.weight, net.weight)
    assert not fresh.training


def test_weights_and_biases(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb: pip install 'hvdtrain[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = flags_for("--output-dir", str(tmp_path / "run"))
    try:
        exec(block("wandb.init"), dict(training=training, flags=flags, wandb=wandb))
        assert wandb.run.id == "run"
        assert wandb.config["batch_size"] == 8
    finally:
        wandb.finish()
