"""Programs as people write them. Each is trained by hvdtrain, and by `Alone`: what its calls mean, in plain PyTorch.

Where the same program would be written in another way without hvdtrain, `PLAIN` has that one.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from docs.programs.sam import SAM
from hvdtrain.inputs.sharding import epoch_order

N, GLOBAL, TESTED = 31, 12, 13  # three steps in an epoch, the last one with 7 samples
EPOCHS = 3


def random_numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, TEST = random_numbers(N, 4), random_numbers(TESTED, 4, seed=2)
Y, TEST_Y = X.sum(1, keepdim=True).sin(), TEST.sum(1, keepdim=True).sin()
LABELS, TEST_LABELS = (x[:, 0].mul(2).long() % 3 for x in (X, TEST))
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


# ---- what the calls mean


class AloneStep:
    """A step with the whole batch at once."""

    def __init__(self, run: "Alone", data: Any, count: int):
        self._run, self._data, self.count = run, data, count
        self.batch = SimpleNamespace(count=count, first=0)

    def batches(self) -> Iterator[Any]:
        for optimizer in self._run.optimizers:
            optimizer.zero_grad()
        yield self._data

    def per_sample(self, number: Callable[[Any], float]) -> float:
        return number(self._data) / self.count

    def backward(self, loss: Tensor, optimizer: Any = None, *, count: Any = None) -> None:
        chosen = self._run.optimizers if optimizer is None else [optimizer]
        loss.backward(inputs=[p for o in chosen for g in o.param_groups for p in g["params"] if p.requires_grad])

    def update(self, optimizer: Any = None, *, clip_norm: float | None = None) -> None:
        for one in self._run.optimizers if optimizer is None else [optimizer]:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_([p for g in one.param_groups for p in g["params"]], clip_norm)
            one.step()


class Alone:
    """A run of one process, without hvdtrain."""

    def __init__(self, metric: str, better: str):
        self._metric, self._better = metric, max if better == "max" else min
        self.evaluation: dict[str, float] = {}
        self._values: dict[int, float] = {}  # of the metric, by epoch
        self._epoch = -1

    def prepare(self, *parts: Any) -> Any:
        self.models = [part for part in parts if isinstance(part, nn.Module)]
        self.optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        return parts

    def register(self, **objects: Any) -> None:
        self.models += [what for what in objects.values() if isinstance(what, nn.Module)]

    def epochs(self, count: int) -> Iterator[int]:
        for epoch in range(self._epoch + 1, count):
            self._epoch = epoch
            yield epoch

    def steps(self, *data: Tensor, changes: bool = False) -> Iterator[AloneStep]:
        for indices in epoch_order(len(data[0]), 1, self._epoch).split(GLOBAL):
            yield AloneStep(self, tuple(part[indices] for part in data), len(indices))

    @contextlib.contextmanager
    def evaluating(self, count: int) -> Iterator[slice]:
        self._sums: dict[str, float] = {}
        for model in self.models:
            model.eval()
        self._inside = True
        with torch.no_grad():
            yield slice(0, count)
        self._inside = False
        for model in self.models:
            model.train()
        self.evaluation = {name: total / count for name, total in self._sums.items()}
        self._values |= {self._epoch: self.evaluation[self._metric]} if self._metric in self.evaluation else {}

    def record(self, **values: Tensor) -> None:
        if not self._inside:
            self.evaluation |= {name: float(value) for name, value in values.items()}
        self._sums |= {name: self._sums.get(name, 0.0) + float(value.sum()) for name, value in values.items()}

    def gather(self, rows: Tensor | list[Tensor]) -> Tensor:
        return torch.cat(rows) if isinstance(rows, list) else rows

    @property
    def best(self) -> Any:
        value = self._better(self._values.values())
        return SimpleNamespace(value=value, epoch=next(e for e, v in self._values.items() if v == value))


# ---- the programs


def network(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def averaged_weights(run: Any) -> Any:
    net = network()
    model, _ = run.prepare(net, sgd(net))
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    run.register(averaged=averaged)
    for _ in run.epochs(EPOCHS):
        for step in run.steps(X, Y):
            for x, y in step.batches():
                step.backward(F.mse_loss(model(x), y))
            step.update()
            averaged.update_parameters(net)
        with run.evaluating(TESTED) as mine:
            run.record(loss=(averaged(TEST[mine]) - TEST_Y[mine]).square())
    return net.state_dict(), averaged.state_dict(), run.evaluation["loss"]


def early_stopping(run: Any) -> Any:
    net = network()
    model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.2))
    for epoch in run.epochs(20):
        for step in run.steps(X, Y):
            for x, y in step.batches():
                step.backward(F.mse_loss(model(x), y))
            step.update()
        with run.evaluating(TESTED) as mine:
            run.record(loss=(model(TEST[mine]) - TEST_Y[mine]).square())
        if epoch - run.best.epoch >= 2:
            break
    return net.state_dict(), epoch, run.best.epoch, run.best.value


def plateau(run: Any) -> Any:
    net = network()
    model, optimizer = run.prepare(net, sgd(net))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    run.register(scheduler=scheduler)
    for _ in run.epochs(EPOCHS):
        for step in run.steps(X, Y):
            for x, y in step.batches():
                step.backward(F.mse_loss(model(x), y))
            step.update()
        with run.evaluating(TESTED) as mine:
            run.record(loss=(model(TEST[mine]) - TEST_Y[mine]).square())
        scheduler.step(run.evaluation["loss"])
    return net.state_dict(), scheduler.get_last_lr()


def freezing(run: Any, apart: bool = False) -> Any:
    """The body is trained from the second epoch, the head in all but the third. Neither momentum nor decay moves others."""
    net = network()
    net[0].requires_grad_(False)
    model, *_ = run.prepare(net, *([sgd(net[0]), sgd(net[2])] if apart else [sgd(net)]))
    for epoch in run.epochs(4):
        net[0].requires_grad_(epoch > 0)
        net[2].requires_grad_(epoch != 2)
        for step in run.steps(X, Y):
            for x, y in step.batches():
                step.backward(F.mse_loss(model(x), y))
            step.update()
    return net.state_dict()


def freezing_apart(run: Any) -> Any:
    """Each has its optimizer, which has nothing to train while they are frozen."""
    return freezing(run, apart=True)


def phases(run: Any) -> Any:
    """The second loop trains all layers, at a lower rate, and stays near what the first one has found."""
    net = network()
    net[0].requires_grad_(False)
    model, optimizer = run.prepare(net, sgd(net))
    found: list[Tensor] = []
    for epochs in (1, EPOCHS):
        for _ in run.epochs(epochs):
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    apart = [(p - q).square().sum() for p, q in zip(net.parameters(), found, strict=False)]
                    step.backward(F.mse_loss(model(x), y) + 0.1 * sum(apart))
                step.update()
        found = [p.detach().clone() for p in net.parameters()]
        net[0].requires_grad_()
        optimizer.param_groups[0]["lr"] *= 0.3
    return net.state_dict()


def layers_added_later(run: Any) -> Any:
    """In plain PyTorch, `add_param_group`. Here, the optimizer has them from the beginning, frozen."""
    net = network()
    net[0].requires_grad_(False)
    model, _ = run.prepare(
        net, torch.optim.AdamW([{"params": net[2].parameters()}, {"params": net[0].parameters(), "lr": 0.02}], lr=0.1)
    )
    for epoch in run.epochs(EPOCHS):
        net[0].requires_grad_(epoch >= 1)
        for step in run.steps(X, Y):
            for x, y in step.batches():
                step.backward(F.mse_loss(model(x), y))
            step.update()
    return net.state_dict()


def layers_added_later_plain() -> Any:
    net = network()
    net[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(net[2].parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        if epoch == 1:
            net[0].requires_grad_()
            optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.02})
        for i in epoch_order(N, 1, epoch).split(GLOBAL):
            optimizer.zero_grad()
            F.mse_loss(net(X[i]), Y[i]).backward()
            optimizer.step()
    return net.state_dict()


def class_weights(run: Any) -> Any:
    net = network(3)
    model, _ = run.prepare(net, sgd(net))
    for _ in run.epochs(EPOCHS):
        for step in run.steps(X, LABELS):
            for x, labels in step.batches():
                loss = F.cross_entropy(model(x), labels, weight=CLASS_WEIGHTS)
                step.backward(loss, count=CLASS_WEIGHTS[labels].sum())
            step.update()
    return net.state_dict()


def sums(run: Any) -> Any:
    net = network(3)
    model, _ = run.prepare(net, sgd(net))
    for _ in run.epochs(EPOCHS):
        for step in run.steps(X, LABELS):
            for x, labels in step.batches():
                step.backward(F.cross_entropy(model(x), labels, reduction="sum") / len(labels))
            step.update(clip_norm=0.1)
    return net.state_dict()


BOXES = [random_numbers(k % 4, 4, seed=k) for k in range(N)]  # zero to three of an image


def detection(run: Any) -> Any:
    """A loss that is a mean over images, and one over the boxes of all of them."""
    net = network(7)
    model, _ = run.prepare(net, sgd(net))
    for _ in run.epochs(EPOCHS):
        for step in run.steps(X, LABELS, torch.arange(N)):
            boxes_per_image = step.per_sample(lambda batch: sum(len(BOXES[k]) for k in batch[2]))
            for x, labels, images in step.batches():
                classes, box = model(x).split([3, 4], 1)
                offsets = torch.cat([(box[i] - BOXES[k]).abs().mean(1) for i, k in enumerate(images)])
                step.backward(F.cross_entropy(classes, labels) + offsets.sum() / len(x) / boxes_per_image)
            step.update()
    return net.state_dict()


def detection_plain() -> Any:
    net = network(7)
    optimizer = sgd(net)
    for epoch in range(EPOCHS):
        for images in epoch_order(N, 1, epoch).split(GLOBAL):
            optimizer.zero_grad()
            classes, box = net(X[images]).split([3, 4], 1)
            offsets = torch.cat([(box[i] - BOXES[k]).abs().mean(1) for i, k in enumerate(images)])
            (F.cross_entropy(classes, LABELS[images]) + offsets.mean()).backward()
            optimizer.step()
    return net.state_dict()


def contrastive(run: Any) -> Any:
    """Each sample is told from those of all ranks."""
    net = network(3)
    model, _ = run.prepare(net, sgd(net))
    for _ in run.epochs(EPOCHS):
        for step in run.steps(X):
            for (x,) in step.batches():
                z = F.normalize(model(x), dim=1)
                everyone = run.gather(z)
                assert len(everyone) == step.count
                step.backward(F.cross_entropy(z @ everyone.T / 0.1, torch.arange(len(z)) + step.batch.first))
            step.update()
    return net.state_dict()


def metrics_of_all_ranks(run: Any) -> Any:
    """What is no mean over samples: an AUC, a confusion matrix, and a list of boxes of unlike lengths, with their image."""
    net = network(3)
    model, _ = run.prepare(net, sgd(net))
    for _ in run.epochs(EPOCHS):
        for step in run.steps(X, LABELS):
            for x, labels in step.batches():
                step.backward(F.cross_entropy(model(x), labels))
            step.update()
        with run.evaluating(TESTED) as mine:
            scores, truth = model(TEST[mine]).softmax(1), TEST_LABELS[mine]
        scores, truth = run.gather(scores), run.gather(truth)
        above = scores[truth == 1, 1].unsqueeze(1) > scores[truth != 1, 1]
        confusion = torch.bincount(3 * truth + scores.argmax(1), minlength=9).view(3, 3)
        run.record(auc=above.double().mean(), loss=-scores.double().gather(1, truth[:, None]).log().mean())
        if find_spec("torchmetrics"):
            theirs = of_torchmetrics(scores, truth)
            torch.testing.assert_close(theirs, (above.float().mean(), confusion), check_dtype=False)
    own = [torch.cat([torch.full((k % 4, 1), float(k)), BOXES[k]], 1) for k in range(TESTED)[mine]]
    boxes = run.gather(own)
    boxes = boxes[boxes[:, 0].argsort(stable=True)]  # a rank has every second image, or every third
    hits = run.gather(scores.argmax(1) == truth)  # of booleans
    return net.state_dict(), run.evaluation["auc"], run.evaluation["loss"], confusion, boxes, hits.float().mean()


def of_torchmetrics(scores: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    from torchmetrics.classification import BinaryAUROC, MulticlassConfusionMatrix

    auc = BinaryAUROC(sync_on_compute=False)(scores[:, 1], truth == 1)
    confusion = MulticlassConfusionMatrix(3, sync_on_compute=False)(scores, truth)
    return auc, confusion


def mixed_by_a_generator(run: Any) -> Any:
    """A random number that all ranks share, from a generator of the program's own."""
    net = network()
    model, _ = run.prepare(net, sgd(net))
    mixing = random.Random(1)
    run.register(mixing=mixing)
    for _ in run.epochs(EPOCHS):
        scale = mixing.random()
        for step in run.steps(X, Y):
            share = mixing.random()
            for x, y in step.batches():
                step.backward(F.mse_loss(model(scale * x), share * y))
            step.update()
    return net.state_dict()


def two_models(run: Any) -> Any:
    """The generator's backward pass goes through the critic, and trains nothing of it."""
    generator, critic = network(4), network()
    g, c, of_g, of_c = run.prepare(generator, critic, sgd(generator), sgd(critic))
    for _ in run.epochs(EPOCHS):
        for step in run.steps(X):
            for (real,) in step.batches():
                step.backward(c(g(real).detach()).mean() - c(real.flip(1)).mean(), of_c)
            step.update(of_c, clip_norm=1.0)
            for (real,) in step.batches():
                step.backward(-c(g(real)).mean(), of_g)
            step.update(of_g)
    return generator.state_dict(), critic.state_dict()


def two_optimizers(run: Any) -> Any:
    """Of the parts of a model, which take turns. Under ddp, each part is given as a model of its own."""
    net = network()
    body, head, of_body, of_head = run.prepare(net[0], net[2], sgd(net[0]), sgd(net[2]))
    for epoch in run.epochs(EPOCHS):
        one = of_body if epoch % 2 else of_head
        for step in run.steps(X, Y):
            for x, y in step.batches():
                step.backward(F.mse_loss(head(body(x).tanh()), y), one)
            step.update(one)
    return net.state_dict()


def sharpness_aware(run: Any) -> Any:
    net = network()
    model, _ = run.prepare(net, SAM(net.parameters(), rho=0.1, lr=0.1, momentum=0.9))
    for _ in run.epochs(EPOCHS):
        for step in run.steps(X, Y):
            for _ in range(2):
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x), y))
                step.update()
    return net.state_dict()


def sharpness_aware_plain() -> Any:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        for i in epoch_order(N, 1, epoch).split(GLOBAL):
            before = [p.detach().clone() for p in net.parameters()]
            optimizer.zero_grad()
            F.mse_loss(net(X[i]), Y[i]).backward()
            norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
            with torch.no_grad():
                for p in net.parameters():
                    p += 0.1 * p.grad / norm
            optimizer.zero_grad()
            F.mse_loss(net(X[i]), Y[i]).backward()
            with torch.no_grad():
                for p, held in zip(net.parameters(), before, strict=True):
                    p.copy_(held)
            optimizer.step()
    return net.state_dict()


def tasks_in_turn(run: Any) -> Any:
    """Two losses of the same samples, with an update each in every step."""
    net = network(3)
    model, _ = run.prepare(net, sgd(net))
    for _ in run.epochs(EPOCHS):
        for step in run.steps(X, Y, LABELS):
            for x, y, _ in step.batches():
                step.backward(F.mse_loss(model(x)[:, :1], y))
            step.update()
            for x, _, labels in step.batches():
                step.backward(F.cross_entropy(model(x), labels))
            step.update()
    return net.state_dict()


def tasks_by_epoch(run: Any) -> Any:
    """Two data sets of unlike lengths. What would be two loops in an epoch is two epochs."""
    net = network(3)
    model, _ = run.prepare(net, sgd(net))
    for epoch in run.epochs(4):
        if epoch % 2 == 0:
            for step in run.steps(X, Y, changes=True):
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x)[:, :1], y))
                step.update()
        else:
            for step in run.steps(X[:20], LABELS[:20], changes=True):
                for x, labels in step.batches():
                    step.backward(F.cross_entropy(model(x), labels))
                step.update()
    return net.state_dict()


def data_set_that_grows(run: Any) -> Any:
    net = network()
    model, _ = run.prepare(net, sgd(net))
    for epoch in run.epochs(EPOCHS):
        count = 15 + 8 * epoch
        for step in run.steps(X[:count], Y[:count], changes=True):
            for x, y in step.batches():
                step.backward(F.mse_loss(model(x), y))
            step.update()
    return net.state_dict()


class Growing(Dataset[Any]):
    count = 15

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


def loader_that_grows(run: Any) -> Any:
    """The same loader, whose data set has more samples in each epoch."""
    net = network()
    model, _ = run.prepare(net, sgd(net))
    data = Growing()
    loader = DataLoader(data, run.flags.batch_size)
    for epoch in run.epochs(EPOCHS):
        data.count = 15 + 8 * epoch
        for step in run.steps(loader, changes=True):
            for x, y in step.batches():
                step.backward(F.mse_loss(model(x), y))
            step.update()
    return net.state_dict()


def loader_that_grows_plain() -> Any:
    net = network()
    optimizer = sgd(net)
    for epoch in range(EPOCHS):
        for i in torch.arange(15 + 8 * epoch).split(GLOBAL):
            optimizer.zero_grad()
            F.mse_loss(net(X[i]), Y[i]).backward()
            optimizer.step()
    return net.state_dict()


def batch_that_grows(run: Any) -> Any:
    """Batches of 3, 4 and 5 samples on each rank."""
    net = network()
    model, _ = run.prepare(net, sgd(net))
    data = TensorDataset(X, Y)
    for epoch in run.epochs(EPOCHS):
        batches = BatchSampler(SequentialSampler(data), 3 + epoch, drop_last=False)
        for step in run.steps(DataLoader(data, batch_sampler=batches), changes=True):
            for x, y in step.batches():
                step.backward(F.mse_loss(model(x), y))
            step.update()
    return net.state_dict()


def batch_that_grows_plain(size: int) -> Any:
    net = network()
    optimizer = sgd(net)
    for epoch in range(EPOCHS):
        for i in torch.arange(N).split((3 + epoch) * size):
            optimizer.zero_grad()
            F.mse_loss(net(X[i]), Y[i]).backward()
            optimizer.step()
    return net.state_dict()


PLAIN: dict[Callable[[Any], Any], Callable[..., Any]] = {
    layers_added_later: layers_added_later_plain,
    detection: detection_plain,
    loader_that_grows: loader_that_grows_plain,
    sharpness_aware: sharpness_aware_plain,
}
FAST = [averaged_weights, contrastive, detection, batch_that_grows, freezing_apart]
SLOW = [
    early_stopping, plateau, freezing, phases, layers_added_later, class_weights, sums, metrics_of_all_ranks,
    mixed_by_a_generator, two_models, two_optimizers, sharpness_aware, tasks_in_turn, tasks_by_epoch, data_set_that_grows,
    loader_that_grows,
]  # fmt: skip
WHOLE = [contrastive]  # a gather has the rows of one micro-batch
