"""What a program needs of an accelerator besides tensors: streams, events and copies that do not stop the host."""

import copy
import os
import platform
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hvdtrain.engines.errors import UserError

LARGEST_PINNED = 2**26  # bytes: not a whole data set, because torch keeps pinned memory for later copies
CPU = torch.device("cpu")
# Variables with which bits repeat. Read once, when cuBLAS and NCCL start.
REPEATABLE = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it, torch refuses matrix products (use_deterministic_algorithms)
    "NCCL_NVLS_ENABLE": "0",  # sums in NVLink switches: "not deterministic between different calls" (nccl#1497)
    # NCCL chooses both by size and topology, and may choose differently in the next job.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
# Variables of oneDNN and MKL that choose instructions or precision on a CPU, and so the last bits.
INSTRUCTIONS = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
)  # fmt: skip


def module_of(device: torch.device) -> Any:
    """Return torch's module for an accelerator, such as torch.cuda: with `Stream`, `Event` and `current_stream`."""
    return getattr(torch, device.type)


def to_device(data: Any, device: torch.device) -> Any:
    """Return `data` with all tensors in nested tuples, lists and mappings moved to `device`; itself if none can be
    elsewhere."""
    if device.type == "cpu" and not torch.cuda.is_initialized():
        return data
    if isinstance(data, Tensor):
        if device.type not in ("cpu", "meta") and data.device.type == "cpu" and data.nbytes <= LARGEST_PINNED:
            # From memory that is not pinned, the host would wait for the copy.
            data = data.pin_memory()  # returns it if it is pinned
        return data.to(device, non_blocking=True)
    if isinstance(data, PackedSequence):
        return data.to(device)  # type: ignore[arg-type] # torch declares only the dtype
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(part, device) for part in data))
    if isinstance(data, (tuple, list)):
        return type(data)(to_device(part, device) for part in data)
    if type(data) is dict:
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, MutableMapping):  # of the same kind, such as Hugging Face's BatchEncoding
        moved = copy.copy(data)
        for key, value in data.items():
            moved[key] = to_device(value, device)
        return moved
    return data


def tensors_in(data: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, (tuple, list, Mapping)):
        for part in data.values() if isinstance(data, Mapping) else data:
            yield from tensors_in(part)


class Copies:
    """Copies batches to the device. To an accelerator, on a stream of their own: while it still computes the last batch."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: Any = None  # from the first copy on

    def to_device(self, data: Any) -> Any:
        """Do the same as the function `to_device`. The copies are complete for what the current stream is given next."""
        if self._device.type == "cpu":
            return to_device(data, self._device)
        backend = module_of(self._device)
        if self._stream is None:
            self._stream = backend.Stream(self._device)
        current = backend.current_stream(self._device)
        with backend.stream(self._stream):
            moved = to_device(data, self._device)
        current.wait_stream(self._stream)
        for tensor in tensors_in(moved):
            if tensor.device.type != "cpu":
                tensor.record_stream(current)  # its memory belongs to the stream of the copies, which may use it again
        return moved


class Delayed:
    """A small tensor of an accelerator, on its way to the host. `values` waits for it: ask when more work is queued."""

    def __init__(self, tensor: Tensor):
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._values.copy_(tensor, non_blocking=True)
        self._arrived = module_of(tensor.device).Event(blocking=True)  # wait without keeping a core busy
        self._arrived.record()

    def values(self) -> Any:
        """Return the value, or a list of them."""
        self._arrived.synchronize()
        return self._values.tolist()


def read_scalars(values: "list[Tensor | float]") -> list[float]:
    """Return the values of scalars as numbers. Those on an accelerator are read with one copy."""
    away = [value for value in values if isinstance(value, Tensor) and value.device.type != "cpu"]
    arrived = iter(torch.stack([value.detach().double() for value in away]).tolist() if away else ())
    return [next(arrived) if isinstance(v, Tensor) and v.device.type != "cpu" else float(v) for v in values]


def exact(value: object) -> Tensor:
    """Return `value` as a tensor. A number keeps its digits, also where torch's default dtype is a short one."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)


def recorded(call: str, name: str, value: object) -> Tensor:
    """Return a value that the program records as a tensor. Raises UserError if it is no number, and no tensor of numbers.

    call: which it was given to, such as "run.record".
    """
    try:
        if hasattr(value, "filled"):  # numpy's masked arrays: torch would take the values below the mask
            raise TypeError
        tensor = exact(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        tensor = None
    if tensor is None or tensor.is_complex():
        raise UserError(f"{call}({name}=...) got a {type(value).__name__}: give it a real number, or a tensor of them")
    return tensor.detach()


def arithmetic_of(device: torch.device) -> dict[str, str]:
    """Return what decides how sums on this rank are rounded, by the name that a user knows."""
    if device.type == "cuda":
        return {"GPU": torch.cuda.get_device_name(device), "torch": torch.__version__}
    kind = [platform.machine(), torch.backends.cpu.get_cpu_capability()]
    processor = " ".join(kind + [f"{name}={os.environ[name]}" for name in INSTRUCTIONS if name in os.environ])
    return {"--threads": str(torch.get_num_threads()), "processor": processor, "torch": torch.__version__}


def set_arithmetic(device: torch.device, *, deterministic: bool, tuning: bool) -> list[str]:
    """Set how torch computes on `device`: fast, or with the same bits in each run. Return what was set, for the user.

    On CPUs nothing is set: the same command on the same machine has the same bits there (docs/restarts.md).
    """
    if device.type != "cuda":
        return ["--deterministic changes nothing on CPUs, where runs have the same bits anyway"] * deterministic
    if deterministic:
        torch.use_deterministic_algorithms(True)
        # Otherwise torch fills each new tensor with NaN, to reveal reads of uninitialized memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # of the module's class
        torch.backends.cudnn.benchmark = False  # it times algorithms, and may choose differently in the next run
        notes = [
            "deterministic: algorithms that give the same bits in each run (slower; an operation without one raises)"
        ]
    elif tuning:
        torch.backends.cudnn.benchmark = True
        notes = ["cuDNN times its algorithms in the first steps; bits differ from run to run (--deterministic)"]
    else:
        notes = []
    if tuning:  # TensorFloat-32: 10 bits of mantissa in products that stay float32 under --amp
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        notes.append("products of float32 in TF32 (exact ones: --tuning off, or NVIDIA_TF32_OVERRIDE=0)")
    return notes
