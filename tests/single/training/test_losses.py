"""What is said of the first loss of a run: a mean over other items than samples has other values on more ranks."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from hvdtrain.engines.errors import UserError
from hvdtrain.program.means import is_percentage
from hvdtrain.program.own_counts import epochs_of_its_own
from tests.single.training.small import X
from tests.single.training.test_mistakes import run, with_its_source

LABELS = (torch.arange(len(X)) % 4).masked_fill(torch.arange(len(X)) % 5 == 0, -100)
MASK = torch.arange(len(X)) % 5 > 0
BEFORE = "flags.accumulate = 2; from tests.single.training.test_losses import LABELS, MASK"
FORM = dict(before=BEFORE, prepare="(net := nn.Linear(3, 4)), torch.optim.SGD(net.parameters(), lr=0.1)")
SAID = {
    "labels that are ignored": ("F.cross_entropy(model(x), y)", "LABELS", r"\d of 8 labels, without those of ignore_index"),
    "beside another loss": ("model(x).mean() * 0.1 + F.cross_entropy(model(x), y)", "LABELS", r"\d of 8 labels"),
    "weights of classes": (
        "F.cross_entropy(model(x), y.clamp(0), weight=torch.arange(1.0, 5))", "LABELS", "weights of classes"),
    "rows by a mask": ("model(x)[:, 0][y].mean()", "MASK", r"\d+ items, of 8 samples"),
    "values by a mask": ("torch.masked_select(model(x)[:, 0], y).mean()", "MASK", r"\d items, of 8 samples"),
    "a mask": ("(model(x).mean(1) * y).sum() / y.sum()", "MASK", r"\d items, of 8 samples"),
}  # fmt: skip
NOT_SAID = {
    "no label is ignored": ("F.cross_entropy(model(x), y.clamp(0))", "LABELS"),
    "a sum by the number of samples": ("model(x).sum() / len(x)", "LABELS"),
    "a sum by reduction, by their number": (
        'F.mse_loss(model(x)[:, 0], y.float(), reduction="sum") / len(x)',
        "LABELS",
    ),
    "a sum by that of its values": ("model(x).sum() / model(x).numel()", "LABELS"),
    # Whose factor is that of two micro-batches, and means something else.
    "the mean over heads of means": (
        "(parts := torch.stack([model(x).mean(), model(x).square().mean(), model(x).abs().mean()])).sum() / len(parts)",
        "LABELS",
    ),
    "a sum by its dimensions and samples": ("((model(x) - 1) ** 2).sum() / 10 / len(x)", "LABELS"),
    "a sum by a number of its own": ("(model(x).abs().mean(1) * 2.0).sum() / (len(x) * 0.625)", "LABELS"),
    # As many as a micro-batch has samples.
    "losses of tasks": ("torch.stack([F.cross_entropy(model(x) * k, y.clamp(0)) for k in range(8)]).sum()", "LABELS"),
    "half of two losses": ("(model(x).mean() + F.cross_entropy(model(x), y.clamp(0))) / 2", "LABELS"),
}


@pytest.mark.parametrize("case", SAID)
def test_a_mean_over_other_items_than_samples_needs_their_number(case, capsys):
    loss, labels, items = SAID[case]
    run(FORM | dict(loss=loss, data=f"X, {labels}"))
    (line,) = re.findall("warning: the loss .*", said := capsys.readouterr().out)
    remedy = r"give step.backward\(loss, count=...\) their number, or the sum of their weights"
    assert re.fullmatch(f"warning: the loss is a mean over {items}.*, and not over samples: {remedy}", line), said


@pytest.mark.parametrize("case", NOT_SAID)
def test_a_mean_over_all_values_does_not(case, capsys):
    loss, labels = NOT_SAID[case]
    # Factors of such names stand elsewhere: of a sum that is shown, of samples.
    beside = (
        "loss_accum = loss.detach() * len(x); print(f'{loss.item()} {8 * flags.accumulate}'); lr = 2 / flags.accumulate"
    )
    run(FORM | dict(loss=loss, data=f"X, {labels}", in_batches=beside))
    assert "warning: the loss" not in capsys.readouterr().out


FOUND = "(rows := (x[:, 0] > 0).nonzero()[:, 0], e := model(x)) and "  # 3 and 6 of the first two micro-batches
UNEQUAL = {  # and whether a line names them
    "triplets that are found": (FOUND + "F.triplet_margin_loss(e[rows], e[rows - 1], e[rows - 2])", True),
    "labelled ones": (FOUND + "F.cross_entropy(e[rows], y[rows].clamp(0))", True),
    "beside a loss of all": (
        FOUND + "F.mse_loss(e, y[:, None].float()) + 0.1 * F.mse_loss(e[rows], e[rows - 1] * 0)",
        True,
    ),
    "a sum by their number": (FOUND + "e[rows, 0].sum() / len(rows)", True),
    "pairs": ("(e := model(x)) is not None and F.pdist(e)[: len(x) * (len(x) - 1) // 2].relu().mean()", False),
    "pairs by indices": (
        "torch.cdist(e := model(x), e)[tuple(torch.triu_indices(len(x), len(x), 1))].relu().mean()",
        False,
    ),
    "drawn rows themselves": ("model(x)[torch.randperm(len(x))[:5]].mean()", False),
    "rows that are drawn": ("model(x)[torch.randperm(len(x))[:5]].abs().mean()", False),
    "pictures of several sizes": ("model(x).repeat(1, 1 + step.micro_batch).abs().mean()", False),
    "a penalty of weights": ("model(x).mean() + 0.1 * model.weight[1:].square().mean()", False),
    "what the program divides by": ("model(x).square().sum() / (100 + x.abs().sum())", False),
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_means_over_unequal_numbers_are_told(case, capsys):
    loss, told = UNEQUAL[case]
    run(FORM | dict(loss=loss, data="X, LABELS"))
    found = re.findall("warning: the loss (.*)", capsys.readouterr().out)
    line = r"is a mean over \d+ items of 8 samples, and \d+ of as many others: give step.backward\(loss, count=...\) their "
    assert [bool(re.match(line, one)) for one in found] == [True] * told


def test_a_step_in_which_nothing_was_found_may_be_skipped(capsys):
    """It ended the run, and a program cannot know before which samples to leave out."""
    found = dict(
        loss=FOUND + "(rows := rows[step.number == 2 :]) is not None and (e[rows] - 1).square().mean()", data="X, LABELS",
        before=BEFORE.replace("2", "1"), backward="step.backward(loss, count=len(rows) * (step.number != 2))",
    )  # fmt: skip
    refused = (
        r"^step 2: step.backward\(count=...\) was 0 or less over all ranks: leave .*, or give --max-skipped, which"
    )
    with pytest.raises(UserError, match=refused):
        run(FORM | found)
    found |= dict(
        at_step="before = [p.detach().clone() for p in net.parameters()]",
        after_update="assert (step.number == 2) == all(map(torch.equal, before, net.parameters()))",
    )
    scope = run(FORM | found, "--max-skipped", "1")
    assert scope["run"].state.step == 5 * 2
    assert "warning: step 2: step.backward(count=...) was 0 or less over all ranks" in capsys.readouterr().out


@pytest.mark.parametrize("loss", [
    'F.mse_loss(model(x)[:, 0], y.float(), reduction="sum")',
    "torch.stack([F.cross_entropy(model(x[k:k + 1]), y[k:k + 1].clamp(0)) for k in range(8)]).sum()",
])  # fmt: skip
def test_a_sum_over_samples_is_to_be_divided(loss, capsys):
    run(FORM | dict(loss=loss, data="X, LABELS"))
    (line,) = re.findall("warning: the loss .*", capsys.readouterr().out)
    remedy = "divide it by their number in the micro-batch, such as loss / len(labels)"
    assert line == f"warning: the loss is a sum over the samples, and not their mean: {remedy}"


def test_one_that_is_given_with_it_is_right(capsys):
    run(
        FORM
        | dict(
            loss="F.cross_entropy(model(x), y)", data="X, LABELS", backward="step.backward(loss, count=(y >= 0).sum())"
        )
    )
    run(FORM | dict(loss="F.cross_entropy(model(x), y)", data="X, LABELS", before=BEFORE.replace("2", "1")))  # one mean
    assert "warning: the loss" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "told"), [("accuracy", 47.5, True), ("accuracy", 20.0, False), ("loss", 47.5, False)]
)
def test_a_share_in_percent_is_no_whole_number(name, value, told):
    assert is_percentage(name, value, 40) == told


@pytest.mark.parametrize(
    ("before", "told"), [("", True), ("print(flags.epochs)", False), ("run.epochs(flags.epochs)", False)]
)
def test_a_number_of_epochs_that_the_program_writes_is_told_unless_it_reads_the_flag(before, told):
    held = {}
    source = f"def main(flags, run):\n    {before or 'pass'}\n    for epoch in run.epochs(3): pass\n"
    run = SimpleNamespace(epochs=lambda count: [held.setdefault("frame", sys._getframe(1))] * 0)
    exec(with_its_source(source, "<epochs>"), held)
    held["main"](SimpleNamespace(epochs=5), run)
    assert bool(epochs_of_its_own(held["frame"], 3, 5)) == told
    assert not epochs_of_its_own(held["frame"], 3, 3)
