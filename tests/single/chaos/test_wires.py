"""The wire between hosts of `python -m tests.chaos.networks`: which packets arrive, and when."""

import random
import struct

import pytest

from tests.chaos.wires import LATE_SECONDS, Rules, deliveries, ports


def frame(source: int = 1000, target: int = 9000, size: int = 100) -> bytes:
    """An Ethernet frame with a TCP segment between these ports."""
    head = bytes(12) + b"\x08\x00" + bytes([0x45]) + bytes(8) + bytes([6]) + bytes(10)
    return (head + struct.pack("!HH", source, target)).ljust(size, b"\0")


def arrivals(rules: Rules, packet: bytes, source: int = 0, target: int = 1, times: int = 1000) -> list[list[float]]:
    dice = random.Random(1)
    return [deliveries(packet, source, target, rules, dice) for _ in range(times)]


def test_all_arrives_at_once_without_rules():
    assert arrivals(Rules(), frame()) == [[0.0]] * 1000


def test_ports_are_read_from_the_frame():
    assert ports(frame(1234, 4321)) == (1234, 4321)
    assert ports(bytes(12) + b"\x08\x06" + bytes(28)) is None  # ARP


def test_one_direction_is_cut():
    rules = Rules(cut=[[0, 1]])
    assert arrivals(rules, frame()) == [[]] * 1000
    assert arrivals(rules, frame(), source=1, target=0) == [[0.0]] * 1000


@pytest.mark.parametrize("packet", [frame(target=9000), frame(source=9000, target=5)])
def test_one_port_is_cut_in_both_directions(packet):
    assert arrivals(Rules(ports=[9000]), packet, times=1) == [[]]
    assert arrivals(Rules(ports=[9001]), packet, times=1) == [[0.0]]


def test_large_packets_vanish():
    rules = Rules(largest=600)
    assert arrivals(rules, frame(size=601), times=1) == [[]]
    assert arrivals(rules, frame(size=600), times=1) == [[0.0]]


@pytest.mark.parametrize(
    ("rules", "outcome"),
    [(Rules(loss=0.3), []), (Rules(duplicate=0.3), [0.0, 0.0]), (Rules(reorder=0.3), [LATE_SECONDS])],
)
def test_a_share_of_the_packets_has_bad_luck(rules, outcome):
    found = arrivals(rules, frame())
    assert 250 < found.count(outcome) < 350
    assert found.count([0.0]) == 1000 - found.count(outcome)
