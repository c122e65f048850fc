"""Writes a model for use without hvdtrain: its weights (.safetensors, .pt), or the program (.pt2: torch.export; .onnx)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from hvdtrain.engines import atomic, files
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import is_extra, uncompiled_name
from hvdtrain.models.weights import write_tensors

WEIGHTS = (".safetensors", ".pt")
PROGRAMS = (".pt2", ".onnx")


def require_kind(path: Path) -> str:
    """Return the ending of `path`. Raises UserError for an unknown one."""
    if path.suffix not in WEIGHTS + PROGRAMS:
        known = "weights are .safetensors or .pt, programs .pt2 or .onnx"
        unknown = f"{path.suffix} is unknown" if path.suffix else "it has none"
        raise UserError(f"{path}: its ending says what to write, and {unknown}: {known}")
    # Bare weights in place of a checkpoint would be called damaged.
    of_run = path.parent.name == "checkpoints" and (path.parent.parent / "metrics.jsonl").exists()
    if of_run and path.match("step-*.safetensors"):
        raise UserError(f"{path} would be among the checkpoints of a run: give a file elsewhere")
    return path.suffix


def write_export(kind: str, model: nn.Module, example: Sequence[Tensor], path: Path) -> None:
    """Write a model's weights, or its program. Raises UserError or Failure if that fails."""
    if kind in WEIGHTS:
        write_weights({uncompiled_name(name): value for name, value in model.state_dict().items()}, path)
    else:
        write_program(model, example, path)


def write_weights(state: Mapping[str, Any], path: Path) -> None:
    """Write a state_dict. Raises UserError or Failure if that fails."""
    try:
        if path.suffix == ".safetensors":
            for name, value in state.items():
                if is_extra(name, value) and not isinstance(value, Tensor):
                    raise UserError(f"{path}: {name} is a {type(value).__name__}, and no tensor: export a .pt file")
            with atomic.replacing(path, "wb") as file:
                write_tensors(file, state)
        else:
            whole = {name: apart(value) if isinstance(value, Tensor) else value for name, value in state.items()}
            with atomic.replacing(path, "wb") as file, Sink(file) as sink:
                torch.save(whole, sink)
    except OSError as error:
        raise files.unwritten(path, error) from error


def apart(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU. A copy only of a part of another one, which torch would write with all of that."""
    own = tensor.detach().cpu().contiguous()
    whole = own.layout is not torch.strided or own.untyped_storage().nbytes() == own.nbytes
    return own if whole else own.clone()


class Sink:
    """A file for torch's writer, which ends the process, or raises another error, where a disk is full: that is kept, and
    raised at the end."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._error: OSError | None = None

    def write(self, content: memoryview) -> int:
        try:
            return len(content) if self._error else self._file.write(content)
        except OSError as error:
            self._error = error
            return len(content)

    def flush(self) -> None:
        """torch asks for it. The file is flushed when it is closed."""

    def __enter__(self) -> Any:  # torch takes it for a file
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._error:
            raise self._error


def write_program(model: nn.Module, example: Sequence[Tensor], path: Path) -> None:
    """Write the model in evaluation mode, on the CPU, for batches of any size.

    example: the arguments of a call, with at least two samples. Raises UserError if the model cannot be exported, UserError
    or Failure if it cannot be written.
    """
    import copy

    model = copy.deepcopy(model).cpu().eval()
    inputs = tuple(tensor.detach().cpu() for tensor in example)
    # Trap: torch.export takes a size of 1 in the example for a constant, so that it has two samples.
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch} for _ in inputs)
    try:
        if path.suffix == ".pt2":
            program = torch.export.export(model, inputs, dynamic_shapes=shapes)
            with atomic.replacing(path, "wb") as file, Sink(file) as sink:
                torch.export.save(program, sink)
        else:
            with atomic.replacing_several(path) as place:  # above 2 GB, weights are in a second file
                torch.onnx.export(model, inputs, place, dynamo=True, dynamic_shapes=shapes, verbose=False)
    except ImportError as error:
        raise UserError(f"{path}: {error}: pip install 'hvdtrain[onnx]'") from error
    except OSError as error:
        raise files.unwritten(path, error) from error
    except Exception as error:  # of many kinds
        first = (str(error) or type(error).__name__).strip().splitlines()[0]
        remedy = "export the weights (.safetensors), or change the model as torch.export asks"
        raise UserError(f"{path}: torch.export cannot follow the model ({first}): {remedy}") from error
