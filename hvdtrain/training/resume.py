"""A run's own checkpoints: which one it continues, whether that one fits, and what is saved when.

Rank 0 alone reads and writes; the others receive what it read over the engine.
"""

import fcntl
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.training import checkpoint
from hvdtrain.training.records.metrics import Telemetry

# Flags that may change between two parts of one run: where and how it runs, what it shows, when it ends early.
NEUTRAL = {
    *("check_steps", "checkpoint_steps", "compression", "data_dir", "dataset", "device", "engine"),
    *("gradient_predivide_factor", "keep", "log_steps", "max_skipped", "no_progress", "output_dir", "recipe", "resume"),
    *("profile", "tensorboard"),
    *("compile", "max_broken", "memory_format", "test_shards", "train_shards"),
    *("step_timeout", "target_accuracy", "threads", "train_samples", "tuning", "weights", "workers"),
}
LOCK_SECONDS = 10.0  # how long the run before may take to die


@dataclass
class Position:
    """Where training stands: the same on all ranks, and whole in every checkpoint."""

    epoch: int = 0  # from 0
    taken: int = 0  # samples of this epoch's order that are behind us, over all ranks
    samples: int = 0  # since the beginning of training, over all ranks
    step: int = 0  # since the beginning of training
    skipped: int = 0  # steps just before this one, in a row, whose gradients were not finite
    train_seconds: float = 0.0
    evaluation: dict = field(default_factory=dict)  # the last one: loss, accuracy, count

    def advance(self, samples: int) -> None:
        self.step += 1
        self.taken += samples
        self.samples += samples

    def reached(self, target_accuracy: float | None) -> bool:
        return target_accuracy is not None and self.evaluation.get("accuracy", -1.0) >= target_accuracy

    def end_epoch(self, **evaluation: float) -> None:
        self.epoch += 1
        self.taken = 0
        self.evaluation = evaluation


class Begun(NamedTuple):
    """How the run began. Rates and the global batch follow from this, also where it goes on with other ranks."""

    ranks: int
    batch_size: int  # per rank
    accumulate: int

    @property
    def global_batch(self) -> int:
        return self.ranks * self.batch_size * self.accumulate


class Checkpoints:
    """Finds the checkpoint to continue, restores it, saves new ones. Making one raises UserError (on rank 0 alone).

    asked: the flags as the user gave them, before anything was chosen automatically. data: what identifies the samples.
    """

    def __init__(self, engine: Engine, flags: Namespace, asked: Mapping[str, object], data: Mapping[str, object]):
        if flags.checkpoint_steps and flags.output_dir is None:
            raise UserError("--checkpoint-steps needs --output-dir, to write there", everywhere=True)
        self.engine = engine
        self.every = flags.checkpoint_steps
        self._keep = flags.keep
        self.begun = Begun(engine.size, flags.batch_size, flags.accumulate)
        self.writes = flags.output_dir is not None
        self.directory = flags.output_dir / "checkpoints" if self.writes else None
        self._config = {name: plain(value) for name, value in asked.items()}
        self._data = dict(data)
        self._reduction = flags.reduction
        self._warnings: list[str] = []
        self._found: tuple[dict, dict[str, Tensor]] | None = None  # on rank 0, until it is restored
        self.continues = False  # on rank 0: the run in --output-dir goes on, and so do its files
        self._facts: dict | None = None  # of the checkpoint to continue, on every rank
        self._last_good: str | None = None
        self._writer: checkpoint.Writer | None = None
        self.telemetry: Telemetry | None = None
        self._lock_handle: int | None = None
        if engine.rank == 0:
            try:
                self._open(flags)
            except UserError:
                self._unlock()
                raise

    def _open(self, flags: Namespace) -> None:
        if self.directory is not None and os.path.islink(self.directory):  # noqa: PTH114 (see `_named`)
            said = f"{self.directory} is a link, and output stays in --output-dir: name the place itself with it"
            raise UserError(said)
        if self.directory is not None:
            self._lock(self.directory.parent)
            checkpoint.remove_temporaries(self.directory)
        if flags.resume == "auto" and self.directory is not None:
            self._found = checkpoint.newest(self.directory, self._warn)
            self.continues = self._found is not None
        elif flags.resume not in ("auto", "never"):
            self._found = self._named(Path(flags.resume))
        if self._found is not None:
            require_whole(*self._found)
            self._require_fit(self._found[0], strict=self.continues)
        elif self._warnings:
            self._warn("no checkpoint is sound: training starts from the beginning")
        if not self.continues and self.directory is not None and checkpoint.listed(self.directory):
            self._move_aside(self.directory)

    def _named(self, path: Path) -> tuple[dict, dict[str, Tensor]]:
        if os.path.isdir(path):  # noqa: PTH112 (Path's own raises where the name is too long)
            inner = path / "checkpoints"
            found = checkpoint.newest(inner if os.path.isdir(inner) else path, self._warn)  # noqa: PTH112
            if found is None:
                raise UserError(f"--resume {path}: no sound checkpoint in it: name a step-*.safetensors, auto or never")
            return found
        try:
            return checkpoint.read(path)
        except (checkpoint.Damaged, OSError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise UserError(f"--resume {path}: {reason}: name a sound checkpoint, or auto or never") from error

    def _lock(self, directory: Path) -> None:
        """Hold the directory until this process ends: two runs in one place would mix. The kernel drops it with us."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock_handle = os.open(directory, os.O_RDONLY)
        except OSError:  # nothing can be written there: telemetry says so
            return
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock_handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    said = f"another run writes to {directory}: wait for it, or name another --output-dir"
                    raise UserError(said) from None
                time.sleep(0.2)
            except OSError:  # a file system without locks
                return

    def _unlock(self) -> None:
        if self._lock_handle is not None:
            os.close(self._lock_handle)
            self._lock_handle = None

    def _move_aside(self, directory: Path) -> None:
        number = 1
        while (aside := directory.with_name(f"checkpoints.{number}")).exists():
            number += 1
        try:
            directory.rename(aside)
        except OSError as error:
            raise UserError(
                f"{directory} cannot be moved aside ({error.strerror}): name another --output-dir"
            ) from error

    def _require_fit(self, facts: dict, *, strict: bool) -> None:
        theirs = facts["config"]
        began = Begun(**facts["begun"])
        # The same global batch, dealt out otherwise: the user has done the arithmetic for the new number of ranks.
        batch_fits = self.begun.global_batch == began.global_batch
        unlike = [
            (f"--{name.replace('_', '-')}", theirs[name], mine)
            for name, mine in self._config.items()
            if name not in NEUTRAL and theirs.get(name, mine) != mine
            and not (batch_fits and name in ("batch_size", "accumulate"))
        ]  # fmt: skip
        unlike += [
            (name, there, self._data.get(name))
            for name, there in facts["data"].items()
            if there != self._data.get(name)
        ]
        if self._reduction != "average" and facts["begun"]["ranks"] != self.engine.size:
            unlike.append(("the number of ranks, on which this --reduction depends", began.ranks, self.engine.size))
        if not unlike:
            return
        listed = "; ".join(f"{name}: {there} there, {here} now" for name, there, here in unlike)
        listed = " ".join(listed.splitlines())  # a name there may be anything
        if strict:
            how = "give the same, or another --output-dir, or --resume never"
            raise UserError(f"{self.directory} holds a run with other flags ({listed}): {how}")
        self._warn(f"the checkpoint was written with other flags ({listed}): continued with those given now")

    def _warn(self, line: str) -> None:
        self._warnings.append(line)
        print(f"warning: {line}", file=sys.stderr, flush=True)

    def begin(self, telemetry: Telemetry) -> Position:
        """Return where training stands, on every rank. A collective."""
        self.telemetry = telemetry
        shared = self._found[0] if self._found is not None else None
        self._facts = self.engine.all_gather_object(shared, "checkpoint.facts")[0]
        for warning in self._warnings:
            telemetry.event("error", kind="checkpoint", message=warning)
        if self.directory is not None and self.engine.rank == 0:
            self._writer = checkpoint.Writer(self.directory, self._keep, self._written)
        if self._facts is None:
            return Position()
        began = Begun(**self._facts["begun"])
        if began.global_batch != self.begun.global_batch:
            per_rank = -(-began.global_batch // self.engine.size)
            telemetry.say(
                f"global batch kept at {began.global_batch}: it began on {began.ranks} ranks; now up to {per_rank} per rank"
            )
        self.begun = began
        at = Position(**self._facts["position"])
        telemetry.say(f"resumed after step {at.step} and {at.samples:,} samples, in epoch {at.epoch + (at.taken > 0)}")
        telemetry.event(
            "resume", epoch=at.epoch + 1, step=at.step, samples=at.samples, taken=at.taken, world_size=self.engine.size,
            begun=began._asdict(), warnings=self._warnings,
        )  # fmt: skip
        return at

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Fill model, optimizer and loss scaler on every rank from the checkpoint, if one is continued. A collective."""
        if self._facts is None:
            return
        rows = torch.zeros(self._facts["buffers"], dtype=torch.float32)
        with self.engine.raising_together("checkpoint"):
            if self._found is not None:
                tensors = self._found[1]
                load_model(model, tensors)
                try:
                    load_optimizer(optimizer, tensors, self._facts["optimizer"])
                    scaler.load_state_dict(self._facts["scaler"] or scaler.state_dict())
                except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
                    first = (str(error) or type(error).__name__).splitlines()[0]
                    raise UserError(
                        f"the checkpoint does not fit the optimizer ({first}): check --optimizer"
                    ) from error
                if rows.shape[1:] != flatten(model).shape:
                    raise UserError("the checkpoint does not fit the model: it has other buffers: check --model")
                rows.copy_(tensors["buffers"])
        self._found = None
        self.engine.broadcast(model, optimizer)
        if rows.numel():
            self.engine.broadcast_(rows, "checkpoint.buffers")
            # Each rank's own batch statistics; on another number of ranks, their mean.
            mine = rows[self.engine.rank] if len(rows) == self.engine.size else rows.mean(0)
            unflatten(mine, model)
        if self._facts["scaler"]:
            scaler.load_state_dict(self._facts["scaler"])

    def due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def save(
        self, at: Position, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
    ) -> None:
        """Take a snapshot and return; rank 0 writes it in the background. A collective."""
        if not self.writes:
            return
        buffers = self.engine.all_gather(flatten(model), "checkpoint.buffers")
        if self._writer is None:
            return
        tensors = {f"model.{name}": snapshot(tensor) for name, tensor in model.state_dict().items()}
        held = optimizer.state_dict()
        state: dict[int, dict] = held["state"]
        for index, entries in state.items():
            tensors |= {f"optimizer.{index}.{k}": snapshot(v) for k, v in entries.items() if isinstance(v, Tensor)}
        values = {i: {k: v for k, v in entries.items() if not isinstance(v, Tensor)} for i, entries in state.items()}
        facts = {
            "format": 1,
            "position": asdict(at),
            "accuracy": at.evaluation.get("accuracy") if at.taken == 0 else None,
            "begun": self.begun._asdict(),
            "world_size": self.engine.size,
            "engine": self.engine.name,
            "config": self._config,
            "data": self._data,
            "optimizer": {
                "values": {str(i): v for i, v in values.items() if v},
                "groups": [{k: plain(v) for k, v in g.items() if k != "params"} for g in held["param_groups"]],
            },
            "scaler": scaler.state_dict(),
            "buffers": list(buffers.shape),
        }
        self._writer.put(facts, {**tensors, "buffers": buffers})

    def _written(self, path: Path, error: OSError | None) -> None:
        assert self.telemetry is not None
        if error is None:
            self._last_good = path.name
            self.telemetry.event("checkpoint", file=path.name, step=int(path.stem.removeprefix("step-")))
            return
        last = f"the last good one is {self._last_good}" if self._last_good else "there is none before it"
        line = f"checkpoint {path} not written ({error.strerror or error}): training goes on; {last}"
        print(f"warning: {line}", file=sys.stderr, flush=True)
        self.telemetry.event("error", kind="checkpoint", message=line)

    def close(self, tick: Callable[[], None] = lambda: None) -> str | None:
        """Wait until the last snapshot is on the disk; return, on every rank, why it could not be written, if so."""
        message = None
        if self._writer is not None:
            self._writer.flush(tick)
            if self._writer.failed is not None:
                reason = self._writer.failed.strerror or self._writer.failed
                message = f"the last checkpoint could not be written to {self.directory} ({reason}): make room there"
        self._unlock()
        return self.engine.all_gather_object(message, "checkpoint.close")[0]


def require_whole(facts: dict, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError where facts are not as `save` writes them: another version's, with its own right checksum."""
    try:
        begun, at = Begun(**facts["begun"]), Position(**facts["position"])
        counts = (*begun, at.epoch, at.taken, at.samples, at.step, at.skipped)
        numbers = (*counts, at.train_seconds, *at.evaluation.values())
        groups, values = facts["optimizer"]["groups"], facts["optimizer"]["values"]
        sound = (
            all(isinstance(number, (int, float)) for number in numbers)
            and all(type(number) is int and 0 <= number < 2**53 for number in counts)
            and min(begun) > 0
            and at.train_seconds >= 0
            and all(isinstance(part, dict) for part in (facts["config"], facts["data"], facts["scaler"], values))
            and all(isinstance(part, dict) for part in (*groups, *values.values()))
            and facts["buffers"] == list(tensors["buffers"].shape)
            and all(type(length) is int for length in facts["buffers"])
            and len(facts["buffers"]) == 2
        )
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise UserError("the checkpoint was written by another version of hvdtrain: use that, or --resume never")


def plain(value: object) -> object:
    """Return `value` as JSON gives it back: paths and the like as text, tuples as lists."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def snapshot(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def flatten(model: nn.Module) -> Tensor:
    """Return this rank's floating-point buffers as one float32 [n] on the CPU."""
    parts = [buffer.detach().reshape(-1).float().cpu() for buffer in model.buffers() if buffer.is_floating_point()]
    return torch.cat(parts) if parts else torch.zeros(0)


def unflatten(flat: Tensor, model: nn.Module) -> None:
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    state = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    expected = model.state_dict()
    for name in sorted(set(state) ^ set(expected)):
        raise UserError(f"the checkpoint does not fit the model: {name} is in one of them only: check --model")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)} in the file, {tuple(expected[name].shape)} in the model"
            raise UserError(f"the checkpoint does not fit the model: {name} is {shapes}: check --model")
    model.load_state_dict(state)


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], facts: dict) -> None:
    state: dict[int, dict[str, object]] = {int(index): dict(values) for index, values in facts["values"].items()}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = tensor
    groups = [
        {**mine, **theirs} for mine, theirs in zip(optimizer.state_dict()["param_groups"], facts["groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
