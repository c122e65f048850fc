"""The route of a quiet step is short: few calls of ours, in few files."""

import json
import subprocess
import sys
from pathlib import Path

from tests.bench.calls import Call, calls_of_step

MOST_CALLS, MOST_FILES = 45, 9


def test_a_quiet_step_of_mnist_keeps_to_the_budget():
    command = [sys.executable, "-m", "tests.bench.calls", "--json"]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=True)
    calls = [Call(*call) for call in json.loads(done.stdout.splitlines()[-1])]
    route = "\n".join(f"{call.file}: {call.function}" for call in calls)
    assert calls[0] == Call("training/loop.py", "Loop._steps")
    assert Call("training/step.py", "Step.backward") in calls
    assert len(calls) <= MOST_CALLS, route
    assert len({call.file for call in calls}) <= MOST_FILES, route


def test_calls_of_other_packages_and_other_steps_are_not_counted():
    from hvdtrain.data.sharding import passes_per_step

    def steps() -> None:
        for _ in range(3):
            json.dumps(passes_per_step(64, 2, 8))

    assert calls_of_step(steps, 0) == [Call("data/sharding.py", "passes_per_step")] * 3
    assert calls_of_step(steps, 1) == []
    assert sys.getprofile() is None
