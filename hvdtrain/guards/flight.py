"""What NCCL was doing when a job hangs: torch's Flight Recorder, a ring of the last collectives of this process.

`record` switches it on. When the monitor ends the job, each rank writes its ring to a file of its own, as torch's
`torchfrtrace` reads it, and rank 0 says which collective is not done and which ranks have not called it.
"""

import contextlib
import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.engines import atomic, files

RING = "64"  # collectives, about 0.5 KB each
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # torch 2.11 warns of the second one
RENAMED = (2, 11)
_kind = ""  # of the recorder that is on: "nccl", or "fr" for Gloo's


class Last(NamedTuple):
    """The last collectives of a rank, by their number in the order of calls, from 1. what: the first that is not done."""

    called: int = 0
    done: int = 0
    what: str = ""


def record(environment: MutableMapping[str, str] = os.environ, kind: str = "nccl") -> None:
    """Record collectives from now on, unless the user has set the size of the ring. Call it before a group is made."""
    global _kind
    if not any(name in environment for name in SIZES):
        import torch

        environment[SIZES[0] if tuple(map(int, torch.__version__.split(".")[:2])) >= RENAMED else SIZES[1]] = RING
    _kind = kind


def _dump(form: str) -> Any:
    """Return the ring: as bytes for torch's tools (form: ""), or as JSON ("_json"); None where torch has no recorder."""
    import torch

    dump = getattr(torch._C._distributed_c10d, f"_dump_{_kind}_trace{form}", None) if _kind else None
    return dump() if dump is not None else None


def last() -> Last:
    """Return where this rank is in the order of collectives. Gloo never says that one is done: all but the last are."""
    try:
        entries = json.loads(_dump("_json") or "{}").get("entries", [])
        ours = [each for each in entries if each["process_group"][0] == "0" and not each["is_p2p"]]  # of all ranks
        called = max((each["collective_seq_id"] for each in ours), default=0)
        complete = [each["collective_seq_id"] for each in ours if each["state"] == "completed"]
        done = max(complete, default=max(0, called - 1))
        return Last(called, done, next((name(each) for each in ours if each["collective_seq_id"] == done + 1), ""))
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError):  # another torch's form
        return Last()


def name(entry: Mapping[str, Any]) -> str:
    """Return "nccl:all_reduce of 1,000 Float"."""
    count = 1
    for length in entry["input_sizes"][0] if entry["input_sizes"] else [0]:
        count *= length
    return f"{entry['profiling_name']} of {count:,} {' '.join(entry['input_dtypes'][:1])}".strip()


def explain(last: Mapping[int, Last], names: Sequence[str]) -> str:
    """Return a line about the collective that ranks wait for; "" if none does. last: by rank, of those that answered."""
    number = min((each.done + 1 for each in last.values() if each.called > each.done), default=0)
    if not number:
        return ""
    what = next(each.what for each in last.values() if each.called > each.done and each.done + 1 == number)
    waits = [names[rank] for rank, each in sorted(last.items()) if each.called >= number > each.done]
    not_called = [names[rank] for rank, each in sorted(last.items()) if each.called < number]
    silent = [each for rank, each in enumerate(names) if rank not in last]
    message = f"  collective {number}, {what}, is not done: {' and '.join(waits)} called it"
    message += f"; not {' and '.join(not_called)}" if not_called else ""
    return message + (f"; no answer from {' and '.join(silent)}" if silent else "") + "\n"


def write(directory: Path, rank: int) -> None:
    """Write this rank's ring to a file in `directory`."""
    with contextlib.suppress(OSError, RuntimeError):
        if content := _dump(""):
            atomic.write(files.make_directory(directory) / f"rank_{rank}", content, sync=False)
