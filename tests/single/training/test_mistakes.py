"""Mistakes that people make: each ends in one line with the remedy, not in a traceback, a hang or wrong weights.

Those that need several ranks are in tests/parallel/test_mistakes.py.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from hvdtrain import training
from hvdtrain.engines.errors import UserError
from tests.single.training.small import X, Y, flags_for, network


class Endless(Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        return iter(range(len(X)))


class Open(Dataset):
    def __getitem__(self, index):
        return DATA[index]


class Mixing(DataLoader):
    def __iter__(self):
        return ((x.flip(0), y) for x, y in super().__iter__())


class Stateful:
    def state_dict(self):
        return {"function": print}

    def load_state_dict(self, state):
        pass


DATA = TensorDataset(X, Y)
FORM = dict(  # a program, with blanks for its mistakes
    before="", unprepared="", data="X, Y", in_epoch="", at_step="", before_loss="", loss="F.mse_loss(model(x), y)",
    backward="step.backward(loss)", in_batches="", update="step.update()", after_update="", after="", epochs="2",
    prepare="net, torch.optim.SGD(net.parameters(), lr=0.1)", metrics="None", prepared="", stop_at="None", loop="step.batches()",
)  # fmt: skip
PROGRAM = """
{before}
with training.start(flags, metrics={metrics}) as run:
    net = network()
    {unprepared}
    model, optimizer = run.prepare({prepare})
    {prepared}
    for _ in run.epochs({epochs}, stop_at={stop_at}):
        {in_epoch}
        for step in run.steps({data}):
            {at_step}
            for x, y in {loop}:
                {before_loss}
                loss = {loss}
                {backward}
                {in_batches}
            {update}
            {after_update}
        {after}
"""
EVALUATE = "with run.evaluating(len(X)): run.record(right=torch.ones(len(X)))"
MISTAKES = {
    "steps before prepare": (dict(unprepared="run.steps(X)"), r"run.steps\(\) before run.prepare\(\)"),
    "epochs before prepare": (dict(unprepared="next(run.epochs(1))"), r"run.epochs\(\) before run.prepare\(\)"),
    "data described twice": (dict(unprepared='run.describe_data("a", "b"); run.describe_data("a", "b")'), "was already called"),
    "no optimizer": (dict(prepare="net"), r"run.prepare\(\) got Sequential: give it models and optimizers"),
    "L-BFGS": (dict(prepare="net, torch.optim.LBFGS(net.parameters())"), "LBFGS computes the loss several times in a step"),
    "SparseAdam": (dict(prepare="net, torch.optim.SparseAdam(net.parameters())"), "SparseAdam needs sparse gradients"),
    "sparse gradients": (
        dict(prepare="nn.Sequential(nn.Embedding(4, 2, sparse=True)), torch.optim.SGD(net.parameters(), lr=0.1)"),
        "0 has sparse gradients, which are not reduced: leave sparse=True out"),
    "a parameter of two optimizers": (
        dict(prepare="net, *(torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))"), "0.weight is in two optimizers: give each"),
    "a metric without a direction": (dict(metrics='{"loss": "down"}'), "metrics: loss is 'down'"),
    "a metric whose name is taken": (dict(metrics='{"loss": "min", "step": "max"}'), "^step is a field of every record: give"),
    "steps without epochs": (dict(prepared="run.steps(X)"), r"run.steps\(\) outside of run.epochs\(\)"),
    "no steps": (dict(in_epoch="continue"), r"epoch 1 had no steps"),
    "two lengths of training": (dict(epochs="1, steps=2"), "a number of epochs, or steps"),
    "fewer epochs than none": (dict(epochs="-1"), "at least 0, not -1"),
    "no data": (dict(data=""), "run.steps got nothing"),
    "no batches": (dict(data="DataLoader(DATA, None)"), "batch_size=None: give it"),
    "batches within batches": (dict(before_loss="next(step.batches())"), r"step.batches\(\) inside step.batches\(\)"),
    "backward before the batches": (dict(at_step="step.backward(model(X).mean())"), r"step.backward\(\) outside of step.batches\(\)"),
    "update before the batches": (dict(at_step="step.update()"), r"step.update\(\) without gradients"),
    "backward twice": (
        dict(before="flags.accumulate = 2", in_batches="step.backward(F.mse_loss(model(x), y))"),
        r"4 backward passes in 2 micro-batches for one optimizer: add the losses up"),
    "a count in one micro-batch": (
        dict(before="flags.accumulate, counts = 2, iter(({}, {'count': 3}))", backward="step.backward(loss, **next(counts))"),
        r"step.backward\(count=...\) in one micro-batch and not in another"),
    "another optimizer": (
        dict(backward="step.backward(loss, torch.optim.SGD(network().parameters(), lr=0.1))"), "this optimizer did not come from run.prepare"),
    "an evaluation within another": (dict(after="with run.evaluating(5), run.evaluating(5): pass"), r"run.evaluating\(\) inside of run.eval"),
    "forgot backward": (dict(backward=""), "a micro-batch had no backward pass: write `for batch"),
    "loss.backward() instead": (dict(backward="loss.backward()"), "a micro-batch had no backward pass"),
    "forgot the update": (dict(update=""), "has gradients that were not applied: call step.update"),
    "update twice": (dict(after_update="step.update()"), r"step.update\(\) without gradients"),
    "update in the loop": (dict(in_batches="step.update()", update=""), r"step.update\(\) inside the loop over"),
    "optimizer.step() instead": (dict(update="optimizer.step()"), r"optimizer.step\(\) applies gradients that are not"),
    "optimizer.step() beside it": (dict(in_batches="optimizer.step()"), r"write step.update\(\) after the loop"),
    "zero_grad before the update": (dict(update="optimizer.zero_grad(); step.update()"), r"zero_grad\(\) would lose the gradients"),
    "zero_grad in each micro-batch": (dict(before="flags.accumulate = 2", before_loss="optimizer.zero_grad()"), "leave it out, gradients"),
    "batch outside of a step": (dict(before="", at_step="pass", after="step.batch"), r"step.batch outside of step.batches"),
    "steps in a list": (dict(data="X, Y", in_epoch="list(run.steps(X, Y))"), "step 1 has no gradients"),
    "steps twice at once": (dict(in_epoch="one = run.steps(X, Y)"), "called twice in one epoch: use one loop"),
    "an epoch that is left": (dict(after_update="break"), "epoch 1 was left after 0 of 40 samples"),
    "a batch loop that is left": (dict(before="flags.accumulate = 2", in_batches="break"), r"step.update\(\) inside the loop"),
    "no epochs": (dict(epochs="1.5"), "takes a whole number of at least 0, not 1.5"),
    "a loader with its own DistributedSampler": (
        dict(data="DataLoader(DATA, 8, sampler=torch.utils.data.DistributedSampler(DATA, 2, 0))"), "leave it out, the samples are"),
    "another batch size": (dict(data="DataLoader(DATA, 32)"), r"write DataLoader\(..., batch_size=flags.batch_size\)"),
    "drop_last": (dict(data="DataLoader(DATA, 8, drop_last=True)"), "an uneven last step is weighted instead"),
    "a sampler without a length": (dict(data="DataLoader(DATA, 8, sampler=Endless())"), "Endless has no length: give it __len__"),
    "a data set without a length": (dict(data="DataLoader(Open(), 8)"), "the DataLoader's Open has no length: give it __len__"),
    "a loader that does something in its iterator": (
        dict(data="Mixing(DATA, 8)"), "the DataLoader is a Mixing, whose own __iter__ is not called: use DataLoader, with its work"),
    "collate_fn returns None": (dict(data="DataLoader(DATA, 8, collate_fn=print)"), "collate_fn returned None: let it return"),
    "a Dataset in place of a loader": (dict(data="DATA"), "run.steps got TensorDataset: give it tensors"),
    "a list in place of a tensor": (dict(data="X.tolist(), Y.tolist()"), "run.steps got list, list: give it tensors"),
    "tensors of other lengths": (dict(data="X, Y[1:]"), "tensors of 40, 39 samples: give equal lengths"),
    "no samples": (dict(data="X[:0], Y[:0]"), "there are no samples"),
    "tensors elsewhere": (dict(data='X.to("meta"), Y'), r"a tensor on meta, and ranks are on cpu: use run.to_device"),
    "more samples in the next epoch": (dict(data="X[: 20 + 8 * run.state.epoch], Y[: 20 + 8 * run.state.epoch]"), "and 20 in the epoch before"),
    "a loss that is not a scalar": (dict(loss='(model(x) - y).square()'), "not a scalar: take the mean"),
    "a loss that is a number": (dict(backward="step.backward(loss.item())"), "got a float, not a scalar"),
    "a loss without a gradient": (dict(backward="step.backward(loss.detach())"), "without a gradient: compute it from the model"),
    "another model trained": (dict(prepared="model = network()"), "0.weight got no gradient in this step: freeze it"),
    "the optimizer of another model": (dict(prepare="net, torch.optim.SGD(network().parameters(), lr=0.1)"), "a model that was not given"),
    "a parameter added later": (
        dict(prepare="net, torch.optim.SGD(net[0].parameters(), lr=0.1)", prepared='optimizer.add_param_group({"params": net[3].parameters()})'),
        r"added to an optimizer after run.prepare\(\): create the optimizer with all"),
    "a layer unfrozen later": (
        dict(prepare="(net[0].requires_grad_(False), net)[1], torch.optim.SGD(net.parameters(), lr=0.1)",
             in_epoch="net[0].requires_grad_(run.state.epoch > 0)"),
        r"^0.weight was frozen at run.prepare\(\), so its gradients are not reduced: leave it unfrozen, with lr=0"),
    "prepare twice": (dict(prepared="run.prepare(net, optimizer)"), "was called twice: give it all models"),
    "a loader prepared": (dict(prepare="net, DataLoader(DATA, 8)"), "got Sequential, DataLoader: give it models and optimizers"),
    "a wrapped model": (dict(prepare="nn.DataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)"), "a DataParallel would reduce"),
    "a list registered": (dict(prepared="run.register(losses=[])"), r"run.register\(losses=...\) got a list: it has no state_dict"),
    "a function registered": (dict(prepared="run.register(it=Stateful())"), "holds a builtin_function_or_method, which a checkpoint"),
    "registered after an epoch": (dict(after="run.register(late=network())"), r"run.register\(\) once training has begun, where a"),
    "an unknown target": (dict(stop_at='{"acuracy": 0.9}'), r'acuracy has no direction: training.start\(flags, metrics='),
    "a target that is not recorded": (
        dict(metrics='{"accuracy": "max"}', stop_at='{"accuracy": 0.9}', after=EVALUATE), r"recorded right, and not accuracy: write run.record\(accuracy"),
    "record of training at the wrong place": (dict(after_update="step.record(a=1.0)"), r"step.record\(\) outside of step.batches"),
    "record of evaluations at the wrong place": (dict(after_update="run.record(a=1.0)"), r"run.record\(\) outside of run.evaluating"),
    "a name of an evaluation that is taken": (dict(after="run.record(step=1.0)"), "^step is a field of every record: give"),
    "a name that is taken": (dict(in_batches="step.record(samples=1.0)"), "samples is a field of every record"),
    "an evaluation that records nothing": (dict(after="with run.evaluating(len(X)): pass"), "recorded nothing: write run.record"),
    "a count in one batch of an evaluation": (
        dict(after="with run.evaluating(2): run.record(a=1.0, count=1); run.record(a=1.0)"),
        r"run.record\(count=...\) in one batch and not in another: give it in all, or in none"),
    "an evaluation of no samples": (dict(after="with run.evaluating(0): run.record(a=0.0)"), "no readable samples"),
    "an evaluation of tensors": (dict(after="with run.evaluating(X): pass"), "got a Tensor: give it a number of samples"),
    "other flags": (dict(before="import argparse; flags = argparse.Namespace(epochs=2)"), "takes what training.parser"),
}  # fmt: skip


def run(changed, *argv):
    """Run the program with other words in its blanks, and return its names."""
    scope = globals() | dict(flags=flags_for(*argv), F=F, nn=nn, DataLoader=DataLoader, training=training)
    exec(PROGRAM.format(**FORM | changed), scope)
    return scope


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_ends_in_one_line_with_the_remedy(case, tmp_path):
    changed, complaint = MISTAKES[case]
    with pytest.raises(UserError, match=complaint) as caught:
        run(changed, "--output-dir", str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


RIGHT = {  # what looks like a mistake, and is right
    "zero_grad before the step's batches": dict(at_step="optimizer.zero_grad()"),
    "zero_grad after the update": dict(after_update="optimizer.zero_grad(set_to_none=True)"),
    "a larger batch than the data": dict(before="flags.batch_size = 1000"),
    "the model as it was before prepare": dict(prepared="model = net"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_looks_like_a_mistake_is_right(case):
    scope = run(RIGHT[case])
    assert scope["run"].state.samples == 80
    assert any(not torch.equal(p, q) for p, q in zip(scope["net"].parameters(), network().parameters(), strict=True))
