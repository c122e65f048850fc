"""Finds the checkpoint from which a run is resumed, and checks that it matches.

Only rank 0 reads files. It broadcasts what it has read to the other ranks.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hvdtrain.checkpoint import checkpoint
from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.checkpoint.contents import IMPLEMENTATION
from hvdtrain.engines import atomic, files, lines
from hvdtrain.engines.accelerators import arithmetic_of
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError, one_line
from hvdtrain.flags import Flags, alike, plain
from hvdtrain.inputs.inputs import Input
from hvdtrain.inputs.sameness import ALIKE, SPLIT
from hvdtrain.loop.optim import LENGTH_NAMES
from hvdtrain.loop.state import Initial, TrainState
from hvdtrain.output.records import parsed
from hvdtrain.output.run_output import RunOutput

if TYPE_CHECKING:
    from hvdtrain.engines.lock import Lock

# A path may have 4,096 bytes. It is tried with this name at the start, not at the first checkpoint.
LONGEST_NAME = "x" * 100  # longer than the names of temporary files
# More than library_settings.ABORT_DELAY: as mpirun was killed, a rank of the run before may still save for so long.
RUN_LOCK_SECONDS = 10.0  # how long to wait for a previous run to end
MOST_NAMED_DIFFERENCES = 3  # differences listed in one message
# In a scheduler's state, these change while it trains, and so do names that begin with _, except for CONSTANT.
POSITION, CONSTANT = {"base_lrs", "last_epoch"}, {"_schedulers", "_milestones"}
ROUNDING = ("compression", "gradient_predivide_factor", "tuning")  # flags that change the last bits of sums over ranks
NAMES_OF_DATA = {"sha256": "the content of the data, or the order of its files, as SHA-256"}
LAYERS, MOST_SETTINGS = "layers", 20  # in `chosen_for`; values of one setting
LENGTHS = ("epochs", "steps")  # flags for the length of training, which may change


# ---- what differs between a run and the checkpoint that it continues from


class Difference(NamedTuple):
    """A value that differs. name: as the user knows it."""

    name: str
    there: object  # in the checkpoint
    here: object


def differences(
    facts: Mapping[str, Any], flags: Flags, config: Mapping[str, object], data: Mapping[str, object], ranks: int
) -> list[Difference]:
    """Return what differs between the checkpoint's facts and this run, and would change the result.

    config, data: of this run, as `flags.plain` gives them.
    """
    began = Initial(**facts["initial"])
    unlike = other_flags(facts, flags, config, ranks)
    unlike.sort(key=lambda one: one.name != "--model")  # --model first: it may be the cause of the other differences
    unlike += [
        # Where nothing is said of the data, they have the program's name.
        Difference(
            "the program" if data.get(name) == flags.program else NAMES_OF_DATA.get(name, name), there, data.get(name)
        )
        for name, there in facts["data"].items()
        if not alike(there, data.get(name))
    ]
    if flags.reduction != "average" and began.ranks != ranks:
        unlike.append(Difference("the number of ranks, on which this --reduction depends", began.ranks, ranks))
    return unlike


def other_flags(facts: Mapping[str, Any], flags: Flags, config: Mapping[str, object], ranks: int) -> list[Difference]:
    """Return the flags that differ, and should not."""
    theirs, began = facts["config"], Initial(**facts["initial"])
    allowed = {*flags.may_change, *LENGTHS}
    # The same global batch, divided differently: the user has adapted --batch-size to the new number of ranks.
    if Initial(ranks, flags.batch_size, flags.accumulate).global_batch == began.global_batch:
        allowed |= {"batch_size", "accumulate"}
    if began.ranks != ranks:
        allowed |= flags.derived
    typed = facts.get("typed", {})
    # The same words name the same files, wherever the run and its program were moved.
    allowed |= {name for name, here in flags.typed.items() if typed.get(name) == plain(here)}
    return [
        Difference(f"--{name.replace('_', '-')}", theirs[name], mine)
        for name, mine in config.items()
        if name not in allowed and not alike(theirs.get(name, mine), mine)
    ]


def other_lengths(facts: Mapping[str, Any], config: Mapping[str, object]) -> list[Difference]:
    """Return the flags for the length of training that differ from the checkpoint's."""
    theirs = facts["config"]
    return [
        Difference(f"--{name}", theirs[name], config[name])
        for name in LENGTHS
        if name in theirs and name in config and theirs[name] != config[name]
    ]


def chosen_for(
    optimizers: Sequence[torch.optim.Optimizer], registered: Mapping[str, Any], models: Sequence[nn.Module] = ()
) -> dict[str, Any]:
    """Return what the program has chosen for optimizers, schedulers and layers, such as rates, as JSON. Call it before a
    checkpoint or a step changes them."""
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    chosen: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        name = kinds[number] if kinds.count(kinds[number]) == 1 else f"{kinds[number]} {number}"
        left_out = {"params", "param_names", *IMPLEMENTATION}
        groups = [
            {key: setting_as_json(value) for key, value in group.items() if key not in left_out}
            for group in optimizer.param_groups
        ]
        chosen[name] = groups[0] if len(groups) == 1 else groups
    for name, what in registered.items():
        if isinstance(what, lr_scheduler.LRScheduler):
            chosen[name] = setting_as_json(what.state_dict())
    return chosen | ({LAYERS: settings_of_layers(models)} if models else {})


def settings_of_layers(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the settings of torch's own layers, such as `Dropout.p`: all values that layers of a kind have."""
    found = dict[str, list[Any]]()
    for layer in (
        layer for model in models for layer in model.modules() if type(layer).__module__.startswith("torch.nn.")
    ):
        for name, value in vars(layer).items():
            # Shapes are compared when weights are loaded. A mode is no setting.
            if name != "training" and not name.startswith("_") and isinstance(value, (bool, int, float, str, tuple)):
                values = found.setdefault(f"{type(layer).__name__}.{name}", [])
                if (held := setting_as_json(value)) not in values and len(values) < MOST_SETTINGS:
                    values.append(held)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def setting_as_json(value: Any) -> Any:
    """Return a setting as JSON; of other objects, the name of the class. Without what depends on the position."""
    if isinstance(value, dict):
        chosen = {str(k): v for k, v in value.items() if k in CONSTANT or not (k in POSITION or str(k).startswith("_"))}
        return {key: setting_as_json(item) for key, item in chosen.items()}
    if isinstance(value, (list, tuple)):
        return [setting_as_json(item) for item in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def other_choices(there: Any, here: Any, name: str = "") -> Iterator[Difference]:
    """Yield where two values of `chosen_for` differ. Numbers are equal that float32 does not tell apart."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in (key for key in there if key in here):  # another version of torch may have more
            yield from other_choices(there[key], here[key], f"{name} {key}".strip())
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, pair in enumerate(zip(there, here, strict=True)):
            yield from other_choices(*pair, f"{name} {number}")
    else:
        numbers = isinstance(there, (int, float)) and isinstance(here, (int, float))
        # Settings that went through float32 tensors come back with 7 digits.
        if not (alike(there, here) or (numbers and math.isclose(there, here, rel_tol=1e-6))):
            yield Difference(name, there, here)


def differences_in_words(unlike: list[Difference]) -> str:
    """Return the first differences as a clause, and the number of the others: there may be a thousand shards."""
    message = "; ".join(
        f"{name}: {there} in the checkpoint, {here} now" for name, there, here in unlike[:MOST_NAMED_DIFFERENCES]
    )
    return message + (
        f"; and {len(unlike) - MOST_NAMED_DIFFERENCES:,} more" if len(unlike) > MOST_NAMED_DIFFERENCES else ""
    )


def is_length(one: Difference) -> bool:
    """Return whether schedulers differ in their length."""
    return any(word in LENGTH_NAMES for word in one.name.split())


# ---- which checkpoint


def saved_step(output_dir: Path) -> int | None:
    """Return the step of the last checkpoint in the record of a run; None: there is none."""
    step = None
    with (
        contextlib.suppress(OSError),
        os.fdopen(files.open_regular(output_dir / "metrics.jsonl"), errors="replace") as record,
    ):
        for line in record:
            if '"checkpoint"' in line and (event := parsed(line)) and event.get("event") == "checkpoint":
                step = event.get("step", step)
    return step


class Resume:
    """The checkpoint to resume from, if there is one, and the directory of the new ones. Raises UserError on rank 0 only."""

    def __init__(self, engine: Engine, flags: Flags, output: RunOutput):
        self.engine, self.output, self._flags = engine, output, flags
        self.writes = flags.output_dir is not None and flags.evaluate is None
        self.directory: Path | None = flags.output_dir / "checkpoints" if self.writes else None
        self.own_optimizers = flags.sync_every > 1  # each group of ranks saves its own state of them
        self.initial = Initial(engine.size, flags.batch_size, flags.accumulate)
        self.lengthened: list[Difference] = []  # --epochs or --steps, if the resumed run has another number of them
        self.continues = False  # on rank 0: the run in --output-dir is resumed, and its files are appended to
        self.facts: Facts | None = None  # of the checkpoint to resume from; on every rank after `begin`
        self.config: Facts = {}  # the flags of this run, as they are compared and saved
        self.data: Facts = {}  # what identifies its data
        self.typed: Facts = {}  # flags that name files, as they were given
        self.lock: Lock | None = None
        self._asked: Facts = {}  # the flags as they were given: `auto` is still `auto`
        self._warnings: list[str] = []
        self.arithmetic: dict[str, str] = {}  # of this run, when it starts
        self._content: tuple[Facts, dict[str, Tensor]] | None = None  # on rank 0, until training begins
        if engine.rank == 0:
            try:
                self._open()
            except BaseException:
                self.release()
                raise

    def _open(self) -> None:
        if self._flags.evaluate is not None:
            self._open_to_evaluate(self._flags.evaluate)
            return
        if self.directory is not None:
            self._take(self.directory)
        resume = self._flags.resume
        if resume == "auto" and self.directory is not None:
            self._content = checkpoint.newest(self.directory, self._warn)
            self.continues = self._content is not None
            if not self.continues and (step := saved_step(self.directory.parent)) is not None:
                with contextlib.suppress(OSError):
                    self.directory.rmdir()  # else what is moved back would come into it
                message = (
                    f"{self.directory.parent} has the record of a run that had saved step {step}, and no checkpoint"
                )
                raise UserError(f"{message}: put {self.directory.name} back as it was, or --resume never")
        elif isinstance(resume, Path):
            self._content = checkpoint.find_checkpoint(resume, f"--resume {resume}", self._warn)

    def _open_to_evaluate(self, evaluate: Path | str) -> None:
        """Read a checkpoint of a run that may still be training."""
        from hvdtrain.checkpoint import mirror

        output_dir = self._flags.output_dir
        if output_dir is not None and (output_dir / "checkpoints").exists():
            remedy = "name another one for the record of the evaluation, or leave it out"
            raise UserError(f"--evaluate: the --output-dir {output_dir} has a run: {remedy}")
        # The run may still be training: nothing of it is changed, not even the name of a damaged file.
        with mirror.local(evaluate, "--evaluate") as path:
            self._content = checkpoint.find_checkpoint(path, f"--evaluate {evaluate}", self._warn, keep_names=True)

    def _take(self, directory: Path) -> None:
        """Create the directory of the checkpoints and lock the one above it, so that no other run writes there."""
        from hvdtrain.engines.lock import Lock

        if os.path.islink(directory):  # noqa: PTH114 (Path's own raises where the name is too long)
            remedy = "give the real directory with --output-dir"
            raise UserError(f"{directory} is a symbolic link, which is not followed: {remedy}")
        output_dir = directory.parent
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            self.lock = Lock(output_dir, RUN_LOCK_SECONDS)
            directory.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                (directory / LONGEST_NAME).lstat()
            if not self.lock.works:
                message = "its file system has no locks, so another host's run there is noticed at a checkpoint only"
                lines.warn(f"--output-dir {output_dir}: {message}")
        except TimeoutError:
            message = f"another run writes to {output_dir}: wait for it, or name another --output-dir"
            raise UserError(message) from None
        except OSError as error:
            which = f"{directory}: {error.strerror}" if self.lock is not None else error.strerror
            remedy = "name another directory, or free some space"
            raise UserError(f"--output-dir {output_dir} cannot be written ({which}): {remedy}") from error
        atomic.remove_partial(directory)

    def release(self) -> None:
        """Release the lock on the output directory. Idempotent."""
        if self.lock is not None:
            self.lock.release()
        self.lock = None

    def _warn(self, line: str) -> None:
        line = one_line(line)
        self._warnings.append(line)
        lines.warn(line)

    def begin(self) -> TrainState:
        """Return the position in training, on every rank. A collective."""
        self._asked = self._flags.given()
        self.typed = {name: plain(value) for name, value in self._flags.typed.items()}
        shared = self._content[0] if self._content is not None else None
        self.facts = self.engine.broadcast_object(shared, "checkpoint.facts")
        if self.facts is None:
            return TrainState()
        try:
            for name in ("config", "data"):
                if not isinstance(self.facts[name], dict):
                    raise TypeError(name)
            self.initial = Initial(**self.facts["initial"])
            if self._flags.evaluate is not None:
                self._flags.adopt(self.facts["config"])
                self._asked = self._flags.given()
            return TrainState(**self.facts["state"])
        except (KeyError, TypeError) as error:
            raise UserError(checkpoint.OTHER_VERSION, everywhere=True) from error

    def content(self) -> tuple[Facts, dict[str, Tensor]] | None:
        """Return what is restored, facts and, on rank 0 alone, tensors; None in a new run."""
        if self.facts is None:
            return None
        return self.facts, self._content[1] if self._content is not None else {}

    def forget(self) -> None:
        """Free the loaded checkpoint."""
        self._content = None

    # ---- whether it matches

    def require_fit(self, data: Mapping[str, object]) -> None:
        """On rank 0, compare flags and data with those of the checkpoint.

        If they differ, raises UserError for a run in --output-dir, and prints a warning for a checkpoint given by --resume.
        """
        now = self._flags.given()
        config = {name: now[name] if value is None else value for name, value in self._asked.items()}
        self.config = {name: plain(value) for name, value in config.items()}
        if self.facts is not None:
            self.lengthened = other_lengths(self.facts, self.config)
        self.data = {name: plain(value) for name, value in data.items()}
        if self.engine.rank != 0:
            return
        unlike = []
        if self.facts is not None:
            unlike = differences(self.facts, self._flags, self.config, self.data, self.engine.size)
        if self._flags.evaluate is not None:
            unlike = [one for one in unlike if one.name in self.data]
            if unlike:
                self._warn(
                    f"the model was trained with other data ({differences_in_words(unlike)}): evaluated on those given now"
                )
            return
        if unlike and self.continues:
            self.release()
            remedy = "give the same, or another --output-dir, or --resume never"
            raise UserError(
                f"{self.directory} holds a run with different flags ({differences_in_words(unlike)}): {remedy}"
            )
        if unlike:
            message = f"the checkpoint was written with different flags ({differences_in_words(unlike)})"
            self._warn(f"{message}: continued with those given now")

    def require_choices(self, chosen: Facts) -> None:
        """On rank 0, compare what the program has chosen for optimizers and schedulers with what the checkpoint's had.

        Raises UserError, as for other flags. On another number of ranks, for another length, and for a checkpoint that
        --resume names, a line says that those of the checkpoint are kept.
        """
        assert self.facts is not None
        unlike = list(other_choices(self.facts["chosen"], chosen))
        if not unlike or self.engine.rank != 0 or self._flags.evaluate is not None:
            return
        # A program may derive its rates from the number of ranks, or from the length of the run.
        if self.continues and not self.lengthened and self.facts["world_size"] == self.engine.size:
            self.release()
            remedy = "give the same, or another --output-dir, or --resume never"
            raise UserError(
                f"{self.directory} holds a run with different settings ({differences_in_words(unlike)}): {remedy}"
            )
        # A scheduler of another length begins again as it is now: `optim.redone`. Another line tells its length.
        again = {one.name.split()[0] for one in unlike if self.lengthened and is_length(one)} | {LAYERS}
        new = [one for one in unlike if one.name.split()[0] in again and not is_length(one)]
        kept = [one for one in unlike if one.name.split()[0] not in again]
        for which, what in ((kept, "those of the checkpoint are kept"), (new, "those given now are used")):
            if which:
                self._warn(
                    f"the program has other settings than the checkpoint ({differences_in_words(which)}): {what}"
                )

    def require_samples(self, source: Input) -> None:
        """Raise UserError on every rank if the program reads other samples than the run to resume."""
        if self.facts is None or (source.changes and not self.facts["state"]["samples_of_epoch"]):
            return
        of_epoch = source.changes or source.may_be_new
        began, now = self.facts.get("split"), source.split
        resplit = None not in (began, now) and began != now
        if resplit and self._flags.resume == "auto" and not source.changes:
            message = "the data set is split otherwise than when the run began, and samples of its test set would be "
            raise UserError(f"{message}trained on: {SPLIT}", everywhere=True)
        rows = self.facts.get("rows", {})
        other = [name for name, held in source.rows.items() if rows.get(name, held) != held]
        if not self.facts["state"]["samples_of_epoch"]:  # its head has set them for the next epoch
            other = [] if of_epoch else [name for name in other if name not in source.set_by_epoch]
        if of_epoch and (other or resplit):
            message = (
                "the data of this epoch are not those with which it began, and some samples are used twice or never"
            )
            remedy = "choose and compute them from the epoch's number, or from what is given to run.register"
            self.output.say(f"warning: {message}: {remedy}")
        elif other:
            remedy = f"{ALIKE}; or the program changes them by epoch"
            self.output.say(f"warning: the {other[0]} of the data set are not those of the run so far: {remedy}")
        there, here = self.facts["input"]["samples"], source.samples
        if there == here or not self.facts["state"]["step"]:  # stopped in an evaluation before the first step
            return
        message = f"the run was trained on {there:,} samples, and run.steps() got {here:,}"
        if self._flags.resume == "auto":
            remedy = "give the same, or --weights FILE with another --output-dir"
            raise UserError(f"{message}: {remedy}", everywhere=True)
        self.output.say(f"warning: {message}: continued with those given now")

    @property
    def per_epoch(self) -> int:
        """Samples of an epoch of the run that is resumed; 0: not known."""
        return int(self.facts["input"]["per_epoch"]) if self.facts is not None else 0

    def announce(self, state: TrainState) -> None:
        """Print and record the step from which the run is resumed."""
        for warning in self._warnings:
            self.output.event("error", kind="checkpoint", message=warning)
        self.arithmetic = arithmetic_of(self.engine.device)  # at the start: a program may change the threads
        if self.facts is None:
            return
        if self._flags.evaluate is not None:
            epoch = state.epoch + (state.samples_of_epoch > 0)
            self.output.say(f"the model after step {state.step} and {state.samples:,} samples, in epoch {epoch}")
            return
        began, now = self.initial, Initial(self.engine.size, self._flags.batch_size, self._flags.accumulate)
        if began.global_batch != now.global_batch:
            per_rank = -(-began.global_batch // self.engine.size)
            self.output.say(
                f"global batch kept at {began.global_batch}: the run began on {began.ranks} ranks; "
                f"now up to {per_rank} per rank"
            )
        before, engine = self.facts["engine"], self.engine
        if before != engine.name and max(self.facts["world_size"], engine.size) > 1 and not engine.takes_turns:
            self.output.say(f"--engine {engine.name} instead of {before}: sums over ranks may be rounded differently")
        arithmetic = self.arithmetic if self.facts["world_size"] == engine.size else {}
        for name, there in self.facts.get("arithmetic", {}).items():
            if (here := arithmetic.get(name, there)) != there:
                self.output.say(f"{name} {here} instead of {there}: results may be rounded differently")
        asked = self.config.get("weights")
        if asked is not None and asked != self.facts["config"].get("weights"):
            self.output.say(f"--weights {asked} is not used: the weights are those of the checkpoint")
        for name in ROUNDING:
            there, here = (config.get(name) for config in (self.facts["config"], self.config))
            if there != here and max(self.facts["world_size"], engine.size) > 1:
                flag = f"--{name.replace('_', '-')}"
                self.output.say(f"{flag} {here} instead of {there}: gradients may be rounded differently")
        epoch = state.epoch + (state.samples_of_epoch > 0)
        done = {"--epochs": epoch, "--steps": state.step}
        for name, there, here in self.lengthened:
            if isinstance(here, int) and 0 < here < done[name]:  # run.epochs refuses it
                continue
            earlier = isinstance(here, int) and isinstance(there, int) and here < there
            so = "training ends earlier" if earlier else "training continues"
            follows = "a learning rate that depends on the end follows the new end"
            self.output.say(f"{name} {here} instead of {there}: {so}, and {follows}")
        self.output.say(f"resumed after step {state.step} and {state.samples:,} samples, in epoch {epoch}")
        self.output.event(
            "resume", epoch=state.epoch + 1, step=state.step, samples=state.samples, taken=state.samples_of_epoch,
            world_size=self.engine.size, initial=began._asdict(), warnings=self._warnings,
        )  # fmt: skip
