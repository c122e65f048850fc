"""The models of a run, and the unique names of their parameters."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn


class Models(list[nn.Module]):
    """The models of a run. names: what the script calls them, `run.prepare(generator=...)`; "": it gave no name."""

    def __init__(self, models: Iterable[nn.Module], names: Iterable[str]):
        super().__init__(models)
        self.names = list(names)


def prefixes(models: Sequence[nn.Module]) -> list[str]:
    """Return what the names of each model's parts begin with: nothing for a single model, else its name or number."""
    if len(models) == 1:
        return [""]
    names = models.names if isinstance(models, Models) else [""] * len(models)
    return [f"{name or number}." for number, name in enumerate(names)]


def own_name(name: str) -> str:
    """Return the name of a parameter or buffer without the part that torch.compile inserts for a compiled module."""
    return name.replace("_orig_mod.", "")


def named_parameters(models: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return each parameter once, with a unique name. With several models, it begins with the model's name or number."""
    named: dict[nn.Parameter, str] = {}
    for prefix, model in zip(prefixes(models), models, strict=True):
        for name, parameter in model.named_parameters():
            named.setdefault(parameter, prefix + own_name(name))
    return [(name, parameter) for parameter, name in named.items()]


def kind_of(tensor: Tensor) -> str:
    """Return a tensor's shape and type in words."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
