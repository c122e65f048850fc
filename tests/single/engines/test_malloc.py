"""What is freed stays with the process: later steps take no page faults; and whoever has chosen otherwise is left alone."""

import ctypes
import os
import subprocess
import sys

import pytest

from hvdtrain.engines.library_settings import OWN_CHOICE, keep_freed_memory

# In one process, first malloc as it comes and then ours, so that nothing but our call differs. Freed in the end, six blocks
# of 8 MiB are above malloc's own threshold for giving memory back (twice the largest one).
PROGRAM = """
import ctypes, resource
from hvdtrain.engines.library_settings import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def steps():
    for _ in range(10):
        blocks = [libc.malloc(2**23) for _ in range(6)]
        for block in blocks:
            ctypes.memset(block, 1, 2**23)
        for block in reversed(blocks):
            libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

print(-steps() + steps())
assert keep_freed_memory({})
print(-steps() + steps())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc: no mallopt")
def test_blocks_are_found_mapped_by_the_next_step():
    """Of 4 kB pages 122,880 faults against none; where the kernel gives pages of 2 MiB unasked, 240."""
    env = {name: value for name, value in os.environ.items() if name not in OWN_CHOICE}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done
    before, after = map(int, done.stdout.split())
    assert before >= 200, "else glibc keeps it by itself now, and our call can go"
    assert after < before / 4


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_a_choice_in_the_environment_stands(name):
    assert not keep_freed_memory({name: "1"})
