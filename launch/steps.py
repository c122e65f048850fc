"""What the set-up programs share: refusals, stages with their time, commands with a log, what the machine has."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

GIB = 1 << 30


class Refusal(Exception):
    """The user or the machine must change something first: one line that says what, exit code 2."""


class BuildFailure(Exception):
    """Something that should have worked did not: the lines that matter, then the remedy, exit code 1."""


def main_with_exit_codes(main: Callable[[], None]) -> None:
    """Run `main`; errors become one message and INTERFACE.md's exit codes, with no traceback."""
    # SIGTERM like Ctrl-C: unwinds the stack, so that children are ended and half-made things removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    name = Path(sys.argv[0]).name
    try:
        main()
    except Refusal as error:
        sys.exit(_fail(name, error, 2))
    except BuildFailure as error:
        sys.exit(_fail(name, error, 1))
    except OSError as error:
        if error.errno not in (28, 122, 30, 13):  # ENOSPC, EDQUOT, EROFS, EACCES
            raise
        sys.exit(_fail(name, f"{error}: free some space, or choose another place (--cache-dir, TMPDIR)", 2))
    except KeyboardInterrupt:
        sys.exit(_fail(name, "interrupted", 130))


def _fail(name: str, message: object, code: int) -> int:
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    return code


class Stage:
    """One line per stage, ended by its seconds. A terminal also sees progress in it; elsewhere each 20 % is a line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.started = time.monotonic()
        self.terminal = sys.stdout.isatty()
        self.shown_percent = 0
        self.broken = False  # something was written since the text: the seconds need a line of their own
        print(f"{text} ...", end="", flush=True)

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def progress(self, percent: int) -> None:
        if self.terminal:
            print(f"\r{self.text} ... {percent:3d} %, {self.seconds():.0f} s ", end="", flush=True)
        elif percent >= self.shown_percent + 20:
            print(f"{'' if self.broken else chr(10)}    {percent} %, {self.seconds():.0f} s", flush=True)
            self.broken, self.shown_percent = True, percent

    def note(self, text: str) -> None:
        """What it is at now; only a terminal shows it."""
        if self.terminal:
            width = max(20, shutil.get_terminal_size().columns - 1)
            print("\r" + f"{self.text} ... {text}"[:width].ljust(width), end="", flush=True)

    def finish(self, result: str) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + f"{self.text} ... {result}".ljust(width), flush=True)
        else:
            print(f"    {result}" if self.broken else f" {result}", flush=True)


@contextmanager
def stage(text: str) -> Iterator[Stage]:
    current = Stage(text)
    try:
        yield current
    except BaseException:
        current.finish(f"failed after {current.seconds():.1f} s")
        raise
    current.finish(f"{current.seconds():.1f} s")


def run(
    command: Sequence[str | Path],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> int:
    """Run `command`, append all it says to `log`, return its exit code. Nothing it started outlives an interruption."""
    with log.open("a", errors="replace") as out:
        out.write(f"$ {' '.join(map(str, command))}\n")
        out.flush()
        with subprocess.Popen(
            list(map(str, command)),
            env=env,
            cwd=cwd,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    out.write(line)
                    on_line(line)
                return process.wait()
            finally:
                kill_group(process)


def kill_group(process: subprocess.Popen[str]) -> None:
    """End a process started with start_new_session=True, and every process it left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def last_lines(log: Path, count: int = 12) -> str:
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(f"    {line[:300]}" for line in lines[-count:])


# ----------------------------------------------------------------------------------------------------------- pip


class Pip:
    """One interpreter's pip. Online it obeys the user's configuration; offline it sees one directory and no network."""

    def __init__(self, python: Path, log: Path, offline: Path | None = None) -> None:
        self.python, self.log, self.offline = python, log, offline

    def __call__(self, *arguments: str | Path, doing: str, env: Mapping[str, str] | None = None) -> None:
        environment = dict(os.environ if env is None else env)
        command: list[str | Path] = [self.python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
        if self.offline is not None:
            # Configured indexes and find-links would still be asked (a mirror mounted as a directory, say).
            environment = {name: value for name, value in environment.items() if not name.startswith("PIP_")}
            environment["PIP_CONFIG_FILE"] = os.devnull
            command += ["--no-index", "--find-links", self.offline]
        with stage(doing) as current:
            start = self.log.stat().st_size if self.log.exists() else 0
            code = run(command, self.log, env=environment, on_line=lambda line: current.note(_pip_note(line)))
        if code != 0:
            raise pip_failure(self.log.read_text(errors="replace")[start:], doing, self.offline)


def _pip_note(line: str) -> str:
    words = line.split()
    return " ".join(words)[:100] if words and words[0] in ("Collecting", "Downloading", "Installing", "Using") else ""


def pip_failure(output: str, doing: str, offline: Path | None) -> Exception:
    """The one line of pip's output that matters, and what to do about it."""
    errors = [line.strip() for line in output.splitlines() if re.match(r"\s*ERROR:", line)]
    what = errors[0].removeprefix("ERROR:").strip() if errors else (output.strip().splitlines() or ["no output"])[-1]
    if "DO NOT MATCH THE HASHES" in output:
        return Refusal(f"{doing}: the file's sha256 is not the expected one; it was not run. Ask who serves your index")
    if "No space left" in output:
        return Refusal(f"{doing}: no space left on the device: free some, or move the checkout or TMPDIR")
    if offline is not None:
        return Refusal(f"{doing}: {what}; to fill {offline}: launch/setup --download DIR where there is a network")
    network = r"NewConnectionError|Max retries|ConnectTimeout|ReadTimeout|Name or service|ProxyError|SSLError"
    if re.search(network, output):
        return Refusal(f"{doing}: no package index answers: check network, proxy, `pip config list`; or --offline DIR")
    return BuildFailure(f"{doing}: {what}")


# ------------------------------------------------------------------------------------------------------- machine


def require_space(path: Path, gib: float, what: str) -> None:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(existing).free / GIB
    if free < gib:
        raise Refusal(f"{what} needs {gib:g} GiB in {path}, which has {free:.1f}: free some, or use another place")


def compile_jobs() -> int:
    """As many compilers at once as there are cores and memory (under 1.5 GiB each with torch's headers)."""
    cores = len(os.sched_getaffinity(0))
    available = _meminfo("MemAvailable")
    try:  # a container sees the host's cores and memory; its own limits are here
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(1, min(cores, int(available / (1.5 * GIB))))


def _meminfo(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 4 * GIB


def has_nvidia_gpu() -> bool:
    """By the driver's own files: nvidia-smi may be absent (containers) or present without a GPU (login nodes)."""
    return Path("/proc/driver/nvidia/version").exists() and any(Path("/dev").glob("nvidia[0-9]*"))
