"""Twins of what is done in a step: optimizers, schedulers, precisions, and hooks."""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from tests.twins import arguments
from tests.twins.twin import SKIPPED, WIDTH, Twin, classes, network, sgd, squares

# ---- optimizers and schedulers


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 1, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0].sigmoid() * 10).long())


def optimizers() -> Iterator[Twin]:
    for name, what in classes(torch.optim, torch.optim.Optimizer):
        known = inspect.signature(what).parameters
        # Muon takes matrices alone.
        model = lambda: nn.Sequential(nn.Linear(WIDTH, 6, bias=False), nn.Tanh(), nn.Linear(6, 1, bias=False))  # noqa: E731
        values = {p: v for p, v in arguments.OF_OPTIMIZERS.items() if p in known}

        def make(net: nn.Module, what: type = what, values: Any = values) -> torch.optim.Optimizer:
            return what(net.parameters(), **values)

        refusal = name in ("LBFGS", "SparseAdam")  # called with a function; of sparse gradients
        yield Twin(
            f"optimizer {name}", model=Looked if name == "SparseAdam" else model, optimizer=make, refusal=refusal
        )
        if refusal:
            continue
        for option, parameter in known.items():
            if isinstance(parameter.default, bool) or (parameter.default is None and option in ("foreach", "fused")):
                given = values | {option: not parameter.default} | ({"momentum": 0.9} if option == "nesterov" else {})

                def other(net: nn.Module, what: type = what, values: Any = given) -> torch.optim.Optimizer:
                    return what(net.parameters(), **values)

                yield Twin(f"optimizer {name}, {option}={given[option]}", model=model, optimizer=other)

    def grouped(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [{"params": net[0].parameters(), "lr": 0.001, "mine": 3}, {"params": net[2].parameters()}], lr=0.02
        )

    yield Twin("optimizer AdamW, parameter groups", optimizer=grouped)
    yield Twin(
        "optimizer AdamW, named parameters", optimizer=lambda net: torch.optim.AdamW(net.named_parameters(), lr=0.02)
    )
    yield Twin(
        "optimizer Adam, lr as a tensor",
        optimizer=lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(0.02)),
    )


def schedulers() -> Iterator[Twin]:
    for name, what in classes(lr_scheduler, lr_scheduler.LRScheduler):

        def make(optimizer: torch.optim.Optimizer, steps: int, name: str = name, what: Any = what) -> Any:
            if name in ("SequentialLR", "ChainedScheduler"):
                some = [
                    lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
                    lr_scheduler.ExponentialLR(optimizer, 0.8),
                ]
                return what(optimizer, some, [2]) if name == "SequentialLR" else what(some)
            needed = [
                p for p, v in inspect.signature(what).parameters.items() if v.default is v.empty and p != "optimizer"
            ]
            values = {p: arguments.OF_SCHEDULERS[p] for p in needed}
            if name == "OneCycleLR":
                values["total_steps"] = steps
            return what(optimizer, **values)

        try:
            make(sgd(network()), 6)
        except Exception as error:
            SKIPPED[f"scheduler {name}"] = f"{type(error).__name__}: {error}"[:120]
            continue
        if name != "ReduceLROnPlateau":
            yield Twin(f"scheduler {name}, by step", scheduler=make)
        if name != "OneCycleLR":
            yield Twin(f"scheduler {name}, by epoch", scheduler=make, by_epoch=True)
    yield Twin("scheduler SWALR, by step", scheduler=lambda optimizer, steps: SWALR(optimizer, 0.02, 3))


# ---- precisions, and what holds for a whole program


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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
        yield Twin(
            f"default dtype {dtype}", context=lambda dtype=dtype: default_dtype(dtype), loss=of_default, near=near
        )
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
        yield Twin(
            f"module hook {name}",
            attach=attach,
            found=lambda net, calls, c=counted: len(calls) if c else bool(calls) * 0,
        )

    def louder(net: nn.Module, optimizer: object) -> None:
        net[0].register_forward_hook(lambda module, args, out: out * 1.5)
        net[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
        net[2].register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 2 for g in inputs))

    yield Twin("module hooks that change values", attach=louder)
    where = torch.nn.modules.module
    for name in named(where):

        @contextlib.contextmanager
        def everywhere(name: str = name) -> Iterator[None]:
            handle = getattr(where, name)(lambda *_, **__: None)
            try:
                yield
            finally:
                handle.remove()
                where._global_is_full_backward_hook = None  # which torch keeps

        yield Twin(f"global module hook {name}", context=everywhere)


def optimizer_hooks() -> Iterator[Twin]:
    for name in named(torch.optim.Optimizer):

        def attach(net: nn.Module, optimizer: torch.optim.Optimizer, name: str = name) -> list[int]:
            calls: list[int] = []

            def hook(*_: object) -> None:
                calls.append(1)
                if name.endswith("step_post_hook"):
                    with torch.no_grad():
                        for parameter in net.parameters():
                            parameter.mul_(0.9)

            getattr(optimizer, name)(hook)
            return calls

        counted = "state_dict" not in name
        yield Twin(f"optimizer hook {name}", attach=attach, found=lambda net, calls, c=counted: len(calls) if c else 0)
    where = importlib.import_module("torch.optim.optimizer")  # torch deletes the attribute
    for name in named(where):

        @contextlib.contextmanager
        def everywhere(name: str = name) -> Iterator[None]:
            def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
                with torch.no_grad():
                    for group in optimizer.param_groups:
                        for parameter in group["params"]:
                            parameter.mul_(0.9)

            handle = getattr(where, name)(hook)
            try:
                yield
            finally:
                handle.remove()

        yield Twin(f"global optimizer hook {name}", context=everywhere)


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def tensor_hooks() -> Iterator[Twin]:
    def doubled(name: str) -> Callable[[nn.Module], None]:
        def put(net: nn.Module) -> None:
            if name == "register_hook":
                net[0].weight.register_hook(lambda gradient: gradient * 2)
            else:
                net[0].weight.register_post_accumulate_grad_hook(double)

        return put

    for name in named(Tensor):
        if name not in ("register_hook", "register_post_accumulate_grad_hook"):
            SKIPPED[f"tensor hook {name}"] = "unknown"
            continue
        put = doubled(name)

        def before(put: Any = put) -> nn.Module:
            net = network()
            put(net)
            return net

        yield Twin(f"tensor hook {name}, before run.prepare", model=before)
        yield Twin(f"tensor hook {name}, after run.prepare", attach=lambda net, optimizer, put=put: put(net))
