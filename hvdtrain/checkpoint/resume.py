"""Finds the checkpoint from which a run is resumed, and checks that it matches.

Only rank 0 reads files. It broadcasts what it has read to the other ranks.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from hvdtrain.checkpoint import checkpoint
from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.checkpoint.differences import (
    LAYERS,
    Difference,
    differences,
    differences_in_words,
    has_real,
    is_length,
    is_of,
    other_choices,
    other_lengths,
)
from hvdtrain.engines import atomic, files, lines
from hvdtrain.engines.accelerators import arithmetic_of
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError, one_line
from hvdtrain.engines.launchers import job_attempt
from hvdtrain.flags import Flags, is_url, plain
from hvdtrain.inputs.inputs import Input
from hvdtrain.inputs.sameness import ALIKE, SPLIT
from hvdtrain.loop.state import Initial, TrainState
from hvdtrain.output.records import parsed
from hvdtrain.output.run_output import RunOutput

if TYPE_CHECKING:
    from hvdtrain.engines.lock import Lock

# A path may have 4,096 bytes. It is tried with this name at the start, not at the first checkpoint.
LONGEST_NAME = "x" * 100  # longer than the names of temporary files
# More than library_settings.ABORT_DELAY: as mpirun was killed, a rank of the run before may still save for so long.
RUN_LOCK_SECONDS = 10.0  # how long to wait for a previous run to end
ROUNDING = ("compression", "gradient_predivide_factor", "tuning")  # flags that change the last bits of sums over ranks


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


def continue_job(engine: Engine, flags: Flags, output: RunOutput) -> None:
    """Let a requeued job continue what it has written, wherever --resume told it to start first. A collective."""
    if flags.resume == "auto" or is_url(flags.resume) or flags.output_dir is None or flags.evaluate is not None:
        return
    attempt, wrote = job_attempt(os.environ), None
    if engine.rank == 0 and attempt is not None and attempt[1]:
        with contextlib.suppress(OSError):
            held = map(checkpoint.read_facts, checkpoint.checkpoints_in(flags.output_dir / "checkpoints"))
            wrote = next((facts.get("attempt") for facts in held if facts), None)
    own = attempt is not None and wrote is not None and wrote[0] == attempt[0] and wrote[1] < attempt[1]
    if engine.broadcast_object(own, "resume.job"):
        output.say(f"--resume {flags.resume} was for the first start: the requeued job continues {flags.output_dir}")
        flags.resume = "auto"


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
        self.attempt = job_attempt(os.environ)
        self.lock: Lock | None = None
        self._asked: Facts = {}  # the flags as they were given: `auto` is still `auto`
        self._warnings: list[str] = []
        self._real: list[Difference] = []  # flags that differ, and may be settings of optimizers
        self._kept: list[Difference] = []  # settings that the program has chosen otherwise
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

    def make_room(self, directory: Path) -> None:
        """Keep the checkpoints of another run under another name. Raises OSError."""
        if self.continues or not (held := checkpoint.checkpoints_in(directory)):
            return
        directory.rename(aside := files.unused_name(directory))
        if isinstance(self._flags.resume, Path):
            kept = f"{directory.parent} had a run up to {held[0].name}, kept in {aside.name}"
            self._warn(f"{kept}: training begins at --resume {self._flags.resume}; without it, that run is continued")

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
        # The first step shows which of these it has: the checkpoint's, or those that the program sets.
        self._real = [one for one in unlike if has_real(one.there) or has_real(one.here)]
        self._warn_of_flags([one for one in unlike if one not in self._real])

    def _warn_of_flags(self, unlike: list[Difference]) -> None:
        if unlike:
            message = f"the checkpoint was written with different flags ({differences_in_words(unlike)})"
            self._warn(f"{message}: continued with those given now")

    def require_choices(self, chosen: Facts) -> None:
        """On rank 0, compare what the program has chosen for optimizers and schedulers with what the checkpoint's had.

        Raises UserError, as for other flags. On another number of ranks, for another length, and for a checkpoint that
        --resume names, `tell_settings` says which are kept.
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
        self._kept += [one for one in unlike if one.name.split()[0] not in again]
        self._warn_of_settings(new, "those given now are used")

    def _warn_of_settings(self, unlike: list[Difference], what: str) -> None:
        if unlike:
            self._warn(f"the program has other settings than the checkpoint ({differences_in_words(unlike)}): {what}")

    def tell_settings(self, restored: Facts, now: Facts) -> None:
        """On rank 0, say which flags and settings the first step has, where the checkpoint and the program have others.

        restored, now: what `chosen_for` returns of the optimizers, when all was restored, and at the first step.
        """
        set_since = {one.name for one in other_choices(restored, now)}  # such as by step.lr
        kept, flags, named = [one for one in self._kept if one.name not in set_since], self._real, list[Difference]()
        told = len(self._warnings)
        for one in kept:
            mine = [flag for flag in flags if is_of(flag, one)]
            named.append(one._replace(name=", ".join([*(flag.name for flag in mine), one.name])))
        self._warn_of_settings(named, "those of the checkpoint are kept")
        self._warn_of_flags([flag for flag in flags if not any(is_of(flag, one) for one in kept)])
        for warning in self._warnings[told:]:
            self.output.event("error", kind="checkpoint", message=warning)
        self._real, self._kept = [], []

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
