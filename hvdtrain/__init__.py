"""Data-parallel training with Horovod on today's PyTorch."""

__version__ = "0.1.0"
