"""The processes that load batches for a rank: their server, how many fit, what they leave when they are killed."""

import contextlib
import json
import multiprocessing
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from hvdtrain.engines import lines
from hvdtrain.engines.choice import start_engine
from hvdtrain.engines.errors import Failure, UserError, of_a_program
from hvdtrain.inputs import dataloaders, fork_server, leftovers, loading
from hvdtrain.inputs.loading import needed, workers_that_fit
from hvdtrain.inputs.sameness import OF_INIT, OF_MAIN
from hvdtrain.launching.processes import runs
from hvdtrain.training import parser as parser_of_training
from tests.single.training.small import Trained
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import os, sys
import torch
from hvdtrain.inputs.loading import loader, start_workers_early

{top}

class Numbers:
    def __getitem__(self, index):
        import gc
        return gc.get_freeze_count(), os.getppid() == SERVER, int(sys.argv[1])

SERVER = os.getpid()  # where the program is imported

def main():
    start_workers_early([])
    for batch in loader(Numbers(), 1, torch.device("cpu"), range(1)):
        print(*batch)

if __name__ == "__main__":
    main()
"""
# How the program is started; what it does when it is imported; what that prints; whether the server has imported it.
# It has imported torch in any case.
PROGRAMS = {
    "FILE, with a Path in sys.argv": (
        ["numbers_of.py"],
        """
int(sys.argv[1])  # it looks at its arguments
print('imported')
from mpi4py import MPI
assert MPI.Is_initialized() == (__name__ == '__main__')
import atexit, pathlib
sys.argv.append(pathlib.Path('elsewhere'))
own = os.getpid()
if __name__ != '__main__':
    atexit.register(lambda: os.getpid() == own and pathlib.Path('exited').touch())
""",
        ["imported"], True,
    ),
    "-m NAME": (["-m", "numbers_of"], "", [], True),
    "whose import ends the server": (["numbers_of.py"],
        "if __name__ != '__main__' and os.environ.pop('FIRST', ''): sys.exit(2)", [], False),
    "in a notebook, which no server can import": (["-c", "import numbers_of; numbers_of.main()"], "", [], False),
}  # fmt: skip


# After it has the name, the server does as with a file. Of a server that has ended, another test has the line.
SLOW = {"-m NAME", "whose import ends the server"}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in PROGRAMS])
def test_the_server_imports_the_program_for_its_workers_and_freezes_it(case, tmp_path):
    command, top, prints, in_server = PROGRAMS[case]
    (tmp_path / "numbers_of.py").write_text(PROGRAM.format(top=top))
    done = subprocess.run(
        [sys.executable, *command, "7"], capture_output=True, text=True, timeout=120, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FIRST": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done
    *said, frozen, forked_there, argument = done.stdout.split()
    assert (said, forked_there, argument) == (prints, str(in_server), "7")
    assert int(frozen) > 50_000  # torch's objects are several times as many
    if "exited" in top:
        wait_for((tmp_path / "exited").exists, "the server was killed, or is there: its exit handlers did not run")


def test_the_server_ends_with_its_rank_though_it_still_imports(tmp_path):
    (tmp_path / "endless.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('new').write_text(str(os.getpid()))\n"
        "os.rename('new', 'pid')\n"
        "time.sleep(300)\n"
    )
    (tmp_path / "rank.py").write_text(
        "import os, pathlib, time\n"
        "from hvdtrain.inputs.loading import start_workers_early\n"
        "start_workers_early(['endless'])\n"
        "while not pathlib.Path('pid').exists(): time.sleep(0.01)\n"
        "os._exit(1)\n"
    )
    subprocess.run(
        [sys.executable, "rank.py"], cwd=tmp_path, timeout=120, env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    )
    server = int((tmp_path / "pid").read_text())
    wait_for(lambda: not runs(server), "the server is still there")


def test_a_program_that_would_train_in_each_worker_ends_with_one_line(tmp_path):
    guarded = (ROOT / "docs/programs/augment.py").read_text()
    guard = 'if __name__ == "__main__":\n    training.main(main)\n'
    assert guarded.endswith(guard)
    (tmp_path / "unguarded.py").write_text(guarded.removesuffix(guard) + "training.main(main)\n")
    done = subprocess.run(
        [sys.executable, "unguarded.py", "--engine", "serial", "--epochs", "1"], capture_output=True, text=True,
        timeout=120, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2, done
    assert done.stderr.startswith("unguarded: error: the process that starts DataLoader workers has ended"), done
    assert 'keep what trains, or uses MPI or other ranks, under `if __name__ == "__main__":`' in done.stderr, done
    assert done.stderr.count("\n") == 1, done


@pytest.mark.slow  # the workers do as where the import of the program ends the server
def test_workers_work_whose_server_cannot_import_hvdtrain(tmp_path):
    """As for a program beside a checkout, started from another directory: the server does not know the rank's sys.path."""
    packages = Path(torch.__file__).parents[1]
    program = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(packages)!r}]\n{PROGRAM.format(top='')}"
    (tmp_path / "elsewhere.py").write_text(program)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "elsewhere.py", "7"], capture_output=True, text=True, timeout=120, cwd=tmp_path,
        env=variables,
    )  # fmt: skip
    assert done.stdout.split() == ["0", "False", "7"], done


def said() -> list:
    return json.loads(bytes.fromhex(fork_server.wanted(["torch"]).removeprefix(fork_server.WANTED)))


def test_arguments_too_long_for_a_command_line_are_left_to_the_workers(monkeypatch):
    assert "sys_argv" in said()[1]
    monkeypatch.setattr(sys, "argv", ["program", "x" * fork_server.LONGEST])
    assert said() == [["torch"], None]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BrokenPipeError(), "a DataLoader worker has ended while it started (what it printed is above)"),
        (EOFError("unexpected EOF"), "has ended while it imported the program"),
        (ConnectionRefusedError(), "has ended while it imported the program"),
        (RuntimeError("A SemLock created in a fork context is"), 'by multiprocessing.get_context("forkserver")'),
        (pickle.PicklingError("<lambda>"), "the Dataset cannot be sent to workers (<lambda>)"),
    ],
)
def test_workers_that_cannot_start_say_why(monkeypatch, error, said):
    class Fails:
        def __iter__(self):
            raise error

    monkeypatch.setattr(loading, "start_workers_early", lambda preload: None)
    monkeypatch.setattr(loading, "loader", lambda *arguments, **options: Fails())
    given = DataLoader(torch.arange(4), num_workers=1)
    with pytest.raises(UserError, match=re.escape(said)):
        dataloaders.iterate(SimpleNamespace(device=torch.device("cpu")), given, 1, iter(()))


def test_shared_memory_that_cannot_be_written_is_one_line(monkeypatch, tmp_path):
    """It was a traceback of forty lines, from a semaphore."""
    monkeypatch.setattr(loading, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(loading, "start_workers_early", lambda preload: None)
    with pytest.raises(UserError, match="none, which DataLoader workers need, cannot be written: make it writable"):
        iter(loading.loader(TensorDataset(torch.zeros(4)), 1, torch.device("cpu"), None))


def test_a_worker_that_imports_the_program_does_not_train(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    monkeypatch.setattr("hvdtrain.engines.choice.refused_in_worker", False)
    with pytest.raises(UserError, match='under `if __name__ == "__main__":`'):
        start_engine("serial")


class Mortal(torch.utils.data.Dataset):
    """Its third item ends the worker that loads it, as the kernel does where memory runs out."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(1)


def test_a_worker_that_is_killed_is_one_line_and_no_bad_input(worker_server):
    batches = iter(loading.loader(Mortal(), 1, torch.device("cpu"), range(4)))
    said = r"a DataLoader worker has ended .*: if the kernel killed it for memory, use fewer"
    with pytest.raises(Failure, match=said) as caught:
        list(batches)
    assert caught.value.exit_code == 1
    assert not caught.value.everywhere


def read(loader, **how):
    """Train on what a loader has."""
    how = dict(epochs=1, batch_size=4, loss=lambda t, x: t.net(x.float().view(-1, 1)).mean()) | how
    return Trained(data=[loader], net=lambda: torch.nn.Linear(1, 1, dtype=torch.float32), **how)


def test_the_workers_of_a_training_that_has_failed_end_with_it(worker_server):
    """The garbage collector found them later, in a notebook, and torch waited ten seconds for each."""
    before = set(multiprocessing.active_children())

    def fails(t, x):
        assert len(set(multiprocessing.active_children()) - before) == 2
        raise KeyError("its own")

    with pytest.raises(KeyError) as caught:
        read(DataLoader(TensorDataset(torch.ones(400, 1)), 4, num_workers=2), loss=fails)
    assert set(multiprocessing.active_children()) <= before
    del caught  # whose traceback holds the iterator


def test_persistent_workers_of_a_loader_that_another_one_follows_end(worker_server):
    """Those of each epoch stayed, until the collector found them and waited ten seconds for each."""
    alive = []

    def data(t):
        return [DataLoader(TensorDataset(torch.ones(16, 3)), 8, num_workers=2, persistent_workers=True)]

    def tail(t, epoch):
        alive.append(len(multiprocessing.active_children()))

    Trained(data=data, epochs=3, changes=True, tail=tail, loss=lambda t, x: t.model(x).square().mean())
    assert alive == [alive[0]] * 3
    assert not [one for one in loading._begun if not one._shutdown]


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        *((killed, Failure, "a DataLoader worker has ended") for killed in (
            EOFError(), ConnectionResetError(104, "Connection reset by peer"), FileNotFoundError(2, "gone"))),
        (EOFError("Caught EOFError in DataLoader worker process 0."), EOFError, "^Caught EOF"),
        (RuntimeError("its own"), RuntimeError, "^its own"),
    ],
)  # fmt: skip
def test_a_worker_that_is_killed_as_it_hands_over_a_batch_is_told_from_an_error_of_the_data_set(error, raised, said):
    def batches():
        yield 1
        raise error

    with pytest.raises(raised, match=said):
        list(loading.while_workers_live(batches()))


class Unreadable(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        try:
            return 1 // 0
        except ZeroDivisionError as error:
            raise ValueError("no image\nat all") from error


def test_other_ranks_are_told_what_a_worker_raised_and_not_its_traceback():
    with pytest.raises(ValueError, match="Original Traceback") as raised:
        list(DataLoader(Unreadable(), num_workers=1))
    assert of_a_program(raised.value) == "ValueError: no image at all (in DataLoader worker process 0)"
    assert of_a_program(KeyError("x")) == "KeyError: 'x'"


def test_flags_go_to_a_worker_with_the_data_set_that_holds_them():
    parser = parser_of_training("test", None)
    parser.add_argument("--half", type=lambda text: int(text) // 2)
    parser.may_change_on_resume("half")
    flags = pickle.loads(pickle.dumps(parser.parse(["--half", "8", "--seed", "3"])))
    assert (flags.half, flags.seed, flags.program) == (4, 3, "test")
    assert "half" in flags.may_change


LARGE_BATCHES = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from hvdtrain import training

def main():
    flags = training.parser("program", None).parse_args()
    with training.start(flags) as run:
        model = torch.nn.Linear(50_000, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in run.epochs(1):
            for step in run.steps(DataLoader(TensorDataset(torch.ones(64, 50_000)), flags.batch_size, num_workers=1)):
                for x, in step.batches():
                    step.backward(model(x).mean())
                step.update()
    return run.exit_code

if __name__ == "__main__":
    training.main(main)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small /dev/shm: needs root")
def test_a_small_dev_shm_is_one_line_with_the_remedy(tmp_path):
    (tmp_path / "program.py").write_text(LARGE_BATCHES)
    small = "mount -t tmpfs -o size=1m tmpfs /dev/shm || exit 99"
    program = f"exec {shlex.quote(sys.executable)} program.py --engine serial --no-progress"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{small}; {program}"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    if "unshare" in done.stderr or done.returncode == 99:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done
    assert "error: /dev/shm is too small for the batches of the DataLoader's workers: make it larger" in done.stderr
    assert "warning: " not in done.stdout  # of another cause: that the rank can read these samples


FACTOR = 1.0


class ByFactor(torch.utils.data.Dataset):
    """Its samples are multiples of what main() has set; or what only main()'s setting lets it read."""

    def __init__(self, fails: bool = False):
        self.fails = fails

    def __len__(self):
        return 80

    def __getitem__(self, index):
        if self.fails and index == 6 and FACTOR == 1.0:
            raise ValueError("truncated")
        return torch.tensor([index * (1.0 if self.fails else FACTOR)])


class OfDtype(ByFactor):
    def __getitem__(self, index):
        return torch.full((1,), float(index))


def sets_factor(worker):
    globals()["FACTOR"] = 3.0


@pytest.mark.parametrize(
    ("data", "line", "init", "remedy"),
    [
        (ByFactor(), r"part 1 of sample \d+ is \d+ in a DataLoader worker, and \d+ in the rank", None, OF_MAIN),
        (ByFactor(), r"part 1 of sample \d+ is \d+ in a DataLoader worker, and \d+ in the rank", sets_factor, OF_INIT),
        (ByFactor(fails=True), "the rank can read the samples that a DataLoader worker could not", None, OF_MAIN),
        (OfDtype(), r"part 1 of sample \d is \[1\] float32 in a DataLoader worker, and \[1\] float64 in the rank", None,
            OF_MAIN),
        (TensorDataset(torch.ones(8, 1)), None, None, None),
    ],
)  # fmt: skip
def test_workers_that_do_not_see_what_main_has_set_are_told_in_one_line(
    data, line, init, remedy, worker_server, monkeypatch, capfd
):
    lines.warn_once.cache_clear()
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    if isinstance(data, OfDtype):
        torch.set_default_dtype(torch.float64)
    try:
        with contextlib.suppress(ValueError):
            read(DataLoader(data, 4, num_workers=1, worker_init_fn=init))
    finally:
        torch.set_default_dtype(torch.float32)
    warnings = [text for text in capfd.readouterr().err.splitlines() if text.startswith("warning: ")]
    assert len(warnings) == (line is not None), warnings
    assert line is None or re.fullmatch(f"warning: {line}: {re.escape(remedy)}", warnings[0])


class Curriculum(ByFactor):
    level = 0

    def __getitem__(self, index):
        return torch.tensor([float(index + self.level)])


@pytest.mark.parametrize("persistent", [True, False])
def test_what_persistent_workers_do_not_see_of_a_data_set_is_told_once(persistent, worker_server, capfd):
    """After a resume, they did: other samples, exit code 0."""
    lines.warn_once.cache_clear()
    data = Curriculum()
    read(DataLoader(Subset(data, range(80)), 40, num_workers=1, persistent_workers=persistent), epochs=3, batch_size=40,
         head=lambda t, epoch: setattr(data, "level", epoch // 2))  # fmt: skip
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    line = "warning: level of the data set is 1 now, and 0 in its workers, until a resume: leave persistent_workers out"
    assert told == [line] * persistent


class Ends(torch.utils.data.Dataset):
    """Its third sample raises what ends a generator, or a worker, without a word."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 2:
            raise self.kind
        return torch.ones(1)


@pytest.mark.parametrize(
    ("kind", "workers"), [(StopIteration, 0), (StopIteration, 1), (KeyboardInterrupt, 1), (SystemExit, 1)]
)
def test_a_sample_that_ends_its_worker_is_named(kind, workers, worker_server):
    said = rf"of the samples 0, 1, 2, 3, raised {kind.__name__} \(\S+test_input_workers.py:\d+\)"
    with pytest.raises(UserError, match=said):
        read(DataLoader(Ends(kind), 4, num_workers=workers))


# ---- how many workers /dev/shm has room for

MIB, BATCH = 2**20, 2 * 256 * 3 * 224**2  # of training and of an evaluation


@pytest.fixture
def left(monkeypatch):
    def leave(free: int | None):
        def usage(path):
            if free is None:
                raise FileNotFoundError(path)
            return SimpleNamespace(free=free)

        monkeypatch.setattr(shutil, "disk_usage", usage)

    return leave


def test_what_a_node_with_sixteen_cores_and_one_with_eight_ranks_need():
    assert needed(15, BATCH, 1) / 1e9 == pytest.approx(2.4, abs=0.05)
    assert needed(3, BATCH // 2, 8) / 1e9 == pytest.approx(2.2, abs=0.05)
    assert needed(0, BATCH, 8) == 0  # the rank itself loads


@pytest.mark.parametrize(
    ("asked", "free", "expected"),
    [
        (None, 4096 * MIB, (15, None)),
        (None, 1024 * MIB,
            (6, "6 DataLoader workers instead of 15, which need 2,278 MiB: /dev/shm has 1,024 MiB left: ")),
        (4, 1024 * MIB, (4, None)),
        (0, 1 * MIB, (0, None)),
        (None, None, (15, None)),  # none here
    ],
)  # fmt: skip
def test_automatic_workers_are_as_many_as_fit(asked, free, expected, left):
    left(free)
    workers, line = workers_that_fit(asked, 15, BATCH, 1, Path("/dev/shm"))
    assert workers == expected[0]
    assert line is None if expected[1] is None else line.startswith(expected[1])
    assert free is None or needed(workers, BATCH, 1) <= free


@pytest.mark.parametrize(
    ("asked", "ranks", "said"),
    [
        (8, 1, "the batches of 8 DataLoader workers need 1,250 MiB: make it larger .*, or take --workers 2"),
        (2, 8, "the batches of 2 DataLoader workers of each of 8 ranks need 2,940 MiB: .*, or take --workers 0"),
        (None, 8, "the batches of 1 DataLoader worker of each of 8 ranks need 1,764 MiB: .*, or take --workers 0"),
    ],
)
def test_more_than_fit_are_refused_in_one_line(asked, ranks, said, left):
    left(512 * MIB)
    with pytest.raises(UserError, match=f"/dev/shm has 512 MiB left, and {said}"):
        workers_that_fit(asked, 15, BATCH, ranks)


# ---- semaphores and sockets of a rank that is killed

RANK = """
import sys, time, torch
from hvdtrain.inputs.loading import loader, start_workers_early
if __name__ == "__main__":
    start_workers_early([])
    batches = iter(loader([1] * 10**6, int(sys.argv[1]), torch.device("cpu"), range(10**6)))
    next(batches)
    print("loads", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def rank(tmp_path):
    """Start a process with DataLoader workers, in a TMPDIR of its own."""
    (tmp_path / "rank.py").write_text(RANK)
    short = tempfile.mkdtemp(prefix="h", dir="/tmp")  # a socket's path has 107 characters at most
    (tmp_path / "tmp").symlink_to(short)
    started = []

    def start(workers: int = 2, directory: str = short) -> subprocess.Popen:
        here = Path(__file__).resolve().parents[3]
        environment = {**os.environ, "TMPDIR": directory, "PYTHONPATH": str(here)}
        command = [sys.executable, str(tmp_path / "rank.py"), str(workers)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout.readline() == "loads\n"
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    shutil.rmtree(short, ignore_errors=True)


def remains(tmp_path: Path, pid: int) -> list[str]:
    semaphores = [path.name for path in Path("/dev/shm").glob(f"sem.hvdtrain-*-{pid}-*")]
    return semaphores + [path.name for path in (tmp_path / "tmp").glob(f"hvdtrain-*-{pid}-*")]


@pytest.mark.slow
def test_what_a_killed_rank_and_its_workers_leave_the_next_start_removes(rank, tmp_path, monkeypatch):
    process, other = rank(), rank()
    os.killpg(process.pid, signal.SIGSTOP)  # so that no worker sees the rank's end before its own
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert remains(tmp_path, process.pid)
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    leftovers.sweep_leftovers()
    assert remains(tmp_path, process.pid) == []
    assert len(remains(tmp_path, other.pid)) > 5  # it lives
    other.kill()  # its workers see that, and leave nothing
    other.wait()
    wait_for(lambda: not remains(tmp_path, other.pid), lambda: remains(tmp_path, other.pid))


def test_only_what_has_ended_and_is_ones_own_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "SEMAPHORES", tmp_path / "shm")
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    ended, lives = f"hvdtrain-{leftovers.machine()}-4194305-1", leftovers.tag(os.getpid())
    names = ["x", "hvdtrain-x", "hvdtrain-00000000-1-2-x", f"{lives}-x", f"{ended}-x", f"{ended}-y"]
    for directory, prefix in (("shm", "sem."), ("tmp", "")):
        (tmp_path / directory).mkdir()
        for name in names:
            (tmp_path / directory / f"{prefix}{name}").touch()
    if os.getuid() == 0:
        for path in ("shm/sem.", "tmp/"):
            os.chown(f"{tmp_path}/{path}{ended}-y", 12345, 12345)
    leftovers.sweep_leftovers()
    kept = names[:4] + names[5:] * (os.getuid() == 0)
    assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == sorted(kept)
    assert sorted(path.name for path in (tmp_path / "shm").iterdir()) == sorted(f"sem.{name}" for name in kept)


def test_a_linked_directory_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / f"hvdtrain-{leftovers.machine()}-4194305-1-x").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    leftovers.sweep_leftovers()
    assert (tmp_path / "elsewhere" / "kept").exists()


def test_workers_load_where_the_temporary_directory_is_too_long_for_the_names_of_sockets(rank, tmp_path):
    long = Path(tempfile.mkdtemp(prefix="h", dir="/tmp"), "x" * 60)
    long.mkdir()
    process = rank(workers=1, directory=str(long))
    assert list(Path("/tmp").glob(f"hvdtrain-*-{process.pid}-*"))
    shutil.rmtree(long.parent)
