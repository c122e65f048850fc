"""A few steps of training, then an end at a random moment on each rank, all derived from SEED.

python tests/horovod_calls/ending.py shutdown SEED      on every rank: hvd.shutdown()
python tests/horovod_calls/ending.py exit SEED          Horovod's own shutdown, as the interpreter exits
python tests/horovod_calls/ending.py thread SEED        the same, while a thread of the script still runs
"""

import random
import sys
import threading
import time

import horovod.torch as hvd
import torch

NAPS = (0.0, 0.0, 0.0003, 0.003, 0.03, 0.3, 1.5)  # seconds, at most


def main() -> None:
    way, seed = sys.argv[1], int(sys.argv[2])
    hvd.init()
    common, own = random.Random(seed), random.Random(100 * seed + hvd.rank())

    def nap() -> None:
        time.sleep(own.choice(NAPS) * own.random())

    nap()
    model = torch.nn.Linear(8, 1)
    if common.random() < 0.7:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        **common.choice([{}, {"groups": 1}]),
    )
    for _ in range(common.choice([0, 0, 1, 3, 10])):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        if own.random() < 0.2:
            nap()
    last = common.choice(["nothing", "allreduce", "barrier", "join", "gather"])
    if last == "allreduce":
        hvd.allreduce(torch.ones(1), name="last")
    elif last == "barrier":
        hvd.barrier()
    elif last == "join":
        nap()
        hvd.join()
    elif last == "gather":
        hvd.allgather_object(hvd.rank(), name="last")
    nap()
    if way == "shutdown":
        hvd.shutdown()
        nap()
    elif way == "thread":
        threading.Thread(target=nap).start()


if __name__ == "__main__":
    main()
