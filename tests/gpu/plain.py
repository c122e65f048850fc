"""Training steps in plain PyTorch, the reference on the same GPU: python -m tests.gpu.plain OUT.json VARIANT ... [--cpu]

eager-256, compile-64     ResNet-50 in bf16 and channels_last, with that batch size
gpt2-32                   GPT-2 of 124 million in bf16, the whole model compiled with its loss (the module of hvdtrain.lm)
clock                     speed of a matrix product
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torchvision.models import resnet18, resnet50

from hvdtrain.models.gpt import GPT, GPT_SIZES, Sizes
from hvdtrain.output.clock import matrix_product_rate

CPU = "--cpu" in sys.argv
DEVICE = torch.device("cpu" if CPU else "cuda")
Values = dict[str, float]
MODEL = resnet18 if CPU else resnet50


def wait() -> None:
    if not CPU:
        torch.cuda.synchronize()


GPT2 = Sizes(layers=1, heads=2, width=32, context=32) if CPU else GPT_SIZES["gpt2"]


def step_of_gpt2(batch: int) -> Callable[[], None]:
    """Return a function that trains a step."""
    rows = 50_304  # of the embedding: padded
    net = GPT(GPT2, rows).to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, rows, (batch, GPT2.context + 1), device=DEVICE)
    forward = torch.compile(net)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()

    return step


def step_of(kind: str, batch: int) -> Callable[[], None]:
    """Return a function that trains a step."""
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    if kind == "gpt2":
        return step_of_gpt2(batch)
    side = 32 if CPU else 224
    net = MODEL().to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5, fused=not CPU)
    images = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8, device=DEVICE)
    labels = torch.randint(0, 1000, (batch,), device=DEVICE)
    forward = torch.compile(net) if kind == "compile" else net

    def step() -> None:
        optimizer.zero_grad()
        pixels = images.to(torch.float32, memory_format=torch.channels_last).sub_(120.0).div_(60.0)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = F.cross_entropy(forward(pixels), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()

    return step


def training(kind: str, batch: int) -> Values:
    batch = 2 if CPU else batch
    began = time.perf_counter()
    step = step_of(kind, batch)
    for _ in range(1 if CPU else 8):
        step()
    wait()
    warmup, rates, host, count = (
        time.perf_counter() - began,
        [],
        [],
        1 if CPU else 40 if kind == "gpt2" else max(10, 6000 // batch),
    )
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(count):
            step()
        host.append((time.perf_counter() - began) / count)  # until all is queued
        wait()
        rates.append(count * batch / (time.perf_counter() - began))
    rate = statistics.median(rates)
    host_ms = statistics.median(host) * 1e3  # near the whole where the host is the limit
    said = {"tokens_per_second": rate * GPT2.context} if kind == "gpt2" else {"images_per_second": rate}
    return dict(said, host_ms=host_ms, step_ms=batch / rate * 1e3, warmup_seconds=warmup)


def main() -> None:
    path, *variants = (word for word in sys.argv[1:] if word != "--cpu")
    found = {}
    for variant in variants:
        kind, _, size = variant.partition("-")
        try:
            if kind == "clock":
                found[variant] = {"bf16_TFLOPs": float(matrix_product_rate(DEVICE, torch.bfloat16)) / 1e12}
            else:
                found[variant] = training(kind, int(size))
        except Exception as error:  # the others still count
            found[variant] = dict(error=f"{type(error).__name__}: {error}"[:300])
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
