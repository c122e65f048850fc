"""Rank 0 of many, simulated: what it receives grows with the ranks at start-up, and not in a save of more than 64."""

import torch
from torch import nn

from hvdtrain import training
from tests.bench.simulated import RankZero, measure, simulated


def started(ranks: int) -> RankZero:
    """Return the engine, which has counted, after `training.start` and `run.prepare`."""
    net = nn.Linear(10, 10)
    flags = training.parser("gathers", None).parse(["--engine", "serial", "--no-progress"])
    with simulated(ranks), training.start(flags) as run:
        run.prepare(net, torch.optim.Adam(net.parameters()))
    return run.engine


def test_start_up_takes_a_fixed_number_of_collectives_and_bytes_in_proportion_to_the_ranks():
    few, many = started(9), started(64)
    assert few.calls == many.calls <= 33
    assert (len(few.others), len(many.others)) == (8, 63)  # the watchdog's
    for name, size in few.received.items():
        assert name == "barrier" or many.received[name] / size < 1.3 * 63 / 8, name


def test_what_a_save_of_more_than_64_ranks_receives_does_not_grow_with_them(tmp_path):
    sizes = []
    for ranks in (65, 130):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
        sizes.append(measure(ranks, net, tmp_path / str(ranks))["saving step"][1])
    assert sizes[0] == sizes[1] < 2000
