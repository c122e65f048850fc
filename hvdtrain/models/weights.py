"""Initial weights from a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import is_extra
from hvdtrain.models.weight_files import refuse_compressed, refuse_large_header, require_file, require_match


def require_values(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor of a file has no values that the model's can take: load_state_dict ended in a traceback
    for those of other layouts, and kept the real part of complex ones."""
    for name, tensor in state.items():
        if is_extra(name, tensor):
            continue
        of = "sparse" if tensor.layout != torch.strided else "quantized" if tensor.is_quantized else ""
        if tensor.is_complex() and not (name in expected and expected[name].is_complex()):
            of = "complex"
        if of or tensor.is_meta:
            raise ValueError(f"{name} is {of or 'without values (on the meta device)'}")


def read_state(path: Path) -> Any:
    """Return what a file of `torch.save(model.state_dict())`, or a .safetensors file, holds. Raises UserError."""
    try:
        require_file(path)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            refuse_large_header(path)
            return load_file(path)
        refuse_compressed(path)
        # weights_only: a pickle could run code (CVE-2025-32434 is fixed in torch 2.6).
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"--weights {path}: {error.strerror or error}: name a file that can be read") from error
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "weights_only" in str(error):  # a long text of torch, with escape codes, about how to run what is in it
            first = "it holds a whole model, or other objects"
        remedy = "save it with torch.save(model.state_dict())"
        raise UserError(f"--weights {path}: not a file of weights ({first}): {remedy}") from error


def load_weights(model: nn.Module, path: Path) -> None:
    """Load weights into `model` from `path` (`read_state`).

    Raises UserError if the file cannot be read, contains anything but tensors, or does not match the model.
    """
    state = read_state(path)
    extra = {name for name, value in model.state_dict().items() if is_extra(name, value)}
    if not isinstance(state, dict) or not all(isinstance(one, Tensor) or name in extra for name, one in state.items()):
        remedy = "torch.save(model.state_dict())"
        raise UserError(f"--weights {path}: holds {type(state).__name__}, not a state_dict: {remedy}")
    try:
        require_match(state, model.state_dict())
    except ValueError as error:
        remedy = "choose the --model, and data with as many classes, that it was saved from"
        prefix = next(iter(state), "").split(".")[0] + "."
        if {name.removeprefix(prefix) for name in state} == set(model.state_dict()):
            remedy = f"its names begin with {prefix}: save the state_dict of that part"
        if all(name.startswith(("module.", "_orig_mod.")) for name in state) and state:
            remedy = "save model.module.state_dict(), of a compiled one model._orig_mod"
            remedy = f"its names are those of a wrapped model: {remedy}"
        raise UserError(f"--weights {path}: does not match the model: {error}: {remedy}") from error
    try:
        require_values(state, model.state_dict())
    except ValueError as error:
        raise UserError(f"--weights {path}: {error}: save dense tensors of the model's types") from error
    try:
        model.load_state_dict(state)
    except Exception as error:  # any: set_extra_state is the author's own
        last = (str(error) or type(error).__name__).splitlines()[-1].strip()
        remedy = "let set_extra_state take what get_extra_state returns"
        raise UserError(f"--weights {path}: the model does not take its state ({last}): {remedy}") from error
