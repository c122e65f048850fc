"""Attack runs at random, start them again, and compare with runs that nothing disturbed: to the bit, sample by sample.

make chaos                                                    20 attacks
make chaos CHAOS="--attacks 200 --seed 7"
make chaos CHAOS="--attacks 30 --kinds stop,spin,sleep"       ranks that hang
make chaos CHAOS="--attacks 30 --kinds slow,stranger,launcher"    what must not end a run, and a launcher that is killed
make chaos CHAOS="--attacks 30 --launchers starter"           ranks that one process has forked
make chaos CHAOS="--attacks 30 --launchers mpirun.sh"         restarts by the wrapper, whose start-up is struck, too
make chaos CHAOS="--attacks 30 --kinds refill"                a disk that is full and free again (root only: mounts one)
make chaos CHAOS="--attacks 50 --programs imagenet,augment"   on shards, and a user's own program, with DataLoader workers

Damaged checkpoints: tests/single/test_bad_files.py. Another number of ranks: tests/e2e/training/test_resume.py.
"""

import argparse
import contextlib
import itertools
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from hvdtrain.checkpoint import checkpoint
from tests.chaos.lineage import HARMLESS, WRAPPER, all_struck, attacked, results, tally
from tests.chaos.programs import EPOCHS, MNIST, PROGRAMS, Program, programs

# Where a fault strikes, and how often a whole run comes by there.
TRAINING = {"load": 16, "backward": 16, "allreduce": 16, "update": 16, "evaluate": 2, "snapshot": 8}
WRITING = {"digest": 7, "fsync": 7, "half": 7, "rename": 7, "directory": 7, "prune": 7}  # rank 0's alone
STARTING = {"import": 1, "start": 1, "broadcast": 1, "restore": 1}
HANGS = ("stop", "spin", "sleep")
SLOW = {"backward": 1, "evaluating": 2, "snapshot": 7}  # what may take longer than a step: the first one, and these
# How often each is drawn.
KINDS = {"kill": 4, "segv": 2, "raise": 2, "stop": 2, "spin": 1, "sleep": 1, "term": 2, "full": 1}
KINDS |= {"slow": 1, "stranger": 1, "launcher": 1, "usr1": 1, "refill": 1}
LAUNCHED = {"mpirun": 2, "gloo": 1, "horovodrun": 1, "starter": 2, "torchrun": 1, WRAPPER: 2}  # how often each is drawn
# Who has the same bits as whom: MPI and Gloo sum three numbers in different orders.
TRANSPORTS = {"mpirun": "mpirun", "horovodrun": "mpirun", "gloo": "gloo", "starter": "gloo", WRAPPER: "mpirun",
              "torchrun": "torchrun"}  # fmt: skip
DISK = "512m"  # size of the file system that is full
ATTEMPTS = 5  # starts of one run, after which it counts as not survived
LIMIT = 300  # seconds of one start, after which it hangs: 8 ranks with DataLoader workers, beside a second session, take 150


def draw(chance: random.Random, kinds: Sequence[str], ranks: int, program: Program, *, restarted: bool = False) -> dict:
    """Return a fault of one of `kinds`. restarted: for the second attempt, whose start-up is struck more often."""
    training = {point: visits for point, visits in (TRAINING | program.visits).items() if visits}
    kind = chance.choices(kinds, [KINDS[kind] for kind in kinds])[0]
    if kind == "full":
        points, rank = {"fsync": 7, "half": 7, "rename": 7, "directory": 7}, 0
    elif kind == "stranger":
        points, rank = {"listen": 1}, 0
    elif kind == "slow":
        slow = {point: visits for point, visits in SLOW.items() if point != "evaluating" or "evaluate" in training}
        points, rank = slow, chance.randrange(ranks)
    elif kind in (*HANGS, "launcher", "refill"):  # a hang before the first step is given ten minutes
        points, rank = training, chance.randrange(ranks)
    else:
        points = chance.choice((training, STARTING, STARTING) if restarted else (training, training, WRITING, STARTING))
        rank = 0 if points is WRITING else chance.randrange(ranks)
    point = chance.choice(list(points))
    if kind == "slow" and point == "snapshot":
        rank = 0  # only this one copies
    first = 2 if kind in HANGS else 1
    return dict(rank=rank, point=point, count=chance.randint(first, max(first, points[point])), kind=kind)


def damage(chance: random.Random, directory: Path) -> None:
    """Spoil the newest checkpoint, as a bad disk would. Without another one, the run would end with exit code 2."""
    found = checkpoint.checkpoints_in(directory / "checkpoints")
    if len(found) < 2:
        return
    data = bytearray(found[0].read_bytes())
    place = chance.randrange(len(data))
    what = chance.choice(("cut", "flip", "empty"))
    if what == "flip":
        data[place] ^= 1 << chance.randrange(8)
    found[0].write_bytes({"cut": data[:place], "flip": data, "empty": b""}[what])
    print(f"then its checkpoint: {what}", end="  ", flush=True)


def shared_memory() -> set[str]:
    """Return the segments and semaphores in /dev/shm that no live process has mapped, nor has its id in their names."""
    mapped = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += "".join(line for line in path.read_text().splitlines() if "/dev/shm/" in line)
    found = {path.name for path in Path("/dev/shm").iterdir() if path.name not in mapped}
    return {
        name for name in found if not any(Path("/proc", part).exists() for part in name.split("-") if part.isdigit())
    }


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """Context manager with a file system of its own at `directory`, except for what the attacked ranks log there."""
    taken = directory.with_name(f"{directory.name}.taken")
    taken.mkdir(parents=True)
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", directory], check=True)
    try:
        (directory / "taken").symlink_to(taken)
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def can_mount() -> bool:
    """Return whether this process may mount a file system."""
    if os.geteuid() != 0:
        return False
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.suppress(subprocess.SubprocessError, OSError),
        small_disk(Path(name, "disk")),
    ):
        return True
    return False


class Undisturbed:
    """What undisturbed runs end with, by program, transport and ranks."""

    def __init__(self, scratch: Path):
        self._scratch = scratch
        self._results: dict[str, dict] = {}

    def results(self, program: Program, launcher: str, ranks: int) -> dict:
        transport = TRANSPORTS[launcher]
        key = f"{program.name}-{transport}-{ranks}"
        if key not in self._results:
            whole = self._scratch / key
            done = attacked(
                whole, ranks=ranks, batch=program.batch[ranks], launcher=transport, timeout=LIMIT, program=program
            )
            assert done.code == 0, done
            self._results[key] = results(whole)
        return self._results[key]


def strike(
    chance: random.Random, kinds: Sequence[str], launchers: Sequence[str], program: Program, sizes: Sequence[int],
    directory: Path, undisturbed: Undisturbed,
) -> None:  # fmt: skip
    """One run: attacked once or twice, perhaps with its newest checkpoint spoiled, and started until it ends."""
    ranks = chance.choice(sizes)
    launcher = chance.choices(launchers, [LAUNCHED[name] for name in launchers])[0]
    attacks = [draw(chance, kinds, ranks, program)]
    if chance.random() < (2 / 3 if launcher == WRAPPER else 1 / 3):
        attacks.append(draw(chance, kinds, ranks, program, restarted=True))
    said = ", then ".join("{kind} rank {rank} at {point} {count}".format(**attack) for attack in attacks)
    print(f"{program.name}, {ranks} ranks, {launcher}: {said}", end="  ", flush=True)
    of_kinds = {attack["kind"] for attack in attacks}
    whole, shared = undisturbed.results(program, launcher, ranks), shared_memory()
    with small_disk(directory) if "refill" in of_kinds else contextlib.nullcontext():
        for attempt in range(ATTEMPTS):
            attack = attacks[attempt] if attempt < len(attacks) else None
            if launcher == WRAPPER and attempt + 1 < len(attacks):
                attack = attacks[attempt] | {"then": attacks[attempt + 1]}
            done = attacked(
                directory, ranks=ranks, batch=program.batch[ranks], flags="--step-timeout 5", attack=attack,
                launcher=launcher, timeout=LIMIT, program=program,
            )  # fmt: skip
            assert done.left_behind == 0, done
            if done.code == 0:
                break
            struck = all_struck(directory)
            assert struck, done
            assert attack is None or attack["kind"] not in HARMLESS or len(struck) > 1, f"a false alarm: {done}"
            if chance.random() < 0.2:
                damage(chance, directory)
        else:
            raise AssertionError("it never came to its end")
        assert results(directory) == whole, "other bits"
        lost, repeated = tally(directory, EPOCHS, program.samples)
        assert lost == repeated == 0, f"{lost} samples lost, {repeated} repeated"
        temporary = list((directory / "checkpoints").glob(".*"))
        assert not temporary, f"left behind: {temporary}"
    left = shared_memory() - shared
    if "launcher" in of_kinds:  # mpirun's own, which it cannot remove once it is killed
        left = {name for name in left if not name.startswith(("ompi.", "vader_segment."))}
    assert not left, f"left behind: {left}"


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser of names of `known`, joined by commas."""

    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return text.split(",")

    return parse


def some_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests.chaos.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attacks", type=int, default=20, help="for each seed (default: %(default)s)")
    parser.add_argument("--seed", type=some_numbers, default=[1], help="of the attacks; several: 1,2 (default: 1)")
    parser.add_argument("--kinds", type=some_of(KINDS), help=f"of attacks (default: {','.join(KINDS)})")
    parser.add_argument("--launchers", type=some_of(LAUNCHED), default=list(LAUNCHED), help="default: all")
    parser.add_argument("--programs", type=some_of(PROGRAMS), default=["mnist"], help=f"of {', '.join(PROGRAMS)}")
    sizes = some_of(list(map(str, MNIST.batch)))
    parser.add_argument(
        "--ranks", type=sizes, default=["2", "3", "4"], help="drawn from (default: 2,3,4; also 6 and 8)"
    )
    flags = parser.parse_args()
    if "refill" in (flags.kinds or KINDS) and not can_mount():
        if flags.kinds:
            parser.error("--kinds refill needs root, to mount a small file system: unshare -m")
        flags.kinds = [kind for kind in KINDS if kind != "refill"]
    flags.kinds = flags.kinds or list(KINDS)
    return flags


def main() -> int:
    flags, failed = parse(), 0
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        known = {"mnist": MNIST} if flags.programs == ["mnist"] else programs(scratch)
        undisturbed, sizes = Undisturbed(scratch), list(map(int, flags.ranks))
        for seed, number in itertools.product(flags.seed, range(1, flags.attacks + 1)):
            program = known[flags.programs[number % len(flags.programs)]]
            own = random.Random(f"{seed} {number}")  # the same attack whatever the others are
            print(f"{number:4}", end="  ", flush=True)
            try:
                strike(own, flags.kinds, flags.launchers, program, sizes, scratch / f"{seed}-{number}", undisturbed)
                print("ok", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"FAIL {error}", flush=True)
    made = len(flags.seed) * flags.attacks
    print(f"{made - failed} of {made} ended with equal bits, no sample lost or repeated, and nothing left over")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
