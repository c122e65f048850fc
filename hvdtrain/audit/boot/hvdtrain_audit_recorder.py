"""Inside the audited program: one line of JSON for each step of an optimizer and each call of an evaluation.

It reads, and changes nothing: no random number is drawn, and no tensor of the program is written. What it can't read is left
out of its line. It also ends the process at the place that HVDTRAIN_AUDIT names.

A line of a step has: key (which optimizer), weights, buffers and state after the step (digests), before (weights and state,
in the first line of an optimizer), lr, options, random (generators, before the first forward pass of the step), rows
(content and index of each sample), loss, scale (of a GradScaler), file (the newest one as large as the weights).
"""

import contextlib
import ctypes
import hashlib
import json
import os
import random
import resource
import signal
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

ORDER = json.loads(
    os.environ["HVDTRAIN_AUDIT"]
)  # log: a prefix of files; out: a folder; whole: bool; kill: a place, or null
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
FACTORS: dict[Any, Any] = {}  # odd numbers, on each device
torch: Any = None  # set by `attach`: the recorder may not import it before the program does


def digest(*parts: bytes) -> str:
    hasher = hashlib.blake2b(digest_size=6)
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def raw(tensor: Any) -> bytes:
    """Return the bytes of a tensor; of a large one, wherever it is, sums of its 64-bit words in exact integers."""
    count = tensor.numel() * tensor.element_size()
    if count < 4096 and tensor.is_cpu and tensor.layout == torch.strided and tensor.is_contiguous():
        return ctypes.string_at(tensor.data_ptr(), count)  # soon: most tensors of a small model
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # a DTensor: the part of this rank
        tensor = tensor.to_local()
    if tensor.layout != torch.strided:
        return raw(tensor.coalesce().values()) if tensor.layout == torch.sparse_coo else raw(tensor.to_dense())
    tensor = tensor.contiguous()
    count = tensor.numel() * tensor.element_size()
    if count >= 4096 and count % 8 == 0:
        # A part of a larger tensor, as after a broadcast of many in one, may begin between two words.
        tensor = tensor.clone() if tensor.data_ptr() % 8 else tensor
        words = tensor.reshape(-1).view(torch.uint8).view(torch.int64)
        if words.device not in FACTORS:
            FACTORS[words.device] = torch.arange(1 << 20, device=words.device, dtype=torch.int64) * 2654435762 + 1
        sums = [(chunk * FACTORS[words.device][: len(chunk)]).sum() for chunk in words.split(1 << 20)]
        return repr(torch.stack(sums).tolist()).encode()
    return ctypes.string_at(tensor.cpu().data_ptr(), count) if count else b""


def tensors_in(value: object) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from tensors_in(value[key])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return next((int(os.environ[name]) for name in RANKS if os.environ.get(name, "").isdigit()), 0)


def generators() -> dict[str, str]:
    """Return a digest of each generator's state: those that every program has, not ones that it made itself."""
    python = random.getstate()
    states = {
        "torch": digest(raw(torch.get_rng_state())),
        "python": digest(repr((hash(python[1]), python[2])).encode()),
    }
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        # Its memory: get_state() takes longer than the step of a small model.
        states["numpy"] = digest(ctypes.string_at(numpy.mtrand._rand._bit_generator.ctypes.state_address, 2500))
    if torch.cuda.is_initialized():
        states["CUDA"] = digest(raw(torch.cuda.get_rng_state()))
    return states


def out_of_reach() -> bool:
    """Whether a compiler traces this call, or a CUDA graph records it: then nothing may be read."""
    return bool(torch.compiler.is_compiling()) or (
        torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    )


class Batches:
    """The batches that DataLoaders have delivered, with the index of each sample: tells augmented samples apart."""

    def __init__(self) -> None:
        # Of each iterator, the indices that it has drawn, oldest first.
        self.drawn: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
        self.delivered: deque[tuple[list[Any], list[list[bytes]]]] = deque(maxlen=64)

    def draw(self, iterator: object, indices: object) -> None:
        self.drawn.setdefault(iterator, deque()).append(indices)

    def deliver(self, iterator: object, batch: object) -> None:
        waiting = self.drawn.get(iterator)
        indices = waiting.popleft() if waiting else None
        if isinstance(indices, (list, tuple)):
            same = [tensor for tensor in tensors_in(batch) if tensor.dim() and len(tensor) == len(indices)]
            self.delivered.append((list(indices), [rows_of(tensor) for tensor in same]))

    def indices(self, rows: list[bytes]) -> list[Any]:
        for indices, columns in self.delivered:
            for column in columns:
                for start in range(len(column) - len(rows) + 1):  # more than 0 where a program splits its batch
                    if column[start] == rows[0] and column[start : start + len(rows)] == rows:
                        return indices[start : start + len(rows)]
        return [None] * len(rows)


def rows_of(tensor: Any) -> list[bytes]:
    data = tensor.detach().cpu().contiguous()
    width = data.numel() * data.element_size() // max(1, len(data))
    whole = ctypes.string_at(data.data_ptr(), width * len(data)) if width else b""
    return [hashlib.blake2b(whole[i * width : (i + 1) * width], digest_size=6).digest() for i in range(len(data))]


class Recorder:
    def __init__(self) -> None:
        self.pid = 0  # of the process that has opened the log; a forked rank opens its own
        self.log = -1
        self.steps = 0
        self.depth = 0  # of modules that call each other, or a backward pass, which calls some again
        # What names each optimizer in every run; how many have the same class and shapes.
        self.keys: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.alike: Counter[str] = Counter()
        self.batches = Batches()
        self.rows: list[list[Any]] = []
        self.losses: list[Any] = []
        self.random: dict[str, str] | None = None
        # Modules that were called in training, by id, for their buffers.
        self.modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.scaler: Any = None
        self.phase, self.calls, self.evaluating = 0, 0, False
        self.newest: list[Any] = []
        self.limited = False

    def write(self, line: dict[str, Any]) -> None:
        if self.pid != os.getpid():
            self.pid, self.steps, self.phase = os.getpid(), 0, 0
            self.log = os.open(
                f"{ORDER['log']}.{rank()}.{self.pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            )
        if self.limited:
            limit_file_size(None)
        os.write(self.log, (json.dumps(line) + "\n").encode())
        if self.limited:
            limit_file_size(ORDER["kill"]["bytes"])

    def died_here(self, place: str, number: int) -> bool:
        kill = ORDER["kill"]
        here = bool(kill) and (kill["place"], kill["number"]) == (place, number) and kill["rank"] in (rank(), None)
        return here and (place != "evaluation" or kill["call"] == self.calls)

    def enter(self, module: Any, arguments: list[object]) -> None:
        # A wrapper's own flag may say evaluation while what it wraps is trained: Lightning's around DistributedDataParallel.
        if torch.is_grad_enabled() and any(inner.training for inner in module.modules()):
            self.evaluating = False
            self.modules[id(module)] = module
            if self.random is None:
                self.random = generators()
                self.losses.clear()  # of no sample: backward passes for DistributedDataParallel's buckets, after a resume
            inputs = [tensor for tensor in tensors_in(arguments) if tensor.dim()]
            if inputs and not any(tensor.grad_fn is not None for tensor in inputs):
                self.rows += samples(inputs, self.batches)
            return
        if not self.evaluating:
            self.evaluating, self.calls = True, 0
            self.phase += 1

    def leave(self, module: Any, arguments: list[object], result: object) -> None:
        if self.evaluating:
            line = {"kind": "evaluation", "phase": self.phase, "after": self.steps, "call": self.calls}
            line["in"] = digest(*map(raw, tensors_in(arguments)))
            line["out"] = digest(*map(raw, tensors_in(result)))
            if not self.calls:
                line["weights"] = digest(*map(raw, module.parameters()))
            self.write(line)
            self.calls += 1

    def before_step(self, optimizer: Any) -> dict[str, Any] | None:
        if optimizer in self.keys:
            return None
        shapes = repr([tuple(parameter.shape) for parameter in parameters_of(optimizer)])
        named = f"{type(optimizer).__name__} {digest(shapes.encode())}"
        self.keys[optimizer] = f"{named} {self.alike[named]}"
        self.alike[named] += 1
        return {"weights": digest(*map(raw, parameters_of(optimizer))), "state": state_of(optimizer)}

    def after_step(self, optimizer: Any, before: dict[str, Any] | None) -> bool:
        """Return whether this was a step of the training: loaders of states make one with a learning rate of 0."""
        if not self.losses and not any(float(group.get("lr", 1)) for group in optimizer.param_groups):
            if before is not None:  # its next step is the first
                self.alike[self.keys.pop(optimizer).rpartition(" ")[0]] -= 1
            return False
        self.evaluating = False
        parameters = parameters_of(optimizer)
        line: dict[str, Any] = {"kind": "step", "key": self.keys[optimizer], "time": time.time()}
        line["weights"] = digest(*map(raw, parameters))
        line["buffers"] = digest(*map(raw, persistent_buffers(self.modules.values())))
        if ORDER["whole"]:
            line["state"] = state_of(optimizer)
        if before is not None:
            line["before"] = before
        line["lr"] = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        options = [[item for item in group.items() if item[0] != "lr" and isinstance(item[1], (int, float, tuple))]
                   for group in optimizer.param_groups]  # fmt: skip
        line["options"] = digest(repr(list(map(sorted, options))).encode())
        line["random"] = self.random or generators()
        line["rows"] = self.rows
        line["loss"] = [float(loss).hex() for loss in self.losses]
        if self.scaler is not None:
            line["scale"] = [self.scaler.get_scale(), int(self.scaler._get_growth_tracker())]
        if rank() == 0:
            smallest = (
                sum(p.numel() * p.element_size() for p in parameters) // 2 // int(os.environ.get("WORLD_SIZE", 1))
            )
            self.newest = newest_file(ORDER["out"], max(1, smallest))
            line["file"] = self.newest
        self.rows, self.losses, self.random = [], [], None
        self.write(line)
        return True


def samples(inputs: list[Any], batches: Batches) -> list[list[Any]]:
    """Return content and index of each row. Inputs that have no row for each sample belong to the content of all."""
    count = len(inputs[0])
    columns = {id(tensor): rows_of(tensor) for tensor in inputs if len(tensor) == count}
    others = [raw(tensor) for tensor in inputs if len(tensor) != count]
    shared = digest(*others).encode() if others else b""
    widest = max((tensor for tensor in inputs if len(tensor) == count), key=lambda tensor: tensor[:1].nbytes)
    indices = batches.indices(columns[id(widest)]) if count else []
    return [
        [
            digest(*row, shared) if len(row) > 1 or shared else row[0].hex(),
            index if index is None or isinstance(index, int) else str(index),
        ]
        for *row, index in zip(*columns.values(), indices, strict=True)
    ]


def is_within_a_step() -> bool:
    """Return whether the hook that calls this is of a step that another step calls, as those of Horovod's optimizers do."""
    frame, steps = sys._getframe(), 0
    while frame and steps < 2:
        code = frame.f_code
        steps += code.co_name == "wrapper" and code.co_filename.endswith("torch/optim/optimizer.py")
        frame = frame.f_back  # type: ignore[assignment] # None at the outermost
    return steps == 2


def parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(optimizer: Any) -> list[Any]:
    """Return the number of parameters that have a state, its digest, and the greatest number of steps that it counts."""
    states = [state for parameter in parameters_of(optimizer) if (state := optimizer.state.get(parameter))]
    values = [state[name] for state in states for name in sorted(state, key=str)]
    numbers = [value for value in values if isinstance(value, (int, float))]
    steps = [float(state["step"]) for state in states if "step" in state]
    return [len(states), digest(*map(raw, tensors_in(values)), repr(numbers).encode()), max(steps, default=0)]


def persistent_buffers(modules: Any) -> Iterator[Any]:
    for outer in modules:
        for module in outer.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield buffer


def newest_file(folder: str, smallest: int) -> list[Any]:
    """Return path, time of change and size of the newest file that is large enough to have weights in it."""
    newest: list[Any] = []
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                        continue
                    status = entry.stat()
                    if status.st_size >= smallest and (not newest or status.st_mtime_ns > newest[1]):
                        newest = [os.path.relpath(entry.path, folder), status.st_mtime_ns, status.st_size]
        except OSError:  # another process has removed it, or it is not there yet
            continue
    return newest


def limit_file_size(count: int | None) -> None:
    """The kernel ends this process in the middle of a write that passes so many bytes of a file, whoever writes."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if count is None else count, hard))


def end_process() -> None:
    """End as ordered: by itself; or the audit ends all ranks, or sends SIGTERM to the launcher."""
    how = ORDER["kill"]["how"]
    if how == "one":
        os.kill(os.getpid(), signal.SIGKILL)
    asked = f"{ORDER['log']}.asked"
    os.close(os.open(asked, os.O_WRONLY | os.O_CREAT))
    end = time.monotonic() + (3600 if how == "all" else 2)
    while time.monotonic() < end and not os.path.exists(f"{ORDER['log']}.sent"):  # noqa: PTH110
        time.sleep(0.002)


def attach(imported: Any) -> None:
    """Put the recorder between the program and torch."""
    global torch
    torch = imported
    recorder = Recorder()

    def readable() -> bool:
        return threading.current_thread() is threading.main_thread() and not out_of_reach()

    def guarded(function: Any, *arguments: Any) -> Any:
        """What the recorder can't read may not end the program; the audit is told once."""
        try:
            return function(*arguments)
        except Exception as error:
            line = {"kind": "unreadable", "error": f"{function.__name__}: {type(error).__name__}: {error}"[:300]}
            with contextlib.suppress(OSError):
                recorder.write(line)
            return None

    module_call = torch.nn.Module.__call__

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or recorder.depth or not readable():
            return module_call(self, *arguments, **named)
        recorder.depth = 1
        try:
            guarded(recorder.enter, self, [arguments, named])
            if recorder.evaluating and recorder.died_here("evaluation", recorder.phase):
                end_process()
            result = module_call(self, *arguments, **named)
            guarded(recorder.leave, self, [arguments, named], result)
            return result
        finally:
            recorder.depth = 0

    backward = torch.autograd.backward

    def backward_pass(tensors: Any, *arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or recorder.depth or not readable():
            return backward(tensors, *arguments, **named)
        recorder.losses += [loss.detach() for loss in tensors_in([tensors]) if loss.numel() == 1]
        recorder.depth = 1  # activation checkpointing calls modules again: these are no new samples
        try:
            return backward(tensors, *arguments, **named)
        finally:
            recorder.depth = 0

    started: dict[int, Any] = {}

    def before_step(optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling() or not readable() or is_within_a_step():
            return
        started[0] = guarded(recorder.before_step, optimizer)
        if recorder.died_here("within", recorder.steps + 1):
            end_process()

    def after_step(optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling() or not readable() or is_within_a_step():
            return
        if guarded(recorder.after_step, optimizer, started.pop(0, None)) is False:
            return
        recorder.steps += 1
        if recorder.died_here("step", recorder.steps):
            end_process()
        if recorder.died_here("file", recorder.steps) and not recorder.limited:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            recorder.limited = True
            limit_file_size(ORDER["kill"]["bytes"])

    scaler_step = torch.amp.GradScaler.step

    def scaled_step(self: Any, *arguments: Any, **named: Any) -> Any:
        recorder.scaler = self
        return scaler_step(self, *arguments, **named)

    iterator_class = torch.utils.data.dataloader._BaseDataLoaderIter
    next_index, next_batch = iterator_class._next_index, iterator_class.__next__

    def draw(self: Any) -> Any:
        indices = next_index(self)
        recorder.batches.draw(self, indices)
        return indices

    def deliver(self: Any) -> Any:
        batch = next_batch(self)
        guarded(recorder.batches.deliver, self, batch)
        return batch

    torch.nn.Module.__call__ = call
    torch.autograd.backward = backward_pass
    torch.amp.GradScaler.step = scaled_step
    iterator_class._next_index, iterator_class.__next__ = draw, deliver
    optimizers = sys.modules["torch.optim.optimizer"]  # torch.optim deletes this name
    optimizers.register_optimizer_step_pre_hook(before_step)
    optimizers.register_optimizer_step_post_hook(after_step)
