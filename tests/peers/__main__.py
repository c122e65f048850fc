"""The same training under several trainers, each audited in the same way: python -m tests.peers

make peers                          makes environments, audits what was not yet, and writes the tables into docs/evidence:
                                    peers.md, and loader.md of the same programs with `exact_loader`
make peers PEERS="--only ignite"    one of them; --ranks 1 or 2; --table: the tables alone

It goes on where it ended. Results are in runs/peers; remove a folder there to audit that trainer again. An audit takes a
minute, and the environments 7 GB, most of them for Composer's own torch.
"""

import argparse
import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.audited import forked, serving
from tests.e2e.launchers import environment
from tests.peers import exact

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNS = ROOT / "runs/peers"
MARKERS = "<!-- measured -->\n", "<!-- end -->\n"
KILLS = 4  # after a step, within one, in an evaluation, while a file is written


class Peer(NamedTuple):
    name: str
    package: str
    words: str  # the program and its arguments
    modules: str  # imported once, before the runs are forked
    environment: str = "peers"
    launcher: str = ""  # of the audit; "": forked
    with_loader: bool = False  # the program has the diff of docs/loader.md


FLAGS = "--checkpoint-steps 5 --no-progress --output-dir"
PEERS = [
    Peer("torch's recipe", "torch", "torch_loop.py", "torch", ""),
    Peer("StatefulDataLoader", "torchdata", "torchdata_loop.py", "torchdata.stateful_dataloader"),
    Peer("the same, with care", "torchdata", "torchdata_loop.py --careful", "torchdata.stateful_dataloader"),
    Peer("accelerate", "accelerate", "accelerate_loop.py", "accelerate,torchdata.stateful_dataloader"),
    Peer("accelerate, stateful", "accelerate", "accelerate_loop.py --stateful", "accelerate,torchdata.stateful_dataloader"),
    Peer("HF Trainer", "transformers", "hf_trainer.py", "transformers.trainer"),
    Peer("Lightning", "lightning", "lightning_trainer.py", "lightning"),
    Peer("Fabric", "lightning", "fabric_loop.py", "lightning"),
    Peer("ignite", "pytorch-ignite", "ignite_loop.py", "ignite.engine,ignite.handlers,ignite.distributed"),
    Peer("Composer", "mosaicml", "composer_trainer.py", "composer", "composer"),
    Peer("hvdtrain", "hvdtrain", f"hvdtrain_loop.py {FLAGS}", "hvdtrain.training", ""),
]  # fmt: skip
# docs/loader.md has a diff of each. One that other rows have is audited once.
LOOPS = [peer for peer in PEERS if peer.words in exact.diffs()]
LOOPS.insert(1, Peer("Horovod", "horovod", "horovod_loop.py", "", "", "mpirun"))
LOADERS = [row for peer in LOOPS for row in (peer, peer._replace(name=f"{peer.name}, exact_loader", with_loader=True))]


def python(name: str) -> Path:
    """Return the Python of an environment; make it if it is not there. All but Composer's use the torch of this one."""
    folder = ROOT / f".venv-{name}"
    program = folder / "bin/python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        if name == "peers":
            own, shared = (next((Path(at) / "lib").glob("python3*/site-packages")) for at in (folder, sys.prefix))
            (own / "mpi4py.py").write_text("raise ImportError\n")  # that of .venv has its libraries elsewhere
            (own / "project.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
        subprocess.run([program, "-m", "pip", "install", "-q", "-r", HERE / f"{name}.txt"], check=True)
        (folder / "complete").touch()
    return program


def folder(peer: Peer, ranks: int) -> Path:
    return RUNS / f"{re.sub(r'[^a-z]+', '-', peer.name.lower())}-{ranks}"


def audit(
    peer: Peer, interpreter: str, ranks: int, target: Path, *options: str, then: int | None = None, **variables: str
) -> int:
    """Audit a program into the folder `target`. Return the audit's exit code. options, variables: of the audit. then: it
    goes on with so many ranks."""
    program, *arguments = peer.words.split()
    with tempfile.TemporaryDirectory() as short, contextlib.ExitStack() as stack:  # the path of a socket is short
        path = exact.written(program, Path(short)) if peer.with_loader else HERE / program
        launcher, command = peer.launcher, [str(path), *arguments, "{out}"]
        if not launcher:
            modules = peer.modules.split(",")
            socket = stack.enter_context(serving(Path(short), interpreter, modules, PYTHONPATH=str(ROOT)))
            again = shlex.join([interpreter, forked.__file__, "run", socket, str(then), *command])
            launcher, command = "none", [interpreter, forked.__file__, "run", socket, str(ranks), *command]
            options = (*options, "--resume-command", again) if then else options
        start = f"-m hvdtrain.audit -np {ranks} --launcher {launcher} --output-dir {target}".split()
        options = (*options, "--then-np", str(then)) if then else options
        line = [sys.executable, *start, *options, "--", *command]
        environ = environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), **variables)
        return subprocess.run(line, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL).returncode


def measure(peer: Peer, ranks: int) -> None:
    """Audit a trainer, and keep its versions beside audit.json."""
    interpreter = sys.executable if peer.environment == "" else str(python(peer.environment))
    target = folder(peer, ranks)
    target.parent.mkdir(parents=True, exist_ok=True)
    if audit(peer, interpreter, ranks, target, "--kills", str(KILLS)) == 2:
        sys.stderr.write(f"peers: {peer.name} on {ranks} ranks could not be audited: see {target}\n")
        return
    query = f"from importlib.metadata import version; print(version({peer.package!r}), version('torch'))"
    versions = subprocess.run([interpreter, "-c", query], capture_output=True, text=True, check=True).stdout.split()
    (target / "versions.json").write_text(json.dumps(versions))


def lines_of_resuming(peer: Peer) -> int:
    """Return how many lines of its program are there for checkpoints and resuming; with the loader, those of its diff."""
    if peer.with_loader:
        return exact.added(peer.words.split()[0])
    marks = ("# resume", "# careful") if "--careful" in peer.words else ("# resume",)
    source = (HERE / peer.words.split()[0]).read_text().splitlines()
    return sum(line.rstrip().endswith(marks) for line in source)


def row(peer: Peer, ranks: int) -> str:
    """Return a line of the table: the worst of all kills."""
    result = json.loads((folder(peer, ranks) / "audit.json").read_text())
    version, _ = json.loads((folder(peer, ranks) / "versions.json").read_text())
    kills = [kill["verdicts"] for kill in result["kills"] if kill["verdicts"]]
    counted = [re.findall(r"(\d+) lost, (\d+) repeated", kill.get("samples", {}).get("text", "")) for kill in kills]
    lost, repeated = (max((int(found[0][at]) for found in counted if found), default=0) for at in (0, 1))

    def held(guarantee: str) -> str:
        """Of those kills after which it could be judged. Who does not resume keeps none; who ended well needs none."""
        judged = [[kill.get(name, {}).get("status") for name in (guarantee, "resumes")] for kill in kills]
        seen = [own == "ok" for own, resumed in judged if own in ("ok", "fails") or resumed == "fails"]
        return f"{sum(seen)} of {len(seen)}" if seen else ""

    names = ("resumes", "random numbers", "final weights", "exit codes")
    resumes, random, bits, codes = map(held, names)
    figures = f"{lost} / {repeated}" if held("samples") else "not seen"
    cells = [peer.name, version.partition("+")[0], str(ranks), resumes, figures, random, bits, codes]
    return f"| {' | '.join([*cells, str(lines_of_resuming(peer))])} |"


def write(page: Path, peers: Sequence[Peer]) -> None:
    """Write the table of what was measured here into a page. Of a page without, nothing changes."""
    head = "trainer | version | ranks | resumes | samples lost / repeated | random numbers | final bits | exit codes | lines"
    rows = [row(peer, ranks) for ranks in (1, 2) for peer in peers if (folder(peer, ranks) / "versions.json").exists()]
    table = "\n".join([f"| {head} |", "|---|---|--:|---|--:|---|---|---|--:|", *rows, ""])
    text = page.read_text()
    before, _, rest = text.partition(MARKERS[0])
    if rows:
        page.write_text(f"{before}{MARKERS[0]}{table}{MARKERS[1]}{rest.partition(MARKERS[1])[2]}")


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tests.peers", description=__doc__, formatter_class=raw)
    parser.add_argument("--only", default="", metavar="PART", help="trainers with this in their names")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="on so many ranks alone")
    parser.add_argument("--table", action="store_true", help="audit nothing, and write the table")
    flags = parser.parse_args()
    for peer in dict.fromkeys([*PEERS, *LOADERS]):
        for ranks in (flags.ranks,) if flags.ranks else (1, 2):
            if flags.only in peer.name and not flags.table and not (folder(peer, ranks) / "versions.json").exists():
                print(f"peers: {peer.name}, ranks: {ranks}", flush=True)
                measure(peer, ranks)
    write(ROOT / "docs/evidence/peers.md", PEERS)
    write(ROOT / "docs/evidence/loader.md", [peer for peer in LOADERS if peer.with_loader or peer not in PEERS])
    return 0


if __name__ == "__main__":
    sys.exit(main())
