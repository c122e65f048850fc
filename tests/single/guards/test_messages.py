"""Each message comes as it was sent, and what is none is refused."""

import pytest

from hvdtrain.guards.diagnosis import Report
from hvdtrain.guards.flight import Last
from hvdtrain.guards.messages import KINDS, Appoint, Ask, Bye, End, Fail, Know, Stand, Stop, decode, encode

REPORT = Report(7, "step", float("inf"), 31.5, 0.0, None, "train.py:3, main")
SENT = [Ask(), Stand(REPORT, ["a line\n", "ä"]), Stand(REPORT, [], Last(9, 8, "all_reduce")), Stop("SIGTERM"),
        Appoint("save", 9, None), Appoint("stop", 9, "Ctrl-C"),
        Know("save"), Fail("KeyError: 1"), Fail("UserError: no", mistake=True), End(75), Bye()]  # fmt: skip


@pytest.mark.parametrize("message", SENT, ids=repr)
def test_a_message_comes_as_it_was_sent(message):
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    got = decode(line)
    assert (type(got), got) == (type(message), message)


def test_all_kinds_are_tried():
    assert {type(message) for message in SENT} == set(KINDS.values())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"1",
        b'["Nothing"]',
        b'["Stop"]',
        b'["Stop", 1, 2]',
        b'["Stand", 1, []]',
        b'["Stand"]',
        b"\xff",
        b"[" * 100_000,
        b'["Stop", ' + b"[" * 100_000 + b"]" * 100_000 + b"]",
    ],
)
def test_what_is_no_message_is_refused(line):
    with pytest.raises(ValueError, match="no message"):
        decode(line)
