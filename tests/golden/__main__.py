"""See tests/golden/__init__.py."""

import argparse
import contextlib
import hashlib
import json
import math
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, TORCHRUN, launch
from tests.golden.table import RUNS, Attempt

FILE = Path(__file__).with_name("golden.json")
LIMIT_SECONDS = 300
# Of metrics.jsonl: what a run decides and computes. Times, speeds, hosts, paths and versions are other in each run.
EVENTS = ("train", "evaluate", "skip", "end")
FIELDS = re.compile(
    r"event|epoch|step|samples|count|learning_rate|.*loss.*|.*accuracy|error|distance|parameters_sha256"
)
SHARED = ("model", "optimizer", "registered")  # what all ranks have in common, by the first word of a tensor's name
Hashes = dict[str, str]


def command(attempt: Attempt, out: Path) -> str:
    starts = {**LAUNCHERS, "alone": "", "torchrun": TORCHRUN}
    start = starts[attempt.launcher].format(ranks=attempt.ranks)
    python = "" if attempt.launcher == "torchrun" else PYTHON
    program = attempt.program.format(out=out)
    where = "" if "--evaluate" in program else f"--output-dir {out}"
    return f"{start} {python} {ROOT}/tests/golden/killed.py {program} --threads 1 --log-steps 1 --no-progress {where}"


def run(attempts: list[Attempt], code: Path, out: Path) -> Hashes:
    """Carry out a training, with the hvdtrain of the directory `code`, and return the hashes of its results."""
    said = ""
    for attempt in attempts:
        kill = str(attempt.kill_after or "")
        done = launch(command(attempt, out), timeout=LIMIT_SECONDS, cwd=code, PYTHONPATH=str(code), GOLDEN_KILL=kill)
        said = done.stdout
        if (done.code != 0) != bool(attempt.kill_after):
            raise SystemExit(f"{command(attempt, out)}\n{done}")
    hashes = {"metrics": digest(metrics(out / "metrics.jsonl")), **checkpoint(out)}
    summary = out / "summary.json"
    if summary.exists():
        hashes["parameters"] = json.loads(summary.read_text())["parameters_sha256"][:16]
    if "--evaluate" in attempts[-1].program:
        hashes["evaluation"] = digest(re.findall(r"test .*", said))
    return hashes


def metrics(path: Path) -> list[dict[str, Any]]:
    """Return the record without what differs between equal runs. Of steps that were taken twice, the last."""
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if line["event"] in EVENTS:
            key = (line["event"], line.get("epoch"), line.get("step"))
            last[key] = {name: value for name, value in line.items() if FIELDS.fullmatch(name)}
    return list(last.values())


def checkpoint(out: Path) -> Hashes:
    """Return a hash of what the newest checkpoint holds, whatever its tensors are called.

    Of a model, each tensor by its name. Of optimizers and registered objects, each tensor. Of what each rank has of its own,
    such as buffers, each number: how these are joined to tensors is the format's. Random number generators, positions and
    optimizers of local steps are left out: the runs that are killed need them to end with the same hashes as others.
    """
    files = sorted((out / "checkpoints").glob("*.safetensors"))
    if not files:
        return {}
    tensors, numbers = list[bytes](), list[bytes]()
    with safe_open(files[-1], framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name).contiguous()
            content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            kind = name.split(".")[0]
            if kind == "own":
                if name == "own":
                    numbers += own_numbers(json.loads(content), file.get_tensor("own.bytes").numpy().tobytes())
            elif kind in SHARED:
                of = f"{name if kind == 'model' else kind} {tensor.dtype} {tuple(tensor.shape)} ".encode()
                tensors.append(of + content)
            elif tensor.is_floating_point():
                width = tensor.element_size()
                numbers += (content[at : at + width] for at in range(0, len(content), width))
    return {"checkpoint": hashlib.sha256(b"".join(sorted(tensors) + sorted(numbers))).hexdigest()[:16]}


def own_numbers(ranks: list[dict[str, Any]], content: bytes) -> Iterator[bytes]:
    """Yield the bytes of each floating-point number that ranks have of their own: see checkpoint/own.py."""
    end = 0
    for packed, length in (one for rank in ranks for one in rank.values()):
        begin, end = end, end + 8 * length
        for skipped, held in tensors_in(packed):
            dtype = getattr(torch, held["dtype"])
            size = math.prod(held["shape"]) * dtype.itemsize
            for at in range(begin, begin + size, dtype.itemsize) if dtype.is_floating_point and not skipped else ():
                yield content[at : at + dtype.itemsize]
            begin += size


def tensors_in(packed: Any, skipped: bool = False) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield what stands for each tensor in nested JSON, and whether it is of an optimizer."""
    if isinstance(packed, dict) and "__tensor__" in packed:
        yield skipped, packed
    elif isinstance(packed, (dict, list)):
        for key, value in packed.items() if isinstance(packed, dict) else enumerate(packed):
            yield from tensors_in(value, skipped or key == "optimizers")


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def machine() -> dict[str, str]:
    """Return what the bits depend on, beside the code."""
    words = (line.partition(": ") for line in Path("/proc/cpuinfo").read_text().splitlines())
    model = next((value for name, _, value in words if name.strip() == "model name"), platform.machine())
    return {"processor": model, "capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


def hashes_of(code: Path, names: list[str]) -> dict[str, Hashes]:
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            found[name] = run(RUNS[name], code, Path(scratch) / "out")
        print(f"{name:16} {'  '.join(f'{what} {value}' for what, value in found[name].items())}", flush=True)
    return found


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "code"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(path), commit], cwd=ROOT, check=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(path)], cwd=ROOT, check=True)


def compare(expected: dict[str, Hashes], found: dict[str, Hashes]) -> int:
    """Print each hash that differs. Return the exit code."""
    code = 0
    for name, hashes in found.items():
        for what in sorted(hashes.keys() | expected.get(name, {}).keys()):
            before, now = expected.get(name, {}).get(what), hashes.get(what)
            if before != now:
                code = 1
                print(f"CHANGED {name}: {what} was {before}, is {now}")
    print("no hash has changed" if code == 0 else "see above; the commit that changes a hash says why")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--write", action="store_true", help="write golden.json anew")
    parser.add_argument("--against", metavar="COMMIT", help="compare with the code of this commit")
    parser.add_argument("--only", metavar="NAMES", help="these runs, joined by commas")
    flags = parser.parse_args()
    names = flags.only.split(",") if flags.only else list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"--only {unknown[0]}: the runs are {', '.join(RUNS)}")
    known = json.loads(FILE.read_text())
    here = next((entry for entry in known if entry["machine"] == machine()), {"machine": machine(), "hashes": {}})
    if flags.against:
        with worktree(flags.against) as code:
            expected = hashes_of(code, names)
    elif here not in known and not flags.write:
        sys.exit(f"golden.json has no hashes of {machine()}: use --against COMMIT")
    else:
        expected = here["hashes"]
    found = hashes_of(ROOT, names)
    if flags.write:
        hashes = {name: found.get(name) or here["hashes"].get(name, {}) for name in RUNS}
        others = [entry for entry in known if entry["machine"] != here["machine"]]
        FILE.write_text(json.dumps([*others, here | {"hashes": hashes}], indent=1) + "\n")
    code = compare(expected, found)
    return 0 if flags.write else code


if __name__ == "__main__":
    sys.exit(main())
