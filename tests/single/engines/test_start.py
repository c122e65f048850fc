"""An engine starts: a share of the cores, the quota, memory that is kept, one line for users. And the end of MPI."""

import ctypes
import math
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hvdtrain import __version__
from hvdtrain.engines.choice import computes_in_bf16, require_same_flags, share_of
from hvdtrain.engines.cores import cpu_quota, near_gpu, threads_asked, turn_on
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import (
    alone_in_pid_namespace,
    bound_by_default,
    bound_unexplained,
)
from hvdtrain.engines.library_settings import OWN_CHOICE, keep_freed_memory
from tests.single.forked import ends_of

SOCKETS = [("a", range(8)), ("a", range(8, 16)), ("a", range(8))]  # mpirun -np 3 on two sockets: the third starts over
SHARES = {  # hosts and cores of the ranks, quota of the container, cores of the Slurm job, threads
    "unbound": ([("a", range(8))] * 3, math.inf, None, [2, 2, 2]),
    "more ranks than cores": ([("a", range(2))] * 4, math.inf, None, [1] * 4),
    "bound apart": ([("a", range(4)), ("a", range(4, 6))], math.inf, None, [4, 2]),
    "an odd number on two sockets": (SOCKETS, math.inf, None, [4, 8, 4]),
    "two hosts": ([("a", range(4)), ("a", range(4)), ("b", range(4))], math.inf, None, [2, 2, 4]),
    "a container": ([("a", range(64))] * 8, 48.0, None, [6] * 8),
    "a Slurm job, not bound": ([("a", range(64))] * 8, 48.0, 16, [2] * 8),
}


@pytest.mark.parametrize("case", SHARES)
def test_threads_are_a_share_of_the_cores_that_the_rank_may_run_on(monkeypatch, case):
    """More of shares: tests/single/commands/test_tuned.py."""
    places, quota, of_job, expected = SHARES[case]
    monkeypatch.setattr("hvdtrain.engines.choice.cpu_quota", lambda: quota)
    if of_job is not None:
        for name, value in {"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_CPUS_ON_NODE": str(of_job)}.items():
            monkeypatch.setenv(name, value)
    told = []
    for rank, (_, cores) in enumerate(places):
        # Of each process: a rank in a PID namespace of its own sees no launcher, and Slurm's may have cores of its own.
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(cores))
        told.append(share_of(rank, [(name, list(theirs)) for name, theirs in places]))
    assert told == expected


ASKED = {
    "by the user": (dict(OMP_NUM_THREADS="3"), 3),
    "by nobody": ({}, None),
    "by torchrun": (dict(OMP_NUM_THREADS="1", TORCHELASTIC_RUN_ID="none", LOCAL_WORLD_SIZE="2"), None),
    "by the user, under torchrun": (dict(OMP_NUM_THREADS="2", TORCHELASTIC_RUN_ID="none", LOCAL_WORLD_SIZE="2"), 2),
    "by the user, of one rank": (dict(OMP_NUM_THREADS="1", TORCHELASTIC_RUN_ID="none", LOCAL_WORLD_SIZE="1"), 1),
    "of levels": (dict(OMP_NUM_THREADS="4,2"), None),
    "of none": (dict(OMP_NUM_THREADS="0"), None),
}


@pytest.mark.parametrize("case", ASKED)
def test_the_number_of_threads_that_the_user_has_set_is_kept(case):
    environ, threads = ASKED[case]
    assert threads_asked(environ) == threads


TURNS = {  # hosts and cores of the ranks, and the core of each
    "four on two cores": ([("a", range(2))] * 4, [0, 0, 1, 1]),
    "cores enough": ([("a", range(4))] * 4, [None] * 4),
    "three on two cores": ([("a", range(2))] * 3, [None] * 3),  # two of them would wait for a core that another leaves
    "bound by a launcher": ([("a", [0]), ("a", [1])] * 2, [None] * 4),
    "two hosts": ([("a", [4, 6]), ("b", [0])] * 4, [4, 0, 4, 0, 6, 0, 6, 0]),
}


@pytest.mark.parametrize("case", TURNS)
def test_more_ranks_than_cores_are_divided_evenly(case):
    places, expected = TURNS[case]
    assert [turn_on(rank, places) for rank in range(len(places))] == expected


def test_all_threads_stay_on_the_core():
    """In a process of its own: those of the tests keep their cores."""
    script = """
import os, threading
from hvdtrain.engines.cores import stay_on
ends = threading.Event()
threading.Thread(target=ends.wait).start()
core = max(os.sched_getaffinity(0))
stay_on(core)
threads = os.listdir("/proc/self/task")
print(len(threads), all(os.sched_getaffinity(int(thread)) == {core} for thread in threads))
ends.set()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 True\n", done.stderr


def test_cpu_quota_is_the_tightest_on_the_way_down(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pod/container\n")
    (tmp_path / "pod" / "container").mkdir(parents=True)
    assert cpu_quota(tmp_path, membership) == math.inf
    (tmp_path / "pod" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "pod" / "container" / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path, membership) == 1.5
    assert cpu_quota(tmp_path, tmp_path / "absent") == math.inf


def test_a_rank_takes_the_cores_next_to_its_gpu_where_its_launcher_has_not_chosen(tmp_path):
    """A folder stands for /sys/bus/pci/devices of a host with two sockets of 8 cores, and two threads a core."""
    for address, cores in {"0000:18:00.0": "0-7,16-23", "0000:9a:00.0": "8-15,24-31", "0000:06:00.0": "0-31"}.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(cores + "\n")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "local_cpulist").write_text("\n")
    near = {*range(8, 16), *range(24, 32)}
    assert near_gpu("0000:9a:00.0", range(32), 32, tmp_path) == near
    assert near_gpu("0000:06:00.0", range(32), 32, tmp_path) == set()  # one node: nothing to choose
    assert near_gpu("0000:9a:00.0", range(16), 32, tmp_path) == set()  # bound already
    assert near_gpu("0000:00:00.0", range(32), 32, tmp_path) == set()  # not said
    assert near_gpu("odd", range(32), 32, tmp_path) == set()


def test_only_a_binding_nobody_asked_for_is_undone():
    bound = {"OMPI_MCA_orte_bound_at_launch": "1"}
    assert bound_by_default(bound)
    assert not bound_by_default({})
    assert not bound_by_default(bound | {"OMPI_MCA_hwloc_base_binding_policy": "core"})
    assert not bound_by_default(bound | {"OMPI_MCA_rmaps_base_mapping_policy": "ppr:2:node:PE=4"})


def test_a_rank_in_a_pid_namespace_of_its_own_is_told_from_one_whose_mpirun_is_with_it():
    rank = {"OMPI_COMM_WORLD_RANK": "1"}
    assert alone_in_pid_namespace(rank, 0, "python")  # process 1 itself: podman run, charliecloud never
    assert alone_in_pid_namespace(rank, 1, "appinit")
    assert not alone_in_pid_namespace(rank, 1, "mpirun")  # podman run IMAGE mpirun ...
    assert not alone_in_pid_namespace(rank, 17, "systemd")
    assert not alone_in_pid_namespace({}, 0, "python")  # a container without mpirun


def test_open_mpi_five_says_nothing_of_its_binding_so_it_is_only_reported():
    assert bound_unexplained({"PRTE_LAUNCHED": "1"}, 1, 64)
    assert not bound_unexplained({"PRTE_LAUNCHED": "1"}, 64, 64)
    assert not bound_unexplained({"PRTE_LAUNCHED": "1"}, 1, 1)
    assert not bound_unexplained({"OMPI_MCA_orte_bound_at_launch": "1"}, 1, 64)
    assert not bound_by_default({"PRTE_LAUNCHED": "1"})


SECOND, FIRST = {"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "2"}
ENDS = {  # what main does, variables, exit code, standard error
    "its exit code": ("return 3", {}, 3, ""),
    "an error of the user": ("raise UserError('no such thing: do this')", {}, 2, "-c: error: no such thing: do this\n"),
    "what every rank knows, rank 0 says": ("raise UserError('x', everywhere=True)", FIRST, 2, "-c: error: x\n"),
    "what every rank knows, others do not say": ("raise UserError('x', everywhere=True)", SECOND, 2, ""),
    "what one rank alone may know": ("raise UserError('x')", SECOND, 2,
        f"-c: rank 1 on {socket.gethostname()}: error: x\n"),
    "a limit on threads": ("raise RuntimeError(\"can't start new thread\")", {}, 2, "ulimit -u"),
    "a single sample for batch norm": ("import torch; torch.nn.BatchNorm1d(2)(torch.ones(1, 2))", {}, 2,
        "batch norm got a single sample, as the last step may leave one to a rank: write"),
    "an operation without a deterministic algorithm": (  # of a kernel that only GPUs have, in the words of torch 2.15
        "raise RuntimeError('adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set')",
        {}, 2, "adaptive_avg_pool2d_backward_cuda has no algorithm whose bits repeat: leave --deterministic out",
    ),
    "a lack of memory": (
        "import torch; torch.ones(10**14)", {}, 2,
        "-c: error: there is not enough memory for another 400,000,000,000,000 bytes: use a smaller --batch-size",
    ),
    "a lack of memory on a GPU": (
        "raise RuntimeError('CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB')",
        {}, 2, "there is not enough memory for another 20.00 GiB: use",
    ),
    "a rank before the start": ("import torch.distributed as d; d.get_rank()", {}, 2,
        "use run.rank and run.size in its block"),
    "an end after the end": ("import torch.distributed as d; d.destroy_process_group()", {}, 2, "hvdtrain has done so"),
    "another attribute": ("object().module", {}, 1, "has no attribute 'module'"),
    "another error": ("raise RuntimeError('something else')", {}, 1, "Traceback"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_a_command_ends_with_its_code_and_one_line_for_users(case, ends):
    *_, code, said = ENDS[case]
    done = ends[case]
    assert (done.code, done.out) == (code, ""), done
    assert done.err == said if not said or "\n" in said else said in done.err
    if code == 2:
        assert len(done.err.splitlines()) == bool(said)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t: fpu avx512_bf16", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t: fpu avx2", False),
        ("", False),
    ],
)
def test_bf16_is_taken_where_the_processor_has_it(flags, expected, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: bf16 in name only\n{flags}\n")
    assert computes_in_bf16(torch.device("cpu"), cpuinfo) is expected
    assert computes_in_bf16(torch.device("cpu"), tmp_path / "none") is False


# ---- what is freed stays with the process: later steps take no page faults

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


# ---- the end of MPI, in real processes, with an MPI whose end is not answered

IMPORTS = """
import atexit, os, sys, threading, time
from types import SimpleNamespace
from hvdtrain.engines import horovod
from hvdtrain.engines.errors import UserError
from hvdtrain.launching.exit_codes import run_command
"""
COMMAND = """
for name in [*os.environ]:
    del os.environ[name]
os.environ.update({variables})
def main(): {main}
run_command(main)
"""
SCRIPT = """
horovod.END_SECONDS = 3.0  # many times what a thread needs to begin
atexit.register(print, "an earlier exit handler")

def shutdown():
    print("barrier" if arrived else "no barrier")
    print("MPI has removed its files")
    if {unanswered}:
        time.sleep(1000)
    print("answered")

arrived = []
basics = SimpleNamespace(shutdown=lambda: time.sleep(1000))
hvd = SimpleNamespace(barrier={barrier}, shutdown=shutdown, mpi_ops=SimpleNamespace(_basics=basics))
if {unanswered}:
    atexit.register(basics.shutdown)  # as Horovod does
horovod.shut_down_at_exit(hvd, killed=False)  # of a training before
horovod.shut_down_at_exit(hvd, killed={killed})
sys.stdout.write("kept, ")
sys.exit(75)
"""


FAILS = "lambda: 1 / 0"  # Horovod was shut down


@pytest.mark.parametrize(
    ("version", "rate", "said"),
    [("0.0.1", 2, "ranks 0 and 1 have hvdtrain .* and 0.0.1: install the same"), (__version__, 2, "different flags")],
)
def test_ranks_of_different_versions_or_flags_are_refused(version, rate, said):
    """A copy of hvdtrain on one host may be old, and its ranks call other collectives."""
    engine = SimpleNamespace(all_gather_object=lambda mine, name: [mine, [version, {"lr": rate}]])
    with pytest.raises(UserError, match=said):
        require_same_flags(engine, {"lr": 1})


ARRIVES = "lambda: arrived.append(1)"
CASES = {  # killed, unanswered, barrier; and what is said
    "killed": ((True, True, ARRIVES), "kept, barrier\nMPI has removed its files\n"),
    "killed after a shutdown": ((True, True, FAILS), "kept, no barrier\nMPI has removed its files\n"),
    "killed, and answered": ((True, False, ARRIVES), "kept, barrier\nMPI has removed its files\nanswered\n"),
    "at its end": ((False, False, FAILS), "kept, no barrier\nMPI has removed its files\nanswered\n"),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    names = ("killed", "unanswered", "barrier")
    scripts = {name: SCRIPT.format(**dict(zip(names, how, strict=True))) for name, (how, _) in CASES.items()}
    scripts |= {name: COMMAND.format(main=main, variables=given) for name, (main, given, *_) in ENDS.items()}
    return ends_of(IMPORTS, scripts, tmp_path_factory.mktemp("ends"))


@pytest.mark.parametrize("name", CASES)
def test_a_killed_job_does_not_wait_for_an_answer_and_keeps_its_exit_code(name, ends):
    assert ends[name] == (75, CASES[name][1] + "an earlier exit handler\n", "")
