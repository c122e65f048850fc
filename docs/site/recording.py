"""Record the pictures of README, each of a run beside one that is killed and resumed, under torchrun.

python docs/site/recording.py             docs/restart.svg: a terminal, with the hashes. Needs what pyproject.toml calls docs
python docs/site/recording.py report DIR  docs/report.png: the curves of MNIST, whose files DIR has; on quiet cores
"""

import base64
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURE, CURVES = ROOT / "docs" / "restart.svg", ROOT / "docs" / "report.png"
COMMAND = "torchrun --nproc-per-node 2 xor.py --epochs 4 --output-dir runs/{name} --checkpoint-steps 20"
COLUMNS = 120
KILLED_AFTER = "epoch 2/4"
# What torchrun says of a killed rank fills a page. These lines of it are shown.
SHOWN = re.compile(r"epoch |resumed |.*Signal 9 \(SIGKILL\)")
MNIST = (
    "torchrun --nproc-per-node 2 -m hvdtrain.mnist --dataset mnist --epochs 4 --checkpoint-steps 700 --log-steps 20"
    " --no-progress --data-dir {data} --output-dir runs/{name}"
)
KILLED_AT = 920  # a step: those since the last checkpoint are repeated


def recorded(
    console: Console, directory: Path, command: str, at_line: Callable[[subprocess.Popen[str], str], None]
) -> None:
    """Run a command, show what it prints, and call `at_line` for each line."""
    console.print(Text(f"$ {command}", style="bold green"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        f"exec {command} --no-progress", shell=True, cwd=directory, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if SHOWN.match(line):
                console.print(Text(shortened(line.rstrip())))
            at_line(process, line)


def shortened(line: str) -> str:
    """Leave out the speed, which is the machine's, and what torchrun says around the signal."""
    line = re.sub(r"  [\d,]+ samples/s$", "", line)
    return re.sub(r"^.*?(Signal 9 \(SIGKILL\)).*", r"torchrun: rank 1 ended by \1", line)


def kill_rank_1(console: Console, process: subprocess.Popen[str], line: str) -> None:
    if not line.startswith(KILLED_AFTER):
        return
    time.sleep(0.4)  # some steps into the next epoch
    ranks = [
        child for child in psutil.Process(process.pid).children(recursive=True) if child.environ().get("RANK") == "1"
    ]
    console.print(Text(f"$ kill -9 {ranks[0].pid}      # rank 1, from another terminal", style="bold red"))
    os.kill(ranks[0].pid, signal.SIGKILL)


def draw_report(data: str) -> int:
    """Train on MNIST, whole, and killed and resumed; keep the picture of the loss that the report draws of both."""
    with tempfile.TemporaryDirectory() as scratch:
        start = dict(cwd=scratch, env=os.environ | {"PYTHONPATH": str(ROOT)}, shell=True)
        whole, killed = (MNIST.format(name=name, data=shlex.quote(data)) for name in ("whole", "killed"))
        subprocess.run(whole, check=True, **start)
        with subprocess.Popen(f"exec {killed}", **start) as process:
            record = Path(scratch, "runs", "killed", "metrics.jsonl")
            while process.poll() is None and not (record.exists() and f'"step": {KILLED_AT}, ' in record.read_text()):
                time.sleep(0.01)
            ranks = json.loads(record.read_text().splitlines()[0])["ranks"]
            os.kill(ranks[1]["pid"], signal.SIGKILL)
        subprocess.run(killed, check=True, **start)
        words = ["-m", "hvdtrain.report", "runs/whole", "runs/killed"]
        subprocess.run([sys.executable, *words], cwd=scratch, env=start["env"], check=True)
        page = Path(scratch, "runs", "report", "report.html").read_text()
        summaries = [Path(scratch, "runs", name, "summary.json").read_text() for name in ("whole", "killed")]
    if len({json.loads(summary)["parameters_sha256"] for summary in summaries}) != 1:
        print("the hashes differ: no picture is written", file=sys.stderr)
        return 1
    CURVES.write_bytes(base64.b64decode(re.search(r'alt="Loss[^>]+base64,([^"]+)', page)[1]))
    print(re.sub(r"<[^>]+>", " ", page.partition("<table>")[2].partition("</table>")[0]))
    return 0


def main() -> int:
    if sys.argv[1:2] == ["report"]:
        return draw_report(str(Path(sys.argv[2]).resolve()))
    console = Console(record=True, width=COLUMNS, file=sys.stdout, force_terminal=True)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        shutil.copy(ROOT / "docs" / "programs" / "xor.py", directory)
        recorded(console, directory, COMMAND.format(name="whole"), lambda *_: None)
        killed = COMMAND.format(name="killed")
        recorded(console, directory, killed, lambda *said: kill_rank_1(console, *said))
        recorded(console, directory, killed, lambda *_: None)
        hashes = "grep parameters_sha256 runs/*/summary.json"
        console.print(Text(f"$ {hashes}", style="bold green"))
        found = subprocess.run(hashes, shell=True, cwd=directory, capture_output=True, text=True, check=True).stdout
        console.print(Text(found.rstrip()))
    values = set(re.findall(r"[0-9a-f]{64}", found))
    if len(values) != 1:
        print("the hashes differ: no picture is written", file=sys.stderr)
        return 1
    picture = console.export_svg(title="the same command, the same bits")
    PICTURE.write_text(
        re.sub(r"@font-face \{.*?\}\n?", "", picture, flags=re.S)
    )  # fonts of a server: true without a network
    return 0


if __name__ == "__main__":
    sys.exit(main())
