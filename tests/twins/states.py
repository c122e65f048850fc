"""Twins of what a model holds and a checkpoint keeps: buffers, parameters, state_dicts, averages."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from tests.twins import arguments
from tests.twins.twin import WIDTH, Twin, digest, network, works


class Holder(nn.Module):
    """Passes its input on, and holds a buffer. use: what forward does with it."""

    def __init__(
        self, buffer: Tensor | None, persistent: bool = True, use: Callable[[Any], object] = lambda module: None
    ):
        super().__init__()
        self.register_buffer("held", buffer, persistent=persistent)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.use(self)
        return x


def between(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), layer, nn.Linear(6, 1))


def add(module: Any) -> None:
    module.held += 1


def assign(module: Any) -> None:
    module.held = module.held + 1


def roll(module: Any) -> None:
    module.held.copy_(module.held.roll(1))


KINDS: dict[str, Callable[[], nn.Module]] = {  # what holds the buffer
    "not persistent": lambda: Holder(torch.arange(3.0), persistent=False),
    "expanded": lambda: Holder(torch.arange(3.0).unsqueeze(1).expand(3, 4)),
    "not contiguous": lambda: Holder(torch.arange(12.0).reshape(3, 4).T),
    "overlapping": lambda: Holder(torch.arange(12.0).as_strided((4, 4), (2, 1))),
    "a scalar": lambda: Holder(torch.tensor(3.0)),
    "empty": lambda: Holder(torch.empty(0, 3)),
    "None": lambda: Holder(None),
    "the lowest float": lambda: Holder(torch.full((3,), torch.finfo(torch.float32).min)),
    "infinite": lambda: Holder(torch.full((3,), -torch.inf)),
    "NaN": lambda: Holder(torch.full((3,), torch.nan)),
    "a counter, added to in forward": lambda: Holder(torch.tensor(0), use=add),
    "a float counter, added to in forward": lambda: Holder(torch.tensor(0.0), use=add),
    "assigned in forward": lambda: Holder(torch.zeros(3), use=assign),
    "rotated in forward": lambda: Holder(torch.arange(5.0), use=roll),
    "channels last": lambda: Holder(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    "sparse": lambda: Holder(torch.eye(4).to_sparse()),
    "sparse rows": lambda: Holder(torch.eye(4).to_sparse_csr()),
}


def held(net: Any, attached: object) -> str:
    buffer = net[1].held
    return digest(buffer.to_dense() if buffer is not None and buffer.layout is not torch.strided else buffer)


def of_dtype(dtype: torch.dtype) -> nn.Module:
    # Some dtypes take no numbers, such as packed ones and bits: torch says so by any of these, and a buffer gets bytes.
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
        return between(Holder(torch.arange(8.0).to(dtype)))
    return between(Holder(torch.arange(16, dtype=torch.uint8).view(dtype)))


def buffers() -> Iterator[Twin]:
    for dtype in arguments.dtypes():
        if works(f"buffer {dtype}", partial(of_dtype, dtype)):
            yield Twin(f"buffer {dtype}", model=partial(of_dtype, dtype), found=held)
    for name, kind in KINDS.items():
        yield Twin(f"buffer {name}", model=lambda kind=kind: between(kind()), found=held)


class Cast(nn.Module):
    """A linear layer of any dtype, between tensors of float32."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x.to(self.layer.weight.dtype))
        return (out.real + out.imag if out.is_complex() else out).float()


ODD: dict[str, Callable[[], Any]] = {  # parameters of other kinds than a layer's
    "a scalar": lambda: nn.Parameter(torch.tensor(1.0)),
    "ParameterList": lambda: nn.ParameterList([torch.ones(1), torch.ones(1)]),
    "ParameterDict": lambda: nn.ParameterDict({"a": torch.ones(1), "b_c": torch.ones(1)}),
    "transposed": lambda: nn.Parameter(torch.ones(3, 4).T),
    "channels last": lambda: nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    "empty": lambda: nn.Parameter(torch.ones(0, 3)),
    "frozen": lambda: nn.Parameter(torch.ones(3), requires_grad=False),
    "shared": lambda: None,  # with the layer
    "named weight.of_mine": lambda: None,  # of a layer called "weight"
}


class Odd(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.layer, self.own = nn.Linear(WIDTH, 1), ODD[kind]()
        if kind == "shared":
            self.own = self.layer.weight
        elif kind == "named weight.of_mine":
            self.add_module("weight", nn.Linear(1, 1))
            self.own = self.weight.weight

    def forward(self, x: Tensor) -> Tensor:
        own = self.own.values() if isinstance(self.own, nn.ParameterDict) else self.own
        each = list(own) if isinstance(self.own, nn.ParameterDict | nn.ParameterList) else [own]
        out = self.layer(x) + sum(part.sum() for part in each) * 0.1
        return out + self.weight.bias if hasattr(self, "weight") else out


def parameters() -> Iterator[Twin]:
    for dtype in arguments.dtypes():
        if not (dtype.is_floating_point or dtype.is_complex):
            continue
        if works(f"parameter {dtype}", lambda dtype=dtype: Cast(dtype)(torch.randn(2, WIDTH)).sum().backward()):
            yield Twin(f"parameter {dtype}", model=partial(Cast, dtype), near=0.2 if dtype.itemsize < 4 else 1e-4)
    for kind in ODD:
        yield Twin(f"parameter {kind}", model=partial(Odd, kind))


class Extra(nn.Module):
    """Keeps something in its state_dict that is no parameter and no buffer."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.calls = kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * (1 + 0.01 * self.calls)

    def get_extra_state(self) -> Any:
        kinds = {"a tensor": torch.tensor(self.calls), "a dictionary": {"calls": self.calls}, "a number": self.calls}
        return kinds[self.kind]

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state["calls"] if isinstance(state, dict) else state)


def with_hooks() -> nn.Module:
    def put(module: nn.Module, state: dict[str, Any], prefix: str, meta: object) -> None:
        state[prefix + "version"] = torch.tensor(3)

    def take(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state.pop(prefix + "version", None)

    net = network()
    net[0].register_state_dict_post_hook(put)
    net[0].register_load_state_dict_pre_hook(take)
    return net


def saved() -> Iterator[Twin]:
    for kind in ("a tensor", "a dictionary", "a number"):
        model = lambda kind=kind: between(Extra(kind))  # noqa: E731
        yield Twin(f"extra state, {kind}", model=model, found=lambda net, attached: net[1].calls)
    yield Twin("state_dict hooks that add a key and take it out", model=with_hooks)


def averages() -> Iterator[Twin]:
    def averaged(how: dict[str, Any], net: nn.Module, optimizer: object) -> AveragedModel:
        return AveragedModel(net, **how)

    for name, function in {"ema": get_ema_multi_avg_fn(0.9), "swa": get_swa_multi_avg_fn()}.items():
        for buffers in (False, True):
            for kind, model in (("no buffers", network), ("batch norm", lambda: between(nn.BatchNorm1d(6)))):
                yield Twin(
                    f"AveragedModel {name}, use_buffers={buffers}, {kind}", model=model, registered=True,
                    attach=partial(averaged, dict(multi_avg_fn=function, use_buffers=buffers)),
                    near=1e-3 if kind == "batch norm" else 1e-4,  # on 3 ranks, of two samples: rounding grows
                    after=lambda net, averaged: averaged.update_parameters(net),
                    found=lambda net, averaged: dict(averaged.state_dict()),
                )  # fmt: skip
