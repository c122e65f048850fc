"""What a training may have beside its core, one file each. `training/start.py` lists them, and the core imports none."""
