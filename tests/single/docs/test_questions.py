"""What people ask first is answered on a page that is two clicks from README: README, docs/index.md, the section."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
METRICS, BEST = "training.md#metrics-that-are-not-means", "training.md#early-stopping-and-the-best-model"
FREEZE, SUMS = "techniques.md#averaged-weights-and-frozen-layers", "techniques.md#sums-and-class-weights"
# question -> where docs/index.md leads, and what the section must say
QUESTIONS = {
    "AUC": (METRICS, ["run.gather", "auc"]),
    "mAP": (METRICS, ["boxes", "run.gather"]),
    "a confusion matrix, torchmetrics": (METRICS, ["bincount", "sync_on_compute=False"]),
    "freeze, unfreeze": (FREEZE, ["requires_grad_", "momentum"]),
    "add layers later": (FREEZE, ["add_param_group"]),
    "averaged weights": (FREEZE, ["AveragedModel", "run.register"]),
    "stop early": (BEST, ["patience", "break"]),
    "the best model": (BEST, ["run.best", "--best"]),
    "ReduceLROnPlateau": ("training.md#learning-rate-schedulers", ["plateau.step"]),
    "resume on other ranks": ("restarts.md#another-number-of-ranks", ["micro-batches", "global batch"]),
    "preemption": ("slurm.md#preemption-and-requeue", ["GraceTime", "requeue"]),
    "batch norm": ("reference/limits.md#what-it-trains", ["running statistics"]),
    "profile": ("watching.md#profile", ["--profile"]),
    "from DDP": ("migrate.md#from-ddp-or-accelerate", ["xor_ddp.py", "torchrun"]),
    "fast JPEGs": ("data.md#fast-jpegs-in-your-own-dataset", ["Prepare("]),
    "class weights": (SUMS, ["count=weights"]),
    "a loss that is a sum": (SUMS, ['reduction="sum"']),
    "a loss over boxes": (SUMS, ["step.per_sample"]),
    "gather": ("techniques.md#losses-over-the-samples-of-all-ranks", ["run.gather", "--accumulate"]),
    "random numbers": ("techniques.md#random-numbers-of-your-own", ["run.register", "resumed"]),
    "other data in another epoch": ("data.md#data-that-change-by-epoch", ["changes=True"]),
    "SAM": ("techniques.md#sharpness-aware-minimization", ["step.update()"]),
}


def section(target: str) -> str:
    """Return the text of PAGE#ANCHOR, with the sections within it."""
    page, _, anchor = target.partition("#")
    lines = (ROOT / "docs" / page).read_text().splitlines()
    heads = [(n, len(line) - len(line.lstrip("#")), line) for n, line in enumerate(lines) if re.match("#+ ", line)]
    start, depth = next((n, d) for n, d, line in heads if slug(line) == anchor)
    end = next((n for n, d, _ in heads if n > start and d <= depth), len(lines))
    return "\n".join(lines[start:end])


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lstrip("# ").lower()).replace(" ", "-")


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_two_clicks_from_readme(question):
    target, words = QUESTIONS[question]
    assert "(docs/index.md)" in (ROOT / "README.md").read_text()
    assert f"]({target})" in (ROOT / "docs" / "index.md").read_text()
    said = section(target)
    assert [word for word in words if word not in said] == []
