"""Twins of what a model is made of: layers, losses, parametrizations, pruning, checkpointing, compilation."""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.twins import arguments
from tests.twins.twin import SKIPPED, WIDTH, Twin, changed, classes, network, short

# ---- layers

SHAPES = {"1d": (4, 8), "2d": (4, 6, 6), "3d": (4, 6, 6, 6)}  # [channels, ...], by the end of a name
OTHERS = [(WIDTH,), (3, WIDTH), (4, 6, 6), (16, 4)]  # of names without such an end: tried one after the other


class Around(nn.Module):
    """A layer between a linear one, which makes its inputs, and another, which makes one number of its outputs."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], inputs: int, whole: bool):
        super().__init__()
        size = torch.Size(shape).numel()
        self.stem, self.layer, self.shape, self.inputs, self.whole = nn.Linear(WIDTH, size), layer, shape, inputs, whole
        with torch.no_grad():
            training = layer.training
            width = self.features(torch.randn(4, WIDTH)).shape[1]
            layer.train(training)
        self.head = nn.Linear(width, 1)

    @classmethod
    def of(cls, name: str, what: type, shape: tuple[int, ...]) -> "Around":
        layer = made(name, what)
        return cls(layer, shape, inputs_of(layer), whole=name.startswith("Embedding"))

    def features(self, x: Tensor) -> Tensor:
        made = self.stem(x).unflatten(1, self.shape)
        if self.whole:  # of an embedding
            made = (made.sigmoid() * 10).long()
        out = self.layer(*[made] * self.inputs)
        while isinstance(out, (tuple, list)):
            out = out[0]
        assert len(out) == len(x), "the first dimension is not the batch"
        return out.reshape(len(x), -1).float()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).tanh() * 0.5)


class Unpooled(nn.Module):
    def __init__(self, pool: type, unpool: type):
        super().__init__()
        self.pool, self.unpool = pool(2, return_indices=True), unpool(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.unpool(*self.pool(x))


def made(name: str, what: type) -> nn.Module:
    """Return a layer of this class."""
    if name in arguments.UNPOOL:
        return Unpooled(arguments.UNPOOL[name], what)
    if name in arguments.BY_CLASS:
        return arguments.BY_CLASS[name]()
    needed = [p for p in inspect.signature(what).parameters.values() if p.default is p.empty]
    values = {p.name: arguments.BY_PARAMETER[p.name] for p in needed if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return what(**values)


def by_sample(net: Around) -> bool:
    """Whether the outputs of a sample depend on it alone."""
    x = torch.randn(6, WIDTH)
    net.eval()
    with torch.no_grad():
        return bool(torch.allclose(net(x)[3:], net(x[3:]), atol=1e-5))


def inputs_of(layer: nn.Module) -> int:
    wanted = inspect.signature(layer.forward).parameters.values()
    return max(1, sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in wanted))


def layers() -> Iterator[Twin]:
    for name, what in classes(nn, nn.Module):
        if name in arguments.NO_LAYERS or "Loss" in name:
            continue
        shapes = [shape for end, shape in SHAPES.items() if name.endswith(end)] or OTHERS
        found, why = None, ""
        for shape in shapes:
            try:
                torch.manual_seed(0)
                around = Around.of(name, what, shape)
                found = found or shape
                if by_sample(around):  # else the first dimension may be that of a sequence
                    found = shape
                    break
            except Exception as error:
                why = short(error)
        if found is None:
            SKIPPED[f"layer {name}"] = why
            continue
        frozen = {"find_unused_parameters": True} if around.whole else {}
        keeps = bool(around.layer.state_dict())
        yield Twin(f"layer {name}", model=partial(Around.of, name, what, found), prepare=frozen, keeps=keeps)


# ---- losses

MEANS = ["mean", "sum", "none"]
WITH_WEIGHTS = {"AdaptiveLogSoftmaxWithLoss": [""], "LinearCrossEntropyLoss": MEANS}  # their own; and reductions


class Inside(nn.Module):
    """A model that returns its loss."""

    def __init__(self, name: str, reduction: str):
        super().__init__()
        self.stem, self.reduction = nn.Linear(WIDTH, WIDTH), reduction
        what = getattr(nn, name)
        self.loss = what(WIDTH, WIDTH, reduction=reduction) if reduction else what(WIDTH, WIDTH, [2])

    def forward(self, x: Tensor) -> Tensor:
        out = self.loss(self.stem(x), x.argmax(1))
        out = out.loss if hasattr(out, "loss") else out
        return out if self.reduction in ("", "mean") else out.sum() / len(x)


def targets(x: Tensor) -> dict[str, Tensor]:
    """Targets of each kind, of outputs [n, 4]."""
    return {
        "numbers": x.sin(), "positive": x.abs() + 0.1, "probabilities": x.softmax(1), "bits": (x > 0).float(),
        "signs": x.sum(1).sign(), "sign of each": x.sign(), "class": x.argmax(1), "classes": (x > 0).long(),
    }  # fmt: skip


def loss_calls(out: Tensor, x: Tensor) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Arguments with which a loss might be called, each tried in turn."""
    known = targets(x)
    for kind in ("numbers", "class", "bits", "signs", "classes"):
        yield kind, (out, known[kind])
        yield f"log, {kind}", (out.log_softmax(1), known[kind])
    yield "sigmoid, bits", (out.sigmoid(), known["bits"])
    yield "three", (out, known["numbers"], known["positive"])
    yield "two and signs", (out, known["numbers"], known["signs"])
    yield "two columns and signs", (out[:, 0], known["numbers"][:, 0], known["signs"])
    lengths = torch.full((len(x),), 3)
    logs = out.unsqueeze(1).expand(-1, 3, -1).log_softmax(2).transpose(0, 1)
    yield "sequences", (logs, known["classes"][:, :1] + 1, lengths, lengths - 2)


def mean_of(make: Any, kind: str, reduction: str, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    value = make()(*dict(loss_calls(model(x), x))[kind])
    return value if reduction == "mean" else value.sum() / len(x) if reduction == "sum" else value.mean()


wide = partial(nn.Linear, WIDTH, WIDTH)


def losses() -> Iterator[Twin]:
    for name, what in classes(nn, nn.Module):
        if "Loss" not in name or name in WITH_WEIGHTS:
            continue
        for reduction in MEANS:
            make = partial(what, reduction=reduction)
            torch.manual_seed(0)
            out, x = torch.randn(6, WIDTH, requires_grad=True), torch.randn(6, WIDTH)
            kind, why = None, ""
            for tried, call in loss_calls(out, x):
                try:
                    value = make()(*call)
                    assert value.requires_grad
                    assert value.isfinite().all()
                    kind = tried
                    break
                except Exception as error:
                    why = short(error)
            if kind is None:
                SKIPPED[f"loss {name}, {reduction}"] = why
                continue
            yield Twin(
                f"loss {name}, {reduction}", model=wide, loss=partial(mean_of, make, kind, reduction), keeps=False
            )
    for name, reductions in WITH_WEIGHTS.items():
        for reduction in reductions:
            title = f"loss {name}, {reduction}".removesuffix(", ")
            yield Twin(title, model=partial(Inside, name, reduction), loss=lambda model, x, y: model(x))
    rare = torch.tensor([1.0, 2.0, 3.0, 4.0])
    some = partial(
        Twin, model=wide, loss=lambda model, x, y: F.cross_entropy(model(x), x.argmax(1), weight=rare),
        measure=lambda model, x, y: F.cross_entropy(model(x), x.argmax(1)),
    )  # fmt: skip
    yield some("loss CrossEntropyLoss, weight=")
    yield some("loss CrossEntropyLoss, weight= and count=", count=lambda x, y: rare[x.argmax(1)].sum())


# ---- what changes the parameters of a layer


def parametrizations() -> Iterator[Twin]:
    for place, where in (("nn.utils.parametrizations", torch.nn.utils.parametrizations), ("nn.utils", torch.nn.utils)):
        for name in ("weight_norm", "spectral_norm", "orthogonal"):
            if function := getattr(where, name, None):
                model = lambda f=function: nn.Sequential(f(wide()), nn.Tanh(), nn.Linear(WIDTH, 1))  # noqa: E731
                yield Twin(f"parametrization {place}.{name}", model=model)

    class Positive(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.abs()

    own = lambda net: torch.nn.utils.parametrize.register_parametrization(net[0], "weight", Positive())  # noqa: E731
    yield Twin("parametrization of one's own", model=partial(changed, own))


def prunings() -> Iterator[Twin]:
    prune = torch.nn.utils.prune
    some = {"amount": 0.3}
    how = {
        "random_unstructured": some, "l1_unstructured": some, "random_structured": some | {"dim": 1},
        "ln_structured": some | {"dim": 1, "n": 2}, "identity": {}, "custom_from_mask": {"mask": torch.eye(6, WIDTH)},
    }  # fmt: skip
    for name, values in how.items():
        put = lambda net, name=name, values=values: getattr(prune, name)(net[0], "weight", **values)  # noqa: E731
        yield Twin(f"pruning {name}", model=partial(changed, put))


# ---- checkpointing, compilation


class Saving(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, reentrant: bool, times: int = 1):
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 1)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.reentrant, self.times = reentrant, times

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.times):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x)


def checkpointing() -> Iterator[Twin]:
    for reentrant in (False, True):
        for times in (1, 2):
            name = f"checkpointing, use_reentrant={reentrant}, {times} x"
            yield Twin(name, model=partial(Saving, reentrant, times))


def vmapped(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.func.vmap(lambda one, other: (one - other).square().mean())(model(x), y).mean()


def compiling() -> Iterator[Twin]:
    yield Twin("compile torch.compile(model)", model=lambda: torch.compile(network()))
    yield Twin("compile model.compile()", model=partial(changed, nn.Module.compile))
    block = lambda: nn.Sequential(torch.compile(nn.Linear(WIDTH, 6)), nn.Linear(6, 1))  # noqa: E731
    yield Twin("compile torch.compile(block)", model=block)
    yield Twin("compile torch.jit.script", model=lambda: torch.jit.script(network()))
    yield Twin("compile torch.jit.trace", model=lambda: torch.jit.trace(network(), torch.randn(2, WIDTH)))
    yield Twin("compile torch.fx.symbolic_trace", model=lambda: torch.fx.symbolic_trace(network()))
    yield Twin("compile torch.func.vmap in the loss", loss=vmapped)
