"""A stand-in accelerator in Python, and the training scripts on it: what each step makes the host wait for."""
