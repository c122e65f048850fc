"""Data sets and loaders. Each module provides tensors in memory or a loader."""
