"""Attack runs at random, start them again, and compare with runs that nothing disturbed: to the bit, sample by sample.

make chaos                              20 attacks
make chaos CHAOS="--attacks 200 --seed 7"
"""

import argparse
import contextlib
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hvdtrain import checkpoint
from tests.chaos.lineage import attacked, results, tally

BATCH = {2: 32, 3: 20, 4: 16}  # by ranks: samples per rank and step
# Where a fault strikes, and how often a whole run comes by there.
TRAINING = {"load": 16, "backward": 16, "allreduce": 16, "update": 16, "evaluate": 2, "snapshot": 8}
WRITING = {"digest": 7, "fsync": 7, "half": 7, "rename": 7, "directory": 7, "prune": 7}  # rank 0's alone
STARTING = {"start": 1, "broadcast": 1}
ENDS = ("kill", "segv", "raise")
HANGS = ("stop", "spin", "sleep")
ATTEMPTS = 5  # starts of one run, after which it counts as not survived


@dataclass
class Outcome:
    attack: str
    survived: bool  # it came to its end, with no hang and no code but those promised
    equal: bool
    lost: int
    repeated: int
    detected: float | None  # seconds from the fault to the end of the launcher; None where the run went on
    redone: float  # seconds that the second start took
    leftovers: int
    note: str = ""


def draw(chance: random.Random, ranks: int) -> dict:
    kind = chance.choices((*ENDS, *HANGS, "term", "full"), (4, 2, 2, 2, 1, 1, 2, 1))[0]
    if kind == "full":
        points, rank = {"fsync": 7, "half": 7, "rename": 7, "directory": 7}, 0
    elif kind in HANGS or kind == "term":  # a hang before the first step is given ten minutes
        points, rank = TRAINING, chance.randrange(ranks)
    else:
        points = chance.choice((TRAINING, TRAINING, WRITING, STARTING))
        rank = 0 if points is WRITING else chance.randrange(ranks)
    point = chance.choice(list(points))
    first = 2 if kind in HANGS else 1
    return dict(rank=rank, point=point, count=chance.randint(first, max(first, points[point])), kind=kind)


def damage(chance: random.Random, directory: Path) -> str:
    """Spoil the newest checkpoint, as a bad disk would."""
    found = checkpoint.listed(directory / "checkpoints")
    if not found:
        return ""
    data = bytearray(found[0].read_bytes())
    place = chance.randrange(len(data))
    what = chance.choice(("cut", "flip", "empty"))
    if what == "flip":
        data[place] ^= 1 << chance.randrange(8)
    found[0].write_bytes({"cut": data[:place], "flip": data, "empty": b""}[what])
    return f", then its checkpoint: {what}"


def shared_memory() -> set[str]:
    """Return the segments in /dev/shm that no live process has mapped; semaphores of input workers are none of ours."""
    mapped = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += "".join(line for line in path.read_text().splitlines() if "/dev/shm/" in line)
    return {
        path.name
        for path in Path("/dev/shm").iterdir()
        if path.name not in mapped and not path.name.startswith("sem.mp-")
    }


def strike(chance: random.Random, directory: Path, wholes: dict[tuple[str, int], dict]) -> Outcome:
    """One run: attacked once or twice, perhaps with its newest checkpoint spoiled, and started until it ends."""
    ranks = chance.choice(tuple(BATCH))
    launcher = chance.choice(("mpirun", "mpirun", "gloo"))
    attacks = [draw(chance, ranks) for _ in range(chance.choice((1, 1, 2)))]
    label = f"{ranks} ranks, {launcher}: " + ", then ".join(
        "{kind} rank {rank} at {point} {count}".format(**attack) for attack in attacks
    )
    shared, seconds, detected, left = shared_memory(), 0.0, None, 0
    for attempt in range(ATTEMPTS):
        attack = attacks[attempt] if attempt < len(attacks) else None
        flags = "--step-timeout 5"
        try:
            done = attacked(
                directory, ranks=ranks, batch=BATCH[ranks], flags=flags, attack=attack, launcher=launcher, timeout=150
            )
        except AssertionError as error:
            return Outcome(label, False, False, 0, 0, None, 0.0, 0, f"hang: {str(error)[:60]}")
        ended, seconds, left = time.time(), done.seconds, left + done.left_behind
        struck = re.search(r"attack: .* time ([\d.]+)", done.stdout)
        if done.code == 0:
            break
        if struck is None:
            tail = " ".join((done.stderr or done.stdout).split())[-200:]
            return Outcome(label, False, False, 0, 0, None, 0.0, left, f"code {done.code} without a fault: {tail}")
        detected = max(detected or 0.0, ended - float(struck[1]))
        if chance.random() < 0.2:
            label += damage(chance, directory)
    else:
        return Outcome(label, False, False, 0, 0, detected, 0.0, left, "never came to its end")
    lost, repeated = tally(directory)
    temporary = [path for path in (directory / "checkpoints").iterdir() if path.name.startswith(".")]
    segments = shared_memory() - shared
    leftovers = left + len(temporary) + len(segments)
    note = f"left behind: {left} processes, {temporary}, {segments}" if leftovers else ""
    return Outcome(
        label, True, results(directory) == wholes[launcher, ranks], lost, repeated, detected, seconds, leftovers, note
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.run", description=__doc__)
    parser.add_argument("--attacks", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    chance = random.Random(flags.seed)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        wholes = {}
        for launcher in ("mpirun", "gloo"):  # which sum three numbers in different orders
            for ranks, batch in BATCH.items():
                whole = Path(scratch) / f"{launcher}{ranks}"
                done = attacked(whole, ranks=ranks, batch=batch, launcher=launcher)
                assert done.code == 0, done
                wholes[launcher, ranks] = results(whole)
        for number in range(1, flags.attacks + 1):
            directory = Path(scratch) / str(number)
            outcome = strike(chance, directory, wholes)
            outcomes.append(outcome)
            good = outcome.survived and outcome.equal and not (outcome.lost or outcome.repeated or outcome.leftovers)
            detected = "-" if outcome.detected is None else f"{outcome.detected:.1f} s"
            print(
                f"{number:4} {'ok  ' if good else 'FAIL'} {detected:>7}  {outcome.attack}  {outcome.note}", flush=True
            )
            if not good:
                print(f"     {outcome}", flush=True)
    print(table(outcomes))
    bad = [o for o in outcomes if not o.survived or not o.equal or o.lost or o.repeated or o.leftovers]
    return 1 if bad else 0


def table(outcomes: list[Outcome]) -> str:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        kinds = Counter(re.findall(r"(kill|segv|raise|stop|spin|sleep|term|full) rank", outcome.attack))
        name = next(iter(kinds)) if sum(kinds.values()) == 1 else "twice"
        groups.setdefault(name, []).append(outcome)
    head = (
        "attack",
        "number",
        "survived",
        "bits equal",
        "lost",
        "repeated",
        "leftovers",
        "detected in s: median, worst",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, some in [*sorted(groups.items()), ("all", outcomes)]:
        times = sorted(o.detected for o in some if o.detected is not None)
        spread = f"{times[len(times) // 2]:.1f}, {times[-1]:.1f}" if times else "-"
        cells = (
            name, len(some), sum(o.survived for o in some), sum(o.equal for o in some), sum(o.lost for o in some),
            sum(o.repeated for o in some), sum(o.leftovers for o in some), spread,
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
