"""Search for the network and the recipe that reach 99 % on MNIST in the least time (docs/evidence/network.md has the table).

python -m tests.bench.networks --data-dir DIR 5x16s2-3x32s2-3x64s2 5x16p-5x32p:lr=0.02,batch=128
python -m tests.bench.networks --data-dir DIR --seeds 1,2,3,4,5 5x16s2-3x32s2-3x64s2

Each candidate is trained in this one process, on one thread, as RANKS ranks would train it: the same order of samples, batch
norm over each rank's own samples, gradients averaged. So accuracy is that of the real command but for rounding, and depends
on no other load. CPU seconds are of all ranks together, training only; a busy machine makes them longer.

A network: layers separated by "-", each KERNELxCHANNELS and then any of s2 (stride 2), v (no padding), p (2 x 2 max pooling
after it), n (no batch norm), f (fixed, as it was initialized), d (fixed: a cosine transform). Last comes a linear layer.
`5x15s2dn-3x32s2-3x64v` is cosinenet, `5x16p-5x32p` convnet. After ":" come settings: the fields of `Settings`.
"""

import argparse
import dataclasses
import re
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.data import idx
from hvdtrain.engines.malloc import keep_freed_memory
from hvdtrain.mnist import scaled
from hvdtrain.models.convnet import cosines
from hvdtrain.training import optim


@dataclasses.dataclass(frozen=True)
class Settings:
    ranks: int = 2
    batch: int = 64  # samples per rank
    lr: float = 0.01  # peak
    momentum: float = 0.9  # adam: beta 1
    beta2: float = 0.999
    decay: float = 0.0
    smoothing: float = 0.05
    optimizer: str = "adam"  # or sgd (Nesterov)
    fused: int = 0
    amp: str = "off"  # or bf16
    samples: int = 60_000
    epochs: float = 1.0  # may be a fraction
    rise: float = 0.3  # share of training in which the rate rises
    average: float = 0.0  # evaluate an average of the weights, which keeps this share of itself in a step; 0: none


def network(text: str) -> nn.Sequential:
    """Return the network that `text` describes, for float32 [b, 1, 28, 28]."""
    layers: list[nn.Module] = []
    channels, side = 1, 28
    for layer in text.split("-"):
        found = re.fullmatch(r"(\d+)x(\d+)((?:s\d|p|n|v|d|f)*)", layer)
        if found is None:
            raise SystemExit(f"{layer}: not KERNELxCHANNELS with s2, p, n, v after it")
        kernel, width, rest = int(found[1]), int(found[2]), found[3]
        stride = int(strides[0]) if (strides := re.findall(r"s(\d)", rest)) else 1
        padding = 0 if "v" in rest else kernel // 2
        conv = nn.Conv2d(channels, width, kernel, stride, padding, bias="n" in rest and "d" not in rest)
        if "d" in rest:
            with torch.no_grad():
                conv.weight.copy_(cosines(width, kernel))
        if "d" in rest or "f" in rest:
            conv.requires_grad_(False)
        layers.append(conv)
        side = (side + 2 * padding - kernel) // stride + 1
        if "n" not in rest:
            layers.append(nn.BatchNorm2d(width))
        if "p" in rest:
            layers.append(nn.MaxPool2d(2))
            side //= 2
        layers.append(nn.ReLU())
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(side * side * channels, 10))


def train(text: str, settings: Settings, seed: int, data: idx.Dataset) -> tuple[float, float]:
    """Return the test accuracy and the CPU seconds of training."""
    images, labels = data.train_images[: settings.samples], data.train_labels[: settings.samples]
    torch.manual_seed(seed)
    net = network(text)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    momentum, shared = settings.momentum, dict(lr=settings.lr, weight_decay=settings.decay, fused=bool(settings.fused))
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "adam":
        optimizer = torch.optim.Adam(trained, betas=(momentum, settings.beta2), **shared)
    else:
        optimizer = torch.optim.SGD(trained, momentum=momentum, nesterov=momentum > 0, **shared)
    averaged = [parameter.detach().clone() for parameter in net.parameters()]
    total, done, epoch = int(len(images) * settings.epochs), 0, 0
    began = time.process_time()
    while done < total:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed + epoch))[: total - done]
        for step in order.split(settings.batch * settings.ranks):
            progress = done / total
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * factor(progress, settings.rise)
            optimizer.zero_grad()
            for rank in range(settings.ranks):
                mine = step[rank :: settings.ranks]
                if len(mine) == 0:
                    continue
                with torch.autocast("cpu", torch.bfloat16, enabled=settings.amp == "bf16"):
                    logits = net(scaled(images[mine]))
                    loss = F.cross_entropy(logits, labels[mine], label_smoothing=settings.smoothing)
                (loss * (len(mine) / len(step))).backward()
            optimizer.step()
            done += len(step)
            if settings.average:
                torch._foreach_lerp_(averaged, list(net.parameters()), 1 - settings.average)
        epoch += 1
    seconds = time.process_time() - began
    if settings.average:
        with torch.no_grad():
            for parameter, mean in zip(net.parameters(), averaged, strict=True):
                parameter.copy_(mean)
    return accuracy(net, data.test_images, data.test_labels), seconds


def factor(progress: float, rise: float) -> float:
    """As `optim.schedule_factor` has it for onecycle, with another share of training in which the rate rises."""
    if progress < rise:
        return optim.schedule_factor("onecycle", 0.3 * progress / rise)
    return optim.schedule_factor("onecycle", 0.3 + 0.7 * (progress - rise) / (1 - rise))


def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    net.eval()
    with torch.inference_mode():
        right = sum(
            int((net(scaled(some)).argmax(1) == of).sum())
            for some, of in zip(images.split(250), labels.split(250), strict=True)
        )
    return right / len(images)


def parsed(candidate: str) -> tuple[str, Settings]:
    text, _, rest = candidate.partition(":")
    values: dict[str, object] = {}
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Settings)}
    for pair in filter(None, rest.split(",")):
        name, _, value = pair.partition("=")
        if name not in kinds:
            raise SystemExit(f"{name}: not one of {', '.join(kinds)}")
        values[name] = kinds[name](value)
    return text, Settings(**values)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests.bench.networks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("candidates", nargs="+")
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", default="1")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory({})
    data = idx.load(flags.dataset, flags.data_dir)
    print("| network and settings | parameters | mean | least | each seed | CPU s |\n|---|---:|---:|---:|---|---:|")
    for candidate in flags.candidates:
        text, settings = parsed(candidate)
        found = [train(text, settings, int(seed), data) for seed in flags.seeds.split(",")]
        reached = [100 * right for right, _ in found]
        count = sum(parameter.numel() for parameter in network(text).parameters())
        each = " ".join(f"{percent:.2f}" for percent in reached)
        print(
            f"| {candidate} | {count:,} | {statistics.mean(reached):.3f} | {min(reached):.2f} | {each} | "
            f"{statistics.median(seconds for _, seconds in found):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
