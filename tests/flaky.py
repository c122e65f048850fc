"""Run tests again and again on a machine that has something else to do, and count how often they fail.

python -m tests.flaky tests/e2e/training/test_guard.py --times 20                beside two loops that never wait
python -m tests.flaky tests/single tests/e2e/commands/test_mnist.py --one-core   all of them on one core, the loops too
python -m tests.flaky tests/e2e/training/test_guard.py -- -k hung -m slow        what follows -- is pytest's

Each run is in another order of files and tests (its number is the seed). What a failed run said is
printed; exit code 1 where any failed. All tests once in another order, several files at a time:

HVDTRAIN_SHUFFLE=1 make test TEST="-p tests.flaky -n 3 --dist loadfile --no-loadscope-reorder"
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `pytest -p tests.flaky`: put files, and the tests of each, into the order that HVDTRAIN_SHUFFLE seeds.

    The tests of a module stay together: its fixtures are set up once.
    """
    chance = random.Random(int(os.environ.get("HVDTRAIN_SHUFFLE", "1")))
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    names = list(modules)
    chance.shuffle(names)
    for name in names:
        chance.shuffle(modules[name])
    items[:] = [item for name in names for item in modules[name]]


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Have so many processes compute meanwhile."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def once(arguments: list[str], seed: int) -> tuple[bool, float, str]:
    """Return whether all passed, in how many seconds, and what pytest said."""
    options = ["-q", "--color=no", "-p", "tests.flaky", "-p", "no:cacheprovider", "--durations=0"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    began = time.monotonic()
    done = subprocess.run(command, env=os.environ | {"HVDTRAIN_SHUFFLE": str(seed)}, capture_output=True, text=True)
    return done.returncode == 0, time.monotonic() - began, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="FILE")
    parser.add_argument("--times", type=int, default=20, metavar="N")
    parser.add_argument("--busy", type=int, default=2, metavar="N", help="loops beside it (default: 2)")
    parser.add_argument("--one-core", action="store_true", help="everything on one core")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the first run's order")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    options = parser.parse_args(own)
    if options.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the loops end with us
    seconds, failed = [], 0
    with busy(options.busy):
        for number in range(options.seed, options.seed + options.times):
            passed, took, said = once([*options.paths, *sys.argv[len(own) + 2 :]], number)
            seconds.append(took)
            failed += not passed
            print(
                f"order {number}: {'passed' if passed else 'FAILED'} in {took:.0f} s: {said.splitlines()[-1]}",
                flush=True,
            )
            if not passed:
                print(said, flush=True)
    print(
        f"{failed} of {len(seconds)} failed; {statistics.median(seconds):.0f} s in the middle, {max(seconds):.0f} at most"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
