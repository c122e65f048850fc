"""Models and evaluations do here what they do in a plain torch program."""

import torch
from torch import nn

from hvdtrain import training
from tests.single.training.small import N, X, Y, fit, flags_for


class Sines(nn.Module):
    """Keeps a table as long as the longest sequence so far, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.inner, self.table = nn.Linear(3, 3), torch.ones(0, 1)

    def forward(self, x):
        if len(self.table) < len(x):
            self.table = torch.arange(len(x)).float().sin().unsqueeze(1)
        return self.inner(x) * self.table[: len(x)]


def test_a_table_that_a_model_made_in_an_evaluation_is_used_in_training():
    with training.start(flags_for()) as run:
        net = Sines()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

        def evaluated_first(step, x):
            if len(net.table) < N:
                with run.evaluating(N):
                    run.record(loss=model(X).square().sum())
            return model(x).square().mean()

        fit(run, [X], evaluated_first)
    assert len(net.table) == N


def test_an_evaluation_may_compute_gradients_of_its_own():
    """Of the input, as for adversarial examples and saliency."""
    with training.start(flags_for(epochs=1)) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        fit(run, [X, Y], lambda step, x, y: (model(x) - y).square().mean())
        with run.evaluating(N) as mine:
            assert not model(X[mine]).requires_grad
            with torch.enable_grad():
                x = X[mine].clone().requires_grad_()
                (gradient,) = torch.autograd.grad(model(x).sum(), x)
            run.record(size=gradient.abs().sum(1))
    assert abs(run.evaluation["size"] - float(net.weight.abs().sum())) < 1e-6
