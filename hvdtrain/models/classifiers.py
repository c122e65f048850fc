"""Creates torchvision's classifiers by name."""

import torch
from torch import nn

from hvdtrain.engines.errors import UserError

SMALL_IMAGES = 100  # pixels: smaller images are tried, as some models need more (inception_v3, 75)


def require_torchvision() -> None:
    """Raise UserError if torchvision is missing, or was built for another version of torch."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # RuntimeError: "operator torchvision::nms does not exist"
        message = str(error).partition("\n")[0]
        raise UserError(
            f"torchvision cannot be used ({message}): pip install the torchvision made for your torch"
        ) from error


def build_model(name: str, classes: int, side: int) -> nn.Module:
    """Return torchvision's classifier `name` with random weights. Raises UserError if there is none for this image size."""
    from torchvision import models

    if name not in models.list_models(module=models):
        raise UserError(
            f"--model {name}: torchvision has no such classifier (resnet50, vit_b_16, ...)", everywhere=True
        )
    options: dict[str, object] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        options |= dict(aux_logits=False, init_weights=True)  # a single output, like the other models
    if name.startswith("vit"):
        options["image_size"] = side
    if name.startswith("maxvit"):
        options["input_size"] = (side, side)
    try:
        net: nn.Module = models.get_model(name, weights=None, **options)
        if side < SMALL_IMAGES:
            with torch.no_grad():
                net.eval()(torch.zeros(1, 3, side, side))
            net.train()
    except (ValueError, AssertionError, RuntimeError) as error:
        message = f"--model {name} does not support --image-size {side}: {error}"
        raise UserError(message, everywhere=True) from error
    return net
