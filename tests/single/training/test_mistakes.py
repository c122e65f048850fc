"""Mistakes that people make: each ends in one line with the remedy, not in a traceback, a hang or wrong weights.

Those that need several ranks are in tests/parallel/test_mistakes.py.
"""

import linecache
import re
import sys
from pathlib import Path
from types import CodeType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hvdtrain import training
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.program.source import tree_of
from tests.e2e.launchers import summary
from tests.single.training.small import X, Y, flags_for, network


class Open(Dataset):
    def __getitem__(self, index):
        return DATA[index]


class Mixing(DataLoader):
    def __iter__(self):
        return ((x.flip(0), y) for x, y in super().__iter__())


class TwoSteps(torch.optim.SGD):  # as public implementations of SAM are
    def first_step(self, zero_grad=False): ...

    def second_step(self, zero_grad=False): ...


class Stateful:
    def state_dict(self):
        return {"function": print}

    def load_state_dict(self, state):
        pass


def shares_of(pictures):
    return pictures.float().flatten(1).mean(1).sum().item()


DATA = TensorDataset(X, Y)
PIXELS = torch.zeros(40, 2, 2, dtype=torch.bool)
PIXELS[::16, 0, 0] = PIXELS[::32, 1, 1] = True
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
    model, optimizer, *_ = run.prepare({prepare})
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
TWO = dict(prepare="net, *(torch.optim.SGD(net[layer].parameters(), lr=0.1) for layer in (0, 3))")
AGAIN = "for x, y in step.batches(): step.backward(F.mse_loss(model(x), y))"
MISTAKES = {
    "steps before prepare": (dict(unprepared="run.steps(X)"), r"run.steps\(\) before run.prepare\(\)"),
    "epochs before prepare": (dict(unprepared="next(run.epochs(1))"), r"run.epochs\(\) before run.prepare\(\)"),
    "data described twice": (dict(unprepared='run.describe_data("a", "b"); run.describe_data("a", "b")'), "was already called"),
    "data described by all of it": (dict(unprepared='run.describe_data("a", "b", c="x" * 70_000)'), "longer than .* give it a checksum"),
    "data of another name": (dict(unprepared='run.describe_data("a", "b", dataset="c")'), "the name of the data is its first argument"),
    "data without a name": (dict(unprepared='run.describe_data(None, "b")'), "got None as the name: give it one line of text"),
    "tensors made elsewhere": (
        dict(before="torch.set_default_device('meta')"), r"^torch.set_default_device\('meta'\) was called: leave it out"),
    "tensors made elsewhere, later": (dict(in_epoch="torch.set_default_device('meta')"), "^torch.set_default_device"),
    "no optimizer": (dict(prepare="net"), r"run.prepare\(\) got Sequential, no optimizer: give it models and optimizers"),
    "no model": (dict(prepare="torch.optim.SGD([torch.zeros(1)])"), r"run.prepare\(\) got SGD, no model: give it models and opt"),
    "L-BFGS": (dict(prepare="net, torch.optim.LBFGS(net.parameters())"), "LBFGS computes the loss several times in a step"),
    "a layer without a shape": (
        dict(prepare="nn.Sequential(nn.LazyLinear(1)), torch.optim.SGD(net.parameters(), lr=0.1)"),
        r"^run.prepare\(\): a layer has no shape yet: call the model once before$"),
    "an optimizer that is called with the loss": (
        dict(before="class WithLoss(torch.optim.SGD):\n    def step(self, loss): pass", prepare="net, WithLoss(net.parameters(), lr=0.1)"),
        r"WithLoss.step\(\) takes arguments that step.update\(\) does not give: give them defaults"),
    "a sparse buffer": (dict(unprepared="net.register_buffer('graph', torch.eye(3).to_sparse())"),
        r"^graph is a sparse tensor, which a checkpoint cannot store: register the buffer with persistent=False"),
    "what DDP wraps": (
        dict(loss="F.mse_loss(model.module(x), y)"), r"^run.prepare\(\) returns the model itself: leave out .module"),
    "the epoch of a sampler": (
        dict(in_epoch="DataLoader(X).sampler.set_epoch(1)"), r"^sampler.set_epoch\(\): leave it out: each epoch has another order"),
    "SAM": (dict(prepare="net, TwoSteps(net.parameters(), lr=0.1)"), r"first_step\(\) and second_step\(\) are not called: let its step"),
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
    "left before the first step": (dict(in_epoch="break"), r"^epoch 1 had no steps"),
    "two lengths of training": (dict(epochs="1, steps=2"), "a number of epochs, or steps"),
    "fewer epochs than none": (dict(epochs="-1"), "at least 0, not -1"),
    "no data": (dict(data=""), "run.steps got nothing"),
    "no batches": (dict(data="DataLoader(DATA, None)"), "batch_size=None: give it"),
    "batches within batches": (dict(before_loss="next(step.batches())"), r"step.batches\(\) inside step.batches\(\)"),
    "backward before the batches": (dict(at_step="step.backward(model(X).mean())"), r"step.backward\(\) outside of step.batches\(\)"),
    "update before the batches": (dict(at_step="step.update()"), r"step.update\(\) without gradients"),
    "backward twice": (dict(before="flags.accumulate = 2", in_batches="step.backward(F.mse_loss(model(x), y))"),
        r"4 backward passes in 2 micro-batches for one optimizer: add the losses up"),
    "a count in one micro-batch": (
        dict(before="flags.accumulate, counts = 2, iter(({}, {'count': 3}))", backward="step.backward(loss, **next(counts))"),
        r"step.backward\(count=...\) in one micro-batch and not in another"),
    "another optimizer": (
        dict(backward="step.backward(loss, torch.optim.SGD(network().parameters(), lr=0.1))"), "this optimizer did not come from run.prepare"),
    "an evaluation within another": (dict(after="with run.evaluating(5), run.evaluating(5): pass"), r"run.evaluating\(\) inside of run.eval"),
    "forgot backward": (dict(backward=""), "no backward pass: write `for batch.*NaN: --max-skipped N"),
    "loss.backward() instead": (dict(backward="loss.backward()"), "a micro-batch had no backward pass"),
    "forgot the update": (dict(update=""), "has gradients that were not applied: call step.update"),
    "a GAN's first loss for both optimizers": (
        dict(TWO, backward="step.backward(loss)", update="step.update(optimizer)", after_update=AGAIN),
        r"before the last gradients were applied: name the optimizer, step.backward\(loss, optimizer\), or update all"),
    "a GAN's update of one of both": (
        dict(TWO, backward="step.backward(loss)", update="step.update(optimizer)"), "were not applied: name the optimizer, step.backward"),
    "update twice": (dict(after_update="step.update()"), r"step.update\(\) without gradients"),
    "update in the loop": (dict(in_batches="step.update()", update=""), r"step.update\(\) inside the loop over"),
    "optimizer.step() instead": (dict(update="optimizer.step()"), r"optimizer.step\(\) applies gradients that are not"),
    "optimizer.step() beside it": (dict(in_batches="optimizer.step()"), r"write step.update\(\) after the loop"),
    "zero_grad before the update": (dict(update="optimizer.zero_grad(); step.update()"), r"zero_grad\(\) would lose the gradients"),
    "zero_grad in each micro-batch": (dict(before="flags.accumulate = 2", before_loss="optimizer.zero_grad()"), "leave it out, gradients"),
    "the model's zero_grad in each micro-batch": (dict(before="flags.accumulate = 2", before_loss="model.zero_grad()"), "were cleared: leave zero_grad"),
    "a GradScaler of its own": (
        dict(before="scaler = torch.amp.GradScaler('cpu')", backward="step.backward(scaler.scale(loss))"),
        r"step.backward\(\) got a loss times 65,536, as of a GradScaler: leave the scaler out, --amp fp16 has its own"),
    "a loss divided by --accumulate": (
        dict(before="flags.accumulate = 2", backward="step.backward(loss / flags.accumulate)"),
        r"got a loss divided by 2, the number of micro-batches of a step: leave that out, gradients are means over all samples"),
    "a loss divided by --accumulate before": (
        dict(before="flags.accumulate = accumulation_steps = 2", loss="F.mse_loss(model(x), y) * (1 / accumulation_steps)"),
        "got a loss divided by 2, the number of micro-batches"),
    "clipping in the loop": (
        dict(before="flags.accumulate = 2", in_batches="nn.utils.clip_grad_norm_(model.parameters(), 0.01)"),
        r"gradients were changed in the loop over step.batches\(\), before they are those of the global batch"),
    "clipping of scaled gradients": (
        dict(before="flags.amp = 'fp16'", in_batches="nn.utils.clip_grad_norm_(model.parameters(), 0.01)"),
        r"gradients were changed in the loop over step.batches\(\), before they are those of the global batch"),
    "a schedule in each micro-batch": (
        dict(before="flags.accumulate = 2", in_batches="scheduler.step()",
             prepared="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 9); run.register(scheduler=scheduler)"),
        r"^scheduler: StepLR was stepped 2 times in a step: call scheduler.step\(\) once, after the loop over step.batches"),
    "gradients set to 0 in each micro-batch": (
        dict(before="flags.accumulate = 2", before_loss="model.zero_grad(set_to_none=False)"), "were cleared: leave zero_grad"),
    "a norm of 0": (dict(update="step.update(clip_norm=0)"), r"clip_norm=0\): give it a number above 0"),
    "a norm that is no number": (dict(update="step.update(clip_norm=float('nan'))"), "clip_norm=nan"),
    "fewer samples than none": (dict(data="-3"), "there are no samples: give"),
    "batch outside of a step": (dict(before="", at_step="pass", after="step.batch"), r"step.batch outside of step.batches"),
    "steps in a list": (dict(data="X, Y", in_epoch="list(run.steps(X, Y))"), "step 1 has no gradients"),
    "another optimizer for a second stage": (
        dict(in_epoch="if step: optimizer = torch.optim.Adam(net.parameters())", prepared="step = None"),
        r"^a Adam was made in the loop over epochs, which no step applies: give it to run.prepare\(\), before the loop, or set"),
    "another schedule for a second stage": (
        dict(in_epoch="if step: stage = torch.optim.lr_scheduler.StepLR(optimizer, 2)", prepared="step = None"),
        "^a StepLR was made in the loop over epochs, which no checkpoint has: make it before the loop, as a part of a Seq"),
    "steps twice at once": (dict(in_epoch="one = run.steps(X, Y)"), "called twice in one epoch: give it both"),
    "an epoch that is left": (dict(after_update="break"), "epoch 1 was left after 0 of 40 samples"),
    "a number of each sample": (dict(at_step="step.per_sample(lambda batch: batch[0])"), r"step.per_sample\(\) got a tensor of shape \(8, 3\)"),
    "a batch loop that is left": (
        dict(before="flags.accumulate = 2", in_batches="break"), r"^step 1: the loop over step.batches\(\) was left, as by `break`: let"),
    "a batch loop of one that is left": (dict(in_batches="break", update=""), r"^step 1: .* left, as by `break`: .*run.end_epoch\(\).*; also of a loss that is NaN: --max-skipped N leaves"),
    "a batch loop that is left and begun again": (
        dict(in_batches="break", update="next(step.batches())"), r"^step 1: the loop over step.batches\(\) was left"),
    "one data set that begins anew": (dict(data="X, Y, restart=True"), r"restart=True\) is for several data sets: leave it out"),
    "no epochs": (dict(epochs="1.5"), "takes a whole number of at least 0, not 1.5"),
    "a loader with its own DistributedSampler": (
        dict(data="DataLoader(DATA, 8, sampler=torch.utils.data.DistributedSampler(DATA, 2, 0))"), "leave it out, the samples are"),
    "another batch size": (dict(data="DataLoader(DATA, 32)"), r"write DataLoader\(..., batch_size=flags.batch_size\)"),
    "drop_last of a few samples": (dict(data="DataLoader(DATA, 8, sampler=range(5), drop_last=True)"), "drop_last=True leaves no step: there are fewer samples than the 8 of one"),
    "a data set without a length": (dict(data="DataLoader(Open(), 8)"), "the DataLoader's Open has no length: give it __len__"),
    "a loader that does something in its iterator": (
        dict(data="Mixing(DATA, 8)"), "the DataLoader is a Mixing, whose own __iter__ is not called: use DataLoader, with its work"),
    "collate_fn returns None": (dict(data="DataLoader(DATA, 8, collate_fn=print)"), "collate_fn returned None: let it return"),
    "a Dataset in place of a loader": (dict(data="DATA"), "run.steps got TensorDataset: give it tensors"),
    "data sets of unlike batches": (dict(data='{"a": DataLoader(DATA, 8), "b": DataLoader(DATA, 12)}'), "'b' has batch_size=12: give it a multiple of"),
    "whole batches beside others": (dict(data='{"a": DataLoader(DATA, 8), "b": DataLoader(DATA, batch_sampler=[[0, 1]])}'), "'b' has no batch_size, and goes with other data"),
    "a list beside a loader": (dict(data='{"a": DataLoader(DATA, 8), "b": [1]}'), "'b' is a list: give it a DataLoader, or tensors"),
    "tensors of unlike lengths beside a loader": (dict(data='{"a": DataLoader(DATA, 8), "b": (X, Y[1:])}'), "tensors of 40, 39 samples: give"),
    "nothing beside a loader": (dict(data='{"a": DataLoader(DATA, 8), "b": (X[:0],)}'), "'b' has no samples"),
    "a list in place of a tensor": (dict(data="X.tolist(), Y.tolist()"), "run.steps got list, list: give it tensors"),
    "tensors of other lengths": (dict(data="X, Y[1:]"), "tensors of 40, 39 samples: give equal lengths"),
    "no samples": (dict(data="X[:0], Y[:0]"), "there are no samples"),
    "tensors elsewhere": (dict(data='X.to("meta"), Y'), r"a tensor on meta, and ranks are on cpu: use run.to_device"),
    "more samples in the next epoch": (dict(data="X[: 20 + 8 * run.state.epoch], Y[: 20 + 8 * run.state.epoch]"), "and 20 in the epoch before: if the data of the epochs differ, write run.steps"),
    "a loss that is not a scalar": (dict(loss='(model(x) - y).square()'), "not a scalar: take the mean"),
    "no loss": (dict(backward="step.backward(None)"), "got None, not a loss: a Hugging Face model computes one if the batch has labels"),
    "an output instead of its loss": (dict(backward="step.backward(SimpleNamespace(loss=loss))"), "a SimpleNamespace, not a scalar: give it the loss in it"),
    "a loss that is a number": (dict(backward="step.backward(loss.item())"), "got a float, not a scalar"),
    "a loss without a gradient": (dict(backward="step.backward(loss.detach())"), "without a gradient: compute it from the model"),
    "another model trained": (dict(prepared="model = network()"), "0.weight got no gradient in this step: freeze it"),
    "a layer that was replaced": (
        dict(unprepared="o = torch.optim.SGD(net.parameters(), lr=0.1); net[0] = nn.Linear(3, 1)", prepare="net, o"),
        "if the model was changed since, as 0.weight is in no group, make the optimizer after that"),
    "the optimizer of another model": (dict(prepare="net, torch.optim.SGD(network().parameters(), lr=0.1)"), "a model that was not given"),
    "a parameter added later": (
        dict(prepare="net, torch.optim.SGD(net[0].parameters(), lr=0.1)", prepared='optimizer.add_param_group({"params": net[3].parameters()})'),
        r"added to an optimizer after run.prepare\(\): create the optimizer with all"),
    "a parameter taken out later": (
        dict(in_epoch="optimizer.param_groups[0]['params'] = [*net[3].parameters()] if run.state.epoch else [*net.parameters()]"),
        r"^0.weight was taken out of an optimizer after run.prepare\(\): leave it there, and freeze it"),
    "prepare twice": (dict(prepared="run.prepare(net, optimizer)"), "was called twice: give it all models"),
    "a loader prepared": (dict(prepare="net, DataLoader(DATA, 8)"), "got Sequential, DataLoader: give it models and optimizers"),
    "a wrapped model": (dict(prepare="nn.DataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)"), "a DataParallel would reduce"),
    "a list registered": (dict(prepared="run.register(losses=[])"), r"run.register\(losses=...\) got a list: it has no state_dict"),
    "a function registered": (dict(prepared="run.register(it=Stateful())"), r"holds a builtin_function_or_method at \['function'\], which a checkpoint"),
    "a scheduler in another one": (  # at the start
        dict(before="class Gradual(torch.optim.lr_scheduler.StepLR):\n    def __init__(self, optimizer, after):\n"
             "        super().__init__(optimizer, 9)\n        self.after = after",
             prepared="run.register(it=Gradual(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 9)))", in_epoch="1 / 0"),
        r"^run.register\(it=...\): its state_dict holds a StepLR at \['after'\], which a checkpoint cannot store: leave it out"),
    "an optimizer of two": (
        dict(before="class Both(torch.optim.SGD):\n    def state_dict(self): return {'first': {}}",
             prepare="net, Both(net.parameters(), lr=0.1)", in_epoch="1 / 0"),
        "^the state_dict of Both has no 'state' and 'param_groups', as torch's: give run.prepare"),
    "an optimizer with slow weights of its own": (
        dict(before="class Slow(torch.optim.SGD):\n    def state_dict(self): return super().state_dict() | {'slow': {}}",
             prepare="net, Slow(net.parameters(), lr=0.1)", in_epoch="1 / 0"),
        "^the state_dict of Slow has 'slow' beside 'state' and 'param_groups', which is not restored: keep that in its state"),
    "an optimizer with the groups of another": (
        dict(before="class Around(torch.optim.Optimizer):\n    def __init__(self, inner): self.inner, self.state = inner, inner.state\n"
             "    param_groups = property(lambda self: self.inner.param_groups)\n    def step(self): self.inner.step()",
             prepare="net, Around(torch.optim.SGD(net.parameters(), lr=0.1))", in_epoch="1 / 0"),
        "^param_groups of Around is a property, which no state is loaded into: make it an attribute, self.param_groups = "),
    "an optimizer with a function in its groups": (
        dict(prepare="net, torch.optim.SGD([{'params': net.parameters(), 'rate_of': print}], lr=0.1)", in_epoch="1 / 0"),
        r"^the state of SGD holds a builtin_function_or_method at .*, which a checkpoint cannot store: keep to numbers"),
    "registered after an epoch": (dict(after="run.register(late=network())"), r"run.register\(\) once training has begun, where a"),
    "registered at an epoch's head": (dict(in_epoch="run.register(late=network())", epochs="1"), r"run.register\(\) once training has begun"),
    "an unknown target": (dict(stop_at='{"acuracy": 0.9}'), r'acuracy has no direction: training.start\(flags, metrics='),
    "a target that is not recorded": (
        dict(metrics='{"accuracy": "max"}', stop_at='{"accuracy": 0.9}', after=EVALUATE), r"recorded right, and not accuracy: write run.record\(accuracy"),
    "record of training at the wrong place": (dict(after_update="step.record(a=1.0)"), r"step.record\(\) outside of step.batches"),
    "record of evaluations at the wrong place": (dict(after_update="run.record(a=1.0)"), r"run.record\(\) outside of run.evaluating"),
    "a name of an evaluation that is taken": (dict(after="run.record(step=1.0)"), "^step is a field of every record: give"),
    "a name that is taken": (dict(in_batches="step.record(samples=1.0)"), "samples is a field of every record"),
    "an evaluation of an empty data set": (
        dict(after="with run.evaluating(DataLoader(TensorDataset(X[:0]), 4)) as mine: [*mine]"),
        "the test set has no samples"),
    "an evaluation that records nothing": (dict(after="with run.evaluating(len(X)): pass"), "recorded nothing: write run.record"),
    "a count in one batch of an evaluation": (
        dict(after="with run.evaluating(2): run.record(a=1.0, count=1); run.record(a=1.0)"),
        r"run.record\(count=...\) in one batch and not in another: give it in all, or in none"),
    "the best of no evaluation": (dict(loop="step.batches()", after="pass", prepared="run.load_best()"), r"^run.load_best\(\): no epoch was evaluated: write"),
    "the end of an epoch outside of its steps": (dict(in_epoch="run.end_epoch()"), r"^run.end_epoch\(\) outside of a step: call it in the loop"),
    "the mean of a batch": (
        dict(after="with run.evaluating(DataLoader(DATA, 8)) as mine:\n            for x, y in mine: run.record(right=(model(x) > y).float().mean().item())"),
        r"^run.record\(right=...\) got a mean, and parts may have unequal numbers: give a value for each sample .* or their sum"),
    "a sum divided by the number of samples": (
        dict(after="with run.evaluating(len(X)) as mine: run.record(loss=(model(X[mine]) - Y[mine]).square().sum() / len(X))"),
        r"^run.record\(loss=...\) got a mean"),
    "the F1 of a batch": (
        dict(after="with run.evaluating(len(X)): run.record(score=(2 * (Y > 0).sum() / (len(Y) + (Y > 0).sum())).item())"),
        r"^run.record\(score=...\) got a quotient of this batch, and batches do not add up: give the sums, with count=; F1 and "
        r"such need all samples: run.gather\(\) after the loop, then record it"),
    "the F1 of a batch, of shares": (
        dict(after="with run.evaluating(len(X)): r = (Y > 0).sum() / (Y < 9).sum(); run.record(score=r * r / (r + r))"),
        r"^run.record\(score=...\) got a quotient of this batch"),
    "a share of all after the batches": (
        dict(after="right = 0\n        with run.evaluating(DataLoader(DATA, 8)) as mine:\n            for x, y in mine: right += 1\n"
             "            run.record(right=right / len(DATA))"), r"^run.record\(right=...\) got a mean"),
    "the average of the means of batches": (
        dict(before="losses = []", after="with run.evaluating(DataLoader(DATA, 8)) as mine:\n            for x, y in mine: "
             "losses.append(F.mse_loss(model(x), y).item())\n            run.record(loss=sum(losses[-5:]) / 5)"),
        r"^run.record\(loss=...\) got a mean"),
    "a percentage in place": (
        dict(after="with run.evaluating(len(X)): run.record(right=(Y > 0).float().sum(0).mul_(100.0 / len(X)))"),
        r"^run.record\(right=...\) got a mean"),
    "a percentage of Python": (
        dict(after="with run.evaluating(len(X)): run.record(accuracy=100.0 * 19 / len(X))"), r"^run.record\(accuracy=...\) got a mean"),
    "the average of decibels of batches": (
        dict(before="losses = []", after="with run.evaluating(DataLoader(DATA, 8)) as mine:\n            for x, y in mine: "
             "losses.append((-10 * F.mse_loss(model(x), y).log10()).item())\n            run.record(psnr=sum(losses[-5:]) / 5)"),
        r"^run.record\(psnr=...\) got a mean"),
    "an evaluation that loops over its own loader": (
        dict(after="with run.evaluating(DataLoader(DATA, 8)) as mine:\n            for x, y in DataLoader(DATA, 8): run.record(right=y[:, 0])"),
        r"got 40 values for 0 samples: loop over what `with run.evaluating\(test\) as mine:` gives, `for x, y in mine:`$"),
    "batches out of steps": (dict(in_epoch="for x, y in run.steps(X, Y): pass"),
        "^a step is no batch: in `for step in run.steps"),
    "a list of metrics": (dict(metrics="['loss']"), r"^metrics=\['loss'\]: give it names with directions, such as {"),
    "a model made anew after its optimizer": (
        dict(prepare="network(), torch.optim.SGD(net.parameters(), lr=0.1)"),
        r"^run.prepare\(\): an optimizer has parameters of a model that was not given, and no others: make it after the model, or its copy$"),
    "a mean divided by the number of samples, and multiplied again": (dict(
        after="with run.evaluating(len(X)): run.record(l=F.mse_loss(model(X), Y) / len(X) * len(X))"), r"\(l=...\) got a mean"),
    "the root of a mean": (
        dict(after="with run.evaluating(len(X)): run.record(error=F.mse_loss(model(X), Y).sqrt())"), r"^run.record\(error=...\) got a mean"),
    "the logarithm of a mean": (
        dict(after="with run.evaluating(len(X)): run.record(psnr=-10 * F.mse_loss(model(X), Y).log10())"), r"^run.record\(psnr=...\) got a mean"),
    "a mean in percent": (
        dict(after="with run.evaluating(len(X)): run.record(right=100 * (Y > 0).float().mean())"), r"^run.record\(right=...\) got a mean"),
    "the overlap of a batch in percent": (
        dict(after="with run.evaluating(len(X)): run.record(iou=100 * (Y > 0).sum() / (Y > -1).sum())"), r"^run.record\(iou=...\) got a quotient"),
    "the logarithm of a mean, in Python": (
        dict(before="import math", after="with run.evaluating(len(X)): run.record(psnr=10 * math.log10(1 / F.mse_loss(model(X), Y).item()))"),
        r"^run.record\(psnr=...\) got a mean"),
    "the perplexity of a batch, of Python": (
        dict(after="with run.evaluating(len(X)): run.record(perplexity=1.234)"), r"^run.record\(perplexity=...\) got a quotient"),
    "the F1 of a batch times its samples": (
        dict(after="with run.evaluating(len(X)): run.record(score=2 * (Y > 0).sum() / (len(Y) + (Y > 0).sum()) * len(X))"),
        r"^run.record\(score=...\) got a quotient of this batch"),
    "the mean loss of a part": (
        dict(after="with run.evaluating(len(X)) as mine: run.record(loss=F.mse_loss(model(X[mine]), Y[mine]), count=2)"), r"^run.record\(loss=...\) got a mean"),
    "the accuracy of another library": (
        dict(after="with run.evaluating(len(X)): run.record(right=(Y > 0).numpy().mean().item())"), r"^run.record\(right=...\) got a mean"),
    "a mean by numpy": (
        dict(after="with run.evaluating(len(X)): run.record(error=Y.square().sqrt().numpy().mean())"),
        r"^run.record\(error=...\) got a mean, and parts may have unequal numbers: give a value for each sample"),
    "a mean of a list of losses": (
        dict(before="import statistics",
             after="with run.evaluating(len(X)): e = statistics.fmean(one.abs().item() for one in Y); run.record(error=e)"),
        r"^run.record\(error=...\) got a mean"),
    "a mean by numpy in percent": (
        dict(before="import numpy as np", after="with run.evaluating(len(X)): run.record(right=100 * np.mean(Y.abs().tolist()))"),
        r"^run.record\(right=...\) got a mean"),
    "a sum of shares of the samples": (
        dict(after="with run.evaluating(len(X)): run.record(right=((Y[:, 0] > 0).double() / len(Y)).sum().item())"),
        r"^run.record\(right=...\) got a mean"),
    "no number": (dict(after="run.record(best='a')"), r"^run.record\(best=...\) got a str: give it a real number, or a tensor"),
    "a count of correct ones": (
        dict(in_batches="step.record(correct=(y > 0).sum() * 0 + 7)"),
        r"^step.record\(correct=7\) got a count of 8 samples, and takes a mean: give it a value for each sample, such as"),
    "no number for a step": (dict(in_batches="step.record(best=None)"), r"^step.record\(best=...\) got a NoneType: give it a real"),
    "a complex number": (dict(after="with run.evaluating(8): run.record(wave=torch.ones(8) * 1j)"), r"^run.record\(wave=...\) got a Tensor: give it a real"),
    "numbers below a mask": (dict(after="with run.evaluating(8): run.record(a=__import__('numpy').ma.masked)"), "got a MaskedConstant: give it a real"),
    "a layer replaced": (
        dict(after_update="net[3] = nn.Linear(8, 1)"), r"^the model has lost 3.weight, which run.prepare\(\) was given: replace layers before"),
    "a frozen layer replaced": (
        dict(prepare="(net[0].requires_grad_(False), net)[1], torch.optim.SGD(net.parameters(), lr=0.1)", after_update="net[0] = nn.Linear(3, 8).requires_grad_(False)"),
        "^the model has lost 0.weight"),
    "a rate of an optimizer without one": (
        dict(before="class Plain(torch.optim.Optimizer):\n    def step(self): pass", prepare="net, Plain(net.parameters(), {})", at_step="step.lr = 1.0"),
        "^step.lr: Plain has no learning rate: leave it out$"),
    "an evaluation of no samples": (dict(after="with run.evaluating(0): run.record(a=0.0)"), r"no readable samples: give run.evaluating\(\) some"),
    "an evaluation of tensors": (dict(after="with run.evaluating(X): pass"), "got a Tensor: give it a number of samples"),
    "other flags": (dict(before="import argparse; flags = argparse.Namespace(epochs=2)"), "takes what training.parser"),
}  # fmt: skip
PROGRAMS = Path(__file__).resolve().parents[3] / "docs" / "programs"
SERIAL = "--engine serial --threads 1 --no-progress"
FAKE = {  # what the critic was shown, with two micro-batches
    "batch_size=64": "batch_size=64, accumulate=2",
    "fake = generator(torch.randn(len(real), 8, device=real.device))\n                    loss = softplus(-critic(fake))":
    "loss = softplus(-critic(fake))",
}  # fmt: skip
IN_PROGRAMS = {  # of docs/programs: by program, what stands there and what somebody writes instead
    "gan": {
        "a fake of the loop before": (
            FAKE, "step 1: a model got an output of the loop before, which is that of its last micro-batch: compute it again"),
        "a detached fake of the loop before": (
            FAKE | {"softplus(-critic(fake))": "softplus(-critic(fake.detach())) + 0 * generator(torch.randn(1, 8)).sum()"},
            "step 1: a model got an output of the loop before"),
    },
    "weighted": {
        "weights of the classes": ({"1 / RARITY[data.tensors[1]]": "1 / RARITY"},
            "the WeightedRandomSampler has 3 weights for 2000 samples: give it one for each sample"),
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
        "a schedule stepped once per epoch": ({"                scheduler.step()": "            scheduler.step()"},
            r"made for the run's steps, and was stepped 0 times in one of them: call scheduler.step\(\) once"),
        "a schedule stepped twice": (
            {"step.backward(loss)": "step.backward(loss)\n                    scheduler.step()"},
            r"was stepped 2 times in one of them: call scheduler.step\(\) once, after step.update\(\)"),
    },
    "buckets": {
        "sampler instead of batch_sampler": ({"batch_sampler=sampler": "sampler=sampler"},
            "Buckets draws something else than indices .* write batch_sampler= for one that draws lists"),
        "a shuffle that cannot be seeded": (
            {"random.shuffle(batches)": "random.SystemRandom().shuffle(batches)"}, "Buckets draws another order each time"),
        "a list that is shuffled in place": (
            {"random.shuffle(batches)": "random.shuffle(self.lengths)"}, "and keep nothing for the next draw"),
        "lines left out at random": (
            {"for index in order:": "for index in [one for one in order if random.random() > 0.1]:", "epochs=3": "epochs=2"},
            r"Buckets draws \d+ samples in epoch 2, and \d+ in the first: draw as many in each"),
    },
    "contrast": {
        "the loss gathered": ({"run.gather(keys)": "run.gather(loss)"}, r"run.gather\(\) got a scalar: give it a tensor with"),
    },
    "reinforce": {
        "a number unpacked": ({"for batch in step.batches()": "for (batch,) in step.batches()"}, r"run.steps\(NUMBER\) gives indices"),
        "one rollout with its graph for many steps": (
            {"            for step in run.steps(EPISODES):":
             "            played = episodes(policy, EPISODES)\n            for step in run.steps(EPISODES):",
             "episodes(policy, len(batch.indices))": "(part[batch.indices] for part in played)"},
            r"step 2: step.backward\(\) got a part of an earlier loss"),
    },
    "records": {
        "the output instead of its loss": (
            {'model(**batch)["loss"]': "model(**batch)"}, r"step.backward\(\) got a dict, not a scalar: give it the loss in it"),
        "a negative count": (
            {'batch["labels"] >= 0': 'batch["labels"] - 1'}, r"step 1: step.backward\(count=...\) got -\d+: give it 0 or more"),
        "a count that is no number": (
            {'batch["labels"] >= 0': 'batch["labels"] / 0'}, r"step 1: step.backward\(count=...\) got nan: give it 0 or more"),
        "no items counted": (
            {'batch["labels"] >= 0': 'batch["labels"] > 1'}, r"step.backward\(count=...\) was 0 or less over all ranks"),
    },
    "semi": {
        "a name misspelt": ({'batch["unlabelled"]': 'batch["unlabeled"]'},
            r"step.batches\(\) has labelled, unlabelled, and not unlabeled: use the names given to run.steps\(\)"),
        "two loaders one after the other": (
            {'{"labelled": labelled, "unlabelled": unlabelled}': "labelled, unlabelled"},
            r"run.steps got DataLoader, DataLoader: several data sets go in a dictionary, run.steps\({"),
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
    "the average never updated": ("distill", {"averaged.update_parameters(net)": "pass"},
        "warning: averaged has averaged nothing: call averaged.update_parameters(model) after step.update()"),
    "another name recorded": ("distill", {"run.record(agreement=": "run.record(agreed="},
        "warning: metrics: agreement was never recorded: write run.record(agreement=...) in run.evaluating()"),
    "epochs of the program's own": ("distill", {"run.epochs(flags.epochs)": "run.epochs(2)"},
        "warning: --epochs 1 has no effect, the program trains 2 epochs: write run.epochs(flags.epochs)"),
    "all folds in one directory": (
        "folds", {'flags.output_dir = output_dir and output_dir / f"fold-{fold}"': "pass"},
        "has trained into OUT before, and continues that run: another training, such as the next fold, needs an --output-dir"),
}  # fmt: skip


def run_program(monkeypatch, name: str, changed: dict[str, str], flags: str = "") -> int:
    """Run a program with other words in it, and return its exit code."""
    source = (PROGRAMS / f"{name}.py").read_text()
    for right, wrong in changed.items():
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *SERIAL.split(), *flags.split()])
    scope = {"__name__": name}
    exec(with_its_source(source, f"{name}.py"), scope)
    return scope["main"]()


def with_its_source(source: str, file: str) -> CodeType:
    """Compile a program that is in no file, whose source Python's tracebacks would show, too."""
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # as of a notebook
    tree_of.cache_clear()
    return compile(source, file, "exec")


def run(changed, *argv):
    """Run the program with other words in its blanks, and return its names."""
    names = dict(
        F=F,
        nn=nn,
        DataLoader=DataLoader,
        TensorDataset=TensorDataset,
        training=training,
        SimpleNamespace=SimpleNamespace,
    )
    scope = globals() | names | dict(flags=flags_for(*argv))
    source = PROGRAM.format(**FORM | changed)
    exec(with_its_source(source, "<program>"), scope)
    return scope


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    """As in a program that has compiled nothing, whatever ran before in this process."""
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        monkeypatch.setattr(dynamo, "counters", type(dynamo.counters)(dynamo.counters.default_factory))


CASES = [("", case) for case in MISTAKES] + [(name, case) for name, cases in IN_PROGRAMS.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_mistake_ends_in_one_line_with_the_remedy(name, case, tmp_path, monkeypatch, request):
    request.addfinalizer(lambda: torch.set_default_device(None))
    changed, complaint = IN_PROGRAMS[name][case] if name else MISTAKES[case]
    with pytest.raises(UserError, match=complaint) as caught:
        run_program(monkeypatch, name, changed) if name else run(changed, "--output-dir", str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


def test_what_python_says_of_a_mistake_is_said_to_all_ranks():
    """Of a rank that failed alone, the others told the TypeError."""
    with pytest.raises(
        UserError, match=r"^<program>, line \d+: run.output_dir is None without --output-dir, and on ranks"
    ):
        run(dict(after="run.output_dir / 'notes.txt'"))
    with pytest.raises(
        UserError, match=r"line \d+: step.backward\(\) got an unexpected keyword argument 'retain_graph': write"
    ):
        run(dict(backward="step.backward(loss, retain_graph=True)"))
    with pytest.raises(TypeError, match="unsupported operand"):
        run(dict(after="None / 'notes.txt'"))


FROZEN = {  # how a program means to freeze, and where `net` is Sequential(0, 1, 2, 3), the line
    "net[3].requires_grad = False": r"3.requires_grad = False has no effect on a module, .*: write 3.requires_grad_\(False\)",
    "net.requires_grad = False": r"model.requires_grad = False has no effect on a module, .*: write model.requires_grad_\(F",
    "net[3].weight.require_grad = False": r"3.weight.require_grad = False has no effect on a parameter: write 3.weight.req",
    "net[3].requires_grad_(False).requires_grad = True": "3.requires_grad = True has no effect on a module",
    "net[3].requires_grad_(False).requires_grad = False": "",
    "net[3].weight.requires_grad = False": "",
    "net[0] = Switched(3, 8)": "",  # whose own code reads it
}


class Switched(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.requires_grad = False

    def forward(self, x):
        return super().forward(x) if self.requires_grad else super().forward(x) * 0.5


@pytest.mark.parametrize("change", FROZEN)
def test_what_freezes_nothing_is_told(change, capsys):
    run(dict(unprepared=change))
    (*told,) = re.findall("warning: .*requires?_grad .*", capsys.readouterr().out)
    assert len(told) == bool(FROZEN[change])
    assert re.match(f"warning: {FROZEN[change]}", *told) if told else True


def test_what_no_optimizer_trains_may_have_it(capsys):
    run(dict(unprepared="net[0].requires_grad = False", prepare="net, torch.optim.SGD(net[3].parameters(), lr=0.1)"))
    assert "has no effect" not in capsys.readouterr().out


PLATEAUS = {  # metrics, mode, what it is stepped by: the metric and the mode of the line
    "an accuracy in mode min": ("None", "min", "run.evaluation['accuracy']", "accuracy", "max"),
    "the best value in mode min": ("{'score': 'max'}", "min", "run.best.value", "score", "max"),
    "a loss in mode max": ("None", "max", "run.evaluation['loss']", "loss", "min"),
    "an accuracy in mode max": ("None", "max", "run.evaluation['accuracy']", "", ""),
    "a loss": ("None", "min", "run.evaluation['loss']", "", ""),
    "what is lacking": ("None", "min", "1 - run.evaluation['accuracy']", "", ""),
    "a name that tells nothing": ("None", "min", "run.evaluation['score']", "", ""),
    "a declared error": ("{'accuracy': 'min'}", "min", "run.evaluation['accuracy']", "", ""),
    "the loss of training": ("None", "max", "step.loss", "", ""),
}


@pytest.mark.parametrize("case", PLATEAUS)
def test_a_plateau_waits_for_what_is_better(case, capsys):
    metrics, mode, given, name, better = PLATEAUS[case]
    run(dict(
        metrics=metrics, prepared=f"plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode={mode!r}); run.register(plateau=plateau)",
        after="with run.evaluating(len(X)): run.record(loss=(model(X) - Y).abs(), accuracy=Y > 0.1, score=Y.sin())\n"
        f"        plateau.step({given})",
    ))  # fmt: skip
    (*told,) = re.findall("warning: (plateau: .*)", capsys.readouterr().out)
    larger = "larger" if better == "max" else "smaller"
    line = f"plateau: ReduceLROnPlateau in mode '{mode}' got {name}, which is better if it is {larger}: "
    assert told == [f'{line}write ReduceLROnPlateau(optimizer, mode="{better}")'] * bool(name)


@pytest.mark.parametrize("case", REPORTED)
def test_what_may_be_meant_is_reported_once(case, monkeypatch, tmp_path, capsys):
    name, changed, line = REPORTED[case]
    assert run_program(monkeypatch, name, changed, f"--epochs 1 --output-dir {tmp_path}") == 0
    said = capsys.readouterr().out
    assert said.count(line.replace("OUT", str(tmp_path))) == (2 if name == "folds" else 1), said


@pytest.mark.parametrize("blank", ["after_update", "after"])
def test_sys_exit_inside_the_block_does_not_look_like_success(blank):
    where = f"epoch 1, after step {0 if blank == 'after_update' else 5}"
    with pytest.raises(
        Failure, match=rf"^sys.exit\(\) in {where}, without a result: end the loops by `break`, or call"
    ):
        run({blank: "sys.exit()"})
    with pytest.raises(Failure, match=rf"^sys.exit\(\) in {where}, without a result"):
        run({blank: "sys.exit(256)"})  # a process has eight bits for it: 0
    with pytest.raises(SystemExit, match="no GPU"):  # an error of the program
        run({blank: "sys.exit('no GPU')"})


def test_a_queue_that_has_grown_is_resumed_as_it_was(monkeypatch, tmp_path):
    """The checkpoint holds more keys than the new one begins with."""
    grows = {"queue.keys])[:QUEUE]": "queue.keys])"}
    assert run_program(monkeypatch, "contrast", grows, f"--epochs 1 --output-dir {tmp_path}") == 0
    assert run_program(monkeypatch, "contrast", grows, f"--epochs 2 --output-dir {tmp_path}") == 0
    assert run_program(monkeypatch, "contrast", grows, f"--epochs 2 --output-dir {tmp_path}/whole") == 0
    assert summary(tmp_path)["parameters_sha256"] == summary(tmp_path / "whole")["parameters_sha256"]


RIGHT = {  # what looks like a mistake, and is right
    "zero_grad before the step's batches": dict(at_step="optimizer.zero_grad()"),
    "zero_grad after the update": dict(after_update="optimizer.zero_grad(set_to_none=True)"),
    "the mean times its number": dict(
        after="with run.evaluating(len(X)): run.record(loss=F.mse_loss(model(X), Y) * len(X))"
    ),
    "the mean times the number of samples in place": dict(
        after="with run.evaluating(len(X)): l = F.mse_loss(model(X), Y); l *= X.size(0); run.record(loss=l)"
    ),
    "the mean over tokens times their number": dict(
        after="with run.evaluating(len(X)): run.record(loss=F.mse_loss(model(X), Y) * 7, count=7)"
    ),
    "an optimizer around another that does not call super().__init__()": dict(
        before="class Around(torch.optim.Optimizer):\n    def __init__(self, inner): self.inner, self.state = inner, inner.state\n"
        "    param_groups = property(lambda self: self.inner.param_groups)\n    def step(self): self.inner.step()",
        prepare="net, Around(torch.optim.SGD(net.parameters(), lr=0.1))",
    ),
    "a hundred samples": dict(after="with run.evaluating(100): run.record(loss=F.mse_loss(model(X), Y).item() * 100)"),
    "the sum of those of single samples": dict(
        after="with run.evaluating(len(X)): run.record(psnr=sum(-10 * F.mse_loss(p, t).log10() for p, t in zip(model(X), Y)))"
    ),
    "the sum of those of single samples in place": dict(
        after="l = 0\n        with run.evaluating(len(X)):\n            for p, t in zip(model(X), Y): l += F.mse_loss(p, t)\n"
        "            run.record(loss=l)"
    ),
    "the sum of those of single samples as a number": dict(
        after="with run.evaluating(len(X)): run.record(loss=sum(F.mse_loss(p, t) for p, t in zip(model(X), Y)).item())"
    ),
    "a perplexity of each sample": dict(after="with run.evaluating(len(X)): run.record(perplexity=12.3 * len(X))"),
    "a share in a later evaluation": dict(
        after="with run.evaluating(len(X)): run.record(wrong=float(step.number < 6) or 0.25)"
    ),
    "the mean times the number of values": dict(
        after="with run.evaluating(len(X)): run.record(loss=F.mse_loss(model(X), Y) * (3 * len(X)), right=(Y > 0).float().mean() * Y.sum())"
    ),
    "a sum by a number of its own": dict(
        after="with run.evaluating(len(X)) as mine: run.record(loss=(model(X[mine]) - Y[mine]).square().sum() / torch.tensor(2))"
    ),
    "a sum of less than one": dict(
        after="with run.evaluating(len(X)): run.record(loss=0.123, right=(Y > 9).float().sum(), a=0.5, count=1)"
    ),
    **{
        f"shares of pixels, {how}": dict(
            before="import numpy as np; from tests.single.training.test_mistakes import PIXELS, shares_of",
            after="with run.evaluating(DataLoader(TensorDataset(PIXELS), 8)) as mine:\n            for (p,) in mine:\n"
            f"                {record}",
        )
        for how, record in {
            "added up": "run.record(iou=p.float().mean((1, 2)).sum().item())",
            "added up elsewhere": "run.record(iou=shares_of(p))",
            "with their number": "run.record(iou=sum(q.float().mean().item() for q in p), count=len(p))",
            "one by one": "t = 0.0\n                for q in p: t += q.sum().item() / q.numel()\n                run.record(iou=t)",
            "by their number": "run.record(iou=(p.sum() / 4).item())",
            "of numpy": "run.record(iou=p.numpy().reshape(len(p), -1).mean(1).sum())",
            "the mean times the samples": "run.record(iou=p.float().mean().item() * len(p))",
            "a mean of numpy, too": "run.record(iou=np.mean(p.numpy()) * len(p), all=p.numpy().mean((1, 2)))",
        }.items()
    },
    "an optimizer without a learning rate": dict(
        before="class Plain(torch.optim.Optimizer):\n    def step(self): self.param_groups[0]['params'][0].data.mul_(0.5)",
        prepare="net, Plain(net.parameters(), {})",
    ),
    "data described by a set": dict(unprepared='run.describe_data("a", "b", c=[{1}])'),
    "a larger batch than the data": dict(before="flags.batch_size = 1000"),
    "a layer unfrozen later": dict(
        prepare="(net[0].requires_grad_(False), net)[1], torch.optim.SGD(net.parameters(), lr=0.1)",
        in_epoch="net[0].requires_grad_(run.state.epoch > 0)",
    ),
    "a layer frozen later": dict(in_epoch="net[0].requires_grad_(run.state.epoch == 0)"),
    "the model as it was before prepare": dict(prepared="model = net"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_looks_like_a_mistake_is_right(case, capsys):
    scope = run(RIGHT[case])
    assert "is taken for a sum" not in capsys.readouterr().out
    assert scope["run"].state.samples == 80
    assert any(not torch.equal(p, q) for p, q in zip(scope["net"].parameters(), network().parameters(), strict=True))


@pytest.mark.parametrize("name", ["contrast", "distill", "folds", "weighted"])
def test_a_program_that_is_right_ends_without_a_warning(name, monkeypatch, capsys):
    assert run_program(monkeypatch, name, {}, "--epochs 1") == 0
    assert "warning" not in capsys.readouterr().out
