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
import json
import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

from hvdtrain import cli
from hvdtrain.data import idx
from hvdtrain.engines.base import Engine
from hvdtrain.engines.cores import cpu_quota
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.engines.start import start
from hvdtrain.engines.tuning import own_script
from hvdtrain.launching.exit_codes import LINGER_SECONDS, run

LEVELS = ("ok", "warning", "problem")
LEAST_SHARED_MEMORY = 256 * 2**20  # bytes; the default in containers is 64 MiB
LEAST_SCRATCH = 2**30  # bytes
SLOW_INTERFACE = 1000  # Mbit/s
SMALL, LARGE = 1, 4 * 2**20  # float32 elements: 4 B shows the latency, 16 MiB the bandwidth


class Findings:
    """The findings of this rank. Each entry can be serialized as JSON."""

    def __init__(self) -> None:
        self.all: list[dict[str, str]] = []

    def ok(self, what: str) -> None:
        self.all.append(dict(level="ok", what=what, why="", do=""))

    def warning(self, what: str, why: str, do: str) -> None:
        self.all.append(dict(level="warning", what=what, why=why, do=do))

    def problem(self, what: str, why: str, do: str) -> None:
        self.all.append(dict(level="problem", what=what, why=why, do=do))

    def worst(self) -> str:
        """Return the highest level among the findings."""
        return max((finding["level"] for finding in self.all), key=LEVELS.index, default="ok")

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Turn an exception inside into a finding: a check that fails must not hide the others."""
        try:
            yield
        except UserError as error:
            what, _, do = str(error).rpartition(": ")
            self.problem(what, "training would refuse to start", do)
        except Exception as error:
            self.problem(f"{name}: {type(error).__name__}: {error}", "training would fail here too", "see the message")


# ------------------------------------------------------------------------------------ checks of each rank on its own


def check_build(found: Findings, engine_name: str) -> dict[str, str]:
    """Check torch and Horovod, and return the versions that must be the same on every rank."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    if engine_name != "horovod":
        found.ok(f"torch {versions['torch']}, Python {versions['python']}")
        return versions
    try:
        import horovod.torch as hvd
    except ImportError as error:
        do = "make setup, or launch/build_horovod.py"
        found.problem(f"Horovod cannot be imported: {error}", "--engine horovod needs it", do)
        return versions
    built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": bool(hvd.nccl_built())}
    versions |= {"horovod": metadata.version("horovod"), "built with": ", ".join(name for name in built if built[name])}
    if built["MPI"]:
        with contextlib.suppress(ImportError, RuntimeError):
            import mpi4py

            mpi4py.rc.initialize = False
            from mpi4py import MPI

            versions["mpi"] = MPI.Get_library_version().split(",")[0].splitlines()[0]
    found.ok(f"torch {versions['torch']}, Horovod {versions['horovod']} with {versions['built with']}")
    if torch.cuda.is_available() and not built["NCCL"]:
        do = "make setup SETUP=--gpu"
        found.problem("there is a GPU, but Horovod was built without NCCL", "training would leave the GPU idle", do)
    return versions


def check_launcher(found: Findings) -> None:
    """Report what started this process, or which launchers are on PATH."""
    told = announced()
    if told.launcher != "none":
        found.ok(f"started by {told.launcher}: {told.size} ranks")
        return
    able = [name for name in ("horovodrun", "mpirun", "srun", "ssh") if shutil.which(name)]
    found.ok(f"started alone; launchers on PATH: {', '.join(able) or 'none'}")
    if "SLURM_JOB_ID" in os.environ:
        do = "`srun python -m hvdtrain.doctor`, or launch/slurm.sbatch"
        found.warning("in a Slurm job, but not started by srun or mpirun", "one process trains, the others idle", do)


def check_names(found: Findings) -> str:
    """Check that this host's name resolves, and return its address; "" if it has none."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        do = f"echo '127.0.1.1 {name}' >> /etc/hosts (one host), or the host's real address there or in DNS (several)"
        found.problem(f"this host's name {name} does not resolve ({error})", "Gloo aborts, with a core dump", do)
        return ""
    found.ok(f"{name} resolves to {address}")
    return address


def check_interface(found: Findings) -> None:
    """Check that the named network interfaces exist, and report the speed of each that is up."""
    import psutil

    here, states = psutil.net_if_addrs(), psutil.net_if_stats()
    for variable in ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"):
        for name in os.environ.get(variable, "").split(","):
            plain = name.lstrip("=^")
            if plain and "/" not in plain and not any(interface.startswith(plain) for interface in here):
                do = f"name one of {', '.join(sorted(here))} ({variable}, or --interface)"
                found.problem(f"{variable}={name}: no such interface here", "the ranks would not find each other", do)
    for name in sorted(here):
        state = states.get(name)
        addresses = [entry.address for entry in here[name] if entry.family == socket.AF_INET]
        if name == "lo" or state is None or not state.isup or not addresses:
            continue
        speed = f"{state.speed} Mbit/s" if state.speed else "speed unknown"
        line = f"interface {name}: {addresses[0]}, {speed}, MTU {state.mtu}"
        if 0 < state.speed < SLOW_INTERFACE:
            found.warning(line, "gradients would crawl", "choose a faster one with --interface, or --compression fp16")
        else:
            found.ok(line)


def check_memory_and_disk(found: Findings) -> None:
    """Check the sizes of /dev/shm and of the scratch directory."""
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    if shared is None or shared.total < LEAST_SHARED_MEMORY:
        size = "missing" if shared is None else f"{shared.total / 2**20:.0f} MiB"
        do = "docker run --shm-size=1g; Kubernetes: emptyDir medium Memory at /dev/shm; Singularity shares the host's"
        found.warning(f"/dev/shm is {size}", "NCCL, MPI and data loader workers end in a bus error when it is full", do)
    scratch = Path(tempfile.gettempdir())
    try:
        with tempfile.NamedTemporaryFile(dir=scratch) as file:
            file.write(b"x")
        free = shutil.disk_usage(scratch).free
    except OSError as error:
        do = "set TMPDIR to a local disk"
        found.problem(f"{scratch} cannot be written: {error.strerror}", "MPI and torch need it", do)
        return
    if free < LEAST_SCRATCH:
        what = f"{scratch} has {free / 2**20:.0f} MiB left"
        found.warning(what, "MPI and torch keep files there", "set TMPDIR to a directory with more space")
    else:
        found.ok(f"scratch {scratch}: {free / 2**30:.0f} GiB free")


# ------------------------------------------------------------------------------------------- checks of all ranks


def check_ranks(found: Findings, engine: Engine) -> None:
    """Check that each rank has its own local rank and device. A collective."""
    place = [socket.gethostname(), engine.local_rank, engine.local_size, str(engine.device)]
    rows = engine.all_gather_object(place, "places")
    on_host = Counter(host for host, *_ in rows)
    for rank, (host, local_rank, local_size, device) in enumerate(rows):
        if local_size != on_host[host] or not 0 <= local_rank < local_size:
            what = f"rank {rank} is told {local_rank} of {local_size} on {host}, which has {on_host[host]} ranks"
            why = "ranks would share a GPU, or look for one that is not there"
            found.problem(what, why, "give every host its own name")
        twins = [other for other, row in enumerate(rows) if other < rank and row[0] == host and row[3] == device]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if twins and device.startswith("cuda") and "," in visible:
            found.problem(f"ranks {twins[0]} and {rank} share {device} on {host}", "half the speed", "one rank per GPU")
    hosts = ", ".join(f"{count} on {host}" for host, count in on_host.items())
    found.ok(f"ranks: {hosts}; devices: {', '.join(sorted({row[3] for row in rows}))}")


def check_alike(found: Findings, engine: Engine, versions: dict[str, str]) -> None:
    """Check that every rank has the same versions. A collective."""
    rows = engine.all_gather_object(versions, "versions")
    for name in sorted({name for row in rows for name in row}):
        values = [row.get(name, "none") for row in rows]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            what = f"{name} differs: rank 0 has {values[0]}, rank {other} has {values[other]}"
            found.problem(what, "mixed versions hang or give wrong sums", "use one environment or image on every host")
    if all(row == rows[0] for row in rows):
        shown = ", ".join(f"{name} {value}" for name, value in versions.items())
        found.ok(f"every rank alike: {shown}")


def check_neighbours(found: Findings, engine: Engine, own_address: str) -> None:
    """Check that the hosts of the job resolve each other's names. A collective."""
    rows = engine.all_gather_object([socket.gethostname(), own_address], "addresses")
    hosts = dict(rows)
    if len(hosts) == 1:
        return
    for host, address in hosts.items():
        if address.startswith("127."):
            do = f"in {host}'s /etc/hosts give {host} its real address"
            found.problem(f"{host} resolves its own name to {address}", "other hosts would connect to themselves", do)
        try:
            socket.gethostbyname(host)
        except OSError as error:
            do = f"add {host} to /etc/hosts on {socket.gethostname()}, or to DNS"
            what = f"{host} does not resolve on {socket.gethostname()} ({error})"
            found.problem(what, "ranks must find each other", do)


def check_cores(found: Findings, engine: Engine) -> None:
    """Check that the threads of this host's ranks fit its cores."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    have = min(cores, quota)
    threads = torch.get_num_threads()
    line = f"cores: {have:g}; ranks on this host: {engine.local_size}; torch threads per rank: {threads}"
    if engine.local_size * threads > have:
        do = "fewer ranks, OMP_NUM_THREADS=1 (--threads 1), or more cores (--cpus-per-task, --bind-to none)"
        found.warning(line, "threads compete for cores, and every rank waits for the slowest", do)
    else:
        found.ok(line)
    if engine.name == "horovod":
        found.ok(own_script(os.environ, engine.local_size, len(os.sched_getaffinity(0)), quota))


def check_output(found: Findings, engine: Engine, directory: Path | None) -> None:
    """Check that rank 0 can write a file in `directory` and that every rank sees it. A collective."""
    if directory is None:
        return
    name = engine.broadcast_object(f".doctor-{uuid.uuid4().hex}", "probe")
    written = ""
    if engine.rank == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text("x")
        except OSError as error:
            written = error.strerror or str(error)
            what = f"--output-dir {directory} cannot be written: {written}"
            found.problem(what, "results would be lost", "name another")
    written = engine.broadcast_object(written, "written")
    sees = (directory / name).exists()
    missing = [rank for rank, seen in enumerate(engine.all_gather_object(sees, "sees")) if not seen]
    if engine.rank == 0 and not written:
        (directory / name).unlink(missing_ok=True)
        if missing:
            do = "name a directory on a shared file system"
            what = f"--output-dir {directory}: ranks {missing} do not see what rank 0 writes there"
            found.warning(what, "a restarted run would not find its checkpoint on every host", do)
        else:
            found.ok(f"--output-dir {directory} is written by rank 0 and seen by all")


def check_data(found: Findings, data_dir: Path | None) -> None:
    """Report where MNIST would be read from."""
    located = idx.locate("mnist" if data_dir is not None else "auto", data_dir, download=False)
    found.ok(f"data: {located.reason}")


def check_all_reduce(found: Findings, engine: Engine) -> None:
    """Check and time sums of known numbers, in small and large messages, on the CPU and on the training device."""
    if engine.size == 1:
        found.ok("one rank, nothing to reduce; to try a transport: `horovodrun -np 2 python -m hvdtrain.doctor`")
        return
    for device in dict.fromkeys([torch.device("cpu"), engine.device]):
        medians = []
        for elements, repeats in ((SMALL, 50), (LARGE, 5)):
            name = f"doctor.{device.type}.{elements}"
            tensor = torch.full((elements,), float(engine.rank + 1), device=device)
            wanted = torch.full_like(tensor, engine.size * (engine.size + 1) / 2)
            if not torch.equal(engine.sum(tensor, name), wanted):
                do = "make setup SETUP=--fresh; if that does not help, report a bug"
                found.problem(f"the all-reduce on {device.type} gives a wrong sum", "gradients would be wrong, too", do)
            seconds = []
            for _ in range(repeats):
                engine.barrier()
                began = time.perf_counter()
                engine.all_reduce_(tensor.zero_(), "sum", name)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            # The median of the slowest rank, the same on every rank, so that it is shown once.
            medians.append(max(engine.all_gather_object(statistics.median(seconds), f"{name}.seconds")))
        carried = engine.description if device == engine.device else f"{engine.name}, CPU tensors"
        bandwidth = LARGE * 4 / medians[1] / 1e9
        found.ok(f"all-reduce, {carried}: {medians[0] * 1e6:.0f} us for 4 B, {bandwidth:.3g} GB/s for 16 MiB (median)")


# ------------------------------------------------------------------------------------------------------------- report


def merged(rows: list[list[dict[str, str]]], first: int = 0) -> list[dict[str, object]]:
    """Return each finding once, with its ranks, and the worst last, where a terminal shows it."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, findings in enumerate(rows, first):
        for finding in findings:
            ranks.setdefault((finding["level"], finding["what"], finding["why"], finding["do"]), []).append(rank)
    keys = sorted(ranks, key=lambda key: LEVELS.index(key[0]))
    return [
        dict(level=level, what=what, why=why, do=do, ranks=ranks[level, what, why, do]) for level, what, why, do in keys
    ]


def show(findings: list[dict[str, object]], size: int, as_json: bool) -> None:
    """Print the findings of `size` ranks, as text or as JSON."""
    counts = Counter(finding["level"] for finding in findings)
    if as_json:
        levels = {level: counts[level] for level in LEVELS}
        print(json.dumps({"world_size": size, **levels, "findings": findings}, indent=2))
        return
    for finding in findings:
        ranks = finding["ranks"]
        assert isinstance(ranks, list)
        where = "" if len(ranks) == size and ranks[0] == 0 else f"  (rank {', '.join(str(rank) for rank in ranks)})"
        print(f"{finding['level']:8} {finding['what']}{where}")
        for label, text in (("why", finding["why"]), ("do", finding["do"])):
            if text:
                print(f"         {label + ':':4} {text}")
    print(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['problem']} problems", flush=True)


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.doctor", __doc__)
    parser.add_argument("--engine", choices=cli.ENGINES, default="horovod", help="what training would use")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what training would use")
    parser.add_argument("--data-dir", type=Path, help="where MNIST's files should be")
    parser.add_argument("--output-dir", type=Path, help="where training would write; checks whether all hosts share it")
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")
    return parser.parse(argv)


def main() -> int:
    flags = parse()
    found = Findings()
    own_address = ""
    versions: dict[str, str] = {}
    with found.check("build"):
        versions = check_build(found, flags.engine)
    with found.check("launcher"):
        check_launcher(found)
    with found.check("host name"):
        own_address = check_names(found)
    with found.check("interfaces"):
        check_interface(found)
    with found.check("memory and disk"):
        check_memory_and_disk(found)
    with found.check("data"):
        check_data(found, flags.data_dir)
    engine = None
    if found.worst() != "problem":  # else the engine would hang or abort
        with found.check("start"):
            engine = start(flags.engine, device=flags.device)
    if engine is None:
        time.sleep(LINGER_SECONDS if announced().rank else 0)  # rank 0 prints first; mpirun then ends the others
        show(merged([found.all], announced().rank), 1, flags.json)
        return 1
    with engine:
        for check in (check_ranks, check_cores, check_all_reduce):
            check(found, engine)
        check_alike(found, engine, versions)
        check_neighbours(found, engine, own_address)
        check_output(found, engine, flags.output_dir)
        findings = merged(engine.all_gather_object(found.all, "findings"))
        if engine.rank == 0:
            show(findings, engine.size, flags.json)
        return int(any(finding["level"] == "problem" for finding in findings))


if __name__ == "__main__":
    run(main)
