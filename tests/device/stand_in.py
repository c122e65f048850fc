"""A stand-in accelerator: device "standin", whose tensors hold a CPU tensor and compute on the CPU.

It notes what makes the host wait, each time with the line of the program:

    read       the value of a tensor on the device is needed now: .item(), .tolist(), .cpu(), a mask as an index
    pageable   a copy to the device from memory that is not pinned: the driver copies it first
    pinned     a copy to the device from pinned memory with non_blocking=True: the host goes on
    out        a copy to pinned memory with non_blocking=True: the host goes on, and must wait before it looks at it
    wait       synchronize() on work of this step
    late       synchronize() on work of an earlier step: by then, the device has more to do

An operation on tensors of both devices is an error, as on CUDA, and so is one that uses what another stream has written
without having waited for it, or memory of another stream that was not given to `record_stream`.

What it cannot show: how long anything takes; that streams really run side by side, and what a race does; NCCL, DDP and
Horovod with GPUs; the numerics, precisions and kernels of a GPU; its memory. Needs torch 2.9 or newer.
"""

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.device import streams
from tests.device.streams import Event, Stream, state

aten = torch.ops.aten
NAME = "standin"
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}
MIXES = {"index", "index_put", "index_put_", "_index_put_impl_"}  # take indices on the CPU, as on CUDA


class Module:
    """What torch asks a backend for, as `torch.cuda`."""

    Stream, Event, stream = Stream, Event, staticmethod(streams.using)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_stream(self, device: object = None) -> Stream:
        return state.current

    def default_stream(self, device: object = None) -> Stream:
        return state.default

    def synchronize(self, device: object = None) -> None:
        state.current.synchronize()


class Ledger:
    """What was noted: how often each (step, kind, line)."""

    def __init__(self) -> None:
        self.noted: Counter[tuple[int, str, str]] = Counter()

    def note(self, kind: str) -> None:
        self.noted[state.step, kind, line_of_program()] += 1


ledger = Ledger()


def line_of_program() -> str:
    """Return the innermost line of the project that led to this call, as "loop/step.py:57 text"."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if (
            path.startswith(str(ROOT))
            and "site-packages" not in path
            and not path.startswith(str(Path(__file__).parent))
        ):
            return f"{path.removeprefix(f'{ROOT}/').removeprefix('hvdtrain/')}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


# ---- memory: by the address of its storage


class Memory:
    """Who has written the storage at an address, who may use it, and what is pinned."""

    def __init__(self) -> None:
        self.written: dict[int, tuple[Stream, int]] = {}  # the stream, and the number of its operation
        self.home: dict[int, Stream] = {}  # the stream on which it was allocated
        self.shared: dict[int, set[Stream]] = {}  # streams given to `record_stream`
        self.borrowed: dict[int, tuple[Stream, str]] = {}  # used by another stream than home, and the line
        self.pinned: dict[int, Tensor] = {}  # kept, so that no address is used again
        self.arriving: dict[int, tuple[Stream, int]] = {}  # pinned memory into which the device copies

    def use(self, tensor: "OnDevice") -> None:
        """Check that the current stream may read `tensor` now."""
        stream, at = state.current, address(tensor.held)
        writer, number = self.written.get(at, (stream, 0))
        if not stream.after(writer, number):
            raise RuntimeError(f"{stream.name} uses a tensor before {writer.name} has written it: {line_of_program()}")
        if self.home.get(at, stream) is not stream:
            self.borrowed[at] = stream, line_of_program()

    def write(self, tensor: "OnDevice", *, new: bool) -> None:
        stream, at = state.current, address(tensor.held)
        self.written[at] = stream, stream.done
        if new:
            self.home[at] = stream
            self.shared.pop(at, None)
            self.borrowed.pop(at, None)

    def require_arrived(self, tensor: Tensor) -> None:
        """Check that the host may look at `tensor`, which is on the CPU."""
        at = address(tensor)
        if at in self.arriving and not state.host.after(*self.arriving[at]):
            raise RuntimeError(f"the host looks at memory before the device has copied into it: {line_of_program()}")

    def unrecorded(self) -> list[str]:
        """Return the lines that used memory of another stream without `record_stream`."""
        return sorted({line for at, (stream, line) in self.borrowed.items() if stream not in self.shared.get(at, ())})


memory = Memory()
autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_pinned(tensor: Tensor) -> bool:
    return not isinstance(tensor, OnDevice) and address(tensor) in memory.pinned


def pinned(tensor: Tensor, device: object = None) -> Tensor:
    if is_pinned(tensor):
        return tensor
    copy = plain_clone(tensor)
    memory.pinned[address(copy)] = copy
    return copy


def plain_clone(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.empty_like(tensor).copy_(tensor)


# ---- tensors


class OnDevice(torch.Tensor):
    """A tensor of the device. It holds a tensor of the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, layout=held.layout, requires_grad=False, device=torch.device(NAME, 0),
        )  # fmt: skip
        made.held = held.detach() if held.requires_grad else held
        return made

    def __init__(self, held: Tensor): ...

    def __repr__(self, *arguments: Any, **named: Any) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        ledger.note("read")
        return self.held.tolist()

    def record_stream(self, stream: Any) -> None:
        memory.shared.setdefault(address(self.held), set()).add(stream)


def on_device(device: object) -> bool:
    return device is not None and torch.device(device).type == NAME  # type: ignore[arg-type]


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation that has the device in it."""
    name = func.overloadpacket.__name__
    given = [tensor for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)]
    ours = [tensor for tensor in given if isinstance(tensor, OnDevice)]
    others = [tensor for tensor in given if not isinstance(tensor, OnDevice)]
    target = kwargs.get("device")
    stream = state.current
    for tensor in ours:
        memory.use(tensor)
    stream.done += 1

    if name == "_to_copy" and ours and target is not None and not on_device(target):
        return copied_out(func, ours[0], kwargs)
    if name == "copy_" and others and ours:
        return copied_between(*args)
    if name == "_to_copy" and others and on_device(target):
        note_copy_in(others[0], bool(kwargs.get("non_blocking")))
    elif ours and name not in MIXES and any(tensor.dim() for tensor in others):
        raise RuntimeError(f"aten.{name} on tensors of {NAME} and of the CPU: {line_of_program()}")
    if name in READS or (name in MIXES and reads_mask(args[1])):
        ledger.note("read")

    wrappers = {id(tensor.held): tensor for tensor in ours}
    addresses = {address(tensor.held) for tensor in ours}

    def unwrap(item: Any) -> Any:
        return item.held if isinstance(item, OnDevice) else CPU if isinstance(item, torch.device) else item

    plain_args, plain_kwargs = tree_map(unwrap, (args, kwargs))
    if on_device(target):
        plain_kwargs |= {"device": CPU}
    plain_kwargs.pop("pin_memory", None)
    with torch.no_grad():
        result = func(*plain_args, **plain_kwargs)
    if func._schema.is_mutable:
        for tensor in written_by(func, args, kwargs):
            memory.write(tensor, new=False)

    def wrap(item: Any) -> Any:
        if not isinstance(item, Tensor) or isinstance(item, OnDevice):
            return item
        if id(item) in wrappers:
            return wrappers[id(item)]
        made = OnDevice(item)
        if address(item) not in addresses:
            memory.write(made, new=True)
        return made

    return tree_map(wrap, result)


def written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[OnDevice]:
    """Return the tensors that the operation changes in place."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [tensor for tensor in tree_iter(value) if isinstance(tensor, OnDevice)]
    return found


def reads_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in tree_iter(indices))


def note_copy_in(source: Tensor, non_blocking: bool) -> None:
    memory.require_arrived(source)
    ledger.note("pageable" if not is_pinned(source) else "pinned" if non_blocking else "wait")


def copied_out(func: Any, source: OnDevice, kwargs: dict[str, Any]) -> Any:
    ledger.note("read")  # torch allocates the target itself, not pinned
    state.host.wait_for(state.current.point())
    with torch.no_grad():
        return func(source.held, **{**kwargs, "device": CPU, "non_blocking": False})


def copied_between(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    with torch.no_grad():
        if isinstance(target, OnDevice):
            note_copy_in(source, non_blocking)
            target.held.copy_(source)
            memory.write(target, new=False)
            return target
        assert isinstance(source, OnDevice)
        ledger.note("out" if non_blocking and is_pinned(target) else "read")
        target.copy_(source.held)
        if non_blocking:
            memory.arriving[address(target)] = state.current, state.current.done
        else:
            state.host.wait_for(state.current.point())
        return target


class Mode(TorchDispatchMode):
    """Hands on what has the device in it: also factories, and copies from the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tree_iter((args, kwargs)))
        if any(isinstance(item, OnDevice) for item in given) or on_device(kwargs.get("device")):
            return compute(func, args, kwargs)
        pins = kwargs.pop("pin_memory", None)  # no driver is here that could pin
        if memory.arriving and threading.current_thread() is threading.main_thread():
            for item in given:
                if isinstance(item, Tensor) and item.layout is torch.strided:
                    memory.require_arrived(item)
        result = func(*args, **kwargs)
        if pins:
            memory.pinned[address(result)] = result
        return result


def note_wait(step: int) -> None:
    ledger.note("wait" if step >= state.step else "late")


def install() -> None:
    """Make the device known to torch. Once per process, which is of no other use afterwards."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    autocast.fallback(torch.library.fallthrough_kernel)  # which then casts nothing
    torch.__future__.set_swap_module_params_on_conversion(True)  # module.to(device) keeps the parameters' identity
    torch.inference_mode = torch.no_grad  # type: ignore[misc,assignment] # inference tensors cannot be wrapped
    streams.on_wait = note_wait
    Tensor.pin_memory = pinned  # type: ignore[method-assign]
    Tensor.is_pinned = is_pinned  # type: ignore[method-assign,assignment]
    Tensor.tolist = checked(Tensor.tolist)  # type: ignore[method-assign]
    torch.tensor = moved(torch.tensor)


def checked(tolist: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(tolist)
    def look(tensor: Tensor) -> Any:
        memory.require_arrived(tensor)
        return tolist(tensor)

    return look


def moved(tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor(..., device=...) does not pass through a dispatch mode."""

    @functools.wraps(tensor)
    def make(*arguments: Any, device: Any = None, **named: Any) -> Tensor:
        if on_device(device):
            return tensor(*arguments, **named).to(device)
        return tensor(*arguments, **named, **({} if device is None else {"device": device}))

    return make
