"""Find problems with this machine, this build and this launch; print each with its cause and remedy.

python -m hvdtrain.doctor                                     this machine alone
horovodrun -np 2 python -m hvdtrain.doctor                    this launch: the doctor instead of the training
launch/mpirun.sh -H a:4,b:4 --interface eth0 python -m hvdtrain.doctor --output-dir OUT --data-dir DIR

Exit codes: 0 no problem (there may be warnings), 1 a problem, 2 bad input.
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

import contextlib
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from hvdtrain import cli
from hvdtrain.checks import host, nvidia_smi, ranks
from hvdtrain.checks.findings import Findings, Here, merged, show
from hvdtrain.engines.choice import start_engine
from hvdtrain.engines.launchers import announced, lack_of_horovod
from hvdtrain.flags import Flags
from hvdtrain.guards.judge import HangTimeouts
from hvdtrain.guards.limits import limited_start
from hvdtrain.launching.exit_codes import LINGER_SECONDS, run_command


def check_build(findings: Findings, here: Here) -> None:
    """Check torch and Horovod, and note the versions that must be the same on every rank."""
    versions = here.versions
    versions |= {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    if here.flags.engine != "horovod":
        findings.ok(f"torch {versions['torch']}, Python {versions['python']}")
        return
    try:
        import horovod.torch as hvd
    except ImportError as error:
        do = "make setup, or launch/build_horovod.py"
        findings.problem(f"Horovod cannot be imported: {error}", "--engine horovod needs it", do)
        return
    built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": bool(hvd.nccl_built())}
    versions |= {"horovod": metadata.version("horovod"), "built with": ", ".join(name for name in built if built[name])}
    if built["MPI"]:
        with contextlib.suppress(ImportError, RuntimeError):
            import mpi4py

            # Importing MPI would start it, before the engine does.
            mpi4py.rc.initialize = False
            from mpi4py import MPI

            versions["mpi"] = MPI.Get_library_version().split(",")[0].splitlines()[0]
    findings.ok(f"torch {versions['torch']}, Horovod {versions['horovod']} with {versions['built with']}")


ALONE = (  # checks of each rank on its own: one that raises does not hide the others
    check_build, nvidia_smi.check_gpus, host.check_launcher, host.check_home, host.check_name, host.check_interfaces,
    host.check_memory_and_disk, host.check_data,
)  # fmt: skip
TOGETHER = (
    ranks.check_places, ranks.check_cores, ranks.check_all_reduce, ranks.check_alike, ranks.check_neighbours,
    ranks.check_output,
)  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.doctor", __doc__)
    parser.add_argument(
        "--engine",
        choices=("auto", *cli.ENGINES),
        default="auto",
        help="what training would use; auto: as training, but Horovod in one process, too, if it is installed",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what training would use")
    parser.add_argument("--data-dir", type=Path, help="where MNIST's files should be")
    parser.add_argument(
        "--output-dir", type=cli.path, help="where training would write; checks whether all hosts share it"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")
    flags = parser.parse(argv)
    if flags.engine == "serial" and flags.engine_reason and not lack_of_horovod():
        flags.engine = "horovod"  # it is this machine that is examined, and what a launcher would start on it
    return flags


def main() -> int:
    here, findings = Here(parse()), Findings()
    flags = here.flags
    for check in ALONE:
        with findings.check(check.__name__.removeprefix("check_").replace("_", " ")):
            check(findings, here)
    engine = None
    if findings.worst() != "problem":  # else the engine would hang or abort
        with findings.check("start"), limited_start(HangTimeouts()):
            engine = start_engine(flags.engine, device=flags.device)
    if engine is None:
        time.sleep(LINGER_SECONDS if announced().rank else 0)  # rank 0 prints first; mpirun then ends the others
        show(merged([findings.all], announced().rank), 1, flags.json)
        return 1
    with engine:
        for together in TOGETHER:
            together(findings, here, engine)
        rows = merged(engine.all_gather_object(findings.all, "findings"))
        if engine.rank == 0:
            show(rows, engine.size, flags.json)
        return int(any(finding["level"] == "problem" for finding in rows))


if __name__ == "__main__":
    run_command(main)
