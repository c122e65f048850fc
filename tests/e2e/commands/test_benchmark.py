"""`hvdtrain.benchmark` under real launchers."""

import json
import statistics
from pathlib import Path

import pytest

from tests.e2e.launchers import Done, several

SMALL = "--model convnet --batch-size 8 --warmup-steps 1 --repeats 3 --steps 3"


@pytest.fixture(scope="module")
def horovod(tmp_path_factory) -> tuple[Path, dict[str, Done]]:
    root = tmp_path_factory.mktemp("horovod")
    runs = {"small": f"{SMALL} --output-dir {root}", "resnet5": f"{SMALL} --model resnet5"}
    return root, several("mpirun", 2, root, runs, "hvdtrain.benchmark")


@pytest.mark.slow
def test_two_ranks(horovod):
    root, done = horovod[0], horovod[1]["small"]
    assert done.code == 0, done
    result = json.loads((root / "benchmark.json").read_text())
    assert (result["engine"], result["world_size"], result["communicates"]) == ("horovod", 2, True)
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    # Of all ranks, over the slowest one's time: never more than what the ranks made each for itself, over all repeats.
    over_all = statistics.harmonic_mean(result["samples_per_second_repeats"])
    assert over_all <= sum(rank["samples_per_second"] for rank in result["ranks"]) * 1.001
    seconds = result["seconds_per_sample"]
    assert seconds["communication"] / sum(seconds.values()) > 0.005  # on quiet cores 0.1 to 0.4; without any 0.0005
    assert done.stdout.count("samples/s") == 3, done  # one block, from rank 0, with a line for each rank


@pytest.mark.slow
def test_what_one_rank_cannot_do_ends_them_all(horovod):
    done = horovod[1]["resnet5"]
    assert done.code == 2, done
    assert done.stderr.count("torchvision has no such classifier") == 1, done
    assert "Traceback" not in done.stderr
