"""How long `hvd.init()` takes, and no more: started as many times as there are ranks, by tests/bench/starting.py."""

import time

import horovod.torch as hvd

began = time.monotonic()
hvd.init()
print(f"hvd.init: {time.monotonic() - began:.3f} s", flush=True)
hvd.shutdown()
