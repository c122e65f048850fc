"""Test the Horovod of this interpreter: `python launch/prove.py`.

Loads the extension, shows what it was built with, and checks an all-reduce on two ranks under each launcher. Every launch
has a time limit, because a broken transport usually hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from steps import BuildFailure, Refusal, has_nvidia_gpu, kill_group, main_with_exit_codes, stage

INSPECT = """
import json, torch, horovod.torch as hvd
print(json.dumps({"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(),
                  "NCCL": bool(hvd.nccl_built()), "CUDA": hvd.cuda_built(),
                  "gpus": torch.cuda.device_count() if hvd.cuda_built() else 0}))
"""

# Integers, so that the sum is exact; sizes below and above the thresholds of Horovod's and MPI's algorithms.
RANK = """
import sys, torch, horovod.torch as hvd
hvd.init()
size, device = hvd.size(), torch.device("cpu")
if sys.argv[1] == "cuda":
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)
assert size == int(sys.argv[2]), f"{sys.argv[2]} ranks were started, Horovod sees {size}"
for n in (1, 1000, 1_000_000):
    mine = (torch.arange(n) % 1000 + hvd.rank()).float().to(device)
    expected = ((torch.arange(n) % 1000) * size + size * (size - 1) // 2).float()
    got = hvd.allreduce(mine, op=hvd.Sum, name=f"sum{n}")
    assert torch.equal(got.cpu(), expected), f"all-reduce of {n} numbers is wrong"
hvd.shutdown()
"""

SECONDS = 180  # per launch: usually a few seconds, but minutes if torch is imported from a cold network file system


def environment() -> dict[str, str]:
    """Return the environment of the ranks."""
    env = dict(os.environ)
    # The launchers of this interpreter, even if its environment is not activated.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    env["OMP_NUM_THREADS"] = "1"
    # Allow two ranks on one core: Open MPI 4, then 5.
    env["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    if os.geteuid() == 0:
        env["OMPI_ALLOW_RUN_AS_ROOT"] = env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return env


def launch(title: str, command: list[str]) -> str:
    """Return the standard output of `command`. Raises BuildFailure with the relevant lines."""
    with (
        stage(title),
        tempfile.TemporaryDirectory() as elsewhere,
        subprocess.Popen(
            command,
            env=environment(),
            cwd=elsewhere,  # not the checkout, where a directory named horovod/ would be imported
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            raise BuildFailure(f"{title}: no result after {SECONDS} s; stopped. It ran: {' '.join(command)}") from None
        finally:
            kill_group(process)
    if process.returncode != 0:
        lines = [line for line in (err + out).splitlines() if line.strip()]
        telling = [line for line in lines if "Error" in line or "error" in line or "undefined symbol" in line]
        shown = "\n".join(f"    {line[:300]}" for line in (telling or lines)[:8])
        raise BuildFailure(f"{title}: exit code {process.returncode}\n{shown}")
    return out


def check_own_name() -> None:
    """Gloo looks up the name of its own host, and crashes with SIGSEGV where that is not found, as in some containers."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        raise Refusal(f"this host's own name {name} does not resolve: add `127.0.0.1 {name}` to /etc/hosts") from None


def prove(mpi: bool = False, gpu: bool = False) -> dict[str, Any]:
    """Run all checks that are possible on this machine, and return what the extension was built with.

    mpi, gpu: whether it must have been built with them. Raises BuildFailure.
    """
    output = launch("load Horovod's extension", [sys.executable, "-c", INSPECT])
    built: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    listed = ", ".join(name for name in ("MPI", "Gloo", "NCCL", "CUDA") if built[name])
    print(f"    built with {listed}", flush=True)
    for name, wanted in (("Gloo", True), ("MPI", mpi), ("NCCL", gpu)):
        if wanted and not built[name]:
            raise BuildFailure(f"Horovod was built without {name}: build it again (launch/build_horovod.py --rebuild)")

    check_own_name()
    gpus = int(built["gpus"])
    device, ranks = ("cuda", str(min(gpus, 2))) if built["NCCL"] and gpus else ("cpu", "2")
    rank = [sys.executable, "-c", RANK, device, ranks]
    horovodrun = [sys.executable, "-c", "from horovod.runner.launch import run_commandline as run; run()"]
    horovodrun.append("--disable-cache")  # which would be in HOME: it may not be there, or be read-only
    launch(f"{ranks} ranks add up: horovodrun --gloo", [*horovodrun, "--gloo", "-np", ranks, *rank])
    if built["MPI"]:
        if shutil.which("mpirun", path=environment()["PATH"]) is None:
            raise BuildFailure(
                "Horovod is built with MPI, but there is no mpirun: load the same MPI module as for the build"
            )
        launch(f"{ranks} ranks add up: horovodrun --mpi", [*horovodrun, "--mpi", "-np", ranks, *rank])
        launch(f"{ranks} ranks add up: mpirun", ["mpirun", "-np", ranks, *rank])
    if built["NCCL"] and not gpus:
        print(f"    NCCL is built in, but was not run: {'torch finds no GPU' if has_nvidia_gpu() else 'no GPU here'}")
    return built


def main() -> None:
    parser = argparse.ArgumentParser(description="Test the Horovod of this interpreter with two ranks.")
    parser.add_argument("--mpi", action="store_true", help="fail unless it was built with MPI")
    parser.add_argument("--gpu", action="store_true", help="fail unless it was built with NCCL")
    options = parser.parse_args()
    prove(options.mpi, options.gpu)


if __name__ == "__main__":
    main_with_exit_codes(main)
