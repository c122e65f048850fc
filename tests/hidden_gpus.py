"""The tests are about processors: no launch of theirs sees a GPU, except those of tests/gpu."""

import os

# CUDA, and ROCm's two; an empty list is no GPU. torch reads them when it first counts its devices.
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
GIVEN = {name: os.environ[name] for name in HIDDEN if name in os.environ}  # before anything was hidden: for tests/gpu


def seeing(environment: dict[str, str]) -> dict[str, str]:
    """Return `environment` with the GPUs that this process was given."""
    return {name: value for name, value in environment.items() if name not in HIDDEN} | GIVEN
