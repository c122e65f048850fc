"""The events of metrics.jsonl and their fields: what docs/reference/metrics.md is made from.

A test compares the names with the calls of `event` in the source. Names that a program chooses are in angle brackets.
"""

EVERY_EVENT = {
    "event": "the name of the event",
    "time": "seconds since 1970",
    "elapsed": "seconds since the process of rank 0 started",
}
# Event: when it is written, and its fields.
EVENTS: dict[str, tuple[str, dict[str, str]]] = {
    "start": (
        "once per start of the command",
        {
            "world_size": "number of ranks",
            "engine": "horovod, ddp, dataparallel or serial",
            "dataset": "name of the data set",
            "reason": "why this data set",
            "config": "all flags",
            "versions": "of Python, torch, Horovod and others",
            "ranks": "a list: rank, host, pid and device of each",
            "automatic": "what was chosen automatically",
            "metrics": "of each metric, whether less (`min`) or more (`max`) is better",
        },
    ),
    "resume": (
        "after a start that continues from a checkpoint",
        {
            "epoch": "number of the epoch, from 1",
            "step": "steps so far",
            "samples": "samples so far, over all ranks",
            "taken": "samples so far in this epoch",
            "world_size": "number of ranks now",
            "initial": "ranks, batch_size and accumulate of the run's first start",
            "warnings": "flags that differ, damaged checkpoints",
        },
    ),
    "train": (
        "every `--log-steps` steps; under hvdtrain.tuned at step 10 and every 50",
        {
            "epoch": "number of the epoch, from 1",
            "step": "steps so far",
            "samples": "samples so far, over all ranks",
            "loss": "of this step, the mean over all ranks; null under hvdtrain.tuned",
            "<name>": "what the program recorded in this step, such as accuracy",
            "loss_rank0": "of rank 0 alone",
            "objective": "the loss that was minimized, if the program reports another one",
            "learning_rate": "of the first optimizer; of others `learning_rate_1` and so on",
            "gradient_norm": "before clipping, if the program clips",
            "samples_per_second": "over all ranks, since the event before",
            "<phase>_seconds": "loading, compute, communication: seconds per sample on rank 0",
            "<phase>_share": "their shares of the time of all ranks, 0 to 1",
            "seconds_per_step": "under hvdtrain.tuned",
            "slowest_rank": "under hvdtrain.tuned: the rank with the most loading and compute",
            "resident_bytes": "under hvdtrain.tuned: the largest memory of a rank",
            "corrupt": "of imagenet: corrupt images so far",
        },
    ),
    "ranks": (
        "once per epoch; each value is a list over ranks",
        {
            "epoch": "number of the epoch, from 1",
            "<phase>_seconds": "seconds spent on loading, compute, communication",
            "without_core_seconds": "seconds in which the rank was ready to run and had no core",
            "resident_bytes": "peak memory of the process",
        },
    ),
    "evaluate": (
        "after each evaluation",
        {
            "epoch": "number of the epoch, from 1",
            "step": "steps so far",
            "<name>": "what was recorded, such as loss and accuracy: the mean over all samples",
            "count": "number of samples, over all ranks",
            "prefix": "the name of the set, such as test",
            "corrupt": "of imagenet: corrupt images so far",
        },
    ),
    "checkpoint": (
        "after a checkpoint is on the disk",
        {
            "file": "its name in the directory checkpoints",
            "step": "steps so far",
            "cost_seconds": "what saving costs training: waiting for it, and processor time",
        },
    ),
    "corrupt": (
        "for each corrupt image or shard of imagenet",
        {"file": "its path", "why": "what is wrong", "samples": "number of samples lost"},
    ),
    "throughput": (
        "of lm, once per epoch",
        {
            "epoch": "number of the epoch, from 1",
            "tokens_per_second": "over all ranks",
            "flops_per_second": "floating-point operations, over all ranks",
        },
    ),
    "sample": ("of lm, once per epoch", {"epoch": "number of the epoch, from 1", "text": "drawn from the model"}),
    "profile": (
        "after `--profile` has written its files",
        {"first_step": "the first recorded", "steps": "how many", "directory": "in the output directory"},
    ),
    "error": (
        "when something goes wrong",
        {
            "kind": "watchdog, failure, non-finite, checkpoint, record or script",
            "message": "the line that was printed",
            "step": "for non-finite gradients: of which step",
        },
    ),
    "stop": (
        "after a stop signal",
        {"reason": "the signal, and its rank", "step": "steps so far", "samples": "samples so far"},
    ),
    "end": (
        "once, at the end of training; also written to summary.json",
        {
            "dataset": "name of the data set",
            "engine": "horovod, ddp, dataparallel or serial",
            "world_size": "number of ranks",
            "epochs": "epochs trained",
            "steps": "steps trained",
            "samples": "samples trained, over all ranks",
            "<prefix>_<name>": "the last evaluation, such as test_accuracy; <prefix>_count is its number of samples",
            "train_seconds": "of training alone",
            "total_seconds": "since the process started",
            "samples_per_second": "samples / train_seconds",
            "parameters_sha256": "a hash of all weights: equal bits have equal hashes",
            "<name>": "what the program added by `run.summary`",
        },
    ),
}
