"""Where samples come from: each module yields tensors in memory or a loader."""
