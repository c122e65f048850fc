"""Which of torch's operations change their bits with the number of threads: python -m tests.bench.threads [THREADS...]

The largest difference from one thread, relative to the largest value: of results, and of gradients after one backward pass.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear(784, 512), batch 64": (lambda: nn.Linear(784, 512), (64, 784)),
    "Linear(1024, 1024), batch 512": (lambda: nn.Linear(1024, 1024), (512, 1024)),
    "Conv2d(1, 64, 4, 2, 1), batch 64, 28x28": (lambda: nn.Conv2d(1, 64, 4, 2, 1), (64, 1, 28, 28)),
    "Conv2d(64, 128, 4, 2, 1), batch 64, 14x14": (lambda: nn.Conv2d(64, 128, 4, 2, 1), (64, 64, 14, 14)),
    "ConvTranspose2d(128, 64, 4, 2, 1), batch 64, 7x7": (lambda: nn.ConvTranspose2d(128, 64, 4, 2, 1), (64, 128, 7, 7)),
    "ConvTranspose2d(64, 1, 4, 2, 1), batch 64, 14x14": (lambda: nn.ConvTranspose2d(64, 1, 4, 2, 1), (64, 64, 14, 14)),
    "BatchNorm2d(64), batch 64, 14x14": (lambda: nn.BatchNorm2d(64), (64, 64, 14, 14)),
    "LayerNorm(512), 512 rows": (lambda: nn.LayerNorm(512), (512, 512)),
}


def results(threads: int) -> dict[str, Tensor]:
    """Return the output and every gradient of each case."""
    torch.set_num_threads(threads)
    found: dict[str, Tensor] = {}
    for name, (make, shape) in CASES.items():
        torch.manual_seed(1)
        layer, x = make(), torch.randn(shape).requires_grad_()
        y = layer(x)
        y.backward(torch.randn(y.shape))
        assert x.grad is not None
        found |= {f"{name}: output": y.detach(), f"{name}: gradient of the input": x.grad}
        found |= {
            f"{name}: gradient of the {part}": p.grad for part, p in layer.named_parameters() if p.grad is not None
        }
    found["mean of 50,176 numbers"] = torch.rand(50_176, generator=torch.Generator().manual_seed(1)).mean()
    return found


def main() -> int:
    one = results(1)
    for threads in map(int, sys.argv[1:] or ["2", "4"]):
        other = results(threads)
        print(f"1 and {threads} threads: of {len(one)} tensors, these differ")
        for name, value in one.items():
            if not torch.equal(value, other[name]):
                print(f"    {name}: {float((value - other[name]).abs().max() / value.abs().max()):.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
