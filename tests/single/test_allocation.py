"""What is freed stays with the process: no page faults in later steps; and whoever has chosen otherwise is left alone."""

import subprocess
import sys

import pytest

from hvdtrain.engines.malloc import keep_freed_memory

STEPS = """
import resource, sys
from hvdtrain.engines.malloc import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory({})
import torch
from hvdtrain.models.convnet import ConvNet
torch.set_num_threads(1)
model, images = ConvNet(), torch.zeros(64, 1, 28, 28)
def step():
    model(images).sum().backward()
for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


def faults_per_step(kind: str) -> int:
    done = subprocess.run([sys.executable, "-c", STEPS, kind], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


def test_later_steps_find_their_memory_mapped():
    assert faults_per_step("kept") < 150
    assert faults_per_step("as it comes") > 500  # else glibc keeps it by itself now, and our call can go


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_a_choice_in_the_environment_stands(name):
    assert not keep_freed_memory({name: "1"})
