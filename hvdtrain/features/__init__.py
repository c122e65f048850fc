"""What a training may have beside its core, one file each. `loop/start.py` lists them, and the core imports none."""
