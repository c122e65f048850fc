"""Gradients that are not finite: a flag on the device, what fused optimizers do with it, buffers of a skipped step."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.features.non_finite import Kept, gradients_are_finite, not_finite, takes_flag
from hvdtrain.loop.prepare import fuse

on_cpu = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4), reason="fused optimizers of a CPU: torch 2.4 and newer"
)
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(1)
    made = [nn.Parameter(torch.randn(3, 4).to(dtype)) for _ in range(3)]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return [*made, nn.Parameter(torch.zeros(2))]  # the last one has no gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("bad", [None, *BAD])
def test_the_flag_says_what_the_check_says(dtype, bad):
    made = parameters(dtype)
    if bad is not None:
        made[1].grad[2, 3] = complex(1.0, BAD[bad]) if dtype.is_complex else BAD[bad]
    flag = not_finite(made)
    assert flag.dtype == torch.float32
    assert flag.shape == ()
    assert bool(flag) is (bad is not None)
    assert gradients_are_finite(made) is (bad is None)


def test_large_gradients_in_half_precision_are_finite():
    made = parameters(torch.float16)
    made[0].grad.fill_(60_000)
    assert not_finite(made) == 0


class Counted(TorchDispatchMode):
    """Counts what is no view: on a GPU, each starts a kernel, those on lists one for many tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.count += not function.is_view
        return result


@pytest.mark.parametrize(
    ("make", "finite"),
    [
        (list, True),
        (lambda some: some[0].fill_(float("-inf")), False),
        (lambda some: [some[0].fill_(float("inf")), some[1].fill_(float("-inf"))], False),
        (lambda some: [one.fill_(2e36) for one in some], True),  # the sum of all is too large for float32
    ],
    ids=["finite", "infinite", "both infinities", "large"],
)
def test_small_gradients_are_looked_at_together(make, finite):
    made = [nn.Parameter(torch.zeros(2, 2)) for _ in range(400)] + [nn.Parameter(torch.zeros(100, 100))]
    made += [nn.Parameter(torch.zeros(3, dtype=torch.float64)), nn.Parameter(torch.zeros(3))]
    for parameter in made[:-1]:
        parameter.grad = torch.randn_like(parameter)
    made[-1].grad = torch.eye(3)[0].to_sparse()
    make([parameter.grad for parameter in made[3:90:2]])
    with Counted() as counted:
        assert gradients_are_finite(made) is finite
    if make is list:
        assert counted.count <= 12  # one by one: a sum of each


@on_cpu
@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    ],
    ids=["adam", "adamw", "sgd"],
)
def test_a_fused_optimizer_with_the_flag_leaves_weights_and_state_bit_for_bit(build):
    """What hvdtrain relies on in torch: `Optimizer.found_inf`."""
    made = parameters()[:3]
    optimizer = build(made)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    before = copy.deepcopy([made, list(optimizer.state_dict()["state"].values())])
    made[1].grad.fill_(float("nan"))
    optimizer.found_inf = not_finite(made)
    optimizer.step()
    for old, new in zip(before[0], made, strict=True):
        assert torch.equal(old, new)
    for old, new in zip(before[1], optimizer.state_dict()["state"].values(), strict=True):
        for name, value in old.items():
            assert torch.equal(value, new[name]), name


@on_cpu
def test_the_first_update_of_sgd_must_not_be_left_out_by_the_flag():
    """Why the first update is checked at once: torch leaves the momentum that it allocates in it as it is."""
    made = parameters()[:1]
    optimizer = torch.optim.SGD(made, lr=0.1, momentum=0.9, fused=True)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert optimizer.state[made[0]]["momentum_buffer"] is not None  # of no defined value


class Elsewhere(nn.Parameter):
    """A parameter that says it is on a GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("build", "lacks", "fused"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), False, True),
        (lambda p: torch.optim.SGD(p, lr=0.1), True, None),  # its kernel needs all momenta or none
        (lambda p: torch.optim.Adam(p), True, True),
        (lambda p: torch.optim.AdamW(p), False, True),
        (lambda p: torch.optim.AdamW(p, foreach=True), False, None),  # the author's choice
        (lambda p: torch.optim.RMSprop(p), False, None),  # torch has none
    ],
)
def test_which_optimizers_are_fused(build, lacks, fused):
    optimizer = build([Elsewhere(torch.zeros(3))])
    fuse(optimizer, may_lack_gradients=lacks)
    assert optimizer.param_groups[0].get("fused") is fused
    assert takes_flag(optimizer) is bool(fused)


def test_on_a_cpu_nothing_is_fused():
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(3))])
    fuse(optimizer, may_lack_gradients=False)
    assert optimizer.param_groups[0]["fused"] is None
    assert not takes_flag(optimizer)


# ---- buffers of a step that is skipped


def net_with_buffers() -> nn.Module:
    net = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(20)))
    net.register_buffer("across", torch.randn(3, 4).t())
    net.register_buffer("same", net[0].running_mean)
    net.register_buffer("sparse", torch.eye(2).to_sparse())
    return net


@pytest.mark.parametrize("flag", [None, True, False])
def test_they_are_as_before_where_the_step_is_skipped_and_only_there(flag):
    net = net_with_buffers()
    if flag is not None:
        del net.sparse  # has no choice on a device
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with Counted() as counted:
        kept = Kept([net])
        taken = counted.count
    net(torch.full((4, 3), float("nan")))
    net.across.zero_()
    net[3].running_mean = other = torch.ones(3)  # in the place of another one
    after = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with Counted() as counted:
        kept.restore(None if flag is None else torch.tensor(flag))
    assert max(taken, counted.count) <= 12  # one by one: 60 copies, and 180 operations
    expected = after if flag is False else before
    for name, buffer in net.named_buffers():
        if name == "3.running_mean" and flag is not None:
            assert buffer is other
            continue
        one, two = (each.to_dense() if each.is_sparse else each for each in (buffer, expected[name]))
        assert torch.equal(one.nan_to_num(7), two.nan_to_num(7)), name
