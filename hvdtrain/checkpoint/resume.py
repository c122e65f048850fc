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
from hvdtrain.checkpoint.comparison import Difference, differences, in_words, other_choices, other_lengths
from hvdtrain.engines import atomic, lines
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError, one_line
from hvdtrain.flags import Flags, plain
from hvdtrain.inputs.inputs import Input
from hvdtrain.inputs.sameness import SPLIT
from hvdtrain.loop.schedules import LENGTH_NAMES
from hvdtrain.loop.state import Initial, TrainState
from hvdtrain.output.run_output import RunOutput

if TYPE_CHECKING:
    from hvdtrain.engines.lock import Lock

LONGEST_NAME = "x" * 100  # longer than the names of temporary files
LOCK_SECONDS = 10.0  # how long to wait for a previous run to end


def is_length(one: Difference) -> bool:
    """Return whether schedulers differ in their length."""
    return any(word in LENGTH_NAMES for word in one.name.split())


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
            from hvdtrain.checkpoint import reading

            self._content = reading.newest(self.directory, self._warn)
            self.continues = self._content is not None
        elif isinstance(resume, Path):
            from hvdtrain.checkpoint import reading

            self._content = reading.find(resume, f"--resume {resume}", self._warn)

    def _open_to_evaluate(self, evaluate: Path | str) -> None:
        """Read a checkpoint of a run that may still be training: nothing of it is changed."""
        from hvdtrain.checkpoint import mirror, reading

        output_dir = self._flags.output_dir
        if output_dir is not None and (output_dir / "checkpoints").exists():
            remedy = "name another one for the record of the evaluation, or leave it out"
            raise UserError(f"--evaluate: the --output-dir {output_dir} has a run: {remedy}")
        with mirror.local(evaluate, "--evaluate") as path:
            self._content = reading.find(path, f"--evaluate {evaluate}", self._warn, keep_names=True)

    def _take(self, directory: Path) -> None:
        """Create the directory of the checkpoints and lock the one above it, so that no other run writes there."""
        from hvdtrain.engines.lock import Lock

        if os.path.islink(directory):  # noqa: PTH114 (Path's own raises where the name is too long)
            remedy = "give the real directory with --output-dir"
            raise UserError(f"{directory} is a symbolic link, which is not followed: {remedy}")
        output_dir = directory.parent
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            self.lock = Lock(output_dir, LOCK_SECONDS)
            directory.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                (directory / LONGEST_NAME).lstat()  # now, not at the first checkpoint: a path may have 4,096 bytes
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
                self._warn(f"the model was trained with other data ({in_words(unlike)}): evaluated on those given now")
            return
        if unlike and self.continues:
            self.release()
            remedy = "give the same, or another --output-dir, or --resume never"
            raise UserError(f"{self.directory} holds a run with different flags ({in_words(unlike)}): {remedy}")
        if unlike:
            message = f"the checkpoint was written with different flags ({in_words(unlike)})"
            self._warn(f"{message}: continued with those given now")

    def require_choices(self, chosen: Facts) -> None:
        """On rank 0, compare what the program has chosen for optimizers and schedulers with what the checkpoint's had.

        Raises UserError, as for other flags. Where these may depend on the number of ranks or the length of the run, and for
        a checkpoint that --resume names, a line says that those of the checkpoint are kept.
        """
        assert self.facts is not None
        unlike = list(other_choices(self.facts["chosen"], chosen))
        if not unlike or self.engine.rank != 0 or self._flags.evaluate is not None:
            return
        if self.continues and not self.lengthened and self.facts["world_size"] == self.engine.size:
            self.release()
            remedy = "give the same, or another --output-dir, or --resume never"
            raise UserError(f"{self.directory} holds a run with different settings ({in_words(unlike)}): {remedy}")
        # A scheduler of another length begins again as it is now: `schedules.redone`. Another line tells its length.
        again = {one.name.split()[0] for one in unlike if self.lengthened and is_length(one)}
        new = [one for one in unlike if one.name.split()[0] in again and not is_length(one)]
        kept = [one for one in unlike if one.name.split()[0] not in again]
        for which, what in ((kept, "those of the checkpoint are kept"), (new, "those given now are used")):
            if which:
                self._warn(f"the program has other settings than the checkpoint ({in_words(which)}): {what}")

    def require_samples(self, source: Input) -> None:
        """Raise UserError on every rank if the program reads other samples than the run to resume."""
        if self.facts is None or (source.changes and not self.facts["state"]["samples_of_epoch"]):
            return
        self._require_split(source.split)
        there, here = self.facts["input"]["samples"], source.samples
        if there == here:
            return
        message = f"the run was trained on {there:,} samples, and run.steps() got {here:,}"
        if self._flags.resume == "auto":
            remedy = "give the same, or --weights FILE with another --output-dir"
            raise UserError(f"{message}: {remedy}", everywhere=True)
        self.output.say(f"warning: {message}: continued with those given now")

    def _require_split(self, split: int | None) -> None:
        """Raise UserError on every rank if the run to resume has trained on another part of its data set. split: of now."""
        held = (self.facts or {}).get("split")
        if self._flags.resume == "auto" and None not in (held, split) and held != split:
            message = "the data set is split otherwise than when the run began, and samples of its test set "
            message += "would be trained on"
            raise UserError(f"{message}: {SPLIT}", everywhere=True)

    @property
    def per_epoch(self) -> int:
        """Samples of an epoch of the run that is resumed; 0: not known."""
        return int(self.facts["input"]["per_epoch"]) if self.facts is not None else 0

    def announce(self, state: TrainState) -> None:
        """Print and record the step from which the run is resumed."""
        for warning in self._warnings:
            self.output.event("error", kind="checkpoint", message=warning)
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
        if before != engine.name and max(self.facts["world_size"], engine.size) > 1:
            self.output.say(f"--engine {engine.name} instead of {before}: sums over ranks may be rounded differently")
        epoch = state.epoch + (state.samples_of_epoch > 0)
        for name, there, here in self.lengthened:
            remedy = "training continues, and a learning rate that depends on the end follows the new end"
            self.output.say(f"{name} {here} instead of {there}: {remedy}")
        self.output.say(f"resumed after step {state.step} and {state.samples:,} samples, in epoch {epoch}")
        self.output.event(
            "resume", epoch=state.epoch + 1, step=state.step, samples=state.samples, taken=state.samples_of_epoch,
            world_size=self.engine.size, initial=began._asdict(), warnings=self._warnings,
        )  # fmt: skip
