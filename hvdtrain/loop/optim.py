"""Learning-rate schedules and scaling, as pure functions of the position in training. optimizers.py makes optimizers.

A rate that depends only on the position can be computed at any step, on any number of ranks, after any restart. Schedules
have no state to save.
"""

import math


def scaled_rate(rate: float, scaling: str, size: int, reduction: str = "average", accumulate: int = 1) -> float:
    """Return the peak learning rate for `size` ranks. scaling: "linear" scales it with the global batch; or "none".

    Source: the linear scaling rule, arXiv:1706.02677, section 2.1. With reduction "sum", the gradient is already `size`
    times as large, so the rate is only multiplied by `accumulate`.
    """
    if scaling == "none":
        return rate
    return rate * accumulate * (size if reduction == "average" else 1)


def warmup_factor(progress_epochs: float, warmup_epochs: float, size: int, scaling: str) -> float:
    """Return the factor for the scaled rate after `progress_epochs` (fractional): rises from 1/size (or 0) to 1.

    The warm-up is linear. With linear scaling it starts from the single-device rate (gradual warm-up, arXiv:1706.02677,
    section 2.2), otherwise from zero.
    """
    if progress_epochs >= warmup_epochs:
        return 1.0
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
    elif progress < 0.3:
        start, end, part = 1 / 25, 1.0, progress / 0.3
    else:
        start, end, part = 1.0, 1 / 25 / 1e4, (progress - 0.3) / 0.7
    return end + (start - end) * (1 + math.cos(math.pi * min(part, 1.0))) / 2
