"""metrics.jsonl of a script that does not use hvdtrain, without Horovod."""

import json
import types

from torch import Tensor

from hvdtrain.output.script_metrics import FIRST_STEPS, Recorder


def test_an_elastic_job_goes_on_with_another_number_of_ranks(engine, tmp_path):
    def allreduce_async_(rows: Tensor, op: object, name: str) -> int:
        return 1

    hvd = types.SimpleNamespace(allreduce_async_=allreduce_async_, Sum=None, poll=bool, synchronize=bool)
    recorder = Recorder(tmp_path, "train.py", "")
    for size in (2, 3):
        engine.size, engine.hvd, engine.description = size, hvd, "Horovod"
        recorder.started(engine)
        for _ in range(60):
            recorder.stepped(None)
    recorder.end(None, 0)
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    ranks = [len(event["elapsed_seconds"]) for event in events if event["event"] == "ranks"]
    assert ranks == [2, 3]
    assert [event["step"] for event in events if event["event"] == "train"] == [FIRST_STEPS, 50, 100]
