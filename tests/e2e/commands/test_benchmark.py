"""`hvdtrain.benchmark` under real launchers."""

import json
import statistics
from pathlib import Path

import pytest

from tests.e2e.launchers import TORCHRUN, Done, launch, several

SMALL = "--model convnet --batch-size 8 --warmup-steps 1 --repeats 3 --steps 3"
DDP = f"{TORCHRUN.format(ranks=2)} -m hvdtrain.benchmark --engine ddp --no-communication {SMALL}"


@pytest.fixture(scope="module")
def horovod(tmp_path_factory) -> tuple[Path, dict[str, Done]]:
    root = tmp_path_factory.mktemp("horovod")
    runs = {"small": f"{SMALL} --output-dir {root}", "resnet5": f"{SMALL} --model resnet5"}
    return root, several("mpirun", 2, root, runs, "hvdtrain.benchmark")


@pytest.fixture(scope="module")
def ddp(tmp_path_factory) -> tuple[Path, dict[str, Done]]:
    root = tmp_path_factory.mktemp("ddp")
    return root, {"small": launch(f"{DDP} --output-dir {root}")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "communicates"), [("horovod", True), pytest.param("ddp", False, marks=pytest.mark.slow)]
)
def test_two_ranks(engine, communicates, request):
    root, done = request.getfixturevalue(engine)[0], request.getfixturevalue(engine)[1]["small"]
    assert done.code == 0, done
    result = json.loads((root / "benchmark.json").read_text())
    assert (result["engine"], result["world_size"], result["communicates"]) == (engine, 2, communicates)
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    # Of all ranks, over the slowest one's time: never more than what the ranks made each for itself, over all repeats.
    over_all = statistics.harmonic_mean(result["samples_per_second_repeats"])
    assert over_all <= sum(rank["samples_per_second"] for rank in result["ranks"]) * 1.001
    seconds = result["seconds_per_sample"]
    share = seconds["communication"] / sum(seconds.values())
    assert share > 0.005 if communicates else share < 0.05, share  # on quiet cores 0.1 to 0.4, and 0.0005
    assert done.stdout.count("samples/s") == 3, done  # one block, from rank 0, with a line for each rank


@pytest.mark.slow
def test_what_one_rank_cannot_do_ends_them_all(horovod):
    done = horovod[1]["resnet5"]
    assert done.code == 2, done
    assert done.stderr.count("torchvision has no such classifier") == 1, done
    assert "Traceback" not in done.stderr
