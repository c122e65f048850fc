"""Signals are heard whatever the program does with its handlers and with the one wakeup descriptor of a process."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from hvdtrain.launching.signal_socket import SignalSocket

HEARD = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in (*HEARD, signal.SIGUSR2)}
    some = SignalSocket()
    some.listen(HEARD)
    yield some
    some.close()
    assert signal.set_wakeup_fd(-1) == -1
    for number, handler in before.items():
        signal.signal(number, handler)


def heard(signals: SignalSocket, number: int) -> bytes:
    os.kill(os.getpid(), number)
    return signals.received()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_after_an_event_loop_that_handled_signals_they_are_heard_again(number, signals):
    async def handle() -> None:
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(number, came.set)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(came.wait(), 10)
        assert signals.received() == b""
        assert heard(signals, signal.SIGUSR1) == bytes([signal.SIGUSR1])  # ours, though the descriptor is the loop's
        os.kill(os.getpid(), number)  # and the loop hears its own as before
        await asyncio.wait_for(came.wait(), 10)
        assert signals.lost() == (number in HEARD)
        assert signals.regain() == (["SIGTERM"] if number in HEARD else [])  # said once
        assert not signals.lost()
        assert signals.regain() == []
        loop.remove_signal_handler(number)

    asyncio.run(handle())
    assert signals.lost() == (number in HEARD)
    assert signals.regain() == []
    assert not signals.lost()
    for each in HEARD:
        assert heard(signals, each) == bytes([each])  # once


def test_in_an_event_loop_that_handles_signals_its_own_still_arrive_and_come_back():
    """`training.start` is called in a coroutine, say."""

    async def train() -> None:
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR2, came.set)
        some = SignalSocket()
        some.listen(HEARD)
        for _ in range(2):  # while it listens: what the monitor reads is handed on; and afterwards
            os.kill(os.getpid(), signal.SIGUSR2)
            some.received()
            await asyncio.wait_for(came.wait(), 10)
            came.clear()
            some.restore()
        some.close()
        loop.remove_signal_handler(signal.SIGUSR2)

    asyncio.run(train())


def test_a_handler_that_the_program_has_installed_is_left_to_it(signals):
    got = []
    signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    assert signals.lost()
    assert signals.regain() == ["SIGTERM"]
    signals.restore()
    os.kill(os.getpid(), signal.SIGTERM)
    assert got == [signal.SIGTERM]


PROGRAM = """
import asyncio, os, signal, time, torch
from torch import nn
from hvdtrain import training

async def handle():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, print)
    loop.remove_signal_handler(signal.SIGTERM)

parser = training.parser("program", "A program that uses asyncio")
flags = parser.parse_args()
with training.start(flags) as run:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    for epoch in run.epochs(100000):
        for step in run.steps(torch.ones(64, 2), torch.ones(64, 1)):
            for x, y in step.batches():
                step.backward((model(x) - y).square().mean())
            step.update()
            if run.state.step == 5:
                asyncio.run(handle())
                began = time.monotonic()
            regained = signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            if run.state.step > 5 and (regained or time.monotonic() > began + 60):
                print("step", flush=True)
raise SystemExit(run.exit_code)
"""


@pytest.mark.slow
def test_sigterm_saves_and_stops_a_training_that_has_used_asyncio(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", "--output-dir", "out", "--no-progress", "--batch-size", "4"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line == "step\n":
                process.terminate()
                break
        said += process.communicate(timeout=60)[0]
    assert process.returncode == 75, said
    assert "saved after step" in said
