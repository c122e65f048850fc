"""The tests are about processors: no launch of theirs sees a GPU, except those of tests/gpu."""

import json
import os

# CUDA, and ROCm's two; an empty list is no GPU. torch reads them when it first counts its devices.
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
KEPT = "HVDTRAIN_TEST_GPUS_GIVEN"  # pytest's workers are started when the GPUs are hidden already
GIVEN: dict[str, str] = (
    json.loads(os.environ[KEPT])
    if KEPT in os.environ
    else {name: os.environ[name] for name in HIDDEN if name in os.environ}
)
os.environ[KEPT] = json.dumps(GIVEN)


def seeing(environment: dict[str, str]) -> dict[str, str]:
    """Return `environment` with the GPUs that this process was given."""
    return {name: value for name, value in environment.items() if name not in HIDDEN} | GIVEN
