"""Starting an engine: the share of the cores, the container's quota, one line for users."""

import math
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hvdtrain.engines.base import computes_in_bf16
from hvdtrain.engines.cores import cpu_quota, threads_for
from hvdtrain.engines.launchers import (
    alone_in_pid_namespace,
    bound_by_default,
    bound_unexplained,
)


@pytest.mark.parametrize(
    ("cores", "quota", "expected"),
    [
        ([("a", [0, 1])], math.inf, [2]),
        ([("a", [0, 1])] * 2, math.inf, [1, 1]),
        ([("a", [0, 1])] * 8, math.inf, [1] * 8),
        ([("a", list(range(8)))] * 3, math.inf, [2, 2, 2]),
        # bound apart by the launcher
        ([("a", [0, 1, 2, 3]), ("a", [4, 5])], math.inf, [4, 2]),
        # two hosts
        ([("a", list(range(4))), ("a", list(range(4))), ("b", list(range(4)))], math.inf, [2, 2, 4]),
        # a container that may use two of 64 cores
        ([("a", list(range(64)))] * 2, 2.0, [1, 1]),
        ([("a", list(range(64)))], 2.0, [2]),
    ],
)
def test_threads_are_the_share_of_the_cores_that_a_rank_has(cores, quota, expected):
    assert [threads_for(rank, cores, quota) for rank in range(len(cores))] == expected


def test_cpu_quota_is_the_tightest_on_the_way_down(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pod/container\n")
    (tmp_path / "pod" / "container").mkdir(parents=True)
    assert cpu_quota(tmp_path, membership) == math.inf
    (tmp_path / "pod" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "pod" / "container" / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path, membership) == 1.5
    assert cpu_quota(tmp_path, tmp_path / "absent") == math.inf


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


def run_main(body: str, **environment: str) -> subprocess.CompletedProcess:
    code = f"from hvdtrain.launching.exit_codes import run\nfrom hvdtrain.engines.errors import UserError\n{body}"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin", "PYTHONPATH": str(Path(__file__).resolve().parents[3]), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_limit_on_threads_is_one_line_and_other_errors_keep_their_traceback():
    done = run_main('def main(): raise RuntimeError("can\'t start new thread")\nrun(main)')
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "ulimit -u" in done.stderr
    done = run_main("def main(): raise RuntimeError('something else')\nrun(main)")
    assert (done.returncode, "Traceback" in done.stderr) == (1, True)


def test_an_operation_without_a_deterministic_algorithm_is_one_line():
    """With the message of torch 2.15 for a kernel that only GPUs have."""
    said = "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set"
    done = run_main(f"def main(): raise RuntimeError({said!r})\nrun(main)")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert (
        "adaptive_avg_pool2d_backward_cuda has no algorithm whose bits repeat: leave --deterministic out" in done.stderr
    )


def test_user_error_is_one_line_and_code_two():
    done = run_main("def main(): raise UserError('no such thing: do this')\nrun(main)")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "-c: error: no such thing: do this\n"


def test_rank_zero_alone_says_what_every_rank_knows():
    body = "def main(): raise UserError('x', everywhere=True)\nrun(main)"
    done = run_main(body, RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stderr) == (2, "")
    done = run_main(body, RANK="0", WORLD_SIZE="2")
    assert (done.returncode, done.stderr) == (2, "-c: error: x\n")


def test_what_one_rank_alone_may_know_is_not_lost():
    done = run_main("def main(): raise UserError('x')\nrun(main)", RANK="1", WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr == f"-c: rank 1 on {socket.gethostname()}: error: x\n"


def test_exit_code_is_mains():
    assert run_main("run(lambda: 3)").returncode == 3


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
