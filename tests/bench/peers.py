"""Ours beside the peers' own examples: the whole way to 99 % on MNIST as a user's shell sees it."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

from hvdtrain.analysis.launching import command, program
from tests.bench.measurements import Left, Setting, for_torchvision, job, mnist_data, once
from tests.e2e.launchers import environment
from tests.hidden_gpus import seeing


def whole(setting: Setting) -> dict[str, float]:
    """Whole commands, from the shell's point of view; a seed of its own per repeat. Ours ends after its one epoch."""
    out = setting.scratch / "out"
    flags = ["--seed", str(setting.repeat), "--no-progress", "--output-dir", str(out)]
    data = mnist_data(setting)
    ours = job(command("horovod", 2, "hvdtrain.mnist", [*data, *flags]), setting.scratch / "ours.log")
    found = {"whole-seconds": ours, "whole-accuracy": json.loads((out / "summary.json").read_text())["test_accuracy"]}
    if setting.peers is not None:
        for name, seconds in peers(setting).items():
            found[f"whole-{name}"] = seconds / ours
    return found


def peers(setting: Setting) -> dict[str, float]:
    """Seconds that the authors' own examples take to 99.0 % or, where they never get there, to their end.

    The accuracy they reached is printed. Their files: see `--peers`.
    """
    assert setting.peers is not None
    scripts = {"horovod": setting.peers / "pytorch_mnist.py", "pytorch": setting.peers / "main.py"}
    for name, script in scripts.items():
        if not script.exists():
            raise Left(f"--peers {setting.peers} lacks {script.name}, the example of {name}")
    for_torchvision(setting, setting.scratch / "data")
    (setting.scratch / "work").mkdir()
    start = [program("horovodrun"), "-np", "2", sys.executable]
    commands = {
        "horovod": [*start, str(scripts["horovod"]), "--data-dir", str(setting.scratch / "data"), "--no-cuda"],
        "pytorch": [sys.executable, str(scripts["pytorch"])],
    }
    found = once(commands, lambda name: until_99(commands[name], setting.scratch / "work"))
    for name, (seconds, accuracy) in found.items():
        print(f"    {name}'s example: {accuracy:.2f} % after {seconds:.1f} s", flush=True)
    return {name: seconds for name, (seconds, _) in found.items()}


def until_99(arguments: list[str], directory: Path) -> tuple[float, float]:
    began, best = time.monotonic(), 0.0
    process = subprocess.Popen(
        arguments, cwd=directory, env=seeing(environment()), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        for line in process.stdout or ():
            if "Test set" in line and (found := re.search(r"(\d+)/(\d+)|([\d.]+)%", line)):
                right, of, percent = (
                    found.groups()
                )  # the one prints a fraction (and its percentage rounded), the other this
                best = max(best, float(percent) if percent else 100 * int(right) / int(of))
                if best >= 99.0:
                    break
        seconds = time.monotonic() - began
    finally:
        process.terminate()
        process.wait(timeout=30)
    return seconds, best
