"""Optimizers by name, fast to import and to step, and which parameters have weight decay."""

import inspect
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def decay_groups(model: nn.Module) -> list[dict[str, object]]:
    """Return groups for `build_optimizer`, with weight decay for matrices and kernels, and none for biases or norms.

    Source: arXiv:1706.02677, section 5.1, for batch norm; biases as arXiv:1812.01187, section 3.1.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    return [{"params": group, **rate} for group, rate in ((matrices, {}), (vectors, {"weight_decay": 0.0})) if group]


def eager(kind: type[AnyOptimizer]) -> type[AnyOptimizer]:
    """Return a subclass of the optimizer that does not import torch.compile, which takes 1.6 s per process.

    The decorators of these methods exclude them from torch.compile, and import all of it to do so (torch 2.15.0:
    torch/_compile.py, `_use_grad` in torch/optim/optimizer.py). hvdtrain never compiles an optimizer.
    """
    methods = ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
    plain = {name: inspect.unwrap(getattr(kind, name)) for name in methods}
    return cast("type[AnyOptimizer]", type(kind.__name__, (kind,), plain | {"step": torch.no_grad()(plain["step"])}))


def build_optimizer(
    name: str,
    parameters: ParamsT,
    rate: float,
    momentum: float,
    weight_decay: float,
    fused: bool = False,
    beta2: float = 0.999,
) -> torch.optim.Optimizer:
    """Return an optimizer: `name` is "sgd", "adam" or "adamw". For adam and adamw, `momentum` is beta 1.

    fused: one kernel for all parameters, which rounds differently; for adam and adamw, where this torch has it.
    """
    if name == "sgd":
        return eager(torch.optim.SGD)(parameters, lr=rate, momentum=momentum, weight_decay=weight_decay)
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    settings: dict[str, Any] = dict(lr=rate, betas=(momentum, beta2), weight_decay=weight_decay)
    return with_fused(kind, parameters, **settings) if fused else eager(kind)(parameters, **settings)


def with_fused(kind: type[torch.optim.Adam], parameters: ParamsT, **settings: Any) -> torch.optim.Optimizer:
    """Return the optimizer with its fused kernel: one for all parameters instead of ten for each."""
    given: list[Any] = list(parameters)
    # The constructor adds `fused` to the groups that it is given.
    copies: list[Any] = [dict(group) if isinstance(group, dict) else group for group in given]
    try:
        return eager(kind)(copies, **settings, fused=True)
    except RuntimeError:  # torch before 2.4 has none for CPUs
        return eager(kind)(given, **settings)
