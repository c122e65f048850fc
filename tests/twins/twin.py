"""A small program, trained by hvdtrain on all ranks and by plain PyTorch in one process, and how they compare."""

import contextlib
import copy
import hashlib
import io
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hvdtrain import training
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.loop.start import started
from hvdtrain.output.metric_names import Metric

SAMPLES, EPOCHS, GLOBAL_BATCH = 31, 2, 12  # three steps in an epoch, the last one with 7 samples
WIDTH = 4
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # for checkpoints, which are synced to the disk
ARITHMETIC = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int64,
}  # fmt: skip

SKIPPED: dict[str, str] = {}  # of what there is no twin, and why
said = io.StringIO()  # by the last run
part = [0, 1]  # which part of a stream the program reads, of how many


def classes(module: Any, base: type) -> Iterator[tuple[str, type]]:
    """Yield the public classes of a namespace that are derived from `base`, by name."""
    for name in sorted(dir(module)):
        what = getattr(module, name)
        if not name.startswith("_") and isinstance(what, type) and issubclass(what, base) and what is not base:
            yield name, what


def short(error: Exception, length: int = 120) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:length]


def works(name: str, make: Callable[[], object]) -> bool:
    """Return whether torch itself can do it; if not, note why."""
    try:
        make()
    except Exception as error:
        SKIPPED[name] = short(error)
    return name not in SKIPPED


def numbered() -> Dataset[Any]:
    """Inputs whose first column tells the sample, and what to learn of them."""
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    x[:, 0] = torch.linspace(-1, 1, SAMPLES)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))


def changed(put: Callable[[Any], object]) -> nn.Module:
    """Return a network that `put` has changed."""
    net = network()
    put(net)
    return net


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def in_order(data: Dataset[Any], batch: int) -> DataLoader[Any]:
    return DataLoader(data, batch)


@dataclass(frozen=True)
class Twin:
    """What a program is made of. Each part can be made anew, with the same values."""

    name: str
    model: Callable[[], nn.Module] = network
    data: Callable[[], Dataset[Any]] = numbered
    loss: Callable[..., Tensor] = squares  # of the model and the parts of a batch: the mean over its samples
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    loader: Callable[[Dataset[Any], int], DataLoader[Any]] = in_order
    scheduler: Callable[[torch.optim.Optimizer, int], Any] | None = None  # of the optimizer and the number of steps
    by_epoch: bool = False  # when the scheduler is stepped
    attach: Callable[[nn.Module, torch.optim.Optimizer], Any] = lambda net, optimizer: None  # hooks, after run.prepare
    measure: Callable[..., Tensor] | None = None  # the loss of an evaluation, if it is another
    count: Callable[..., Tensor | float] | None = None  # of the loss, of the parts of a batch
    found: Callable[[nn.Module, Any], object] = lambda net, attached: None  # what else must be as in the plain loop
    after: Callable[[nn.Module, Any], object] = lambda net, attached: None  # after each update
    registered: bool = False  # what `attach` returns is registered
    flags: Sequence[str] = ()
    prepare: dict[str, Any] = field(default_factory=dict)
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # around the whole program
    refusal: bool = False  # the plain loop would be another: only what hvdtrain says of it
    draws: bool = False  # the loader draws samples at random: their number is compared
    brief: bool = False  # starts processes: without a resumed run
    keeps: bool = True  # what a checkpoint must hold, besides weights; also whatever draws random numbers
    says: str = ""  # what a run on several ranks must print
    differs: str = ""  # why a plain loop cannot have the same steps, though it has the same samples
    differs_alone: bool = True  # in one process, too
    near: float = 1e-4


class Result(NamedTuple):
    state: dict[str, Any]
    losses: list[float]  # of each step, over all ranks
    seen: list[list[float]]  # by epoch, of all ranks, sorted
    evaluation: float
    found: object
    bits: str  # of weights, buffers and the optimizer's state


class Verdict(NamedTuple):
    """kind: works, differs, refused, failed (exit code 1, one line), WRONG, TRACEBACK; torch: which refuses it itself."""

    kind: str
    detail: str = ""


def parts(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, (tuple, list)) else [batch]


def rows(leaf: Any, some: Tensor) -> Any:
    return leaf[some] if isinstance(leaf, Tensor) and leaf.ndim else leaf


def first_column(batch: Any) -> list[float]:
    first = next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    values: list[float] = first.reshape(len(first), -1)[:, 0].double().tolist()
    return values


def digest(what: object) -> str:
    """Return a hash of nested tensors and other values."""
    total = hashlib.sha256()

    def add(part: object) -> None:
        if isinstance(part, Tensor):
            whole = (part if part.layout is torch.strided else part.to_dense()).detach().contiguous().reshape(-1)
            total.update(f"{part.dtype} {tuple(part.shape)}".encode() + bytes(whole.view(torch.uint8).numpy()))
        elif isinstance(part, dict):
            for key, value in part.items():
                total.update(repr(key).encode())
                add(value)
        elif isinstance(part, (list, tuple)):
            for value in part:
                add(value)
        else:
            total.update(repr(part).encode())

    add(what)
    return total.hexdigest()[:16]


def evaluate(twin: Twin, net: nn.Module, loader: DataLoader[Any]) -> float:
    """The mean loss over the samples of a loader, in evaluation mode."""
    net.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in loader:
            values = parts(batch)
            total += float((twin.measure or twin.loss)(net, *values)) * len(first_column(batch))
            count += len(first_column(batch))
    net.train()
    return total / count


Kept = list[tuple[nn.Module, dict[str, Tensor | None], Any]]


def copied(buffer: Tensor | None) -> Tensor | None:
    with contextlib.suppress(RuntimeError, NotImplementedError):
        return None if buffer is None else buffer.clone()
    return buffer  # of a dtype that cannot be copied, and so not be changed


def buffers_of(net: nn.Module) -> Kept:
    """Return what each module holds besides parameters, as it is now."""

    def extra(module: nn.Module) -> Any:
        own = type(module).get_extra_state is not nn.Module.get_extra_state
        return copy.deepcopy(module.get_extra_state()) if own else None

    return [(m, {name: copied(b) for name, b in m.named_buffers(recurse=False)}, extra(m)) for m in net.modules()]


def put_back(kept: Kept) -> None:
    for module, buffers, extra in kept:
        for name, buffer in buffers.items():
            setattr(module, name, copied(buffer))
        if extra is not None:
            module.set_extra_state(extra)


class Gradients:
    """Sums up the gradients of several backward passes, each of which begins without any."""

    def __init__(self, net: nn.Module):
        self.parameters = list(net.parameters())
        self.sums: list[Tensor | None] = [None] * len(self.parameters)

    def take(self) -> None:
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.sums[i] = parameter.grad if self.sums[i] is None else self.sums[i] + parameter.grad
                parameter.grad = None

    def give(self) -> None:
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            parameter.grad = total


def plain(twin: Twin, pieces: int = 1, seed: int = 7) -> Result:
    """Train in one process. pieces: the gradient of a batch is summed up over so many of its parts."""
    with twin.context():
        torch.manual_seed(5)
        net = twin.model()
        loader = twin.loader(twin.data(), GLOBAL_BATCH)
        optimizer = twin.optimizer(net)
        steps = EPOCHS * -(-SAMPLES // GLOBAL_BATCH)
        scheduler = twin.scheduler(optimizer, steps) if twin.scheduler else None
        attached = twin.attach(net, optimizer)
        part[:] = [0, 1]
        torch.manual_seed(seed)
        losses, seen, evaluation = [], [], 0.0
        for _ in range(EPOCHS):
            column: list[float] = []
            for batch in loader:
                values = parts(batch)
                column += first_column(batch)
                optimizer.zero_grad()
                mean = 0.0
                size = len(first_column(batch))
                weighed = float(twin.count(*values)) if twin.count else size
                before, summed = buffers_of(net), Gradients(net)
                for number, some in enumerate(torch.arange(size)[first::pieces] for first in range(min(pieces, size))):
                    if number:  # each rank has buffers of its own
                        put_back(before)
                    piece = values if pieces == 1 else tree_map(lambda leaf, some=some: rows(leaf, some), values)
                    share = (float(twin.count(*piece)) if twin.count else len(some)) / weighed
                    loss = twin.loss(net, *piece) * share
                    loss.backward()
                    summed.take() if pieces > 1 else None
                    mean += float(loss.detach().real)
                summed.give() if pieces > 1 else None
                optimizer.step()
                twin.after(net, attached)
                losses.append(mean)
                if scheduler is not None and not twin.by_epoch:
                    scheduler.step()
            seen.append(sorted(column))
            evaluation = evaluate(twin, net, loader)
            if scheduler is not None and twin.by_epoch:
                step_by_epoch(scheduler, evaluation)
        state = dict(copy.deepcopy(net.state_dict()))
        return Result(state, losses, seen, evaluation, twin.found(net, attached), "")


def step_by_epoch(scheduler: Any, evaluation: float) -> None:
    needs_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    scheduler.step(evaluation) if needs_metric else scheduler.step()


@contextlib.contextmanager
def a_run(engine: Engine, twin: Twin, directory: str | None) -> Iterator[training.Run]:
    parser = training.parser("twin", None, epochs=EPOCHS, batch_size=GLOBAL_BATCH // engine.size)
    kept = ["--output-dir", directory, "--checkpoint-steps", "2", "--keep", "9"] if directory else []
    flags = parser.parse(["--engine", engine.name, "--no-progress", "--log-steps", "1", *kept, *twin.flags])
    said.seek(0)
    said.truncate()
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        started(engine, flags, {"loss": Metric("min")}) as run,
    ):
        yield run


def wait_for_checkpoint(directory: str) -> None:
    """Wait for the first one: it is written in the background, and on a busy machine, a newer one takes its place."""
    until = time.monotonic() + 30
    while not list(Path(directory, "checkpoints").glob("step-*.safetensors")) and time.monotonic() < until:
        if "not written" in said.getvalue():
            return
        time.sleep(0.002)


def ours(engine: Engine, twin: Twin, directory: str | None = None) -> Result:
    """Train with hvdtrain. directory: for checkpoints, and to resume a run in it."""
    with twin.context(), a_run(engine, twin, directory) as run:
        part[:] = [engine.rank, engine.size]
        torch.manual_seed(5)
        net = twin.model()
        data = twin.data()
        loader = twin.loader(data, GLOBAL_BATCH // engine.size)
        model, optimizer = run.prepare(net, twin.optimizer(net), **twin.prepare)
        scheduler = twin.scheduler(optimizer, run.total_steps(loader, EPOCHS)) if twin.scheduler else None
        if scheduler is not None:
            run.register(scheduler=scheduler)
        attached = twin.attach(net, optimizer)
        if twin.registered:
            run.register(attached=attached)
        losses, seen = [], []
        for _ in run.epochs(EPOCHS):
            column: list[float] = []
            for step in run.steps(loader):
                if directory and step.number > 2 and engine.rank == 0:
                    wait_for_checkpoint(directory)
                for batch in step.batches():
                    values = parts(batch)
                    if step.batch.count:
                        column += first_column(batch)
                    how = {"count": twin.count(*values)} if twin.count else {}
                    step.backward(twin.loss(model, *values), **how)
                step.update()
                twin.after(net, attached)
                losses.append(step.loss)
                if scheduler is not None and not twin.by_epoch:
                    scheduler.step()
            everyone = engine.all_gather_object(column, "seen")
            seen.append(sorted(value for rank in everyone for value in rank))
            with run.evaluating(loader) as mine:
                for batch in mine:
                    values = parts(batch)
                    run.record(loss=(twin.measure or twin.loss)(model, *values) * len(first_column(batch)))
            if scheduler is not None and twin.by_epoch:
                step_by_epoch(scheduler, run.evaluation["loss"])
        state = dict(copy.deepcopy(net.state_dict()))
        bits = digest([state, optimizer.state_dict()["state"], run.evaluation])
        return Result(state, losses, seen, run.evaluation["loss"], twin.found(net, attached), bits)


def unlike(ours: object, theirs: object, near: float) -> bool:
    """Whether two nested values differ by more than rounding."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return list(ours) != list(theirs) or any(unlike(ours[name], theirs[name], near) for name in ours)
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor) and ours.dtype not in ARITHMETIC:
        return digest(ours) != digest(theirs)
    try:
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near / 10, equal_nan=True)
    except (AssertionError, TypeError, ValueError):
        return type(ours) is not type(theirs) or isinstance(ours, Tensor) or digest(ours) != digest(theirs)
    return False


ANEW = "of the stream begins anew"  # what hvdtrain says of a resumed run over a data set without a state_dict
BEGINS_ANEW = "a stream without state_dict begins its epoch anew when a run is resumed, as a line says"
DEPENDS = "a sample's loss depends on the others of its batch"


def comparable(twin: Twin, ranks: int) -> tuple[Result, str]:
    """Return what plain PyTorch gives, and why several ranks cannot give the same; "": they can. If it is DEPENDS, the
    plain loop sums up the gradients of as many parts of each batch.
    """
    whole = plain(twin)
    with twin.context():
        twin.model().load_state_dict(whole.state)  # which torch cannot, of some dtypes
    differs = twin.differs if twin.differs_alone or ranks > 1 else ""
    if differs or twin.brief:
        return whole, differs
    if unlike(whole.losses, plain(twin, seed=8).losses, twin.near):
        return whole, "random numbers"
    try:
        in_parts = plain(twin, pieces=3)
    except Exception as error:  # such as a batch that has no rows
        return whole, f"a batch cannot be divided ({type(error).__name__})"
    if unlike(whole.losses, in_parts.losses, twin.near) or unlike(whole.state, in_parts.state, twin.near):
        return in_parts if ranks == 3 else plain(twin, pieces=ranks), DEPENDS
    return whole, ""


def judge(engine: Engine, twin: Twin, resume: bool = True) -> Verdict:
    """Train, and compare. A collective, unless a rank alone ends with an exception."""
    if twin.refusal:
        ours(engine, twin)
        return Verdict("WRONG", "is not refused")
    try:
        expected, why = comparable(twin, engine.size)
    except Exception as error:
        return Verdict("torch", short(error))
    if not resume or twin.brief or not (twin.keeps or why == "random numbers"):
        result = ours(engine, twin)
        wrong = compare(engine, twin, result, expected, why)
    else:
        directory = engine.broadcast_object(tempfile.mkdtemp(dir=MEMORY) if engine.rank == 0 else None, "directory")
        try:
            result = ours(engine, twin, directory)
            wrong = unsaid(engine, twin) or compare(engine, twin, result, expected, why)
            wrong = wrong or resumed(engine, twin, result, directory)
        finally:
            if engine.rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
    if wrong == ANEW:
        return Verdict("differs", BEGINS_ANEW)
    if wrong:
        return Verdict("WRONG", wrong)
    different = why if why in ("random numbers", twin.differs) or engine.size > 1 else ""
    return Verdict("differs", different) if different else Verdict("works")


def unsaid(engine: Engine, twin: Twin) -> str:
    """Return what the last run should have printed, "": nothing."""
    missing = twin.says not in said.getvalue() and engine.size > 1
    return f"nothing is said of {twin.says!r}" if engine.broadcast_object(missing, "said") else ""


def compare(engine: Engine, twin: Twin, result: Result, expected: Result, why: str) -> str:
    """Return what is wrong, "": nothing."""
    everyone = engine.all_gather_object([result.bits, result.losses, result.evaluation], "bits")
    if any(digest(each) != digest(everyone[0]) for each in everyone):
        return "ranks differ"
    ours_seen, plain_seen = ([len(s) for s in r.seen] if twin.draws else r.seen for r in (result, expected))
    if unlike(ours_seen, plain_seen, 1e-6):
        return f"samples: {ours_seen} and not {plain_seen}"[:200]
    torch.manual_seed(5)
    part[:] = [0, 1]
    with twin.context():
        net = twin.model()
        net.load_state_dict(result.state)
        twin.attach(net, twin.optimizer(net))
        loader = twin.loader(twin.data(), GLOBAL_BATCH // engine.size)
        alone = evaluate(twin, net, loader) if not twin.draws else result.evaluation
    if why != "random numbers" and unlike(result.evaluation, alone, max(twin.near, 1e-5)):
        return f"evaluation: {result.evaluation} and not {alone}"
    in_parts = why == DEPENDS and engine.size > 1
    if twin.draws or (why in ("random numbers", twin.differs) and why) or (why and engine.size > 1 and not in_parts):
        return ""
    if in_parts:  # each rank has buffers of its own, of which an evaluation takes the mean
        trained = [name for name, _ in net.named_parameters()]
        result, expected = (r._replace(state={name: r.state[name] for name in trained}) for r in (result, expected))
    for what in ("losses", "state") if in_parts else ("losses", "state", "evaluation", "found"):
        if unlike(getattr(result, what), getattr(expected, what), twin.near):
            return f"{what}: {first_difference(getattr(result, what), getattr(expected, what))}"
    return ""


def first_difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        name = next((name for name in ours if unlike(ours[name], theirs.get(name), 1e-4)), "")
        ours, theirs = (side.get(name) for side in (ours, theirs))
        return f"{name} {str(ours)[:60]} and not {str(theirs)[:60]}".replace("\n", " ")
    return f"{str(ours)[:80]} and not {str(theirs)[:80]}"


def resumed(engine: Engine, twin: Twin, whole: Result, directory: str) -> str:
    """Train again from a checkpoint of the run in `directory`. Return what is not as without, "": nothing."""
    if engine.rank == 0:
        saved = sorted(Path(directory, "checkpoints").glob("step-*"))
        steps = [int(path.stem.removeprefix("step-")) for path in saved]
        for path, step in zip(saved, steps, strict=True):
            if step >= len(whole.losses):
                path.unlink()
        Path(directory, "summary.json").unlink(missing_ok=True)
    else:
        steps = []
    if not any(step < len(whole.losses) for step in engine.broadcast_object(steps, "steps")):
        return "no checkpoint could be written, which a warning alone says"
    again = ours(engine, twin, directory)
    if engine.broadcast_object(ANEW in said.getvalue(), "anew"):
        return ANEW
    if len(again.losses) >= len(whole.losses):
        return "it began anew, and said " + " | ".join(said.getvalue().splitlines()[:6])
    return "" if again.bits == whole.bits else f"resumed: other bits, {first_difference(again.state, whole.state)}"


def outcome(engine: Engine, twin: Twin, resume: bool = True) -> Verdict:
    """The same as `judge`, with what was raised as a verdict."""
    try:
        return judge(engine, twin, resume)
    except UserError as error:
        return Verdict("refused", str(error))
    except Failure as error:
        return Verdict("failed", str(error))
    except Exception as error:
        return Verdict("TRACEBACK", short(error, 300))
