"""Ranks that one process has forked, with all that a program does there: Horovod, DataLoader workers, OpenMP."""

import pytest

from tests.e2e.launchers import LAUNCHERS, launch

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
    done = launch(f"{LAUNCHERS['starter'].format(ranks=3)} {program}", cwd=tmp_path)
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} done False" for rank in range(3)], done
    assert done.left_behind == 0, done
