"""Merges the recordings of all ranks into one Chrome trace, which Perfetto and chrome://tracing can open."""

from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]  # of a Chrome trace, or what a rank has recorded

PIDS_PER_RANK = 100
PHASES_TID = 2**22 + 1  # above all thread IDs on Linux (PID_MAX_LIMIT)


def clock_offsets(kernels: Sequence[str], rounds: Sequence[Sequence[Sequence[int]]]) -> list[tuple[float, float]]:
    """Return for each rank the offset of its wall clock to rank 0's, and the maximum error, in nanoseconds.

    rounds: by rank, (entry, exit) of several barriers on the rank's own clock. No rank leaves a barrier before all have
    entered it, so exit_r - offset >= entry_0 and exit_0 >= entry_r - offset. Each round bounds the offset from both sides;
    the middle of the intersection is used (F. Cristian, Probabilistic clock synchronization, 1989). Ranks on the same
    kernel have the same clock, so their bounds are combined.
    """
    bounds: dict[str, tuple[float, float]] = {}
    for kernel, mine in zip(kernels, rounds, strict=True):
        low = max(entry - exit_0 for (entry, _), (_, exit_0) in zip(mine, rounds[0], strict=True))
        high = min(left - entry_0 for (_, left), (entry_0, _) in zip(mine, rounds[0], strict=True))
        before = bounds.get(kernel, (low, high))
        bounds[kernel] = max(low, before[0]), min(high, before[1])
    bounds[kernels[0]] = 0, 0
    return [(sum(bounds[kernel]) / 2, (bounds[kernel][1] - bounds[kernel][0]) / 2) for kernel in kernels]


def merge(pieces: Sequence[Event], first_step: int, steps: int) -> Event:
    """Return one Chrome trace of all ranks. `ts` is in microseconds since the earliest recording began, on rank 0's clock.

    pieces: by rank, the recordings that `Profile` gathers. steps: number of recorded steps.
    """
    offsets = clock_offsets([piece["kernel"] for piece in pieces], [piece["rounds"] for piece in pieces])
    began_ns = [piece["began_ns"] - round(offset_ns) for piece, (offset_ns, _) in zip(pieces, offsets, strict=True)]
    zero_ns, end_ns = min(began_ns), pieces[0]["ended_ns"]
    events: list[Event] = []
    for rank, piece in enumerate(pieces):
        events += _rows_of_rank(rank, piece, (began_ns[rank] - zero_ns) / 1000, first_step, steps)
    within_us = max(uncertainty for _, uncertainty in offsets) / 1000
    other = {
        "ranks": len(pieces), "hosts": [piece["host"] for piece in pieces], "first_step": first_step, "steps": steps,
        "began_ns": zero_ns, "ended_ns": end_ns, "clock_offsets_us": [offset / 1000 for offset, _ in offsets],
        "clocks_within_us": within_us,
    }  # fmt: skip
    # Sort by time, outer events before nested ones. Metadata events come first, so that each row has its name.
    events.sort(key=lambda e: (e["ph"] != "M", e["ph"] != "M" and e["ts"], -e.get("dur", 0)))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _named(what: str, pid: int, tid: int, name: str, sort: int) -> list[Event]:
    """Return the metadata events for the name and the position of a "process" or "thread"."""
    row = {"ph": "M", "ts": 0, "pid": pid, "tid": tid}
    return [
        {"name": f"{what}_name", "args": {"name": name}} | row,
        {"name": f"{what}_sort_index", "args": {"sort_index": sort}} | row,
    ]


def _rows_of_rank(rank: int, piece: Event, shift_us: float, first_step: int, steps: int) -> list[Event]:
    """Return a rank's events: its threads, each of its GPUs, and the phases measured by the clock."""
    labels = {e["pid"]: e["args"]["labels"] for e in piece["events"] if e["name"] == "process_labels"}
    used = {event["pid"] for event in piece["events"] if event["ph"] != "M"}
    pids: dict[int, int] = {}
    for pid in sorted(used, key=lambda pid: (labels.get(pid) != "CPU", pid)):
        pids[pid] = rank * PIDS_PER_RANK + len(pids) + 1
    host = f"rank {rank} on {piece['host']}"
    rows = []
    for old, new in pids.items():
        name = f"{host}, {labels[old]}" if labels.get(old, "CPU") != "CPU" else host
        rows += _named("process", new, 0, name, new)
    step = first_step
    for event in sorted(piece["events"], key=lambda event: event["ts"]):
        if event["pid"] not in pids or event["name"].startswith("process_"):
            continue
        moved = event | {"pid": pids[event["pid"]], "ts": event["ts"] + shift_us}
        if "id" in event:  # a flow event (arrow)
            moved["id"] = f"{rank}.{event['id']}"
        if event["name"].startswith("ProfilerStep#") and event.get("cat") == "user_annotation":
            if step == first_step + steps:  # a step that was not complete at the end of the run
                continue
            moved["name"] = f"step {step}"
            step += 1
        rows.append(moved)
    pid = rank * PIDS_PER_RANK + 1
    if not pids:
        rows += _named("process", pid, 0, host, pid)
    rows += _named("thread", pid, PHASES_TID, "phases", -1)
    for phase, start_us, microseconds in piece["spans"]:
        where = {"pid": pid, "tid": PHASES_TID, "ts": start_us + shift_us, "dur": microseconds}
        rows.append({"ph": "X", "cat": "phase", "name": phase} | where)
    return rows
