"""While torch.compile compiles, the watchdog knows."""

import time

from hvdtrain.engines.single import SerialEngine
from hvdtrain.training.resilience.watchdog import Watchdog


def test_a_compilation_is_a_phase_of_its_own_at_each_new_shape():
    import torch._dynamo.callback  # as torch.compile does

    seen = []
    watchdog = Watchdog(SerialEngine(tuning=False, rank=0, size=1, launcher="none"), None)
    try:
        until = time.monotonic() + 20
        while not watchdog._hears_of_compilations:
            assert time.monotonic() < until
            time.sleep(0.05)
        watchdog.begin_step(0)
        watchdog.finish_step(1)

        def backend(graph, example):
            seen.append(watchdog._progress.phase.name)
            return graph.forward

        compiled = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
        for size in (2, 3, 2):
            compiled(torch.ones(size))
            seen.append(watchdog._progress.phase.name)
    finally:
        watchdog.close()
        torch._dynamo.reset()
    assert seen == ["compilation", "step", "compilation", "step", "step"]
