"""Learning-rate schedules and scaling, as pure functions of the position in training; and optimizers by name.

A rate that depends only on the position can be computed at any step, on any number of ranks, after any restart. Schedules
have no state to save.
"""

import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import ParamsT

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)

# The attribute that is the number of steps after which a scheduler has reached its end.
LENGTH_NAME = {
    lr_scheduler.OneCycleLR: "total_steps",
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.PolynomialLR: "total_iters",
    lr_scheduler.LinearLR: "total_iters",
}

# Hugging Face's schedulers have their length as `num_training_steps`, SequentialLR that of its parts as `_milestones`.
LENGTH_NAMES = (*LENGTH_NAME.values(), "num_training_steps", "_milestones")  # in a state_dict


def scaled_rate(rate: float, scaling: str, size: int, reduction: str = "average", accumulate: int = 1) -> float:
    """Return the peak learning rate for `size` ranks. scaling: "linear" scales it with the global batch; or "none".

    Source: the linear scaling rule, arXiv:1706.02677, section 2.1. With reduction "sum", only `accumulate` multiplies it.
    """
    if scaling == "none":
        return rate
    # With the sum, the gradient is `size` times as large already.
    return rate * accumulate * (size if reduction == "average" else 1)


def warmup_factor(progress_epochs: float, warmup_epochs: float, size: int, scaling: str) -> float:
    """Return the factor for the scaled rate after `progress_epochs` (fractional): rises from 1/size (or 0) to 1.

    The warm-up is linear. With linear scaling it starts from the single-device rate, otherwise from zero.
    """
    if progress_epochs >= warmup_epochs:
        return 1.0
    # Gradual warm-up starts from the rate of a single device (arXiv:1706.02677, section 2.2).
    start = 1.0 / size if scaling == "linear" else 0.0
    return start + (1.0 - start) * progress_epochs / warmup_epochs


def schedule_factor(schedule: str, progress: float) -> float:
    """Return the factor for the peak rate at `progress` (0 to 1: the fraction of all samples already processed).

    `onecycle`: cosine from 1/25 up to 1 at 30 %, cosine down to 1/250000 (arXiv:1708.07120; the constants of
    `torch.optim.lr_scheduler.OneCycleLR`). `cosine`: half a cosine from 1 to 0 (arXiv:1608.03983). `step`: divided by 10
    after 30/90, 60/90 and 80/90 of training (arXiv:1706.02677, section 5.1).
    """
    if schedule == "constant":
        return 1.0
    if schedule == "step":
        return 0.1 ** sum(progress >= epochs / 90 for epochs in (30, 60, 80))
    if schedule == "cosine":
        start, end, part = 1.0, 0.0, progress
    # These are pct_start, div_factor and final_div_factor of torch's OneCycleLR: 0.3, 25 and 1e4.
    elif progress < 0.3:
        start, end, part = 1 / 25, 1.0, progress / 0.3
    else:
        start, end, part = 1.0, 1 / 25 / 1e4, (progress - 0.3) / 0.7
    return end + (start - end) * (1 + math.cos(math.pi * min(part, 1.0))) / 2


# ---- registered torch schedulers: whether their length is the run's, and how they continue when a run is made longer


def length_of(scheduler: object) -> int | None:
    """Return the number of steps after which `scheduler` has reached its end; None if it has none, or may end early."""
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        last = length_of(scheduler._schedulers[-1])
        return None if last is None else int(scheduler._milestones[-1]) + last
    if isinstance(scheduler, lr_scheduler.LambdaLR):  # those of Hugging Face are functools.partial objects
        lengths = (getattr(one, "keywords", {}).get("num_training_steps") for one in scheduler.lr_lambdas)
        return next((length for length in lengths if isinstance(length, int)), None)
    if isinstance(scheduler, lr_scheduler.LinearLR) and scheduler.end_factor >= scheduler.start_factor:
        return None  # a warm-up ends before the run
    name = next((name for kind, name in LENGTH_NAME.items() if isinstance(scheduler, kind)), None)
    return int(getattr(scheduler, name)) if name else None


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a torch scheduler was made for `optimizer`: it wraps the optimizer's `step`."""
    # torch wraps `step` to warn of schedulers that are called before it, and marks it so, or before 2.4 by the latter.
    return hasattr(optimizer.step, "_wrapped_by_lr_sched") or hasattr(optimizer.step, "_with_counter")


def redone(scheduler: object, saved: Mapping[str, Any]) -> bool:
    """Bring a new scheduler to the position of `saved`, if that was made for another length. Return whether it was.

    A run that is continued with more epochs continues as if the scheduler had had the new length from the beginning. The
    optimizer has its initial rate. saved: the scheduler's earlier state_dict.
    """
    if not isinstance(scheduler, lr_scheduler.LRScheduler) or _lengths(scheduler.state_dict()) == _lengths(saved):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `scheduler.step()` before `optimizer.step()`
        # torch's schedulers compute each rate from the one before, so that every step is repeated.
        for _ in range(int(saved["last_epoch"])):
            scheduler.step()
    return True


def _lengths(state: Mapping[str, Any]) -> list[object]:
    """Return all lengths in a scheduler's state_dict, also those of the schedulers within, and their milestones."""
    lengths = [state[name] for name in LENGTH_NAMES if name in state]
    for inner in (*state.get("_schedulers", []), *state.get("lr_lambdas", [])):
        lengths += _lengths(inner) if isinstance(inner, Mapping) else []
    return lengths


# ---- optimizers, fast to import and to step, and which parameters have weight decay


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

    hvdtrain never compiles an optimizer.
    """
    methods = ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
    # The decorators exclude these methods from torch.compile,
    # and import all of it to do so (torch 2.15.0: torch/_compile.py).
    plain = {name: inspect.unwrap(getattr(kind, name)) for name in methods}
    # The decorator of `step` also turns gradients off (`_use_grad`
    # in torch/optim/optimizer.py): without it, no_grad does.
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
