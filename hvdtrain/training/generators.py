"""The global generators of torch, Python and numpy: seeded together, and kept over a block."""

import contextlib
import random
import sys
from collections.abc import Iterator

import torch


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of torch (CPU and `device`), Python and numpy."""
    # Not torch.manual_seed, which queries every accelerator backend: hundreds of microseconds, and this runs in every step.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(seed)
        for index, generator in enumerate(torch.cuda.default_generators):  # DataParallel computes on the others, too
            if index != (device.index or 0):
                generator.manual_seed((seed + 1 + index) % 2**64)
    random.seed(seed)
    if "numpy" in sys.modules:  # otherwise it is not used
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Context manager that restores the global generators (of torch: the CPU's) after the block."""
    state, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
