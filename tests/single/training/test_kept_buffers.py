"""Buffers of a step that is skipped: restored to the bit, with few kernels on a device."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.features.non_finite import Kept


class Counted(TorchDispatchMode):
    """Counts what is no view: on a GPU, each starts a kernel, those on lists one for many tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.count += not function.is_view
        return result


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
