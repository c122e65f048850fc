"""Programs of users that end, fork, catch signals, or are started, in a way that only a whole process shows.

What is called in the wrong order or with a wrong value is in tests/single/training/test_mistakes.py.
"""

from pathlib import Path

from tests.chaos.attempts import Attempt

# The program of most attempts. A line marked with a capital letter is replaced by the attempt's own.
PROGRAM = """
import os, signal, sys, threading, time
import torch
from torch import nn
from hvdtrain import training
#TOP
x = torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)

def main():
    parser = training.parser("own", None, epochs=2, batch_size=8)
    flags = parser.parse()
    #PARSED
    with training.start(flags) as run:
        #START
        net = nn.Linear(4, 1)
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        #PREPARED
        for epoch in run.epochs(flags.epochs):
            #EPOCH
            for step in run.steps(x, y):
                #STEP
                for inputs, targets in step.batches():
                    #BATCH
                    step.backward(nn.functional.mse_loss(model(inputs), targets))
                    #BACKWARD
                step.update()
                #UPDATED
            #AFTER
            with run.evaluating(len(x)) as mine:
                #EVALUATING
                run.record(loss=nn.functional.mse_loss(model(x[mine]), y[mine], reduction="sum"))
        #END
    #LEFT
    return run.exit_code

if __name__ == "__main__":
    training.main(main)
"""
ALONE = "python own.py --engine serial --no-progress --output-dir out"
TWO = "mpirun --oversubscribe -np 2 python own.py --no-progress --output-dir out"
FORKED = "python -m hvdtrain.starter --oversubscribe --local-ranks 2 own.py --no-progress --output-dir out"


AT_3 = "if run.state.step == 3"
LOADED = (
    "sed -i 's/run.steps(x, y)/run.steps(torch.utils.data.DataLoader(D(), batch_size=8, num_workers=2))/' own.py; "
    + ALONE
)


def data_set(at_40: str) -> str:
    """Return a Dataset that does `at_40` where sample 40 is asked for."""
    return (
        "class D(torch.utils.data.Dataset):\n    def __len__(self): return 64\n"
        f"    def __getitem__(self, i):\n        if i == 40: {at_40}\n        return x[i], y[i]"
    )


def program(**parts: str) -> str:
    lines = []
    for line in PROGRAM.splitlines():
        mark = line.strip().removeprefix("#").lower()
        indent = line[: len(line) - len(line.lstrip())]
        lines += [indent + own for own in parts[mark].splitlines()] if mark in parts and "#" in line else [line]
    return "\n".join(lines) + "\n"


def own(
    name: str, what: str, code: int | tuple[int, ...] = 0, says: str = "", command: str = ALONE, unsaid: str | None = None,
    **parts: str,
) -> Attempt:  # fmt: skip
    """An attempt with the program above. An exception of the user's own code has its traceback."""
    if unsaid is None:
        unsaid = "x^" if code != 0 and code != 2 else Attempt.unsaid

    def prepare(here: Path) -> None:
        (here / "own.py").write_text(program(**parts))

    return Attempt(f"own-{name}", "careless programs", what, command, code, says, unsaid, prepare, limit=150)


PROGRAMS = [
    own("plain", "nothing is wrong", command=f"{ALONE} && {TWO.replace('dir out', 'dir two')} && {FORKED.replace('dir out', 'dir three')}"),
    own("interrupt-in-step-two", "the same on rank 1 of two", (1, 75, 130), command=TWO, step=f"{AT_3} and run.rank == 1: raise KeyboardInterrupt"),
    own("stop-iteration-two", "StopIteration on rank 0 of two", tuple(range(1, 256)), "StopIteration", command=TWO, step=f"{AT_3} and run.rank == 0: raise StopIteration"),
    own("exit-0", "sys.exit(0) in a step: not the end of training", (0, 1), step=f"{AT_3}: sys.exit(0)", unsaid=r"Traceback"),
    own("exit-0-two", "sys.exit(0) in a step on rank 1 of two: the other must not wait", tuple(range(256)), command=TWO, step=f"{AT_3} and run.rank == 1: sys.exit(0)"),
    own("exit-text", "sys.exit('text') in a step", 1, "my own words", step=f"{AT_3}: sys.exit('my own words')"),
    own("os-exit", "os._exit(0) on rank 1 of two", tuple(range(1, 256)), command=TWO, step=f"{AT_3} and run.rank == 1: os._exit(0)"),
    own("os-exit-forked", "os._exit(0) on rank 1 of the starter's two", tuple(range(1, 256)), command=FORKED, step=f"{AT_3} and run.rank == 1: os._exit(0)"),
    own("break-steps-two", "break on rank 1 of two", (1, 2), r"epoch 1 was left after|waits at own.py", command=TWO, step=f"{AT_3} and run.rank == 1: break"),
    own("sigterm-own", "the program has its own handler of SIGTERM, set after start", (0, 75), start="signal.signal(signal.SIGTERM, lambda *_: None)", step=f"{AT_3}: os.kill(os.getpid(), signal.SIGTERM)"),
    own("sigterm-default", "SIGTERM is ignored by the program before start", (0, 75), top="signal.signal(signal.SIGTERM, signal.SIG_IGN)", step=f"{AT_3}: os.kill(os.getpid(), signal.SIGTERM)"),
    own("sigchld", "the program ignores SIGCHLD", 0, top="signal.signal(signal.SIGCHLD, signal.SIG_IGN)", command=f"{ALONE} && {FORKED.replace('dir out', 'dir two')}"),
    own("alarm", "a timer signal every millisecond, which ends any Python that exits", (0, -14), top="signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)"),
    own("blocked-signals", "every signal is blocked by the program", 0, top="signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())", command=f"{ALONE} && {FORKED.replace('dir out', 'dir two')}"),
    own("thread-start", "training.start in a thread that is not the main one", (0, 1), "in another thread than the main one", unsaid="x^",
        command="sed -i 's/^    training.main(main)/    t = threading.Thread(target=main); t.start(); t.join()/' own.py; " + ALONE),
    own("threads", "ten threads that compute beside", 0, start="for _ in range(10): threading.Thread(target=lambda: [torch.rand(9, 9) @ torch.rand(9, 9) for _ in range(999)], daemon=True).start()"),
    own("fork", "os.fork in a step: the child leaves with os._exit", 0, step=f"{AT_3} and os.fork() == 0: os._exit(0)"),
    own("fork-exit-two", "the same on both ranks of mpirun", tuple(range(256)), command=TWO, step=f"{AT_3} and os.fork() == 0: sys.exit(0)"),
    own("subprocess-inherits", "a child process that outlives the program, with its output", 0, command=f"timeout 60 {ALONE} | cat", after="os.system('sleep 20 >/dev/null 2>&1 &')"),
    own("environ-cleared", "os.environ.clear() after start", 0, start="os.environ.clear()"),
    own("environ-cleared-two", "os.environ.clear() after start, on two ranks", 0, command=TWO, start="os.environ.clear()"),
    own("fds-closed", "the program closes every file descriptor above 2", tuple(range(256)), start="os.closerange(3, 4096)", unsaid="x^"),
    own("stdout-replaced", "sys.stdout is a StringIO, then None", 0, start="import io; sys.stdout = io.StringIO()", epoch="sys.stdout = None"),
    own("excepthook", "sys.excepthook that fails, an exception in a step", 1, top="sys.excepthook = lambda *a: 1 / 0", step=f"{AT_3}: raise ValueError('x')"),
    own("exception-odd", "an exception whose text fails", 1, top="class Odd(Exception):\n    def __str__(self): raise ValueError('no text')", step=f"{AT_3}: raise Odd"),
    own("dataset-interrupt", "KeyboardInterrupt in a Dataset with workers", (1, 2, 75, 130), top=data_set("raise KeyboardInterrupt"), command=LOADED),
    own("dataset-exit", "sys.exit in a Dataset with workers", (1, 2), top=data_set("sys.exit(0)"), command=LOADED),
    own("dataset-killed", "a Dataset's worker kills itself (out of memory)", (1, 2), top=data_set("os.kill(os.getpid(), 9)"), command=LOADED),
    own("no-main-guard", "a program without `if __name__`, with DataLoader workers: told to write one", 2, "under `if __name__", top=data_set("pass"),
        command=f"sed -i 's/^if __name__.*/if True:/' own.py; {LOADED}"),
    own("from-stdin", "the program comes from standard input", 0, command="cat own.py | python - --engine serial --no-progress --output-dir out"),
    own("from-c", "the program is python -c", 0, command="python -c \"$(cat own.py)\" --engine serial --no-progress --output-dir out"),
    own("from-zip", "the program lies in a zip file", 0, command="mv own.py __main__.py; python -m zipfile -c own.zip __main__.py; python own.zip --engine serial --no-progress --output-dir out"),
    own("name-odd-forked", "the same under the starter", 0, command="mv own.py $'a\\n\\xff.py'; python -m hvdtrain.starter --oversubscribe --local-ranks 2 $'a\\n\\xff.py' --no-progress --output-dir out"),
    own("removed-itself", "the program's file is removed after the start", 0, start="os.unlink(__file__)"),
    own("atexit", "an atexit handler that raises", (0, 1), top="import atexit; atexit.register(lambda: 1 / 0)", unsaid="x^"),
    own("meta-path", "an import hook of its own that fails for our modules", (1, 2), "no more imports", top="class H:\n    def find_spec(self, name, *_):\n        if name.startswith('hvdtrain.'): raise ImportError('no more imports')\nsys.meta_path.insert(0, H())", unsaid="x^"),
    own("exit-256", "sys.exit(256) in a step, of which a process has eight bits: 0", 1, "without a result", step=f"{AT_3}: sys.exit(256)"),
    own("execv", "os.execv of another program on rank 1 of the starter's two", tuple(range(1, 256)), command=FORKED, step=f"{AT_3} and run.rank == 1: os.execv('/bin/true', ['true'])", unsaid=r"Traceback"),
    own("exception-group", "an ExceptionGroup on rank 1 of the starter's two", 1, "No space", command=FORKED, step=f"{AT_3} and run.rank == 1: raise ExceptionGroup('many', [ValueError('a'), OSError(28, 'No space')])"),
    own("time-still", "the program replaces time.time by one that stands still", top="time.time = lambda: 0.0"),
    own("stream-object", "sys.stdout and sys.stderr are objects with `write` and `flush` alone", top="class W:\n    def write(self, text): sys.__stdout__.write(text)\n    def flush(self): pass\nsys.stdout = sys.stderr = W()"),
    own("pool", "a multiprocessing.Pool in a step of the starter's two", command=FORKED, step=f"{AT_3}:\n    import multiprocessing\n    with multiprocessing.get_context('fork').Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]"),
    own("ten-samples", "three ranks on ten samples", command=FORKED.replace("ranks 2", "ranks 3"), parsed="globals().update(x=x[:10], y=y[:10])"),
    own("two-samples", "three ranks on two samples", 2, "2 samples but 3 ranks", command=FORKED.replace("ranks 2", "ranks 3"), parsed="globals().update(x=x[:2], y=y[:2])"),
    own("rank-differs", "rank 1 changes its weights", 1, "the weights differ between ranks", command=f"{FORKED} --check-steps 1",
        step=f"{AT_3} and run.rank == 1:\n    with torch.no_grad(): net.weight.add_(1e-3)"),
]  # fmt: skip
