"""Training steps in plain PyTorch, the reference on the same GPU: python -m tests.gpu.plain OUT.json VARIANT ... [--cpu]

eager-256, compile-256, graph-64     ResNet-50 in bf16 and channels_last, with that batch size; graph: a CUDA graph
clock                                bandwidth of a copy, speed of a matrix product
wire-fp16, wire-bf16                 its gradients to the type of the network and back, one by one and a bucket at once
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

from hvdtrain.engines.compression import GradientCompressor
from hvdtrain.engines.horovod import buckets

CPU = "--cpu" in sys.argv
DEVICE = torch.device("cpu" if CPU else "cuda")
Values = dict[str, float]
MODEL = resnet18 if CPU else resnet50


def wait() -> None:
    if not CPU:
        torch.cuda.synchronize()


def step_of(kind: str, batch: int) -> Callable[[], None]:
    """Return a function that trains a step."""
    side = 32 if CPU else 224
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
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

    if kind != "graph":
        return step
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def training(kind: str, batch: int) -> Values:
    batch = 2 if CPU else batch
    began = time.perf_counter()
    step = step_of(kind, batch)
    for _ in range(1 if CPU else 8):
        step()
    wait()
    warmup, rates, host, count = time.perf_counter() - began, [], [], 1 if CPU else max(10, 6000 // batch)
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(count):
            step()
        host.append(
            (time.perf_counter() - began) / count
        )  # until all is queued: near the whole where the host is the limit
        wait()
        rates.append(count * batch / (time.perf_counter() - began))
    rate = statistics.median(rates)
    return dict(
        images_per_second=rate, host_ms=statistics.median(host) * 1e3, step_ms=batch / rate * 1e3, warmup_seconds=warmup
    )


def seconds_of(work: Callable[[], object], count: int) -> float:
    work()
    wait()
    began = time.perf_counter()
    for _ in range(count):
        work()
    wait()
    return (time.perf_counter() - began) / count


def clock() -> Values:
    size, side, count = (1 << 20, 256, 2) if CPU else (1 << 30, 8192, 20)
    one = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    other, matrix = torch.empty_like(one), torch.randn(side, side, device=DEVICE).bfloat16()
    copied = 2 * size / seconds_of(lambda: other.copy_(one), count)
    return dict(copy_TBps=copied / 1e12, bf16_TFLOPs=2 * side**3 / seconds_of(lambda: matrix @ matrix, count) / 1e12)


def wire(dtype: torch.dtype) -> Values:
    """Milliseconds of the host's and the GPU's work of a step, whichever is longer."""
    net = MODEL().to(DEVICE, memory_format=torch.channels_last)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    divisor = 2.0 if dtype == torch.float16 else 1.0
    compressor = GradientCompressor(dtype, divisor, divisor / 2)
    groups = [[parameter.grad for parameter in group] for group in buckets(list(net.parameters()))]

    def carry(parts: list[list[torch.Tensor]]) -> None:
        for part in parts:
            for tensor, where in zip(*compressor.together(part), strict=True):
                compressor.decompress(tensor, where)

    def one_by_one() -> None:  # as before buckets were compressed at once
        for gradient in (one for group in groups for one in group):
            sent = (gradient / divisor if divisor != 1.0 else gradient).to(dtype)
            sent.to(torch.float32).mul_(divisor / 2)

    count = 2 if CPU else 50
    return dict(
        together_ms=seconds_of(lambda: carry(groups), count) * 1e3, one_by_one_ms=seconds_of(one_by_one, count) * 1e3
    )


def main() -> None:
    path, *variants = (word for word in sys.argv[1:] if word != "--cpu")
    found = {}
    for variant in variants:
        kind, _, size = variant.partition("-")
        try:
            if kind == "clock":
                found[variant] = clock()
            elif kind == "wire":
                found[variant] = wire(torch.float16 if size == "fp16" else torch.bfloat16)
            elif kind == "graph" and CPU:
                continue
            else:
                torch.manual_seed(1)
                found[variant] = training(kind, int(size))
        except Exception as error:  # the others still count
            found[variant] = dict(error=f"{type(error).__name__}: {error}"[:300])
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
