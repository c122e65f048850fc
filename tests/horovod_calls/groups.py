"""Groups of more tensors than Horovod remembers, which ranks queue in turn first (launch/patches/30)."""

import sys
import time

import horovod.torch as hvd
import torch

TENSORS, STEPS = int(sys.argv[1]), 30

if __name__ == "__main__":
    hvd.init()
    ranks = hvd.size()
    for step in range(STEPS):
        if (step + hvd.rank()) % ranks == 0:
            time.sleep(0.01)
        tensors = [torch.full((2,), float(hvd.rank() + i + step)) for i in range(TENSORS)]
        handle = hvd.grouped_allreduce_async(tensors, name="many", op=hvd.Sum)
        if step % 3 == 2:
            hvd.allreduce(torch.ones(3), name=f"one{step % 7}")
        for i, tensor in enumerate(hvd.synchronize(handle)):
            assert tensor[0].item() == ranks * (i + step) + ranks * (ranks - 1) / 2, (step, i)
    hvd.shutdown()
