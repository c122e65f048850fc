"""Train for a long time, and see that no rank's memory, threads or open files grow.

python -m tests.chaos.soak --minutes 60 --ranks 8          mpirun
python -m tests.chaos.soak --minutes 60 --launcher gloo    horovodrun --gloo

Trains on the embedded digits with checkpoints, evaluations and the comparison of weights going on, and stops the run by
SIGUSR1. The first quarter of the time is the warm-up; after it, a straight line is fitted to the samples of each quantity.
It fails where that line climbs by more than BOUNDS say.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.e2e.launchers import LAUNCHERS, PYTHON, events, members, running

FLAGS = (
    "--dataset digits --epochs 1000000000 --checkpoint-steps 200 --check-steps 50 --log-steps 50 --keep 2 --no-progress"
)
# Climb over the measured time: at least so much, or so much an hour.
BOUNDS = {"RSS in MiB": (4.0, 16.0), "threads": (0.5, 0.5), "open files": (0.5, 0.5)}
WARM_SHARE = 0.25
START_SECONDS, END_SECONDS = 180.0, 120.0


class Sample(NamedTuple):
    seconds: float  # since sampling began
    values: tuple[float, float, float]  # in the order of BOUNDS


class Line(NamedTuple):
    """What a quantity of one rank did after the warm-up."""

    first: float
    last: float
    most: float
    climb: float  # of the fitted line over the measured time
    bound: float

    @property
    def flat(self) -> bool:
        return self.climb <= self.bound


def look(pid: int) -> tuple[float, float, float]:
    """Return resident memory (MiB), threads and open files of a process. Raises OSError where it is gone."""
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), len(list((process / "fd").iterdir()))


def judged(samples: Sequence[Sample]) -> dict[str, Line]:
    """Return each quantity's line. Raises ValueError where there are fewer than three samples after the warm-up."""
    warm = [sample for sample in samples if sample.seconds >= samples[-1].seconds * WARM_SHARE]
    if len(warm) < 3:
        raise ValueError("fewer than three samples after the warm-up: soak for longer, or look more often")
    times = [sample.seconds for sample in warm]
    measured = times[-1] - times[0]
    lines = {}
    for place, (name, (least, per_hour)) in enumerate(BOUNDS.items()):
        values = [sample.values[place] for sample in warm]
        climb = statistics.linear_regression(times, values).slope * measured
        lines[name] = Line(values[0], values[-1], max(values), climb, max(least, per_hour * measured / 3600))
    return lines


def table(ranks: Sequence[dict[str, Line]]) -> str:
    head = [f"{name}: first, last, most; climb (at most)" for name in BOUNDS]
    lines = ["| rank | " + " | ".join(head) + " | |", "|" + "---|" * (len(head) + 2)]
    for rank, quantities in enumerate(ranks):
        cells = [
            f"{line.first:.0f}, {line.last:.0f}, {line.most:.0f}; {line.climb:+.2f} ({line.bound:.1f})"
            for line in quantities.values()
        ]
        flat = all(line.flat for line in quantities.values())
        lines.append(f"| {rank} | " + " | ".join(cells) + f" | {'ok' if flat else 'FAIL'} |")
    return "\n".join(lines)


def soak(
    directory: Path, *, minutes: float, ranks: int, launcher: str, every: float
) -> tuple[list[dict[str, Line]], str]:
    """Return each rank's lines, and what the run did. Raises AssertionError where it ended badly."""
    command = f"{LAUNCHERS[launcher].format(ranks=ranks)} {PYTHON} -m hvdtrain.mnist {FLAGS} --output-dir {directory}"
    log = directory.with_name("soak.log")
    with log.open("w") as output, running(command, stdout=output, stderr=subprocess.STDOUT) as (process, job):
        pids = started(directory, process, log)
        samples: list[list[Sample]] = [[] for _ in pids]
        began = time.monotonic()
        while (seconds := time.monotonic() - began) < 60 * minutes:
            for rank, pid in enumerate(pids):
                try:
                    samples[rank].append(Sample(seconds, look(pid)))
                except OSError as error:
                    raise AssertionError(f"rank {rank} is gone after {seconds:.0f} s: {said(log)}") from error
            time.sleep(every)
        os.kill(pids[-1], signal.SIGUSR1)  # one rank is enough: all save the same step and leave
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        # horovodrun over Gloo may report 1 where its ranks left with 75: the stop event is the run's own word.
        assert process.poll() is not None, f"not over {END_SECONDS:.0f} s after SIGUSR1: {said(log)}"
        (stop,) = events(directory, "stop")
        assert not members(job), "processes are left behind"
    evaluations, checkpoints = len(events(directory, "evaluate")), len(events(directory, "checkpoint"))
    did = f"{stop['step']:,} steps, {evaluations:,} evaluations, {checkpoints:,} checkpoints"
    return [judged(of_rank) for of_rank in samples], did


def started(directory: Path, process: subprocess.Popen, log: Path) -> list[int]:
    """Return the process ids by rank, once there is a step."""
    until = time.monotonic() + START_SECONDS
    while not (directory / "metrics.jsonl").exists() or not events(directory, "train"):
        assert process.poll() is None, f"it ended before it trained: {said(log)}"
        assert time.monotonic() < until, f"no step within {START_SECONDS:.0f} s: {said(log)}"
        time.sleep(0.5)
    return [rank["pid"] for rank in events(directory, "start")[0]["ranks"]]


def said(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-400:]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.chaos.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--launcher", choices=tuple(LAUNCHERS), default="mpirun")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks (default: 5)")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        ranks, did = soak(
            Path(scratch, "out"), minutes=flags.minutes, ranks=flags.ranks, launcher=flags.launcher, every=flags.every
        )
    print(f"{flags.minutes:g} minutes, {flags.ranks} ranks, {flags.launcher}: {did}\n{table(ranks)}")
    return 0 if all(line.flat for quantities in ranks for line in quantities.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
