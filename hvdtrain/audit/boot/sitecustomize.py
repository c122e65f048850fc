"""Inside the audited program: a line of JSON for each step of an optimizer, and for each call in an evaluation.

Python imports this by itself at its start, because the audit put this folder at the front of PYTHONPATH. It waits until
the program has imported torch. It reads, and changes nothing: it draws no random number, and writes no tensor. It also ends
the process at the place that HVDTRAIN_AUDIT names.

A line has kind (step, evaluation, unreadable). That of a step: key (which optimizer), first (of it in this process), before
and after (digest of its weights; its state, as `state_of` has it), buffers, options (of each group), random (generators,
before the first forward pass), contents and indices (of the samples), loss, scale (of a GradScaler), file (the newest one
as large as the weights).
"""

import array
import contextlib
import ctypes
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import re
import resource
import signal
import struct
import sys
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

# log: a prefix of files; out: a folder; kill: a place, or null; whole: what is read of the optimizers at each step, beside
# their weights after it: weights (before it), state, true (both), false
ORDER = json.loads(os.environ.get("HVDTRAIN_AUDIT", "null"))
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
UNREAD = [-1, "", 0]
FACTORS: dict[Any, Any] = {}  # odd numbers, on each device
KERNEL = ctypes.CDLL(None)
NO_WEIGHTS = re.compile(r"(^|/)\.[^/]*$|\.(tmp|temp|part|partial|jsonl|csv|log)$")  # names of files
CHANGES = 0xFCE  # of inotify: all events but opening, reading, and closing what was read
encode = json.JSONEncoder(default=str).encode
# Runs before a call until its yield, and the rest after it; yields the name of a place.
Around = Generator[str, Any, None]
torch: Any = None  # this file may not import it before the program does


def digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=6).hexdigest()


def memory_of(tensor: Any) -> bytes:
    """Raises TypeError for one that has none of its own, as quantized ones have."""
    if not (start := tensor.data_ptr()) and tensor.nbytes:
        raise TypeError(f"{type(tensor).__name__} does not say where its values are")
    return ctypes.string_at(start, tensor.nbytes)


def local(tensor: Any) -> Any:
    """Return what this rank has of it: a DTensor has no memory of its own."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def raw(tensor: Any) -> bytes:
    """Return the bytes of a tensor; of a large one, wherever it is, sums of its 64-bit words in exact integers."""
    if tensor.layout is torch.strided and (size := tensor.nbytes) < 4096 and tensor.is_cpu and tensor.is_contiguous():
        if start := tensor.data_ptr():
            return ctypes.string_at(start, size)  # soon: most tensors of a small model
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.detach().coalesce()
        return raw(tensor.indices()) + raw(tensor.values())
    tensor = local(tensor if tensor.layout is torch.strided else tensor.to_dense()).contiguous()
    if tensor.nbytes < 4096 or tensor.nbytes % 8:
        return memory_of(tensor.cpu())
    # A part of a larger tensor, as after a broadcast of many in one, may begin between two words.
    tensor = tensor.clone() if tensor.data_ptr() % 8 else tensor
    words = tensor.view(-1).view(torch.int64)
    if words.device not in FACTORS:
        mixed = torch.arange(1 << 20, device=words.device) * 0x1E3779B97F4A7C15
        # Odd, so that a product modulo 2^64 loses no bit of a word.
        FACTORS[words.device] = (mixed ^ mixed >> 29) * 0x3F58476D1CE4E5B9 | 1
    multiplied = torch.dot if words.is_cpu else lambda part, factors: (part * factors).sum()
    factors = FACTORS[words.device]
    parts = words.split(len(factors)) if len(words) > len(factors) else [words]
    return repr([multiplied(part, factors[: len(part)]).item() for part in parts]).encode()


def tensors_in(value: object) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = [value[key] for key in sorted(value, key=str)]
    if not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in ([part] if isinstance(part, torch.Tensor) else tensors_in(part))]


def rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    named = (os.environ[name] for name in RANKS if name in os.environ)  # get() takes longer, if there is none
    return next((int(number) for number in named if number.isdigit()), 0)


def generators() -> dict[str, int]:
    """Return a checksum of each generator's state: those that every program has, not ones that it made itself."""
    # Python's and numpy's from their memory, 624 words and a position: to ask for them takes as long as a small step.
    states = {"python": ctypes.string_at(id(random._inst) + object.__basicsize__, 2500)}
    states["torch"] = memory_of(torch.get_rng_state())
    bits: Any = sys.modules["numpy.random"].mtrand._rand._bit_generator if "numpy.random" in sys.modules else None
    if type(bits).__name__ == "MT19937":  # unless the program has put in another kind
        states["numpy"] = ctypes.string_at(bits.ctypes.state_address, 2500)
    if torch.cuda.is_initialized():
        states["CUDA"] = memory_of(torch.cuda.get_rng_state())
    return {name: zlib.crc32(state) for name, state in states.items()}


def rows_of(tensor: Any, sums: list[int] | None = None) -> list[int]:
    """Return a checksum of each row. sums: those of another tensor's rows, which these continue."""
    data = local(tensor).cpu().contiguous()
    sums = sums or [0] * len(data)
    if not data.nbytes:
        return sums
    rows = struct.iter_unpack(f"{data.nbytes // len(data)}s", memory_of(data))
    return [zlib.crc32(row, start) for (row,), start in zip(rows, sums, strict=True)]


def samples(inputs: list[Any], batches: "Batches") -> list[tuple[int, Any]]:
    """Return content and index of each row."""
    columns = [tensor for tensor in inputs if len(tensor) == len(inputs[0]) and tensor.layout is torch.strided]
    # Inputs that have no row for each sample belong to the content of all.
    shared = zlib.crc32(b"".join(raw(tensor) for tensor in inputs if not any(tensor is column for column in columns)))
    contents = [shared] * len(inputs[0])
    for tensor in columns:
        contents = rows_of(tensor, contents)
    return list(zip(contents, batches.indices(max(columns, key=lambda tensor: tensor.nbytes)), strict=True))


def is_within_a_step() -> bool:
    """Return whether the hook that calls this is of a step that another step calls."""
    frame, steps = sys._getframe(), 0
    while frame and steps < 2:
        code = frame.f_code
        steps += code.co_name == "wrapper" and code.co_filename.endswith("torch/optim/optimizer.py")
        frame = frame.f_back  # type: ignore[assignment] # None at the outermost
    # The step of one of Horovod's optimizers calls that of the class which it is made of.
    return steps == 2


def parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def weights_of(optimizer: Any) -> str:
    return digest(*map(raw, parameters_of(optimizer)))


def state_of(optimizer: Any) -> list[Any]:
    """Return the number of parameters that have a state, its digest, and the greatest number of steps that it counts."""
    states = [state for parameter in parameters_of(optimizer) if (state := optimizer.state.get(parameter))]
    values = [state[name] for state in states for name in sorted(state, key=str)]
    numbers = [value for value in values if isinstance(value, (int, float))]
    steps = [float(state["step"]) for state in states if "step" in state]
    return [len(states), digest(*map(raw, tensors_in(values)), repr(numbers).encode()), max(steps, default=0)]


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    kept = (int, float, tuple, torch.Tensor)
    return [
        {name: float(value) if isinstance(value, torch.Tensor) else value for name, value in group.items()
         if name != "params" and isinstance(value, kept)} for group in optimizer.param_groups
    ]  # fmt: skip


def persistent_buffers(modules: Any) -> Iterator[Any]:
    for module in modules:
        if module is not None:
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield buffer
            yield from persistent_buffers(module._modules.values())


class Files:
    """What is written under {out}. Listed again once the kernel tells of a change (inotify); if it can't, at each step."""

    def __init__(self) -> None:
        self.pid = self.changes = -1
        self.told = False
        self.found: list[list[Any]] = []  # of each file: time of change, path, size

    def newest(self, optimizer: Any) -> list[Any]:
        """Return the newest file that may have the weights of a rank in it."""
        if self.pid != os.getpid():  # at first, and after a fork: both would read what is told to one
            self.pid, self.told = os.getpid(), False
            self.changes = getattr(KERNEL, "inotify_init1", lambda _: -1)(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(BlockingIOError):  # nothing has changed
            self.told = self.told and not os.read(self.changes, 1 << 16)
        if not self.told:
            self.look()
        least = max(1, sum(p.nbytes for p in parameters_of(optimizer)) // 2 // int(os.environ.get("WORLD_SIZE", 1)))
        # A file that is not complete yet has another name, as a rule; and of a small model, a record is as large.
        return max((file for file in self.found if file[2] >= least and not NO_WEIGHTS.search(file[1])), default=[])

    def look(self) -> None:
        folders = [os.fsencode(folder) for folder, *_ in os.walk(ORDER["out"]) if self.changes >= 0]
        watches = [KERNEL.inotify_add_watch(self.changes, folder, CHANGES) for folder in folders]
        self.told, self.found = min(watches, default=-1) >= 0, []
        for path in [Path(folder, name) for folder, _, names in os.walk(ORDER["out"]) for name in names]:
            with contextlib.suppress(OSError):  # another process has removed it
                self.told = self.told and not path.is_symlink()  # what it leads to may change elsewhere
                status = path.stat()
                self.found.append([status.st_mtime_ns, str(path)[len(ORDER["out"]) + 1 :], status.st_size])


class Batches:
    """The batches that DataLoaders have delivered, with the index of each sample: tells augmented samples apart."""

    def __init__(self) -> None:
        # Of each iterator, the indices that it has drawn, oldest first.
        self.drawn: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
        self.delivered: deque[tuple[list[Any], list[list[int]]]] = deque(maxlen=64)

    def draw(self, indices: object, iterator: object) -> None:
        self.drawn.setdefault(iterator, deque()).append(indices)

    def deliver(self, batch: object, iterator: object) -> None:
        waiting = self.drawn.get(iterator)
        indices = waiting.popleft() if waiting else None
        if isinstance(indices, (list, tuple)):
            same = [tensor for tensor in tensors_in(batch) if tensor.dim() and len(tensor) == len(indices)]
            named = [index if isinstance(index, int) else str(index) for index in indices]
            self.delivered.append((named, [rows_of(tensor) for tensor in same]))

    def indices(self, tensor: Any) -> list[Any]:
        """Return the index of each row, or None."""
        rows = rows_of(tensor) if self.delivered else []
        for indices, columns in [*self.delivered][::-1]:  # most are used at once
            for column in columns:
                for start in range(len(column) - len(rows) + 1):  # more than 0 where a program splits its batch
                    if column[start] == rows[0] and column[start : start + len(rows)] == rows:
                        return indices[start : start + len(rows)]
        return [None] * len(tensor)


class Recorder:
    def __init__(self) -> None:
        self.pid = 0  # of the process that has opened the log; a forked rank opens its own
        self.log = -1
        self.steps = self.calls = 0  # of optimizers; of modules in evaluation since the last of these
        self.within = False  # a module that calls others, or a backward pass, which calls some again: no new samples
        self.stepping: Around | None = None
        # What names each optimizer in every run, and its last `after`; how many have the same class and shapes.
        self.known: weakref.WeakKeyDictionary[Any, tuple[str, list[Any]]] = weakref.WeakKeyDictionary()
        self.alike: Counter[str] = Counter()
        self.batches, self.files = Batches(), Files()
        # Of the step to come:
        self.rows: list[tuple[int, Any]] = []
        self.losses: list[Any] = []
        self.random: dict[str, int] | None = None
        # Modules that were called in training, by id, for their buffers.
        self.modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.scaler: Any = None
        self.limit = 0  # of a file, in bytes
        self.changed = 0  # how often a file under {out} was opened for writing or renamed since the last step
        self.last_change = 0  # the number of the change before which the process is to end; 0: of none
        if ORDER["whole"] or (ORDER["kill"] or {}).get("place") == "between":
            sys.addaudithook(self.changes)

    def write(self, kind: str, **line: Any) -> None:
        if self.pid != os.getpid():
            self.pid, self.steps = os.getpid(), 0
            path = f"{ORDER['log']}.{rank()}.{self.pid}"
            self.log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        if self.limit:
            limit_file_size(None)
        text, written = (encode({"kind": kind, **line}) + "\n").encode(), 0
        with contextlib.suppress(OSError):
            written = os.write(self.log, text)
        if written < len(text):  # a full disk: an empty file still has room
            Path(f"{ORDER['log']}.lost").touch()
        if self.limit:
            limit_file_size(self.limit)

    def advance(self, around: Around, result: Any = None) -> None:
        """Let `around` read, and end the process if it is to end here. What can't be read may not end the program."""
        place = ""
        try:
            place = around.send(result)
        except StopIteration:
            return
        except Exception as error:
            with contextlib.suppress(OSError):
                where = getattr(around, "__name__", "")
                self.write("unreadable", error=f"{where}: {type(error).__name__}: {error}"[:300])
        kill = ORDER["kill"]
        if place and kill and kill["number"] == self.steps and kill["rank"] in (rank(), None):
            if place == kill["place"] and kill.get("call", self.calls) == self.calls:
                end_process(kill["how"])
            elif (place, kill["place"]) == ("step", "file"):
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
                resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
                self.limit = kill["bytes"]
                limit_file_size(self.limit)
            elif (place, kill["place"]) == ("step", "between"):
                self.last_change = kill["change"]

    def changes(self, event: str, arguments: Any) -> None:
        """Note a change of a file under {out}, by Python's audit events, and end the process before the one that is asked
        for. torch.save opens its file without such an event."""
        if event not in ("open", "os.rename"):
            return
        path, flags = (arguments[0], arguments[2]) if event == "open" else (arguments[1], os.O_WRONLY)
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        if writes and isinstance(path, str | os.PathLike) and str(os.fspath(path)).startswith(ORDER["out"] + os.sep):
            self.changed += 1
            if self.changed == self.last_change:
                end_process("one")

    def reads(self) -> bool:
        """Not in other threads, and not where a CUDA graph records the call."""
        captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return threading.get_ident() == threading.main_thread().ident and not captured

    def module_call(self, module: Any, *arguments: Any, **named: Any) -> Around:
        # A wrapper's own flag may say evaluation while what it wraps is trained: Lightning's around DistributedDataParallel.
        training = torch.is_grad_enabled() and (module.training or any(inner.training for inner in module.modules()))
        if training:
            self.modules[id(module)] = module
            if self.random is None:
                self.random = generators()
                self.losses.clear()  # of no sample: backward passes for DistributedDataParallel's buckets, after a resume
            inputs = [tensor for tensor in tensors_in([arguments, named]) if tensor.dim()]
            if inputs and not any(tensor.grad_fn is not None for tensor in inputs):
                self.rows += samples(inputs, self.batches)
        result = yield "" if training else "evaluation"
        if not training:
            self.calls += 1
            call = [digest(*map(raw, tensors_in(some))) for some in ([arguments, named], result)]
            self.write("evaluation", call=call)

    def backward(self, tensors: Any, *_: Any, **__: Any) -> Around:
        self.losses += [loss.detach() for loss in tensors_in([tensors]) if loss.numel() == 1]
        yield ""

    def scaler_step(self, scaler: Any, *_: Any, **__: Any) -> Around:
        self.scaler = scaler
        yield ""

    def step(self, optimizer: Any) -> Around:
        first = optimizer not in self.known
        key, before = ("", [None, state_of(optimizer)]) if first else self.known[optimizer]
        if first or ORDER["whole"] in (True, "weights"):  # anew: programs clip weights, too
            before = [weights_of(optimizer), before[1]]
        yield "within"
        if not self.losses and not any(float(group.get("lr", 1)) for group in optimizer.param_groups):
            return  # no step of the training: loaders of states make one with a learning rate of 0
        if first:
            shapes = repr([tuple(parameter.shape) for parameter in parameters_of(optimizer)])
            alike = f"{type(optimizer).__name__} {digest(shapes.encode())}"
            key, self.alike[alike] = f"{alike} {self.alike[alike]}", self.alike[alike] + 1
        after = [weights_of(optimizer), state_of(optimizer) if ORDER["whole"] in (True, "state") else UNREAD]
        self.known[optimizer] = key, after
        scale = [self.scaler.get_scale(), int(self.scaler._get_growth_tracker())] if self.scaler is not None else []
        self.write(
            "step", time=time.time(), key=key, first=first, before=before, after=after, options=options_of(optimizer),
            buffers=digest(*map(raw, persistent_buffers(self.modules.values()))), random=self.random or generators(),
            contents=array.array("I", [row[0] for row in self.rows]).tobytes().hex(), indices=[row[1] for row in self.rows],
            loss=[repr(float(loss)) for loss in self.losses], scale=scale,
            file=self.files.newest(optimizer) if rank() == 0 else [], changes=self.changed,
        )  # fmt: skip
        self.rows, self.losses, self.random, self.changed = [], [], None, 0
        self.steps, self.calls = self.steps + 1, 0
        yield "step"

    def before_step(self, optimizer: Any, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self.reads() and not is_within_a_step():
            self.stepping = self.step(optimizer)
            self.advance(self.stepping)

    def after_step(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self.reads() and not is_within_a_step() and self.stepping:
            self.advance(self.stepping)

    def next_index(self, iterator: Any) -> Around:
        self.batches.draw((yield ""), iterator)

    def next_batch(self, iterator: Any) -> Around:
        self.batches.deliver((yield ""), iterator)

    def put(self, owner: Any, name: str, around: Callable[..., Around], outermost: bool = False) -> None:
        """Run `around` around each call of owner.name. outermost: not within a module's call or a backward pass."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or (outermost and (self.within or not self.reads())):
                return original(*arguments, **named)
            reading = around(*arguments, **named)
            try:
                self.advance(reading)
                self.within = self.within or outermost
                result = original(*arguments, **named)
                self.advance(reading, result)
                return result
            finally:
                self.within = self.within and not outermost
                reading.close()

        setattr(owner, name, call)


def limit_file_size(count: int | None) -> None:
    """The kernel ends this process in the middle of a write that passes so many bytes of a file, whoever writes."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if count is None else count, hard))


def end_process(how: str) -> None:
    """End by itself; or the audit ends all ranks, or sends SIGTERM to the launcher."""
    if how == "one":
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(os.open(f"{ORDER['log']}.asked", os.O_WRONLY | os.O_CREAT))
    end = time.monotonic() + (3600 if how == "all" else 2)
    while time.monotonic() < end and not os.path.exists(f"{ORDER['log']}.sent"):  # noqa: PTH110
        time.sleep(0.002)


def attach(imported: Any) -> None:
    """Put a recorder between the program and torch."""
    global torch
    torch = imported
    recorder = Recorder()
    recorder.put(torch.nn.Module, "__call__", recorder.module_call, outermost=True)
    recorder.put(torch.autograd, "backward", recorder.backward, outermost=True)
    recorder.put(torch.amp.GradScaler, "step", recorder.scaler_step)
    recorder.put(torch.utils.data.dataloader._BaseDataLoaderIter, "_next_index", recorder.next_index)
    recorder.put(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", recorder.next_batch)
    optimizers = sys.modules["torch.optim.optimizer"]  # torch.optim deletes this name
    optimizers.register_optimizer_step_pre_hook(recorder.before_step)
    optimizers.register_optimizer_step_post_hook(recorder.after_step)


class AfterImport(importlib.abc.MetaPathFinder):
    """Attaches the recorder once the import of torch is complete. A child that is forked before that has its own copy."""

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        sys.meta_path.insert(0, self)  # until it is imported: a program may ask first whether it is there
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    attach(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if ORDER and "torch" in sys.modules:
    attach(sys.modules["torch"])
elif ORDER:
    sys.meta_path.insert(0, AfterImport())
# The sitecustomize that the environment has of its own.
others = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]
if (own := importlib.machinery.PathFinder.find_spec("sitecustomize", others)) is not None and own.loader is not None:
    own.loader.exec_module(importlib.util.module_from_spec(own))
