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
    own("interrupt-in-step-two", "the same on rank 1 of two", (1, 75, 130), command=TWO, step=f"{AT_3} and run.rank == 1: raise KeyboardInterrupt"),
    own("stop-iteration-two", "StopIteration on rank 0 of two", tuple(range(1, 256)), "StopIteration", command=TWO, step=f"{AT_3} and run.rank == 0: raise StopIteration"),
    own("os-exit-forked", "os._exit(0) on rank 1 of the starter's two", tuple(range(1, 256)), command=FORKED, step=f"{AT_3} and run.rank == 1: os._exit(0)"),
    own("break-steps-two", "break on rank 1 of two", (1, 2), r"epoch 1 was left after|waits at own.py", command=TWO, step=f"{AT_3} and run.rank == 1: break"),
    own("sigterm-own", "the program has its own handler of SIGTERM, set after start", (0, 75), start="signal.signal(signal.SIGTERM, lambda *_: None)", step=f"{AT_3}: os.kill(os.getpid(), signal.SIGTERM)"),
    own("sigchld", "the program ignores SIGCHLD", 0, top="signal.signal(signal.SIGCHLD, signal.SIG_IGN)", command=f"{ALONE} && {FORKED.replace('dir out', 'dir two')}"),
    own("alarm", "a timer signal every millisecond, which ends any Python that exits", (0, -14), top="signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)"),
    own("blocked-signals", "every signal is blocked by the program", 0, top="signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())", command=f"{ALONE} && {FORKED.replace('dir out', 'dir two')}"),
    own("subprocess-inherits", "a child process that outlives the program, with its output", 0, command=f"timeout 60 {ALONE} | cat", after="os.system('sleep 20 >/dev/null 2>&1 &')"),
    own("environ-cleared-two", "os.environ.clear() after start, on two ranks", 0, command=TWO, start="os.environ.clear()"),
    own("stdout-replaced", "sys.stdout is a StringIO, then None", 0, start="import io; sys.stdout = io.StringIO()", epoch="sys.stdout = None"),
    own("exception-odd", "an exception whose text fails", 1, top="class Odd(Exception):\n    def __str__(self): raise ValueError('no text')", step=f"{AT_3}: raise Odd"),
    own("from-stdin", "the program comes from standard input", 0, command="cat own.py | python - --engine serial --no-progress --output-dir out"),
    own("from-zip", "the program lies in a zip file", 0, command="mv own.py __main__.py; python -m zipfile -c own.zip __main__.py; python own.zip --engine serial --no-progress --output-dir out"),
    own("name-odd-forked", "the same under the starter", 0, command="mv own.py $'a\\n\\xff.py'; python -m hvdtrain.starter --oversubscribe --local-ranks 2 $'a\\n\\xff.py' --no-progress --output-dir out"),
    own("meta-path", "an import hook of its own that fails for our modules", (1, 2), "no more imports", top="class H:\n    def find_spec(self, name, *_):\n        if name.startswith('hvdtrain.'): raise ImportError('no more imports')\nsys.meta_path.insert(0, H())", unsaid="x^"),
    own("execv", "os.execv of another program on rank 1 of the starter's two", tuple(range(1, 256)), command=FORKED, step=f"{AT_3} and run.rank == 1: os.execv('/bin/true', ['true'])", unsaid=r"Traceback"),
    own("exception-group", "an ExceptionGroup on rank 1 of the starter's two", 1, "No space", command=FORKED, step=f"{AT_3} and run.rank == 1: raise ExceptionGroup('many', [ValueError('a'), OSError(28, 'No space')])"),
    own("pool", "a multiprocessing.Pool in a step of the starter's two", command=FORKED, step=f"{AT_3}:\n    import multiprocessing\n    with multiprocessing.get_context('fork').Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]"),
]  # fmt: skip
