"""Data-parallel training with Horovod. README.md shows the layout; `hvdtrain.training` is the library for your programs."""

__version__ = "0.1.0"
