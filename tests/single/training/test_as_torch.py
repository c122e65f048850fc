"""Models and evaluations do here what they do in a plain torch program."""

import pytest
import torch
from torch import nn

from hvdtrain import training
from tests.e2e.launchers import events
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


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def short(request):
    """The default dtype, while the test runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def test_numbers_keep_their_digits_whatever_the_default_dtype_is(short, tmp_path):
    """Those of the program, and a count of tokens: the gradient of their mean is 1 for each weight."""
    ones = torch.ones(N, 3, dtype=torch.float32)
    with training.start(flags_for("--accumulate", "8", "--log-steps", "1", "--output-dir", str(tmp_path))) as run:
        net = nn.Linear(3, 1, dtype=torch.float32)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        before = net.weight.detach().clone()
        for _ in run.epochs(1):
            for step in run.steps(ones):
                per_sample = step.per_sample(lambda batch: 1001.0)
                for (x,) in step.batches():
                    step.record(number=1001.25)
                    step.backward(model(x).mean(), count=torch.tensor(1001))
                step.update()
            with run.evaluating(N):
                run.record(loss=1001.25, count=1)
    assert run.evaluation["loss"] == 1001.25
    assert per_sample == 5 * 1001 / N
    assert torch.allclose(before - net.weight, torch.ones(1, 3, dtype=torch.float32))
    assert events(tmp_path, "train")[0]["number"] == 1001.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_over_a_step_is_added_up_in_32_bits(dtype):
    with training.start(flags_for("--accumulate", "40", "--log-steps", "1", epochs=1, batch_size=1)) as run:
        net = nn.Linear(3, 1).to(dtype)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        for _ in run.epochs(1):
            for step in run.steps(N):
                for _batch in step.batches():
                    loss = model(torch.ones(1, 3, dtype=dtype)).sum()
                    step.backward(loss - loss.detach() + 101, count=torch.tensor(4001))
                step.update()
                assert step.loss == 101
