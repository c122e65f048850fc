"""Rank 0 of many, simulated: what it receives at start-up grows with the ranks, and no collective is added unnoticed."""

import torch
from torch import nn

from hvdtrain import training
from tests.bench.simulated import RankZero, simulated


def started(ranks: int) -> RankZero:
    """Return the engine, which has counted, after `training.start` and `run.prepare`."""
    net = nn.Linear(10, 10)
    flags = training.parser("gathers", None).parse(["--engine", "serial", "--no-progress"])
    with simulated(ranks), training.start(flags) as run:
        run.prepare(net, torch.optim.Adam(net.parameters()))
    return run.engine


def test_start_up_takes_a_fixed_number_of_collectives_and_bytes_in_proportion_to_the_ranks():
    few, many = started(9), started(65)
    assert few.calls == many.calls <= 33
    assert (len(few.others), len(many.others)) == (8, 64)  # the watchdog's
    for name, size in few.received.items():
        assert name == "barrier" or many.received[name] / size < 1.3 * 64 / 8, name
