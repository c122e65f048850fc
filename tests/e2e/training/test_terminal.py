"""What ranks show, as a terminal gets it from each launcher; what a file and a pipe get instead."""

import os
import pty
import re
import shlex
import termios
import time

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, TORCHRUN, launch, running

MODULE = "-m hvdtrain.mnist --dataset digits --model convnet --epochs 1 --log-steps 2"
TRAIN = f"{PYTHON} {MODULE}"
BAR = re.compile(r"\repoch \d+/\d+ +\d+% \|#*\d?\.*\| \d+/\d+  \S+ left, loss [^\r\n]*")


def on_a_terminal(command: str, columns: int, timeout: float = 120, into: str = "") -> str:
    """Run a command line on a terminal, and return what that shows. `into`: a file for its standard output."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, columns))
    shell = f"exec {command}" + (f" > {shlex.quote(into)} 2>&1" if into else "")
    until, shown = time.monotonic() + timeout, b""
    with running(["bash", "-c", shell], stdin=its, stdout=its, stderr=its) as (process, _):
        os.close(its)
        os.set_blocking(ours, False)
        while process.poll() is None:
            assert time.monotonic() < until, f"not over after {timeout:.0f} s: {command}\n{shown.decode()}"
            shown += _waiting(ours)
            time.sleep(0.05)
    shown += _waiting(ours)
    os.close(ours)
    assert process.returncode == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n")


def _waiting(terminal: int) -> bytes:
    """Return what there is to read; at the end reading is an error."""
    found = b""
    try:
        while part := os.read(terminal, 65536):
            found += part
    except OSError:
        pass
    return found


def command(launcher: str, ranks: int = 2) -> str:
    if launcher == "torchrun":
        return f"{TORCHRUN.format(ranks=ranks)} {MODULE} --engine ddp"
    return f"{LAUNCHERS[launcher].format(ranks=ranks)} {TRAIN}"


@pytest.mark.timeout(180)
# Without a launcher it is as under torchrun.
@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_bar_where_what_is_written_arrives_as_it_is(launcher):
    shown = on_a_terminal(command(launcher, 1), 100)  # rank 0 alone has one
    assert BAR.search(shown), shown
    bars = [text for text in re.split(r"[\r\n]", shown) if "| " in text]
    assert max(map(len, bars)) < 100
    assert re.search(r"\r +\r\n*$", shown), repr(shown[-300:])  # taken away at the end


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("launcher", ["horovodrun", "gloo"])
def test_no_bar_where_the_launcher_writes_before_each_line(launcher):
    shown = on_a_terminal(command(launcher), 100)
    assert "\r" not in shown
    assert "epoch 1/1  train loss" in shown


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_a_file_gets_neither_bar_nor_warnings_also_from_a_terminal(launcher, tmp_path):
    assert on_a_terminal(command(launcher), 100, into=str(tmp_path / "log")) == ""
    written = (tmp_path / "log").read_text()
    assert "epoch 1/1  train loss" in written
    assert "\r" not in written
    assert "Warning" not in written  # DDP compares the gradients' strides with the weights'


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_open_mpi_tags_whole_lines():
    start = f"mpirun --tag-output --oversubscribe -np 2 {TRAIN} --no-progress"
    done = launch(start, PYTHONUNBUFFERED="1")
    assert done.code == 0, done
    lines = [line for line in done.stdout.splitlines() if line]
    assert len(lines) == 5, done
    assert all(re.fullmatch(r"\[1,0\]<stdout>:[a-z0-9][^<]*", line) for line in lines), done
