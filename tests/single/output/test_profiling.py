"""The merged profile: clocks of several hosts, ranks side by side."""

import json

import pytest

from hvdtrain import imagenet, mnist
from hvdtrain.engines.errors import UserError
from hvdtrain.output.traces import PHASES_TID, clock_offsets, merge

SECOND = 10**9
MS = 10**6


def barriers(true_offset_ns: int, count: int = 5) -> tuple[list, list]:
    """Return (entry, exit) on the clocks of rank 0 and of a rank ahead by `true_offset_ns`, late in turn."""
    zero, other = [], []
    for i in range(count):
        at = i * SECOND
        late_zero, late_other = (0, 3 * MS) if i % 2 else (3 * MS, 0)
        leaves = at + 3 * MS + MS // 10
        zero.append((at + late_zero, leaves))
        other.append((at + late_other + true_offset_ns, leaves + true_offset_ns + MS // 20))
    return zero, other


@pytest.mark.parametrize("true_offset_ns", [0, 7 * SECOND, -2 * MS])
def test_clocks_of_two_hosts_are_compared_by_barriers(true_offset_ns):
    zero, other = barriers(true_offset_ns)
    (mine, my_error), (theirs, their_error) = clock_offsets(["a", "b"], [zero, other])
    assert (mine, my_error) == (0, 0)
    assert abs(theirs - true_offset_ns) <= their_error
    assert their_error < 0.2 * MS  # although each barrier took 3 ms


def test_ranks_on_one_kernel_share_its_clock_and_its_bounds():
    zero, other = barriers(5 * SECOND)
    loose = [(entry - SECOND, left + SECOND) for entry, left in other]
    offsets = clock_offsets(["a", "b", "a", "b"], [zero, loose, loose, other])
    assert offsets[2] == (0, 0)
    assert offsets[1] == offsets[3] == clock_offsets(["a", "b"], [zero, other])[1]


def piece(pid: int, host: str, began_ns: int, rounds: list) -> dict:
    where = {"pid": pid, "tid": pid}
    return {
        "host": host, "kernel": host, "rounds": rounds, "began_ns": began_ns, "ended_ns": began_ns + 100 * MS,
        "events": [
            {"ph": "M", "name": "process_name", "ts": 0, "args": {"name": "python"}, **where},
            {"ph": "M", "name": "process_labels", "ts": 0, "args": {"labels": "CPU"}, **where},
            {"ph": "M", "name": "process_labels", "ts": 0, "args": {"labels": "GPU 0"}, "pid": 0, "tid": 0},
            {"ph": "M", "name": "process_labels", "ts": 0, "args": {"labels": "GPU 7"}, "pid": 7, "tid": 0},
            {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 50.0, "dur": 50.0, **where},
            {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#2", "ts": 0.0, "dur": 50.0, **where},
            {"ph": "s", "id": 5, "cat": "fwdbwd", "name": "fwdbwd", "ts": 1.0, **where},
            {"ph": "X", "cat": "kernel", "name": "conv", "ts": 2.0, "dur": 1.0, "pid": 0, "tid": 7},
        ],
        "spans": [("compute", 0.0, 40.0), ("communication", 40.0, 10.0)],
    }  # fmt: skip


def test_ranks_stand_side_by_side_on_rank_0s_clock():
    zero, other = barriers(7 * SECOND)
    # Rank 1 began 20 ms after rank 0, on a clock that is 7 s ahead.
    pieces = [piece(400, "a", 60 * SECOND, zero), piece(400, "b", 67 * SECOND + 20 * MS, other)]
    merged = json.loads(json.dumps(merge(json.loads(json.dumps(pieces)), 6, 2)))
    events = merged["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["rank 0 on a", "rank 0 on a, GPU 0", "rank 1 on b", "rank 1 on b, GPU 0"]

    steps = {(e["pid"], e["name"]): e["ts"] for e in events if e["name"].startswith("step ")}
    first, second = (pid for pid, name in names.items() if "GPU" not in name)
    assert list(steps) == [(first, "step 6"), (first, "step 7"), (second, "step 6"), (second, "step 7")]
    assert steps[first, "step 6"] == 0
    assert steps[second, "step 6"] == pytest.approx(20_000, abs=merged["otherData"]["clocks_within_us"])

    arrows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(set(arrows)) == 2  # or arrows would lead from one rank to another
    phases = [(e["pid"], e["name"]) for e in events if e["tid"] == PHASES_TID and e["ph"] == "X"]
    assert phases == [(pid, phase) for pid in (first, second) for phase in ("compute", "communication")]


def test_a_rank_that_began_before_rank_0_still_begins_at_no_less_than_nought():
    zero, other = barriers(0)
    pieces = [piece(400, "a", 60 * SECOND, zero), piece(400, "b", 60 * SECOND - 2 * MS, other)]
    merged = merge(pieces, 6, 2)
    timed = [e for e in merged["traceEvents"] if e["ph"] != "M"]
    assert min(e["ts"] for e in timed) == 0
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    first = next(e for e in timed if e["name"] == "step 6" and e["pid"] == 1)
    assert first["ts"] == pytest.approx(2000, abs=merged["otherData"]["clocks_within_us"])
    assert merged["otherData"]["began_ns"] + first["ts"] * 1000 == pytest.approx(60 * SECOND, abs=1000)


def test_a_rank_without_a_record_still_has_its_phases():
    zero, other = barriers(0)
    broken = piece(400, "b", 60 * SECOND, other) | {"events": []}
    events = merge([piece(400, "a", 60 * SECOND, zero), broken], 6, 2)["traceEvents"]
    assert "rank 1 on b" in [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert len([e for e in events if e.get("cat") == "phase"]) == 4


def test_a_step_that_had_only_begun_is_left_out():
    zero, other = barriers(0)
    merged = merge([piece(400, "a", 60 * SECOND, zero), piece(400, "b", 60 * SECOND, other)], 6, 1)
    assert [e["name"] for e in merged["traceEvents"] if e["name"].startswith(("step", "Prof"))] == ["step 6"] * 2


@pytest.mark.parametrize("flag", ["--profile 5", "--tensorboard", "--track mlflow"])
@pytest.mark.parametrize("script", [mnist, imagenet])
def test_output_dir_is_needed(script, flag):
    with pytest.raises(UserError, match=f"{flag.split()[0]} needs --output-dir") as caught:
        script.parse(flag.split())
    assert caught.value.everywhere  # said once, by rank 0
