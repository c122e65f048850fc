"""Trainings on forked processes over Gloo: one import of torch for many. Reads JSON, a list of attempts, a line; prints what
came out: exit codes, and a hash of the weights and of all losses.

The program is put together of the words in --case.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from hvdtrain import training
from hvdtrain.loop.run import Run

SAMPLES, SECONDS = 43, 300
FIELDS = ("loss", "loss_rank0", "error", "hits", "gradient_norm", "count")  # which must be the same


def optimizers_of(net: nn.Sequential, case: set[str]) -> list[torch.optim.Optimizer]:
    if "two" not in case:
        return [torch.optim.AdamW(net.parameters(), 0.01)]
    others = [*net[1].parameters(), *net[5].parameters(), *net.parameters(recurse=False)]
    return [torch.optim.SGD(net[0].parameters(), 0.05, momentum=0.9), torch.optim.AdamW(others, 0.01)]


class Numbers(IterableDataset):
    """A rank's part of the samples, of unequal lengths, with a state."""

    def __init__(self, run: Run, x: torch.Tensor, y: torch.Tensor):
        self._run, self._x, self._y, self._at = run, x, y, 0

    def __iter__(self):
        own = range(self._run.rank, SAMPLES, self._run.size)
        while self._at < len(own):
            number = own[self._at]
            self._at += 1
            yield self._x[number] + 0.1 * torch.randn(()), self._y[number]
        self._at = 0

    def state_dict(self):
        return {"at": self._at}

    def load_state_dict(self, state):
        self._at = state["at"]


def data_of(run: Run, x: torch.Tensor, y: torch.Tensor, batch_size: int, case: set[str]) -> tuple:
    data, sampler = TensorDataset(x, y), WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES)
    if "several" in case:
        return ({"first": (x, y), "other": DataLoader(data, batch_size=2 * batch_size, shuffle=True)},)
    if "stream" in case:
        return (DataLoader(Numbers(run, x, y), batch_size=batch_size, num_workers=int("workers" in case)),)
    if "batches" in case:
        return (DataLoader(data, batch_sampler=BatchSampler(sampler, 3, drop_last=False)),)
    if "sampler" in case:
        return (DataLoader(data, batch_size=batch_size, sampler=sampler),)
    return (DataLoader(data, batch_size=batch_size, shuffle=True),) if "loader" in case else (x, y)


def first(batch):
    return batch["first"] if isinstance(batch, dict) else batch


def main() -> int:
    parser = training.parser("virtual", None, epochs=2, batch_size=2)
    parser.add_argument("--case", type=lambda text: text.split(","), default=[])
    parser.add_argument("--kill", type=int, default=0)
    parser.may_change_on_resume("kill")
    flags = parser.parse()
    case = set(flags.case)
    with training.start(flags, metrics={"error": "min"}) as run:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
        y = torch.randint(5, (SAMPLES,), generator=generator)
        norm = nn.BatchNorm2d(6) if "norm" in case else nn.Identity()
        net = nn.Sequential(nn.Conv2d(1, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(216, 5))
        if "channels_last" in case:
            net = net.to(memory_format=torch.channels_last)
        net.register_buffer("place", torch.zeros((), dtype=torch.int64))  # in a queue, of which each rank has its own
        net.register_buffer("queue", torch.zeros(3))
        net.register_buffer("seen", torch.zeros(0))
        if "empty" in case:  # and the only one of its type
            net.register_parameter("none", nn.Parameter(torch.zeros(0, dtype=torch.float64)))
        unused = "unused" in case
        model, *optimizers = run.prepare(net, *optimizers_of(net, case), find_unused_parameters=unused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 3)
        slow = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        run.register(schedule=schedule, **({"slow": slow} if "average" in case else {}))
        data = data_of(run, x, y, flags.batch_size, case)
        for epoch in run.epochs(flags.epochs):
            net[0].requires_grad_(epoch == 0 or "frozen" not in case)
            shift = torch.randn(1)  # the same on all ranks: outside of step.batches
            for step in run.steps(*data):
                scale = step.per_sample(lambda batch: first(batch)[1].sum() * 0.1) if "share" in case else 1.0
                for batch in step.batches():
                    images, labels = first(batch)
                    output = model(images + 0.1 * shift + 0.1 * torch.randn(()))
                    if unused and run.rank % 3 == 1:
                        output = output.detach() + net[5].bias
                    net.place += int(labels.sum())
                    net.queue[int(net.place) % 3] = images.mean()
                    losses = F.cross_entropy(output, labels, reduction="none")
                    if "grows" in case:
                        net.seen = torch.cat([net.seen, images.mean().view(1)])
                        net[2].register_buffer("late", net.seen[-1:] * 2)
                        losses = losses * (1 + net.seen.mean() + net[2].late)
                        if (other := net._buffers.pop("other", None)) is None:  # it comes and goes
                            net.register_buffer("other", images.mean())
                        else:
                            losses = losses + other
                    if "empty" in case:
                        losses = losses + net.none.sum()
                    if "several" in case:
                        losses = losses + 0.1 * model(batch["other"][0]).square().mean()
                    if "gather" in case:
                        everyone = run.gather(output.float())
                        labels_of_all = run.gather(F.one_hot(labels, 5).float())
                        losses = losses + 0.1 * (output @ everyone.T - labels_of_all.sum()).square().mean(1)
                    if "count" in case:
                        weights = labels * 0.37 + 0.1
                        step.backward((losses * weights).sum() / weights.sum(), count=weights.sum())
                    else:
                        step.backward(losses.mean() / (1 + scale) + 0.01 * net.queue.mean())
                    step.record(hits=(output.argmax(1) == labels).float())
                step.update(clip_norm=1.0)
                schedule.step()
                if "average" in case:
                    slow.update_parameters(net)
                if step.number == flags.kill:
                    run.checkpoints.close()  # what is due is on the disk
                    os._exit(9)
            evaluated = slow if "average" in case else model
            if "batched" in case:
                with run.evaluating(DataLoader(TensorDataset(x, y), batch_size=4)) as batches:
                    for images, labels in batches:
                        run.record(error=F.cross_entropy(evaluated(images), labels, reduction="none"))
            else:
                with run.evaluating(SAMPLES) as mine:
                    run.record(error=F.cross_entropy(evaluated(x[mine]), y[mine], reduction="sum"))
    return run.exit_code


def attempt(processes: int, words: list[str]) -> list[int]:
    """Train once; return the exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        if (child := os.fork()) == 0:
            place = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "virtual"}
            os.environ.update({name: str(value) for name, value in place.items()} if processes > 1 else {})
            os.dup2(2, 1)  # the answer goes to standard output
            signal.alarm(SECONDS)
            engine = "ddp" if processes > 1 else "serial"
            sys.argv = ["virtual", "--engine", engine, "--no-progress", "--log-steps", "3", *words]
            code = 1
            try:
                training.main(main)
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def answer(attempts: list[tuple[int, list[str]]]) -> list:
    with tempfile.TemporaryDirectory() as out:
        codes = [attempt(processes, [*words, "--output-dir", out]) for processes, words in attempts]
        events = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (Path(out) / "metrics.jsonl").read_text().splitlines():
                event = json.loads(line)
                if event["event"] in ("train", "evaluate"):  # a step that is repeated after a kill is there twice
                    events[f"{event['event']} {event['step']}"] = {name: event.get(name) for name in FIELDS}
            weights = json.loads((Path(out) / "summary.json").read_text())["parameters_sha256"]
            return [codes, hashlib.sha256(json.dumps([weights, sorted(events.items())]).encode()).hexdigest()[:16]]
        return [codes, None]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
