"""Models and evaluations do here what they do in a plain torch program."""

import pytest
import torch
from torch import nn

from tests.e2e.launchers import events
from tests.single.training.small import N, Trained, X, squares


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
    def evaluated_first(t, x):
        if len(t.net.table) < N:
            with t.run.evaluating(N):
                t.run.record(loss=t.model(X).square().sum())
        return squares(t, x)

    assert len(Trained(net=Sines, data=[X], loss=evaluated_first).net.table) == N


def test_an_evaluation_may_compute_gradients_of_its_own():
    """Of the input, as for adversarial examples and saliency."""

    def evaluate(t, epoch):
        with t.run.evaluating(N) as mine:
            assert not t.model(X[mine]).requires_grad
            with torch.enable_grad():
                x = X[mine].clone().requires_grad_()
                (gradient,) = torch.autograd.grad(t.model(x).sum(), x)
            t.run.record(size=gradient.abs().sum(1))

    t = Trained(net=nn.Linear(3, 1), lr=0.0, epochs=1, tail=evaluate)
    assert abs(t.run.evaluation["size"] - float(t.net.weight.abs().sum())) < 1e-6


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def short(request):
    """The default dtype, while the test runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def test_numbers_keep_their_digits_whatever_the_default_dtype_is(short, tmp_path):
    """Those of the program, and a count of tokens: the gradient of their mean is 1 for each weight."""
    net = nn.Linear(3, 1, dtype=torch.float32)
    before = net.weight.detach().clone()

    def at_step(t):
        t.share = t.step.per_sample(lambda batch: 1001.0)

    def loss(t, x):
        t.step.record(number=1001.25)
        return t.model(x).mean()

    def evaluate(t, epoch):
        with t.run.evaluating(N):
            t.run.record(loss=1001.25, count=1)

    t = Trained("--accumulate", "8", "--log-steps", "1", out=tmp_path, net=net, lr=1.0, count=torch.tensor(1001), epochs=1,
                data=[torch.ones(N, 3, dtype=torch.float32)], at_step=at_step, loss=loss, tail=evaluate)  # fmt: skip
    assert t.run.evaluation["loss"] == 1001.25
    assert t.share == 5 * 1001 / N
    assert torch.allclose(before - net.weight, torch.ones(1, 3, dtype=torch.float32))
    assert events(tmp_path, "train")[0]["number"] == 1001.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_over_a_step_is_added_up_in_32_bits(dtype):
    def loss(t, _):
        sums = t.model(torch.ones(1, 3, dtype=dtype)).sum()
        return sums - sums.detach() + 101

    def each(t):
        assert t.step.loss == 101

    Trained("--accumulate", "40", "--log-steps", "1", net=nn.Linear(3, 1).to(dtype), lr=0.0, epochs=1, batch_size=1,
            data=[N], loss=loss, count=torch.tensor(4001), each=each)  # fmt: skip
