"""The energy of a run for the page: in total, per sample, and per percent of accuracy."""

from hvdtrain.analysis.reporting.runs import Run, results
from hvdtrain.training.records.energy import said
from hvdtrain.training.records.named import number


def joules(value: float) -> str:
    """Return 3600000 as "3.6 MJ (1 kWh)"."""
    for factor, unit in ((1e6, "MJ"), (1e3, "kJ")):
        if abs(value) >= factor:
            hours = f" ({value / 3.6e6:.3g} kWh)" if factor == 1e6 else ""
            return f"{value / factor:.4g} {unit}{hours}"
    return f"{value:.4g} J"


def figures(run: Run) -> dict[str, tuple[str, str]]:
    """Return the energy by name, as a figure and a qualification; {} if none was measured."""
    whole = run.energy.get("energy_joules")
    if whole is None:
        return {}
    least = "" if all(attempt.energy and attempt.energy_complete for attempt in run.attempts) else "at least "
    found = {"energy": (f"{least}{joules(whole)}", counted(run))}
    samples = number(run.summary.get("samples")) or (run.train[-1]["samples"] if run.train else None)
    if samples:
        found["energy per sample"] = (f"{least}{joules(whole / samples)}", "")
    percents = per_percent(run)
    if percents:
        label, accuracy = percents
        found[f"energy per percent of {label}"] = (f"{least}{joules(whole / (100 * accuracy))}", "")
    return found


def per_percent(run: Run) -> tuple[str, float] | None:
    """Return label and value (0 to 1) of the first result that is a percentage to be maximized; None without one."""
    for result in results(run):
        if (
            result.metric is not None
            and result.metric.percent
            and result.metric.direction == "max"
            and result.value > 0
        ):
            return result.label, result.value
    return None


def counted(run: Run) -> str:
    """Return which devices and starts of the run the energy covers, as text."""
    parts = [
        f"{name} {joules(run.energy[key])}"
        for key, name in (("energy_cpu_joules", "CPU packages"), ("energy_gpu_joules", "GPUs"))
        if run.energy.get(key)
    ]
    starts = len(run.attempts)
    if starts > 1:
        measured = sum(bool(attempt.energy) for attempt in run.attempts)
        parts.append(f"all {starts} starts" if measured == starts else f"{measured} of {starts} starts")
    return "; ".join(parts)


def source(run: Run) -> str:
    """Return what was measured, or why nothing was; "" if it is not recorded."""
    return said(run.start.get("energy"))
