"""Registered torch schedulers: whether their length is the run's, and how they continue when a run is made longer."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

# The attribute that is the number of steps after which a scheduler has reached its end.
LENGTH_NAME = {
    lr_scheduler.OneCycleLR: "total_steps",
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.PolynomialLR: "total_iters",
    lr_scheduler.LinearLR: "total_iters",
}

LENGTH_NAMES = (*LENGTH_NAME.values(), "num_training_steps", "_milestones")  # in a state_dict


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
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def redone(scheduler: object, saved: Mapping[str, Any]) -> bool:
    """Bring a new scheduler to the position of `saved`, if that was made for another length. Return whether it was.

    A run that is continued with more epochs continues as if the scheduler had had the new length from the beginning. The
    optimizer has its initial rate. saved: the scheduler's earlier state_dict.
    """
    if not isinstance(scheduler, lr_scheduler.LRScheduler) or _lengths(scheduler.state_dict()) == _lengths(saved):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `scheduler.step()` before `optimizer.step()`
        for _ in range(int(saved["last_epoch"])):
            scheduler.step()
    return True


def _lengths(state: Mapping[str, Any]) -> list[object]:
    """Return all lengths in a scheduler's state_dict, also those of the schedulers within, and their milestones."""
    lengths = [state[name] for name in LENGTH_NAMES if name in state]
    for inner in (*state.get("_schedulers", []), *state.get("lr_lambdas", [])):
        lengths += _lengths(inner) if isinstance(inner, Mapping) else []
    return lengths
