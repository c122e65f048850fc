"""`hvdtrain.benchmark` under real launchers."""

import json
import statistics

import pytest

from .launchers import LAUNCHERS, PYTHON, TORCHRUN, launch

SMALL = "--model convnet --batch-size 8 --warmup-steps 1 --repeats 3 --steps 3"
HOROVOD = f"{LAUNCHERS['mpirun'].format(ranks=2)} {PYTHON} -m hvdtrain.benchmark {SMALL}"
DDP = f"{TORCHRUN.format(ranks=2)} -m hvdtrain.benchmark --engine ddp {SMALL}"


@pytest.mark.parametrize(
    ("command", "engine", "communicates"), [(HOROVOD, "horovod", True), (f"{DDP} --no-communication", "ddp", False)]
)
def test_two_ranks(command, engine, communicates, tmp_path):
    done = launch(f"{command} --output-dir {tmp_path}", timeout=120)
    assert done.code == 0, done
    result = json.loads((tmp_path / "benchmark.json").read_text())
    assert (result["engine"], result["world_size"], result["communicates"]) == (engine, 2, communicates)
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    # Of all ranks, over the slowest one's time: never more than what the ranks made each for itself, over all repeats.
    over_all = statistics.harmonic_mean(result["samples_per_second_repeats"])
    assert over_all <= sum(rank["samples_per_second"] for rank in result["ranks"]) * 1.001
    seconds = result["seconds_per_sample"]
    share = seconds["communication"] / sum(seconds.values())
    assert share > 0.005 if communicates else share < 0.05, share  # on quiet cores 0.1 to 0.4, and 0.0005
    assert done.stdout.count("samples/s") == 3, done  # one block, from rank 0, with a line for each rank


def test_what_one_rank_cannot_do_ends_them_all(tmp_path):
    done = launch(f"{HOROVOD} --model resnet5", timeout=120)
    assert done.code == 2, done
    assert done.stderr.count("torchvision has no such classifier") == 1, done
    assert "Traceback" not in done.stderr
