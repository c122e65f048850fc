"""A rehearsal of tests/gpu on processors: every test, rate and script runs, so that none fails on a typo where a GPU is."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.e2e.launchers import BIN, PYTHON, ROOT, environment, launch, running
from tests.gpu.rates import rows
from tests.waiting import wait_for


def without_ssh(folder: Path) -> str:
    """Return a PATH on which all is found but ssh: some machines with a GPU have none."""
    path = [Path(BIN), *map(Path, environment()["PATH"].split(os.pathsep))]
    for place, directory in enumerate(path):
        if (directory / "ssh").exists():
            path[place] = folder / str(place)
            path[place].mkdir(parents=True)
            for program in directory.iterdir():
                if program.name not in ("ssh", "slogin", "rsh"):
                    (path[place] / program.name).symlink_to(program)
    return os.pathsep.join(map(str, path))


@pytest.mark.slow
@pytest.mark.leaves("pytest-of-", "vader_segment", "ompi.")  # of the pytest that it starts, and of killed ranks
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    bool(os.environ.get("HVDTRAIN_TEST_UNTIL")),
    reason="takes minutes by itself: make test-slow TEST=tests/e2e/commands/test_gpu.py",
)
def test_the_script_is_killed_twice_and_runs_each_test_and_rate_once(tmp_path):
    own = dict(WORK=str(tmp_path / "work"), DEVICE="cpu", QUICK="--quick", NO_INSTALL="1", TEST_SECONDS="540")
    own |= dict(TESTS_AT_ONCE="2", PATH=without_ssh(tmp_path / "bin"))
    outs = [tmp_path / str(number) for number in range(8)]
    lines = lambda path: path.read_text().splitlines() if path.exists() else []  # noqa: E731
    for out, file, count in zip(outs, ("seen", "rates.jsonl"), (3, 2), strict=False):
        with running("bash tests/gpu/alone.sh", env=own | {"OUT": str(out)}, stdout=-3, stderr=-3):
            wait_for(lambda: len(lines(out / file)) >= count, lambda: lines(out / "log"), 560)  # noqa: B023
    for out in outs[2:]:  # one call is enough, where nothing else runs
        done = launch("bash tests/gpu/alone.sh", timeout=600, **own, OUT=str(out))
        assert (done.code, "error" in done.stdout) == (0, False), done
        if len(lines(out / "rates.jsonl")) >= len(rows()) and re.search("tests ended with [05]", done.stdout):
            break
    assert [json.loads(line)["row"] for line in lines(out / "rates.jsonl")] == list(rows())
    assert lines(out / "rates.jsonl")[:2] == lines(outs[1] / "rates.jsonl")[:2]
    passed = [line for line in lines(out / "seen") if line.startswith("passed ")]
    assert len(passed) == len(set(passed)) > 20
    assert "\nfailed " not in (out / "seen").read_text(), done
    assert max(len(list(out.iterdir())) for out in outs if out.exists()) <= 6  # few files may come back


@pytest.mark.slow
def test_without_a_gpu_each_is_skipped_with_the_reason_in_sight():
    done = launch(f"{PYTHON} -m pytest -q -m gpu -p no:cacheprovider tests/gpu -k sum_of", cwd=ROOT, **dict(os.environ))
    assert done.code == 0, done
    assert "torch sees no GPU here" in done.stdout, done
