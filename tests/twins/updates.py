"""Twins of what is done in a step: optimizers, schedulers, precisions, and hooks."""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from tests.twins import arguments
from tests.twins.twin import SKIPPED, WIDTH, Twin, changed, classes, network, sgd, squares, works

# ---- optimizers and schedulers


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 1, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0].sigmoid() * 10).long())


def made(what: type, values: dict[str, Any], net: nn.Module) -> torch.optim.Optimizer:
    return what(net.parameters(), **values)


def optimizers() -> Iterator[Twin]:
    for name, what in classes(torch.optim, torch.optim.Optimizer):
        known = inspect.signature(what).parameters
        # Muon takes matrices alone.
        model = lambda: nn.Sequential(nn.Linear(WIDTH, 6, bias=False), nn.Tanh(), nn.Linear(6, 1, bias=False))  # noqa: E731
        values = {p: v for p, v in arguments.OF_OPTIMIZERS.items() if p in known}
        refusal = name in ("LBFGS", "SparseAdam")  # called with a function; of sparse gradients
        of_first = Looked if name == "SparseAdam" else model
        yield Twin(f"optimizer {name}", model=of_first, optimizer=partial(made, what, values), refusal=refusal)
        if refusal:
            continue
        for option, parameter in known.items():
            if isinstance(parameter.default, bool) or (parameter.default is None and option in ("foreach", "fused")):
                given = values | {option: not parameter.default} | ({"momentum": 0.9} if option == "nesterov" else {})
                title = f"optimizer {name}, {option}={given[option]}"
                yield Twin(title, model=model, optimizer=partial(made, what, given))

    def grouped(net: nn.Module) -> Any:
        return [{"params": net[0].parameters(), "lr": 0.001, "mine": 3}, {"params": net[2].parameters()}]

    adam = torch.optim.AdamW
    yield Twin("optimizer AdamW, parameter groups", optimizer=lambda net: adam(grouped(net), lr=0.02))
    yield Twin("optimizer AdamW, named parameters", optimizer=lambda net: adam(net.named_parameters(), lr=0.02))
    tensor = {"lr": torch.tensor(0.02)}
    yield Twin("optimizer Adam, lr as a tensor", optimizer=partial(made, torch.optim.Adam, tensor))


def schedulers() -> Iterator[Twin]:
    for name, what in classes(lr_scheduler, lr_scheduler.LRScheduler):

        def make(optimizer: torch.optim.Optimizer, steps: int, name: str = name, what: Any = what) -> Any:
            if name in ("SequentialLR", "ChainedScheduler"):
                linear = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
                some = [linear, lr_scheduler.ExponentialLR(optimizer, 0.8)]
                return what(optimizer, some, [2]) if name == "SequentialLR" else what(some)
            known = inspect.signature(what).parameters.items()
            needed = [p for p, v in known if v.default is v.empty and p != "optimizer"]
            values = {p: arguments.OF_SCHEDULERS[p] for p in needed}
            if name == "OneCycleLR":
                values["total_steps"] = steps
            return what(optimizer, **values)

        if not works(f"scheduler {name}", lambda make=make: make(sgd(network()), 6)):
            continue
        if name != "ReduceLROnPlateau":
            yield Twin(f"scheduler {name}, by step", scheduler=make)
        if name != "OneCycleLR":
            yield Twin(f"scheduler {name}, by epoch", scheduler=make, by_epoch=True)
    yield Twin("scheduler SWALR, by step", scheduler=lambda optimizer, steps: SWALR(optimizer, 0.02, 3))


# ---- precisions, and what holds for a whole program


@contextlib.contextmanager
def switched(put: Callable[[Any], None], value: object, back: object) -> Iterator[None]:
    put(value)
    try:
        yield
    finally:
        put(back)


@contextlib.contextmanager
def hooked(register: Callable[[Any], Any], hook: object, end: Callable[[], object] = list) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()
        end()


def in_bf16(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return squares(model, x, y)


def of_default(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    return squares(model, x.to(dtype), y.to(dtype))


def precisions() -> Iterator[Twin]:
    yield Twin("precision --amp bf16", flags=("--amp", "bf16"), near=0.1)
    skips = "the loss scaler skips the first steps, whose gradients overflow"
    yield Twin("precision --amp fp16", flags=("--amp", "fp16"), differs=skips)
    yield Twin("precision torch.autocast in the loop", loss=in_bf16, near=0.05)
    for dtype in (torch.float64, torch.bfloat16):
        near = 1e-4 if dtype is torch.float64 else 0.2
        around = partial(switched, torch.set_default_dtype, dtype, torch.get_default_dtype())
        yield Twin(f"default dtype {dtype}", context=around, loss=of_default, near=near)
    deterministic = partial(switched, torch.use_deterministic_algorithms, True, False)
    yield Twin("context torch.device('cpu')", context=lambda: torch.device("cpu"))
    yield Twin("context torch.use_deterministic_algorithms", context=deterministic)
    yield Twin("context torch.autograd.detect_anomaly", context=lambda: torch.autograd.detect_anomaly(check_nan=False))
    yield Twin("context torch.autograd.graph.save_on_cpu", context=torch.autograd.graph.save_on_cpu)


# ---- hooks


def named(where: Any, words: str = "hook") -> list[str]:
    return sorted(name for name in dir(where) if name.startswith("register_") and words in name)


def module_hooks() -> Iterator[Twin]:
    for name in named(nn.Module):

        def attach(net: nn.Module, optimizer: object, name: str = name) -> list[int]:
            calls: list[int] = []
            getattr(net[0], name)(lambda *_, **__: calls.append(1))
            return calls

        counted = "state_dict" not in name  # how often the weights are read is hvdtrain's
        yield Twin(f"module hook {name}", attach=attach, found=lambda net, calls, c=counted: len(calls) if c else 0)

    def louder(net: nn.Module, optimizer: object) -> None:
        net[0].register_forward_hook(lambda module, args, out: out * 1.5)
        net[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
        net[2].register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 2 for g in inputs))

    yield Twin("module hooks that change values", attach=louder)
    where = torch.nn.modules.module
    full = partial(setattr, where, "_global_is_full_backward_hook", None)  # which torch keeps
    for name in named(where):
        yield Twin(
            f"global module hook {name}", context=partial(hooked, getattr(where, name), lambda *_, **__: None, full)
        )


def shrink(parameters: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.9)


def optimizer_hooks() -> Iterator[Twin]:
    for name in named(torch.optim.Optimizer):

        def attach(net: nn.Module, optimizer: torch.optim.Optimizer, name: str = name) -> list[int]:
            calls: list[int] = []

            def hook(*_: object) -> None:
                calls.append(1)
                if name.endswith("step_post_hook"):
                    shrink(net.parameters())

            getattr(optimizer, name)(hook)
            return calls

        counted = "state_dict" not in name
        yield Twin(f"optimizer hook {name}", attach=attach, found=lambda net, calls, c=counted: len(calls) if c else 0)
    where = importlib.import_module("torch.optim.optimizer")  # torch deletes the attribute

    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        shrink(parameter for group in optimizer.param_groups for parameter in group["params"])

    for name in named(where):
        yield Twin(f"global optimizer hook {name}", context=partial(hooked, getattr(where, name), hook))


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def tensor_hooks() -> Iterator[Twin]:
    hooks = {"register_hook": lambda gradient: gradient * 2, "register_post_accumulate_grad_hook": double}
    for name in named(Tensor):
        if name not in hooks:
            SKIPPED[f"tensor hook {name}"] = "unknown"
            continue
        put = lambda net, name=name: getattr(net[0].weight, name)(hooks[name])  # noqa: E731
        yield Twin(f"tensor hook {name}, before run.prepare", model=partial(changed, put))
        yield Twin(f"tensor hook {name}, after run.prepare", attach=lambda net, optimizer, put=put: put(net))
