"""Twins of what a model holds and a checkpoint keeps: buffers, parameters, state_dicts, averages."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from tests.twins import arguments
from tests.twins.twin import SKIPPED, WIDTH, Twin, digest, network


class Holder(nn.Module):
    """Passes its input on, and holds a buffer. use: what forward does with it."""

    def __init__(
        self, buffer: Tensor | None, persistent: bool = True, use: Callable[[nn.Module], object] = lambda module: None
    ):
        super().__init__()
        self.register_buffer("held", buffer, persistent=persistent)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.use(self)
        return x


def holding(*args: Any, **kwargs: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), Holder(*args, **kwargs), nn.Linear(6, 1))


def increment(module: nn.Module) -> None:
    module.held += 1


def assign(module: nn.Module) -> None:
    module.held = module.held + 1


def roll(module: nn.Module) -> None:
    module.held.copy_(module.held.roll(1))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "not persistent": lambda: holding(torch.arange(3.0), persistent=False),
    "expanded": lambda: holding(torch.arange(3.0).unsqueeze(1).expand(3, 4)),
    "not contiguous": lambda: holding(torch.arange(12.0).reshape(3, 4).T),
    "overlapping": lambda: holding(torch.arange(12.0).as_strided((4, 4), (2, 1))),
    "a scalar": lambda: holding(torch.tensor(3.0)),
    "empty": lambda: holding(torch.empty(0, 3)),
    "None": lambda: holding(None),
    "the lowest float": lambda: holding(torch.full((3,), torch.finfo(torch.float32).min)),
    "infinite": lambda: holding(torch.full((3,), -torch.inf)),
    "NaN": lambda: holding(torch.full((3,), torch.nan)),
    "a counter, added to in forward": lambda: holding(torch.tensor(0), use=increment),
    "a float counter, added to in forward": lambda: holding(torch.tensor(0.0), use=increment),
    "assigned in forward": lambda: holding(torch.zeros(3), use=assign),
    "rotated in forward": lambda: holding(torch.arange(5.0), use=roll),
    "channels last": lambda: holding(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    "sparse": lambda: holding(torch.eye(4).to_sparse()),
    "sparse rows": lambda: holding(torch.eye(4).to_sparse_csr()),
}


def held(net: nn.Module, attached: object) -> str:
    buffer = net[1].held
    return digest(buffer.to_dense() if buffer is not None and buffer.layout is not torch.strided else buffer)


def buffers() -> Iterator[Twin]:
    for dtype in arguments.dtypes():

        def model(dtype: torch.dtype = dtype) -> nn.Module:
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                return holding(torch.arange(8.0).to(dtype))
            return holding(torch.arange(16, dtype=torch.uint8).view(dtype))

        try:
            model()
        except Exception as error:
            SKIPPED[f"buffer {dtype}"] = f"{type(error).__name__}: {error}"[:120]
            continue
        yield Twin(f"buffer {dtype}", model=model, found=held)
    for name, kind in KINDS.items():
        yield Twin(f"buffer {name}", model=kind, found=held)


class Cast(nn.Module):
    """A linear layer of any dtype, between tensors of float32."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x.to(self.layer.weight.dtype))
        return (out.real + out.imag if out.is_complex() else out).float()


class Odd(nn.Module):
    """Parameters of other kinds than a layer's."""

    def __init__(self, kind: str):
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, 1), kind
        if kind == "a scalar":
            self.own = nn.Parameter(torch.tensor(1.0))
        elif kind == "ParameterList":
            self.own = nn.ParameterList([torch.ones(1), torch.ones(1)])
        elif kind == "ParameterDict":
            self.own = nn.ParameterDict({"a": torch.ones(1), "b.c".replace(".", "_"): torch.ones(1)})
        elif kind == "transposed":
            self.own = nn.Parameter(torch.ones(3, 4).T)
        elif kind == "channels last":
            self.own = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
        elif kind == "empty":
            self.own = nn.Parameter(torch.ones(0, 3))
        elif kind == "frozen":
            self.own = nn.Parameter(torch.ones(3), requires_grad=False)
        elif kind == "shared":
            self.own = self.layer.weight
        elif kind == "named weight.of_mine":
            self.add_module("weight", nn.Linear(1, 1))
            self.own = self.weight.weight

    def forward(self, x: Tensor) -> Tensor:
        own = self.own
        each = (
            list(own.values())
            if isinstance(own, nn.ParameterDict)
            else list(own)
            if isinstance(own, nn.ParameterList)
            else [own]
        )
        out = self.layer(x) + sum(part.sum() for part in each) * 0.1
        return out + self.weight.bias if self.kind == "named weight.of_mine" else out


def parameters() -> Iterator[Twin]:
    for dtype in arguments.dtypes():
        if not (dtype.is_floating_point or dtype.is_complex):
            continue
        try:
            net = Cast(dtype)
            net(torch.randn(2, WIDTH)).sum().backward()
        except Exception as error:
            SKIPPED[f"parameter {dtype}"] = f"{type(error).__name__}: {error}"[:120]
            continue
        near = 0.2 if dtype.itemsize < 4 else 1e-4
        yield Twin(f"parameter {dtype}", model=lambda dtype=dtype: Cast(dtype), near=near)
    for kind in (
        "a scalar", "ParameterList", "ParameterDict", "transposed", "channels last", "empty", "frozen", "shared",
        "named weight.of_mine",
    ):  # fmt: skip
        yield Twin(f"parameter {kind}", model=lambda kind=kind: Odd(kind))


class Extra(nn.Module):
    """Keeps something in its state_dict that is no parameter and no buffer."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.calls = kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * (1 + 0.01 * self.calls)

    def get_extra_state(self) -> Any:
        return {"a tensor": torch.tensor(self.calls), "a dictionary": {"calls": self.calls}, "a number": self.calls}[
            self.kind
        ]

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state["calls"] if isinstance(state, dict) else state)


def with_hooks() -> nn.Module:
    net = network()

    def add(module: nn.Module, state: dict[str, Any], prefix: str, meta: object) -> None:
        state[prefix + "version"] = torch.tensor(3)

    def take(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state.pop(prefix + "version", None)

    net[0].register_state_dict_post_hook(add)
    net[0].register_load_state_dict_pre_hook(take)
    return net


def saved() -> Iterator[Twin]:
    for kind in ("a tensor", "a dictionary", "a number"):
        yield Twin(
            f"extra state, {kind}",
            model=lambda kind=kind: nn.Sequential(nn.Linear(WIDTH, 6), Extra(kind), nn.Linear(6, 1)),
            found=lambda net, attached: net[1].calls,
        )  # fmt: skip
    yield Twin("state_dict hooks that add a key and take it out", model=with_hooks)


def averages() -> Iterator[Twin]:
    batch_norm = lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))  # noqa: E731
    for name, function in {"ema": get_ema_multi_avg_fn(0.9), "swa": get_swa_multi_avg_fn()}.items():
        for buffers in (False, True):
            for model in (network, batch_norm):
                kind = "batch norm" if model is batch_norm else "no buffers"
                yield Twin(
                    f"AveragedModel {name}, use_buffers={buffers}, {kind}",
                    model=model,
                    attach=lambda net, optimizer, f=function, b=buffers: AveragedModel(net, multi_avg_fn=f, use_buffers=b),
                    registered=True,
                    near=1e-3 if kind == "batch norm" else 1e-4,  # on 3 ranks, of two samples: rounding grows
                    after=lambda net, averaged: averaged.update_parameters(net),
                    found=lambda net, averaged: dict(averaged.state_dict()),
                )  # fmt: skip
