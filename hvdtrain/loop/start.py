"""The start and the end of a training run, in the required order."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.checkpoint.checkpoint import checkpoints_in
from hvdtrain.checkpoint.resume import continue_job
from hvdtrain.checkpoint.saving import Checkpoints
from hvdtrain.engines import choice
from hvdtrain.engines.base import Engine
from hvdtrain.engines.choice import require_same_flags, start_engine
from hvdtrain.engines.errors import UserError
from hvdtrain.flags import Flags, is_url
from hvdtrain.guards.judge import HangTimeouts
from hvdtrain.guards.limits import limited_start
from hvdtrain.guards.watch import remember_ignored, watch_ranks
from hvdtrain.inputs import leftovers
from hvdtrain.inputs.inputs import InputKind
from hvdtrain.inputs.sharding import seed_generators
from hvdtrain.inputs.sources import Data, require_default_device
from hvdtrain.launching import exit_codes
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.run import Run
from hvdtrain.loop.state import Stage
from hvdtrain.loop.stopping import Stopped, Stopping, early_ends_refused
from hvdtrain.models import compile_cache
from hvdtrain.output.metric_names import Metric, metrics_of
from hvdtrain.output.run_output import RunOutput
from hvdtrain.program.restarted import without_steps

if TYPE_CHECKING:
    from hvdtrain.checkpoint.mirror import Mirror

_running: list[bool] = []  # one, inside `start`


finished: set[Path | None] = set()  # output directories of earlier trainings in this process


class TrainingBlock:
    """What `start` returns, to be entered by a `with` statement, which then has the run."""

    def __init__(self, training: contextlib.AbstractContextManager[Run]):
        self._training = training

    def __enter__(self) -> Run:
        return self._training.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._training.__exit__(kind, error, traceback)

    def __getattr__(self, name: str) -> Any:
        # Anything else is a line of a program that has forgotten `with`.
        if name.startswith("_"):  # Python's own questions, such as those of copy and pickle
            raise AttributeError(name)
        remedy = "write `with training.start(flags) as run:`"
        raise UserError(f"run.{name} of a training that was not started: {remedy}", everywhere=True)


def start(flags: Flags, *, metrics: Mapping[str, Metric | str] | None = None) -> TrainingBlock:
    """Start the engine, find the checkpoint to resume from, and monitor the ranks until the block ends. A context manager.

    flags: of `training.parser(...).parse_args()`. metrics: the metrics that evaluations record, each with "min" or "max",
    whichever is better (default: loss, "min"); the first one determines the best checkpoint. Raises UserError on every rank.
    """
    return TrainingBlock(_start(flags, metrics))


@contextlib.contextmanager
def _start(flags: Flags, metrics: Mapping[str, Metric | str] | None) -> Iterator[Run]:
    if not isinstance(flags, Flags):
        raise UserError("training.start() takes what training.parser(...).parse_args() returned", everywhere=True)
    if threading.current_thread() is not threading.main_thread():
        raise UserError("training.start() in another thread than the main one, which stop signals reach: call it there")
    if _running:
        raise UserError(
            "training.start() inside training.start(): end the first block before the next", everywhere=True
        )
    require_default_device()
    for name in ("output_dir", "data_dir"):  # which a program may set after parsing
        if isinstance(given := getattr(flags, name, None), str):
            setattr(flags, name, Path(given))
    remember_ignored()
    directions = metrics_of({"loss": "min"} if metrics is None else metrics)
    tuning = flags.tuning == "auto"
    with contextlib.ExitStack() as stack:
        _running.append(True)
        stack.callback(_running.pop)
        # A rank that never comes would keep the others waiting in the engine's start, where nobody watches yet.
        with limited_start(HangTimeouts(flags.step_timeout)) as starting:
            engine = start_engine(
                flags.engine,
                tuning=tuning,
                device=flags.device,
                threads=flags.threads,
                deterministic=flags.deterministic,
            )
            engine.reason = flags.engine_reason
            flags.settle(engine.gpu_bytes)
            starting.engine = stack.enter_context(engine)
            run = stack.enter_context(started(engine, flags, directions, named=metrics is not None))
        yield run


def kinds_of_data() -> list[InputKind]:
    """Return the kinds of data that run.steps and run.evaluating take: the first one that takes it opens it."""
    from hvdtrain.inputs.dataloaders import LOADER
    from hvdtrain.inputs.inputs import NUMBER, TENSORS
    from hvdtrain.inputs.samplers import SAMPLED
    from hvdtrain.inputs.several import several_of
    from hvdtrain.inputs.streams import STREAM

    kinds: list[InputKind] = [NUMBER, TENSORS, STREAM, SAMPLED, LOADER]
    return [*kinds, several_of(tuple(kinds))]


def features_of(
    engine: Engine, flags: Flags, output: RunOutput, name_of: Callable[[int], str],
    heartbeat: Callable[[], None],
) -> list[Feature]:  # fmt: skip
    """Return the features that the flags ask for, each a file of training/features, in the order in which they are called.

    name_of: returns the name of a rank.
    """
    from hvdtrain.features import non_finite
    from hvdtrain.features.replicas import Replicas
    from hvdtrain.features.schedule_rules import ScheduleRules

    # What is not asked for is not imported: all ranks of a host import at the same time.
    features: list[Feature] = []

    features.append(non_finite.of(engine, flags, output, name_of))
    features.append(replicas := Replicas(engine, flags.check_steps, name_of))
    if flags.sync_every > 1 and flags.evaluate is None:
        from hvdtrain.features.local_steps import LocalSteps

        features.append(LocalSteps(engine, flags, name_of, replicas.compare))
    if flags.profile:
        from hvdtrain.features.profile import Profile

        features.append(Profile(engine, flags, output, heartbeat))
    if flags.mfu:
        from hvdtrain.features.profile import Utilization

        features.append(Utilization())
    if flags.virtual_ranks is not None:
        from hvdtrain.features.virtual_ranks import VirtualFeature

        features.append(VirtualFeature(engine, flags))
    features.append(ScheduleRules())
    return features


def mirrored(engine: Engine, flags: Flags, output: RunOutput) -> "Mirror | None":
    """Begin to copy the run to --mirror, if that is asked for. A collective."""
    if flags.evaluate is not None or (flags.mirror is None and not is_url(flags.resume)):
        return None
    from hvdtrain.checkpoint.mirror import Mirror

    return Mirror(engine, flags, output)


def kind_of_run(flags: Flags) -> type[Run]:
    """Return the class of the run: with --evaluate, one that takes no steps."""
    if flags.evaluate is not None:
        from hvdtrain.features.evaluate_only import EvaluationRun

        return EvaluationRun
    return Run


@contextlib.contextmanager
def started(engine: Engine, flags: Flags, metrics: Mapping[str, Metric], *, named: bool = False) -> Iterator[Run]:
    """Do the same as `start`, with an engine that is already running. named: whether the script has named `metrics`."""
    # Comes first: with another batch size or seed, ranks would hang
    # in a later collective, or train differently without an error.
    require_same_flags(engine, flags.of_all_ranks())
    track_as = (flags.track, flags.program) if flags.track else None
    output = RunOutput(
        engine, flags.output_dir, progress=not flags.no_progress, tensorboard=flags.tensorboard, track_as=track_as
    )
    continue_job(engine, flags, output)
    mirror = mirrored(engine, flags, output)
    processes = engine
    if flags.virtual_ranks is not None:
        from hvdtrain.features.virtual_ranks import virtual_ranks_on

        engine = virtual_ranks_on(processes, flags)
    with engine.raising_together("start"):
        checkpoints = Checkpoints(engine, flags, metrics, output, mirror)
    with contextlib.suppress(OSError):  # there is no directory for temporary files
        leftovers.sweep_leftovers()  # of earlier attempts of this run that were killed
    compile_cache.use_private()  # for a program that calls torch.compile itself
    state = checkpoints.resume.begin()
    flags.compression = choice.choose_compression(engine, flags.compression)
    config = checkpoints.resume.facts["config"] if checkpoints.resume.facts is not None else {}
    flags.amp = choice.choose_amp(engine, flags.amp, flags.amp_of_cpus, config.get("amp"))
    if flags.gradient_predivide_factor is None:
        flags.gradient_predivide_factor = choice.default_predivision(flags.compression, engine.size)

    def hung(headline: str) -> None:
        output.event("error", kind="watchdog", message=headline)

    def stopped(reason: str) -> None:
        output.event("stop", reason=reason)
        remedy = "nothing to save: run the same command again"
        output.say(f"stopped by {reason}, before the first step was finished; {remedy}")

    watch = watch_ranks(processes, HangTimeouts(flags.step_timeout), hung, stopped)
    watch.recordings = flags.output_dir and flags.output_dir / "collectives"
    with output, Stopping(processes, output, watch, flags.checkpoint_steps) as stopping:
        features = features_of(engine, flags, output, watch.peers.name, stopping.heartbeat)
        data = Data(kinds_of_data, engine, flags, output)
        run = kind_of_run(flags)(engine, flags, metrics, output, checkpoints, stopping, data, state, features)
        # Right before the program builds its model, so that its weights do not depend on what was drawn earlier.
        torch.manual_seed(flags.seed)
        seed_generators(flags.seed)
        if checkpoints.resume.continues and flags.output_dir in finished:
            remedy = "another training, such as the next fold, needs an --output-dir of its own"
            run.say(
                f"warning: this process has trained into {flags.output_dir} before, and continues that run: {remedy}"
            )
        with carried_out(run):
            with early_ends_refused(engine, lambda: f"in epoch {state.epoch + 1}, after step {state.step}"):
                yield run
            run.finish(warn_of=metrics if named else ())
            finished.add(flags.output_dir)


@contextlib.contextmanager
def carried_out(run: Run) -> Iterator[None]:
    """Context manager around a training and its end."""
    checkpoints, failed = run.checkpoints, True
    try:
        yield
        failed = False
    except Stopped:
        failed = False
        unsaved = checkpoints.close(run.stopping.heartbeat)
        run.exit_code = run.stopping.leave(run.state, unsaved, writes=checkpoints.writes)
    except (TypeError, AttributeError) as error:  # here, so that the other ranks are told what it means
        if (meant := exit_codes.of_python(error)) is None:
            raise
        raise meant from error
    except UnboundLocalError as error:
        step, output_dir = run.state.step, run.flags.output_dir
        if run.engine.activity.finished or not step or output_dir is None:
            raise
        if (unset := without_steps(error, step, checkpoints_in(output_dir / "checkpoints"))) is None:
            raise
        raise unset from error
    finally:
        run.stage = Stage.ENDED
        with run.engine.activity.during("checkpoint", 0.0):  # an exception may have come while one was written
            checkpoints.release(run.stopping.heartbeat)
            if checkpoints.mirror is not None:
                # After the last checkpoint is written, so that it is copied, too.
                checkpoints.mirror.end(run.stopping.heartbeat)
        for feature in run.features.all:
            feature.close(failed=failed)
        # Left to the garbage collector, in a notebook,
        # torch waits up to ten seconds for each worker of a failed training.
        if loading := sys.modules.get("hvdtrain.inputs.loading"):
            loading.end_workers()
