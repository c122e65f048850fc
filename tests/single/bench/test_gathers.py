"""Rank 0 of many, simulated: what it receives at start-up grows with the ranks, and no collective is added unnoticed."""

from tests.bench.gathers import measure


def test_start_up_takes_a_fixed_number_of_collectives_and_bytes_in_proportion_to_the_ranks():
    few, many = measure(9)[1], measure(65)[1]
    assert few.calls == many.calls <= 33
    assert (len(few.others), len(many.others)) == (8, 64)  # the watchdog's
    for name, size in few.received.items():
        assert name == "barrier" or many.received[name] / size < 1.3 * 64 / 8, name
