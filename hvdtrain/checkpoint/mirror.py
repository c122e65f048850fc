"""--mirror, and --resume with a URL: on rank 0, a process that copies the output directory (mirror_process.py)."""

import contextlib
import json
import subprocess
import threading
import time
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.checkpoint.mirror_process import END
from hvdtrain.engines import lines
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.flags import is_url
from hvdtrain.launching import attendant
from hvdtrain.output.run_output import RunOutput


class Mirror:
    """The copy of a run at a URL. Without --mirror, and on other ranks than 0, `end` does nothing.

    The constructor copies the run to the output directory, if it is not there: before the checkpoint to resume from is
    looked for. A collective; raises UserError on every rank. Flags used: mirror, mirror_timeout, resume, output_dir, keep,
    evaluate.
    """

    def __init__(self, engine: Engine, flags: Namespace, output: RunOutput):
        self._url, self._limit, self._output = flags.mirror, flags.mirror_timeout, output
        self._process: subprocess.Popen[bytes] | None = None
        url = flags.resume if is_url(flags.resume) else None
        if flags.evaluate is not None or (flags.mirror is None and url is None):
            return
        with engine.raising_together("mirror"):
            if engine.rank == 0:
                self._start(flags.output_dir, url or ("auto" if flags.resume == "auto" else "anew"), flags.keep)
        if url is not None:
            flags.resume = "auto"

    def _start(self, output_dir: Path, resume: str, keep: int) -> None:
        asked = dict(output_dir=str(output_dir), mirror=self._url, resume=resume, keep=keep)
        self._process = process = attendant.start("hvdtrain.checkpoint.mirror_process", asked, stdin=subprocess.PIPE)
        weakref.finalize(self, process.kill)  # also if training never begins
        for kind, text in messages_of(process):
            if kind == "error":
                raise UserError(text)
            if kind == "ready":
                break
            self._print(kind, text)
        else:
            raise Failure(f"--mirror: its process has ended with exit code {process.wait()}")
        if self._url is None:  # --resume alone: nothing is left to do
            self._process = None
            process.wait()
            return
        threading.Thread(target=self._listen, args=(process,), name="mirror", daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        for kind, text in messages_of(process):
            self._print(kind, text)
        if self._process is not None:  # killed, as for lack of memory
            remedy = "training continues; the same command, started again, copies the rest"
            self._print(
                "warn", f"--mirror {self._url}: its process has ended with exit code {process.wait()}: {remedy}"
            )

    def _print(self, kind: str, text: str) -> None:
        if kind == "warn":
            lines.warn(text)
            self._output.event("error", kind="mirror", message=text)
        else:
            self._output.say(text)

    def end(self, heartbeat: Callable[[], None]) -> None:
        """Wait until all of the run is at the URL, for a limited time. `heartbeat` is called meanwhile. Idempotent."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        assert process.stdin is not None
        until = time.monotonic() + self._limit
        with contextlib.suppress(OSError):  # it has been killed
            process.stdin.write(END)
            process.stdin.flush()
        while process.poll() is None and time.monotonic() < until:
            heartbeat()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(1.0, max(0.0, until - time.monotonic())))
        if process.poll() != 0:
            process.kill()
            remedy = "--output-dir has all of it; the same command copies the rest"
            message = f"not all of the run could be copied within {self._limit:g} s (--mirror-timeout)"
            self._print("warn", f"--mirror {self._url}: {message}: {remedy}")
            process.wait()


def messages_of(process: subprocess.Popen[bytes]) -> Iterator[tuple[str, str]]:
    """Yield what the process says, until it ends."""
    assert process.stdout is not None
    for line in process.stdout:
        kind, text = json.loads(line)
        yield kind, text
