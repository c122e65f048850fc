"""horovod.run() and an elastic job with collectives, while a stranger sends pickles (launch/patches/28).

Horovod's own tests of both: test_horovods_tests.py. Each of the stranger's ways: tests/single/launch/test_strangers.py.
"""

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, launch
from tests.single.launch.test_strangers import STRANGER

pytestmark = pytest.mark.slow

RUN = """
import os, sys
import horovod

def rank(factor):
    import torch
    import horovod.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([float(factor * (hvd.rank() + 1))]), op=hvd.Sum)
    shown = [line for line in os.popen("ps -eo args") if os.environ["_HOROVOD_SECRET_KEY"] in line]
    return hvd.rank(), hvd.mpi_enabled(), total.item(), shown

if __name__ == "__main__":
    print(horovod.run(rank, (10,), num_proc=2, **{f"use_{sys.argv[1]}": True}))
"""


@pytest.mark.parametrize("over", ["mpi", "gloo"])
def test_horovod_run_returns_what_the_ranks_return(over, tmp_path):
    (tmp_path / "job.py").write_text(RUN)
    done = launch(f"{PYTHON} {tmp_path}/job.py {over}", timeout=120)
    assert done.code == 0, done
    mpi = over == "mpi"
    assert str([(rank, mpi, 30.0, []) for rank in range(2)]) in done.stdout, done
    assert done.left_behind == 0


ELASTIC = """
from stranger import *
import torch
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError

hvd.init()
address, port = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
asked = [("PUT", "/worker_addresses/localhost:0"), ("PUT", "/global/0"), ("DELETE", "/global/0")]
asked.append(("GET", "/rank_and_size/localhost:0"))

@hvd.elastic.run
def train(state):
    if hvd.rank() == 0:
        answers = {ask(method, port, path, FORMS[0], address=address)[0] for method, path in asked for _ in range(3)}
        print("answers", answers, flush=True)
    while state.step < 3:
        hvd.allreduce(torch.ones(1), name="x")
        state.step += 1
        state.commit()
        if state.step == 2 and os.environ["HOROVOD_HOSTNAME"] == "localhost" and not os.path.exists("failed"):
            open("failed", "w").close()
            raise HorovodInternalError("as if the other were gone")  # shutdown, and init over the same server
    print("size", hvd.size(), "step", state.step, flush=True)

train(hvd.elastic.TorchState(step=0))
"""


def test_an_elastic_job_trains_restarts_and_answers_no_stranger(tmp_path):
    (tmp_path / "stranger.py").write_text(STRANGER)
    (tmp_path / "train.py").write_text(ELASTIC)
    horovodrun = LAUNCHERS["gloo"].split()[0]
    options = "--gloo -np 2 --min-np 2 -H localhost:1,127.0.0.1:1 --network-interfaces lo"
    written = tmp_path / "written"
    done = launch(
        f"{horovodrun} {options} {PYTHON} {tmp_path}/train.py", timeout=180, cwd=tmp_path, WRITTEN=str(written)
    )
    assert not written.exists(), "a stranger's pickle was executed"
    assert done.code == 0, done
    assert "answers {403}" in done.stdout, done
    assert done.stdout.count("size 2 step 3") == 2, done
    assert (tmp_path / "failed").exists()
    assert done.left_behind == 0
