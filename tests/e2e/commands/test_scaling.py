"""`hvdtrain.benchmark --np` with real launchers."""

import json
import signal
import statistics
import subprocess
import time

import pytest

from tests.e2e.launchers import PYTHON, launch, members, running

TINY = "--batch-size 4 --repeats 2 --steps 2 --warmup-steps 1"


def rows(directory):
    return json.loads((directory / "scaling.json").read_text())["rows"]


@pytest.mark.slow
def test_one_that_fails_does_not_stop_the_others(tmp_path):
    flags = f"--engines serial,horovod --np 2 --rounds 1 --timeout 120 --output-dir {tmp_path}"
    done = launch(f"{PYTHON} -m hvdtrain.benchmark {flags} {TINY} --compression fp16", timeout=280)
    assert done.code == 1, done
    assert "error: serial, 1 rank: exit code 2" in done.stderr, done
    assert "--compression fp16 is not for --engine serial" in done.stderr, done
    found = {(row["name"], row["ranks"]): row for row in rows(tmp_path)}
    assert set(found) == {("no communication", 1), ("no communication", 2), ("horovod", 2)}
    horovod = found["horovod", 2]
    share = horovod["samples_per_second"]["median"] / found["no communication", 2]["samples_per_second"]["median"]
    assert abs(horovod["efficiency"]["median"] - share) < 1e-6
    apart, together = (tmp_path / "runs" / f"{name}-2-round1" for name in ("no-communication", "horovod"))
    assert not json.loads((apart / "benchmark.json").read_text())["communicates"]
    result = json.loads((together / "benchmark.json").read_text())
    assert (result["engine"], result["world_size"], result["communicates"]) == ("horovod", 2, True)
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    # Of all ranks, over the slowest one's time: never more than what the ranks made each for itself, over all repeats.
    over_all = statistics.harmonic_mean(result["samples_per_second_repeats"])
    assert over_all <= sum(rank["samples_per_second"] for rank in result["ranks"]) * 1.001
    seconds = result["seconds_per_sample"]
    assert seconds["communication"] / sum(seconds.values()) > 0.005  # on quiet cores 0.1 to 0.4; without any 0.0005
    assert (together / "log").read_text().count("samples/s") == 3  # one block, from rank 0, with a line for each rank
    assert "| horovod | 2 |" in done.stdout


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_keeps_what_was_measured(tmp_path):
    flags = f"--engines horovod --np 2 --rounds 9 --output-dir {tmp_path}"
    command = f"{PYTHON} -m hvdtrain.benchmark {flags} {TINY}"
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as (process, job):
        before = ""
        for line in process.stdout:  # what is planned, perhaps that the machine is busy, the first result
            before += line
            if line.endswith("samples/s\n"):
                break
        deadline = time.monotonic() + 120
        while len(members(job)) < 4 and time.monotonic() < deadline:  # the driver, a launcher, two ranks
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
        assert members(job) == []
    assert process.returncode == 130, before + stdout + stderr
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert len(rows(tmp_path)) >= 1
