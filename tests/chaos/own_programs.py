"""Programs of users who misunderstood something, or whose own code fails in an odd place; and MLflow servers that do."""

from collections.abc import Callable
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


def program(**parts: str) -> str:
    text = PROGRAM
    for line in PROGRAM.splitlines():
        mark = line.strip()
        if mark.startswith("#") and mark[1:].lower() in parts:
            indent = line[: len(line) - len(line.lstrip())]
            text = text.replace(
                f"{line}\n", "".join(f"{indent}{own}\n" for own in parts[mark[1:].lower()].splitlines())
            )
    return text


def write(**parts: str) -> Callable[[Path], None]:
    return lambda here: (here / "own.py").write_text(program(**parts)) and None


def own(
    name: str,
    what: str,
    code: int | tuple[int, ...] = 0,
    says: str = "",
    command: str = ALONE,
    unsaid: str | None = None,
    **parts: str,
) -> Attempt:
    """An attempt with the program above. An exception of the user's own code has its traceback."""
    if unsaid is None:
        unsaid = "x^" if code != 0 and code != 2 else Attempt.unsaid
    return Attempt(f"own-{name}", "careless programs", what, command, code, says, unsaid, write(**parts), limit=150)


OWN = [
    own("plain", "nothing is wrong", command=f"{ALONE} && {TWO.replace('dir out', 'dir two')} && {FORKED.replace('dir out', 'dir three')}"),
    own("interrupt-in-step", "KeyboardInterrupt raised by the program in a step", (1, 75, 130), step="if run.state.step == 3: raise KeyboardInterrupt"),
    own("interrupt-in-step-two", "the same on rank 1 of two", (1, 75, 130), command=TWO, step="if run.state.step == 3 and run.rank == 1: raise KeyboardInterrupt"),
    own("stop-iteration", "StopIteration in the loop of steps", 1, "StopIteration", step="if run.state.step == 3: raise StopIteration"),
    own("stop-iteration-two", "StopIteration on rank 0 of two", tuple(range(1, 256)), "StopIteration", command=TWO, step="if run.state.step == 3 and run.rank == 0: raise StopIteration"),
    own("generator-exit", "GeneratorExit in the loop", 1, step="if run.state.step == 3: raise GeneratorExit"),
    own("exit-0", "sys.exit(0) in a step: not the end of training", (0, 1), step="if run.state.step == 3: sys.exit(0)", unsaid=r"Traceback"),
    own("exit-0-two", "sys.exit(0) in a step on rank 1 of two: the other must not wait", tuple(range(256)), command=TWO, step="if run.state.step == 3 and run.rank == 1: sys.exit(0)"),
    own("exit-text", "sys.exit('text') in a step", 1, "my own words", step="if run.state.step == 3: sys.exit('my own words')"),
    own("exit-300", "sys.exit(300), which becomes 44", 44, step="if run.state.step == 3: sys.exit(300)"),
    own("os-exit", "os._exit(0) on rank 1 of two", tuple(range(1, 256)), command=TWO, step="if run.state.step == 3 and run.rank == 1: os._exit(0)"),
    own("os-exit-forked", "os._exit(0) on rank 1 of the starter's two", tuple(range(1, 256)), command=FORKED, step="if run.state.step == 3 and run.rank == 1: os._exit(0)"),
    own("break-steps", "break out of the loop of steps", 2, "epoch 1 was left after", step="if run.state.step == 3: break"),
    own("break-steps-two", "break on rank 1 of two", (1, 2), r"epoch 1 was left after|waits at own.py", command=TWO, step="if run.state.step == 3 and run.rank == 1: break"),
    own("break-batches", "break out of the loop of batches", (0, 2), batch="break"),
    own("break-epochs", "break out of the loop of epochs", (0, 2), after="break"),
    own("return-inside", "return out of the middle of a step", (0, 2), step="if run.state.step == 3: return 0"),
    own("nested-start", "training.start inside of training.start", (0, 2), start="with training.start(flags) as inner: pass"),
    own("two-runs", "two runs in one process, one after the other", 0, command="python own.py --engine serial --no-progress",
        left="with training.start(flags) as again: again.prepare(nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)) if False else None"),
    own("used-after-end", "the run is used after its end", (0, 1, 2), left="run.say('late')\nrun.event('late')\nrun.heartbeat()\nfor _ in run.epochs(3): pass"),
    own("steps-kept", "the steps are collected first, then used", 2, after="list(run.steps(x, y))"),
    own("steps-in-list", "list(run.steps(...)) as the loop", 2, step="pass", epoch="for step in list(run.steps(x, y)): pass\ncontinue"),
    own("update-twice", "step.update() twice", 2, "update", updated="step.update()"),
    own("backward-never", "no backward in a step", 2, "backward", batch="continue"),
    own("backward-twice", "backward twice in a batch", 2, "backward", backward="step.backward(nn.functional.mse_loss(model(inputs), targets))"),
    own("loss-number", "backward of a number", (1, 2), batch="step.backward(3.0)"),
    own("loss-vector", "backward of a vector", (1, 2), batch="step.backward(model(inputs)[:, 0])"),
    own("loss-detached", "backward of a loss without a graph", (1, 2), batch="step.backward(model(inputs).detach().mean())"),
    own("record-odd", "record of a string, of a dictionary, of a huge integer", (1, 2), evaluating="run.record(loss='x')"),
    own("record-nan", "an evaluation that is NaN", 0, evaluating="run.record(loss=torch.tensor(float('nan')))\ncontinue"),
    own("event-odd", "events with sets, NaN, bytes, surrogates, 10 MB", 0, epoch="run.event('x', a={1}, b=float('nan'), c=b'x', d='\\ud800', e='x' * 10**7)"),
    own("event-circle", "an event with a list that holds itself", 1, "own.py.*|Circular", epoch="loop = []; loop.append(loop)\nrun.event('y', loop=loop)"),
    own("event-name", "events named as ours, with our fields", (0, 1, 2), epoch="run.event('train', step='x', time='never')\nrun.event('end')\nrun.event('start', world_size=-1)"),
    own("say-odd", "lines with line breaks, escape codes, surrogates", 0, epoch="run.say('a\\nb\\x1b[2J\\ud800')"),
    own("say-odd-c-locale", "the same with an ASCII terminal", 0, command=f"PYTHONIOENCODING=ascii:strict {ALONE}", epoch="run.say('Zürich 🚂')"),
    own("sigterm-own", "the program has its own handler of SIGTERM, set after start", (0, 75), start="signal.signal(signal.SIGTERM, lambda *_: None)", step="if run.state.step == 3: os.kill(os.getpid(), signal.SIGTERM)"),
    own("sigterm-default", "SIGTERM is ignored by the program before start", (0, 75), top="signal.signal(signal.SIGTERM, signal.SIG_IGN)", step="if run.state.step == 3: os.kill(os.getpid(), signal.SIGTERM)"),
    own("sigchld", "the program ignores SIGCHLD", 0, top="signal.signal(signal.SIGCHLD, signal.SIG_IGN)", command=f"{ALONE} && {FORKED.replace('dir out', 'dir two')}"),
    own("alarm", "a timer signal every millisecond", 0, top="signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)"),
    own("blocked-signals", "every signal is blocked by the program", 0, top="signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())", command=f"{ALONE} && {FORKED.replace('dir out', 'dir two')}"),
    own("thread-start", "training.start in a thread that is not the main one", (0, 1), "in another thread than the main one", unsaid="x^",
        command="sed -i 's/^    training.main(main)/    t = threading.Thread(target=main); t.start(); t.join()/' own.py; " + ALONE),
    own("threads", "ten threads that compute beside", 0, start="for _ in range(10): threading.Thread(target=lambda: [torch.rand(9, 9) @ torch.rand(9, 9) for _ in range(999)], daemon=True).start()"),
    own("fork", "os.fork in a step: the child leaves with os._exit", 0, step="if run.state.step == 3 and os.fork() == 0: os._exit(0)"),
    own("fork-exit", "os.fork in a step: the child leaves with sys.exit", 0, step="if run.state.step == 3 and os.fork() == 0: sys.exit(0)"),
    own("fork-exit-two", "the same on both ranks of mpirun", tuple(range(256)), command=TWO, step="if run.state.step == 3 and os.fork() == 0: sys.exit(0)"),
    own("fork-goes-on", "os.fork in a step: the child goes on training", (0, 1, 2), step="if run.state.step == 3: os.fork()"),
    own("subprocess-inherits", "a child process that outlives the program, with its output", 0, command=f"timeout 60 {ALONE} | cat", after="os.system('sleep 20 >/dev/null 2>&1 &')"),
    own("chdir", "os.chdir in the loop, relative --output-dir", 0, epoch="os.makedirs('d', exist_ok=True); os.chdir('d')", command=f"{ALONE} && test -e out/summary.json"),
    own("environ-cleared", "os.environ.clear() after start", 0, start="os.environ.clear()"),
    own("environ-cleared-two", "os.environ.clear() after start, on two ranks", 0, command=TWO, start="os.environ.clear()"),
    own("fds-closed", "the program closes every file descriptor above 2", tuple(range(256)), start="os.closerange(3, 4096)", unsaid="x^"),
    own("stdout-replaced", "sys.stdout is a StringIO, then None", 0, start="import io; sys.stdout = io.StringIO()", epoch="sys.stdout = None"),
    own("stdout-none", "sys.stdout and sys.stderr are None before the start", (0, 2), top="sys.stdout = sys.stderr = None"),
    own("excepthook", "sys.excepthook that fails, an exception in a step", 1, top="sys.excepthook = lambda *a: 1 / 0", step="if run.state.step == 3: raise ValueError('x')"),
    own("recursion", "infinite recursion in a step", 1, "RecursionError", step="f = lambda: f()\nif run.state.step == 3: f()"),
    own("memory-error", "MemoryError in a step", 1, "MemoryError", step="if run.state.step == 3: raise MemoryError"),
    own("exception-odd", "an exception whose text fails", 1, top="class Odd(Exception):\n    def __str__(self): raise ValueError('no text')", step="if run.state.step == 3: raise Odd"),
    own("user-error-lines", "a UserError with line breaks and escape codes", 2, start="raise training.UserError('a\\nb\\x1b[2J')"),
    own("seeded", "torch.manual_seed(0), deterministic algorithms, default dtype float64", (0, 1, 2), top="torch.manual_seed(0); torch.use_deterministic_algorithms(True); torch.set_default_dtype(torch.float64)"),
    own("no-grad", "torch.set_grad_enabled(False)", (1, 2), top="torch.set_grad_enabled(False)"),
    own("inference", "torch.inference_mode around everything", (1, 2), command="sed -i 's/^    training.main(main)/    training.main(torch.inference_mode()(main))/' own.py; " + ALONE),
    own("default-device", "torch.set_default_device('meta')", (1, 2), top="torch.set_default_device('meta')"),
    own("parameters-frozen", "no parameter has a gradient", (1, 2), prepared="net.requires_grad_(False)"),
    own("parameters-added", "a parameter is added to the optimizer after prepare", (0, 1, 2), prepared="optimizer.add_param_group({'params': [nn.Parameter(torch.ones(3))]})"),
    own("parameters-shared", "two optimizers of the same parameters", (0, 2), prepared="torch.optim.SGD(net.parameters(), 0.1)"),
    own("parameters-empty", "a model without parameters", 2, start="run.prepare(nn.ReLU())"),
    own("prepare-odd", "prepare of a number, None, a class", 2, start="run.prepare(3)"),
    own("prepare-twice", "prepare twice", 2, "prepare", prepared="run.prepare(net)"),
    own("register-odd", "register of a state with a lambda, a set, a circle", (1, 2), prepared="class S:\n    def state_dict(self): return {'f': lambda: 1}\n    def load_state_dict(self, s): pass\nrun.register(s=S())"),
    own("register-raises", "register of an object whose state_dict raises in a checkpoint", 1, "state is lost", prepared="class S:\n    n = 0\n    def state_dict(self):\n        raise RuntimeError('state is lost')\n    def load_state_dict(self, s): pass\nrun.register(s=S())"),
    own("register-huge-int", "register of integers of 5,000 digits, NaN, -0.0, None", 0, prepared="class S:\n    def state_dict(self): return {'i': 10**4000, 'n': float('nan'), 'z': -0.0, 'x': None, 't': (1, 2)}\n    def load_state_dict(self, s): print(s.keys())\nrun.register(s=S())",
        command=f"{ALONE} && rm out/summary.json && {ALONE} --epochs 2"),
    own("register-own-name", "register of names of ours: model, optimizer, ''", (0, 2), prepared="class S:\n    def state_dict(self): return {'t': torch.ones(2)}\n    def load_state_dict(self, s): assert s['t'].sum() == 2\nrun.register(model=S(), optimizer=S(), **{'a.b/c \\n': S(), '': S()})",
        command=f"{ALONE} && rm out/summary.json && {ALONE}"),
    own("sizes-change", "another number of samples in the second epoch", 2, "samples", epoch="if epoch: x2 = x[:32]", step="pass",
        command="sed -i 's/run.steps(x, y)/run.steps(x[: 64 - 32 * epoch], y[: 64 - 32 * epoch])/' own.py; " + ALONE),
    own("data-empty", "data sets of no sample", 2, command="sed -i 's/run.steps(x, y)/run.steps(x[:0], y[:0])/' own.py; " + ALONE),
    own("data-odd", "steps of None", 2, command="sed -i 's/run.steps(x, y)/run.steps(None)/' own.py; " + ALONE),
    own("data-unequal", "tensors of different lengths", 2, command="sed -i 's/run.steps(x, y)/run.steps(x, y[:5])/' own.py; " + ALONE),
    own("metrics-odd", "a metric without a direction, named '', with a line break", 2, command="sed -i 's/training.start(flags)/training.start(flags, metrics={\"\": \"up\"})/' own.py; " + ALONE),
    own("flags-odd", "training.start of None", 2, command="sed -i 's/training.start(flags)/training.start(None)/' own.py; " + ALONE),
    own("epochs-zero", "run.epochs(0), of -1", (0, 2), command="sed -i 's/run.epochs(flags.epochs)/run.epochs(0)/' own.py; " + ALONE),
    own("epochs-negative", "run.epochs(-1)", (0, 2), command="sed -i 's/run.epochs(flags.epochs)/run.epochs(-1)/' own.py; " + ALONE),
    own("epochs-fraction", "run.epochs(1.5)", 2, command="sed -i 's/run.epochs(flags.epochs)/run.epochs(1.5)/' own.py; " + ALONE),
    own("evaluating-zero", "run.evaluating(0)", (0, 2), command="sed -i 's/run.evaluating(len(x))/run.evaluating(0)/' own.py; " + ALONE),
    own("evaluating-nested", "evaluating inside of evaluating", 2, evaluating="with run.evaluating(3): pass"),
    own("steps-in-evaluating", "steps inside of evaluating", 2, evaluating="for step in run.steps(x, y): pass"),
    own("lr-odd", "step.lr = NaN, negative, a string", (1, 2), step="step.lr = float('nan')"),
    own("lr-text", "step.lr = 'fast'", (1, 2), step="step.lr = 'fast'"),
    own("dataset-interrupt", "KeyboardInterrupt in a Dataset with workers", (1, 2, 75, 130), top="class D(torch.utils.data.Dataset):\n    def __len__(self): return 64\n    def __getitem__(self, i):\n        if i == 40: raise KeyboardInterrupt\n        return x[i], y[i]",
        command="sed -i 's/run.steps(x, y)/run.steps(torch.utils.data.DataLoader(D(), batch_size=8, num_workers=2))/' own.py; " + ALONE),
    own("dataset-exit", "sys.exit in a Dataset with workers", (1, 2), top="class D(torch.utils.data.Dataset):\n    def __len__(self): return 64\n    def __getitem__(self, i):\n        if i == 40: sys.exit(0)\n        return x[i], y[i]",
        command="sed -i 's/run.steps(x, y)/run.steps(torch.utils.data.DataLoader(D(), batch_size=8, num_workers=2))/' own.py; " + ALONE),
    own("dataset-killed", "a Dataset's worker kills itself (out of memory)", (1, 2), top="class D(torch.utils.data.Dataset):\n    def __len__(self): return 64\n    def __getitem__(self, i):\n        if i == 40: os.kill(os.getpid(), 9)\n        return x[i], y[i]",
        command="sed -i 's/run.steps(x, y)/run.steps(torch.utils.data.DataLoader(D(), batch_size=8, num_workers=2))/' own.py; " + ALONE),
    own("dataset-index-error", "IndexError in a Dataset, which a loop would take for its end", (1, 2), "IndexError", top="class D(torch.utils.data.Dataset):\n    def __len__(self): return 64\n    def __getitem__(self, i):\n        if i == 40: raise IndexError('40')\n        return x[i], y[i]",
        command="sed -i 's/run.steps(x, y)/run.steps(torch.utils.data.DataLoader(D(), batch_size=8, num_workers=0))/' own.py; " + ALONE, unsaid="x^"),
    own("dataset-length", "a Dataset whose length is negative, infinite, changes", (1, 2), top="class D(torch.utils.data.Dataset):\n    n = 64\n    def __len__(self):\n        D.n -= 1\n        return D.n\n    def __getitem__(self, i): return x[i], y[i]",
        command="sed -i 's/run.steps(x, y)/run.steps(torch.utils.data.DataLoader(D(), batch_size=8))/' own.py; " + ALONE, unsaid="x^"),
    own("no-main-guard", "a program without `if __name__`, with input workers: told to write one", 2, "under `if __name__", top="class D(torch.utils.data.Dataset):\n    def __len__(self): return 64\n    def __getitem__(self, i): return x[i], y[i]",
        command="sed -i 's/run.steps(x, y)/run.steps(torch.utils.data.DataLoader(D(), batch_size=8, num_workers=2))/; s/^if __name__.*/if True:/' own.py; " + ALONE),
    own("from-stdin", "the program comes from standard input", 0, command="cat own.py | python - --engine serial --no-progress --output-dir out"),
    own("from-c", "the program is python -c", 0, command="python -c \"$(cat own.py)\" --engine serial --no-progress --output-dir out"),
    own("from-zip", "the program lies in a zip file", 0, command="mv own.py __main__.py; python -m zipfile -c own.zip __main__.py; python own.zip --engine serial --no-progress --output-dir out"),
    own("from-pipe", "the program is a FIFO", 0, command="mkfifo p.py; cat own.py > p.py & python p.py --engine serial --no-progress --output-dir out"),
    own("name-odd", "the program's name is not UTF-8 and has a line break", 0, command="mv own.py $'a\\n\\xff.py'; python $'a\\n\\xff.py' --engine serial --no-progress --output-dir out"),
    own("name-odd-forked", "the same under the starter", 0, command="mv own.py $'a\\n\\xff.py'; python -m hvdtrain.starter --oversubscribe --local-ranks 2 $'a\\n\\xff.py' --no-progress --output-dir out"),
    own("removed-itself", "the program's file is removed after the start", 0, start="os.unlink(__file__)"),
    own("gc", "gc.disable, gc.set_threshold(1)", 0, top="import gc; gc.set_threshold(1)"),
    own("atexit", "an atexit handler that raises", (0, 1), top="import atexit; atexit.register(lambda: 1 / 0)", unsaid="x^"),
    own("settrace", "a trace function that fails", (0, 1), top="sys.settrace(lambda *a: None)", unsaid="x^"),
    own("meta-path", "an import hook of its own that fails for our modules", (1, 2), "no more imports", top="class H:\n    def find_spec(self, name, *_):\n        if name.startswith('hvdtrain.'): raise ImportError('no more imports')\nsys.meta_path.insert(0, H())", unsaid="x^"),
]  # fmt: skip

MLFLOW = ALONE + " --track mlflow"


def server(name: str, what: str, answer: str, says: str = "record .* is incomplete|--track", more: str = "") -> Attempt:
    """--track with a server on loopback that answers each connection with the Python statements `answer`."""

    def prepare(here: Path) -> None:
        (here / "own.py").write_text(program())
        body = "\n".join(f"        {line}" for line in answer.splitlines())
        (here / "server.py").write_text(
            "import socket, threading, time\nl = socket.create_server(('127.0.0.1', 0))\nopen('port', 'w').write(str(l.getsockname()[1]))\n"
            f"def one(s):\n    try:\n        s.recv(9999)\n{body}\n        s.close()\n    except OSError: pass\n"
            "while True:\n    threading.Thread(target=one, args=(l.accept()[0],), daemon=True).start()\n"
        )

    command = f"python server.py & until [ -s port ]; do sleep 0.1; done; MLFLOW_TRACKING_URI=http://u:secret@127.0.0.1:$(cat port){more} {MLFLOW}; rc=$?; kill %1; exit $rc"
    return Attempt(
        f"track-{name}",
        "MLflow servers that fail",
        what,
        command,
        0,
        says,
        "secret|Traceback",
        prepare,
        needs=("mlflow",),
        limit=200,
    )


TRACKING = [
    server("500", "a server that answers 500", r's.sendall(b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n")'),
    server("html", "a log-in page instead of JSON", r's.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>")'),
    server("slow", "a server that accepts and says nothing", "time.sleep(300)"),
    server("drip", "an answer of a byte a second", "s.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 999\\r\\n\\r\\n')\nwhile True:\n    s.sendall(b' ')\n    time.sleep(1)"),
    server("redirects", "redirects in a circle", r's.sendall(b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n")'),
    server("deep-json", "JSON of 100,000 brackets", r's.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100000)'),
    Attempt("track-dead", "MLflow servers that fail", "nobody listens", f"MLFLOW_TRACKING_URI=http://127.0.0.1:9 {MLFLOW}", 0, "--track", prepare=write(), needs=("mlflow",)),
    Attempt("track-odd-uri", "MLflow servers that fail", "a tracking URI that is none", f"MLFLOW_TRACKING_URI='ht!tp://[::' {MLFLOW}", (0, 2), "--track", prepare=write(), needs=("mlflow",)),
    Attempt("track-full", "MLflow servers that fail", "the folder of the record is a file", f"mkdir out; touch out/mlflow; {MLFLOW}", (0, 2), "--track", prepare=write(), needs=("mlflow",)),
    Attempt("track-poisoned", "MLflow servers that fail", "mlflow-run.json names a run ../../etc", f"{ALONE}; echo '{{\"run_id\": \"../../../../etc\", \"tracking_uri\": \"x\"}}' > out/mlflow-run.json; {MLFLOW} --epochs 2",
            (0, 2), prepare=write(), needs=("mlflow",)),
]  # fmt: skip

PROGRAMS = [*OWN, *TRACKING]
