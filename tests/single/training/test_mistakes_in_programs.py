"""Mistakes that people make in programs such as those of docs/programs: each ends in one line with the remedy.

A mistake is what stands in the program, and what somebody writes instead. test_mistakes.py has those of any program, and
tests/parallel/test_mistakes.py those of several ranks.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvdtrain.engines.errors import UserError

PROGRAMS = Path(__file__).resolve().parents[3] / "docs" / "programs"
SERIAL = "--engine serial --threads 1 --no-progress"

QUICK = {"ring(4_000, 1)": "ring(300, 1)"}
ACCUMULATE = QUICK | {"batch_size=64": "batch_size=64, accumulate=2"}
KEPT = {  # what the critic was shown
    "fake = generator(torch.randn(len(real), 8, device=real.device))\n                    loss = softplus(-critic(fake))":
    "loss = softplus(-critic(fake))",
}  # fmt: skip
MISTAKES = {
    "gan": {
        "a fake of the loop before": (
            ACCUMULATE | KEPT, r"step 1: step.backward\(\) got a part of an earlier loss: detach"),
    },
    "weighted": {
        "weights of the classes": (
            {"1 / RARITY[data.tensors[1]]": "1 / RARITY"},
            "the WeightedRandomSampler has 3 weights for 2000 samples: give it one for each sample"),
        "a DistributedSampler as well": (
            {"WeightedRandomSampler(1 / RARITY[data.tensors[1]], len(data))":
             "torch.utils.data.DistributedSampler(data, run.size, run.rank)"},
            "the DataLoader has a DistributedSampler: leave it out"),
        "a sampler of another data set": (
            {"data = clouds(2_000, 1)": "data = clouds(10, 1)",
             "WeightedRandomSampler(1 / RARITY[data.tensors[1]], len(data))": "torch.utils.data.SubsetRandomSampler(range(5, 15))"},
            r"SubsetRandomSampler draws the index 1\d, and the data set has 10 samples: make it for this data set"),
        "a schedule of one epoch": (
            {"run.total_steps(train, flags.epochs)": "len(train)", "epochs=4": "epochs=2"},
            r"OneCycleLR is made for 63 steps, and this run has 126 steps in 2 epochs over all ranks: give it run.total_steps"),
        "a schedule that is not registered": (
            {"run.register(scheduler=scheduler)": "pass"}, r"write run.register\(scheduler=scheduler\)"),
        "a schedule made before prepare": (
            {"net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))":
             "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
             "        OneCycleLR(optimizer, 0.2, total_steps=252)\n"
             "        net, optimizer = run.prepare(net, optimizer)"},
            r"create it afterwards, from the optimizer that this returns"),
        "a schedule stepped once per epoch": (
            {"                scheduler.step()": "            scheduler.step()"},
            r"made for the run's steps, and was stepped 0 times in one of them: call scheduler.step\(\) once"),
        "a schedule stepped twice": (
            {"step.backward(loss)": "step.backward(loss)\n                    scheduler.step()"},
            r"was stepped 2 times in one of them: call scheduler.step\(\) once, after step.update\(\)"),
    },
    "buckets": {
        "sampler instead of batch_sampler": (
            {"batch_sampler=sampler": "sampler=sampler"},
            "Buckets draws something else than indices .* write batch_sampler= for one that draws lists"),
        "a shuffle that cannot be seeded": (
            {"random.shuffle(batches)": "random.SystemRandom().shuffle(batches)"}, "Buckets draws another order each time"),
        "no length": ({"def __len__": "def length"}, "Buckets has no length: give it __len__"),
        "lines left out at random": (
            {"for index in order:": "for index in [one for one in order if random.random() > 0.1]:", "epochs=3": "epochs=2"},
            r"Buckets draws \d+ samples in epoch 2, and \d+ in the first: draw as many in each"),
        "the model forgotten": ({"run.prepare(model, optimizer)": "run.prepare(optimizer)"}, "got Adam: give it models and"),
    },
    "contrast": {
        "keys with a gradient in the queue": (
            {"with torch.no_grad():": "if True:", "slow(view(batch))": "model(view(batch))"},
            r"got a part of an earlier loss: detach\(\)"),
        "the loss gathered": ({"run.gather(keys)": "run.gather(loss)"}, r"run.gather\(\) got a scalar: give it a tensor with"),
        "a head that is not prepared": (
            {"torch.optim.SGD(net.parameters()": "torch.optim.SGD([*net.parameters(), *nn.Linear(8, 8).parameters()]"},
            "an optimizer has parameters of a model that was not given: pass that model, too"),
        "register before prepare": (
            {"model, optimizer = run.prepare(net": "run.register(slow=AveragedModel(net))\n        model, optimizer = run.prepare(net"},
            r"run.register\(\) before run.prepare\(\)"),
        "a tensor registered": ({"queue=queue)": "queue=queue.keys)"}, r"run.register\(queue=...\) got a Tensor: it has no state"),
    },
    "distill": {
        "the teacher in the optimizer": (
            {"torch.optim.Adam(net.parameters()": "torch.optim.Adam([*net.parameters(), *teacher.parameters()]"},
            "an optimizer has parameters of a model that was not given"),
        "the teacher taught": ({"student(batch)": "teacher(batch)"}, "got a loss without a gradient: compute it from the model"),
        "the average trained": ({"student(batch)": "averaged(batch)"}, "0.weight got no gradient in this step: freeze it"),
    },
    "reinforce": {
        "a number unpacked": ({"for batch in step.batches()": "for (batch,) in step.batches()"}, r"run.steps\(NUMBER\) gives indices"),
        "one rollout with its graph for many steps": (
            {"            for step in run.steps(EPISODES):":
             "            played = episodes(policy, EPISODES)\n            for step in run.steps(EPISODES):",
             "episodes(policy, len(batch.indices))": "(part[batch.indices] for part in played)"},
            r"step 2: step.backward\(\) got a part of an earlier loss"),
        "a loss for each episode": (
            {"(chosen * (returns - returns.mean())).mean()": "chosen * (returns - returns.mean())"},
            r"got a tensor of shape \(64,\), not a scalar: take the mean"),
        "a range of episodes": ({"run.steps(EPISODES)": "run.steps(range(EPISODES))"}, "run.steps got range: give it tensors, a number"),
        "training recorded as an evaluation": ({"step.record(": "run.record("}, r"training metrics go to step.record\(\)"),
    },
    "records": {
        "the output instead of its loss": (
            {'model(**batch)["loss"]': "model(**batch)"}, r"step.backward\(\) got a dict, not a scalar: give it the loss in it"),
        "the last batch dropped": ({"shuffle=True": "shuffle=True, drop_last=True"}, "drop_last=True: leave it out"),
        "no items counted": (
            {'batch["labels"] >= 0': 'batch["labels"] > 1'}, r"step.backward\(count=...\) was 0 on all ranks"),
    },
    "huggingface": {
        "the output instead of its loss": (
            {"model(**batch).loss": "model(**batch)"}, "got a SequenceClassifierOutput, not a scalar: give it the loss in it"),
        "no labels": ({', "labels": labels}': "}"}, "got None, not a loss: a Hugging Face model computes one if the batch has"),
    },
    "semi": {
        "a name misspelt": (
            {'batch["unlabelled"]': 'batch["unlabeled"]'},
            r"step.batches\(\) has labelled, unlabelled, and not unlabeled: use the names given to run.steps\(\)"),
        "two loaders one after the other": (
            {'{"labelled": labelled, "unlabelled": unlabelled}': "labelled, unlabelled"},
            r"run.steps got DataLoader, DataLoader: several data sets go in a dictionary, run.steps\({"),
        "two loops of steps": (
            {'for step in run.steps({"labelled": labelled, "unlabelled": unlabelled})':
             "for step, _ in zip(run.steps(labelled), run.steps(unlabelled))"},
            r"called twice in one epoch: use one loop of steps per epoch, for several data sets run.steps\({"),
        "one name for both": ({'"unlabelled": unlabelled': '"labelled": unlabelled'}, "batch_size=112, --batch-size is 16"),
        "a batch that is no multiple": ({"7 * flags.batch_size": "100"}, "'unlabelled' has batch_size=100: give it a multiple of"),
        "an endless iterator": (
            {'"unlabelled": unlabelled': '"unlabelled": iter(unlabelled)'}, "'unlabelled' is a .*Iter: give it a DataLoader"),
    },
    "folds": {
        "one model for all folds": (
            {"    losses = []": "    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))\n    losses = []",
             "            model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))\n": ""},
            "this Linear was trained by an earlier run: create models and optimizers anew for each run"),
        "an evaluation after the end": (
            {'losses.append(run.evaluation["loss"])': "with run.evaluating(4):\n            run.record(loss=0.0)"},
            r"run.evaluating\(\) after the end of its training: move it into `with training.start\(flags\) as run:`"),
        "no with": (
            {"        with training.start(flags) as run:": "        run = training.start(flags)\n        if True:"},
            r"run.to_device of a training that was not started: write `with training.start\(flags\) as run:`"),
        "a run for all folds around those of each": (
            {"with training.start(flags) as run:": "with training.start(flags), training.start(flags) as run:"},
            r"training.start\(\) inside training.start\(\): end the first block before the next"),
    },
}  # fmt: skip
REPORTED = {
    "the average never updated": (
        "distill", {"averaged.update_parameters(net)": "pass"},
        "warning: averaged has averaged nothing: call averaged.update_parameters(model) after step.update()"),
    "another name recorded": (
        "distill", {"run.record(agreement=": "run.record(agreed="},
        "warning: metrics: agreement was never recorded: write run.record(agreement=...) in run.evaluating()"),
    "all folds in one directory": (
        "folds", {'flags.output_dir = output_dir and output_dir / f"fold-{fold}"': "pass"},
        "has trained into OUT before, and continues that run: another training, such as the next fold, needs an --output-dir"),
}  # fmt: skip


def run(monkeypatch, name: str, changed: dict[str, str], flags: str = "") -> int:
    """Run a program with other words in it, and return its exit code."""
    source = (PROGRAMS / f"{name}.py").read_text()
    for right, wrong in changed.items():
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *SERIAL.split(), *flags.split()])
    scope = {"__name__": name}
    exec(compile(source, f"{name}.py", "exec"), scope)
    return scope["main"]()


CASES = [
    pytest.param(name, case, marks=pytest.mark.skipif(
        name == "huggingface" and find_spec("transformers") is None, reason="huggingface.py needs transformers"))
    for name, cases in MISTAKES.items()
    for case in cases
]  # fmt: skip


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_mistake_ends_in_one_line_with_the_remedy(name, case, monkeypatch):
    changed, complaint = MISTAKES[name][case]
    with pytest.raises(UserError, match=complaint) as caught:
        run(monkeypatch, name, changed)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("case", REPORTED)
def test_what_may_be_meant_is_reported_once(case, monkeypatch, tmp_path, capsys):
    name, changed, line = REPORTED[case]
    assert run(monkeypatch, name, changed, f"--epochs 1 --output-dir {tmp_path}") == 0
    said = capsys.readouterr().out
    assert said.count(line.replace("OUT", str(tmp_path))) == (2 if name == "folds" else 1), said


def test_a_queue_that_has_grown_is_not_resumed(monkeypatch, tmp_path):
    """Its program forgets to cut it: the checkpoint holds more keys than the new one begins with."""
    grows = {"queue.keys])[:QUEUE]": "queue.keys])"}
    assert run(monkeypatch, "contrast", grows, f"--epochs 1 --output-dir {tmp_path}") == 0
    with pytest.raises(
        UserError, match=r"^the checkpoint does not match 'queue' \(size mismatch for keys: .* register the"
    ):
        run(monkeypatch, "contrast", grows, f"--epochs 2 --output-dir {tmp_path}")


RIGHT = [(name, {}) for name in ("contrast", "distill", "folds", "weighted")]
RIGHT += [("gan", ACCUMULATE), ("gan", QUICK | KEPT)]  # with one micro-batch, the critic's fake is that of this one


@pytest.mark.parametrize(("name", "changed"), RIGHT)
def test_a_program_that_is_right_ends_without_a_warning(name, changed, monkeypatch, capsys):
    assert run(monkeypatch, name, changed, "--epochs 1") == 0
    assert "warning" not in capsys.readouterr().out
