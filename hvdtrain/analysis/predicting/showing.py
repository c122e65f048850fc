"""Shows a prediction: Markdown tables, and plots of predicted and measured values."""

from collections.abc import Sequence
from pathlib import Path

from hvdtrain.analysis import plotting
from hvdtrain.analysis.predicting.formulas import ALGORITHMS
from hvdtrain.analysis.predicting.prediction import Band, Check, Model, Prediction

DRAWN = ("ring", "halving")


def about(model: Model) -> str:
    """Return the fit, the network and the step in three lines of text."""
    fitted = model.fit
    if fitted.latency is None:
        delay = f"{fitted.overhead * 1e6:,.0f} us fixed cost (once or at every step: unknown from one number of ranks)"
    else:
        delay = f"{fitted.overhead * 1e6:,.0f} us once, {fitted.latency * 1e6:,.1f} us per step of the ring"
    counts = ", ".join(map(str, fitted.ranks))
    here = [(ranks.per_host, took) for ranks, (took, _) in model.computing.items() if ranks.hosts == 1]
    computed = "; ".join(f"{per_host} on a host {milliseconds(took)}" for per_host, took in here)
    return (
        f"fit      {delay}; {fitted.bandwidth / 1e9:.3g} GB/s; off by {fitted.residual:.0%} "
        f"(root mean square of {fitted.points} points, {counts} ranks)\n"
        f"wire     {model.wire.latency * 1e6:,.1f} us, {model.wire.bandwidth / 1e6:,.4g} MB/s of payload per host\n"
        f"step     {model.size / 1e6:,.2f} MB in {model.buckets} bucket{'s'[: model.buckets > 1]}; "
        f"without communication, ms: {computed}"
    )


def milliseconds(span: Band) -> str:
    """Return a range of seconds as text in milliseconds."""
    return f"{span.middle * 1e3:,.4g} ({span.least * 1e3:,.4g} to {span.most * 1e3:,.4g})"


def shares(one: Prediction, steps: Band) -> str:
    """Return the efficiency for a range of step times as text."""
    return f"{one.share(steps.middle):.2f} ({one.share(steps.most):.2f} to {one.share(steps.least):.2f})"


def table(model: Model, predictions: Sequence[Prediction]) -> str:
    """Return a Markdown table with one row per number of ranks and algorithm."""
    lines = [
        "| ranks | hosts | | all-reduce, ms | efficiency, no overlap | with overlap | samples/s, with overlap |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    for one in predictions:
        samples = one.ranks.total * model.batch_size / one.overlapped.middle
        cells = [
            f"{one.ranks.total:,}", f"{one.ranks.hosts:,}", one.algorithm, milliseconds(one.communication),
            shares(one, one.plain), shares(one, one.overlapped), f"{samples:,.0f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def check_table(checks: Sequence[Check]) -> str:
    """Return a Markdown table with one row per step, and per power of 16 in a sweep (prediction.json has all sizes)."""
    lines = [
        "| | ranks | hosts | measured, ms | predicted, ms | predicted / measured |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for check in checks:
        if check.what != "step" and int(check.bytes).bit_length() % 4 != 3:  # 4 B, 64 B, 1 KiB, ...
            continue
        what = check.what if check.what == "step" else f"{check.what} of {plotting.bytes_text(check.bytes)}"
        cells = [
            what, str(check.ranks.total), str(check.ranks.hosts), milliseconds(check.measured),
            milliseconds(check.predicted), f"{check.ratio:.2f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(model: Model, predictions: Sequence[Prediction], checks: Sequence[Check], path: Path) -> list[Path]:
    """Draw efficiency over ranks (predictions as bands, measurements as points) and the checks; return the paths."""
    shown = [check for check in checks if check.share is not None and check.ranks.hosts == 1]
    above = plotting.above_one([(check.share.least, check.share.most) for check in shown if check.share])
    panels = [plotting.Panel("efficiency", "share of ranks that do not communicate",
                             lambda axes: draw_shares(axes, model, predictions, shown), above)]  # fmt: skip
    if checks:
        titled = "seconds, predicted over measured"
        panels.append(plotting.Panel("checks", titled, lambda axes: draw_checks(axes, checks)))
    about = (
        f"{model.engine}, {model.size / 1e6:.3g} MB per step, {model.wire.bandwidth * 8 / 1e9:.3g} Gbit/s of payload, "
        f"{model.wire.latency * 1e6:.3g} us"
    )
    return plotting.write(path, about, panels)


def draw_shares(axes, model: Model, predictions: Sequence[Prediction], shown: Sequence[Check]) -> None:
    """Draw predicted and measured efficiency over ranks."""
    for index, name in enumerate(ALGORITHMS):
        mine = [one for one in predictions if one.algorithm == name]
        if name not in DRAWN or not mine:
            continue
        counts, colour = [one.ranks.total for one in mine], plotting.COLOURS[index]
        for kind, line in (("plain", ":"), ("overlapped", "-")):
            if kind == "overlapped" and model.buckets == 1:
                continue  # one bucket cannot overlap: the line would be the same
            steps: list[Band] = [getattr(one, kind) for one in mine]
            middle, least, most = (
                [one.share(getattr(step, which)) for one, step in zip(mine, steps, strict=True)]
                for which in ("middle", "most", "least")
            )
            style = dict(color=colour, linestyle=line, marker=plotting.MARKERS[index], markersize=3.5)
            axes.plot(counts, middle, label=f"{name}, {'no overlap' if kind == 'plain' else 'overlap'}", **style)
            axes.fill_between(counts, least, most, color=colour, alpha=0.12, linewidth=0)
    if shown:
        middle = [check.share.middle for check in shown if check.share]
        below = [check.share.middle - check.share.least for check in shown if check.share]
        more = [check.share.most - check.share.middle for check in shown if check.share]
        where = [check.ranks.total for check in shown]
        axes.errorbar(where, middle, yerr=[below, more], fmt="x", color="black", capsize=3, label="measured, one host")
    axes.set_xscale("log", base=2)
    ticks = sorted({one.ranks.total for one in predictions} | {check.ranks.total for check in shown})
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45)
    axes.minorticks_off()
    axes.set(xlabel="ranks", ylabel="share of no communication", ylim=(0, None))


def draw_checks(axes, checks: Sequence[Check]) -> None:
    """Draw predicted over measured seconds of all checks."""
    for index, what in enumerate(dict.fromkeys(check.what for check in checks)):
        mine = [check for check in checks if check.what == what]
        x, y = [check.measured.middle for check in mine], [check.predicted.middle for check in mine]
        bars = [
            [[getattr(check, kind).middle - getattr(check, kind).least for check in mine],
             [getattr(check, kind).most - getattr(check, kind).middle for check in mine]]
            for kind in ("measured", "predicted")
        ]  # fmt: skip
        style = dict(color=plotting.COLOURS[index], fmt=plotting.MARKERS[index], markersize=4, capsize=2, linewidth=1)
        axes.errorbar(x, y, xerr=bars[0], yerr=bars[1], label=what, **style)
    ends = [value for check in checks for value in (*check.measured, *check.predicted) if value > 0]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="grey", linewidth=1, linestyle="--", label="equal")
    axes.set(xlabel="measured (s)", ylabel="predicted (s)", xscale="log", yscale="log")
