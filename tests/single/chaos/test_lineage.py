"""How much training a fault has cost, by the records of a run."""

import json

import pytest

from tests.chaos.lineage import Fault, seconds_lost


def record(path, *events):
    """Write metrics.jsonl of (time, event) or (time, event, step)."""
    facts = [dict(zip(("time", "event", "step"), event, strict=False)) for event in events]
    path.write_text("".join(json.dumps(fact) + "\n" for fact in facts))


START, SAVED, AGAIN, END = (10, "start"), (13, "checkpoint", 3), (30, "start"), (40, "end")
RESUMED = (30, "resume", 3)
CASES = {
    "killed": ([START, SAVED, AGAIN, RESUMED, END], [(17.5, "kill")], 4.5),
    "no checkpoint yet": ([START, AGAIN, END], [(17.5, "kill")], 7.5),
    "the newest checkpoint was damaged":
        ([START, SAVED, (15, "checkpoint", 6), AGAIN, RESUMED, END], [(17.5, "kill")], 4.5),
    "stopped, and saved afterwards":
        ([START, SAVED, (18, "checkpoint", 5), (18, "stop", 5), AGAIN, (30, "resume", 5)], [(17.5, "term")], 0.0),
    "not ended by it": ([START, SAVED, END], [(17.5, "refill")], 0.0),
    "ended by the second only": ([START, SAVED, AGAIN, RESUMED, END], [(12.0, "refill"), (17.5, "kill")], 4.5),
    "the last checkpoint of all could not be written": ([START, SAVED, AGAIN, RESUMED, END], [(17.5, "full")], 4.5),
    "before training": ([START, END], [(5.0, "kill")], 0.0),
    "again before the next one trained": ([START, SAVED, AGAIN, RESUMED, END], [(17.5, "kill"), (25.0, "kill")], 4.5),
    "completed as the fault struck": ([START, AGAIN, RESUMED, END], [(17.5, "kill")], 0.0),
    "resumed, and saved nothing since": ([START, SAVED, (20, "start"), (20, "resume", 3), AGAIN, RESUMED],
        [(14.0, "kill"), (22.5, "kill")], 3.5),
}  # fmt: skip


@pytest.mark.parametrize(("events", "faults", "seconds"), CASES.values(), ids=CASES)
def test_training_done_again_is_counted_from_the_checkpoint_to_the_fault(events, faults, seconds, tmp_path):
    record(tmp_path / "metrics.jsonl", *events)
    assert seconds_lost(tmp_path, [Fault(*fault) for fault in faults]) == seconds


def test_an_attempt_that_found_no_checkpoint_has_a_record_of_its_own(tmp_path):
    record(tmp_path / "metrics.1.jsonl", (10, "start"))
    record(tmp_path / "metrics.jsonl", (30, "start"), (40, "end"))
    assert seconds_lost(tmp_path, [Fault(17.5, "kill")]) == 7.5
