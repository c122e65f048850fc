"""Ranks that one process has forked, with all that a program does there: Horovod, DataLoader workers, OpenMP."""

import contextlib
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, launch, members, remaining, running
from tests.waiting import wait_for

SCRIPT = """
import os
import numpy
import torch, horovod.torch as hvd
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.tensor([float(i)])

if __name__ == "__main__":
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (hvd.local_rank(), hvd.local_size())
    for context in ("fork", "spawn"):
        loader = DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context=context)
        assert sum(float(batch.sum()) for batch in loader) == 2016
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    model(torch.full((1, 1), float(hvd.rank()))).sum().backward()
    optimizer.synchronize()
    assert float(model.weight.grad) == (hvd.size() - 1) / 2
    torch.set_num_threads(2)  # OpenMP's first region is after the fork
    ones = torch.ones(500, 500)
    assert float((ones @ ones).sum()) == 500.0**3
    drawn = hvd.allgather(torch.tensor([numpy.random.random()], dtype=torch.float64))
    assert len(set(drawn.tolist())) == hvd.size(), drawn
    print("rank", hvd.rank(), "done", torch.cuda.is_initialized(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", ["script.py", "-m hvdtrain.tuned script.py"])
def test_a_program_of_ones_own_has_all_that_it_would_have(program, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = launch(f"{LAUNCHERS['starter'].format(ranks=3)} {program}", cwd=tmp_path, timeout=120)
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} done False" for rank in range(3)], done
    assert done.left_behind == 0, done


def test_an_error_is_the_programs_own(tmp_path):
    """On each rank, from its own first frame; the rank that was the first names itself, and gives the exit code."""
    (tmp_path / "script.py").write_text("import horovod.torch as hvd\nhvd.init()\n1 / hvd.rank()\nhvd.barrier()\n")
    done = launch(f"{LAUNCHERS['starter'].format(ranks=2)} {PYTHON} script.py", cwd=tmp_path, timeout=120)
    assert done.code == 1, done
    assert f'Traceback (most recent call last):\n  File "{tmp_path}/script.py", line 3, in <module>' in done.stderr, (
        done
    )
    assert "hvdtrain.starter: error: rank 0 on " in done.stderr, done
    assert done.left_behind == 0, done


@pytest.mark.slow
def test_ctrl_c_while_torch_is_imported_leaves_nothing(tmp_path):
    """As soon as the process that imports has torch's largest library mapped; conftest looks at what is left."""
    words = f"{LAUNCHERS['starter'].format(ranks=2)} -m hvdtrain.mnist --dataset digits --output-dir {tmp_path}/out"
    with running(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as (run, job):
        wait_for(lambda: any("libtorch_cpu" in maps(pid) for pid in members(job)), "torch was never imported")
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=30)
        assert remaining(job) == []
    assert (run.returncode, out) == (130, "")
    assert not (tmp_path / "out").exists()


def maps(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text(errors="replace")
    return ""
