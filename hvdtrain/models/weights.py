"""Loads initial weights from a file. A state_dict is loaded without executing code."""

from pathlib import Path

import torch
from torch import nn

from hvdtrain.engines.errors import UserError
from hvdtrain.models.tensor_files import refuse_large_header, require_file


def load_weights(model: nn.Module, path: Path) -> None:
    """Load weights into `model` from `path`: a file written by `torch.save(model.state_dict())`, or a .safetensors file.

    Raises UserError if the file cannot be read, contains anything but tensors, or does not match the model.
    """
    try:
        require_file(path)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            refuse_large_header(path)
            state = load_file(path)
        else:
            # weights_only: a pickle could run code (CVE-2025-32434 is fixed in torch 2.6).
            state = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise UserError(f"--weights {path}: {error}: pip install safetensors") from error
    except OSError as error:
        raise UserError(f"--weights {path}: {error.strerror or error}: name a file that can be read") from error
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"--weights {path}: not a file of weights ({first}): save it with torch.save(model.state_dict())"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(
            f"--weights {path}: holds {type(state).__name__}, not a state_dict: torch.save(model.state_dict())"
        )
    expected = model.state_dict()
    for name in [*expected, *state]:
        if name not in state or name not in expected:
            whose = "the model lacks it" if name in state else "the file lacks it"
            raise UserError(
                f"--weights {path}: does not match the model: {name}: {whose}: choose the --model it was saved from"
            )
        if state[name].shape != expected[name].shape:
            shapes = f"{tuple(state[name].shape)} in the file, {tuple(expected[name].shape)} in the model"
            how = "choose the --model, and data with as many classes, that it was saved from"
            raise UserError(f"--weights {path}: does not match the model: {name} is {shapes}: {how}")
    model.load_state_dict(state)
