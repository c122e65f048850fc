"""hvdtrain.tuned under real launchers: a plain script, watched, repeatable, and otherwise as without it."""

import os
import re

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, launch

TUNED = f"{PYTHON} -m hvdtrain.tuned"
PLAIN = "tests/foreign/mnist.py --samples 600 --batch-size 10"

MODEL = """
import sys, time
import torch, horovod.torch as hvd
hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
SCRIPTS = {
    "stuck": """
def sleepy():
    time.sleep(1000)
for number in range(20):
    step()
    if number == 9 and hvd.rank() == 1:
        sleepy()
""",
    # Rank 1 has no batch and no collective for fourteen times the limit: computing, then writing.
    "works alone": """
import hvdtrain.guards.judge
hvdtrain.guards.judge.LEAST_SECONDS = 1.0
from pathlib import Path
for number in range(20):
    step()
    if number == 9 and hvd.rank() == 1:
        until = time.monotonic() + 7
        while time.monotonic() < until:
            model(torch.ones(2000, 4))
        until = time.monotonic() + 7
        with open("/dev/null", "wb", buffering=0) as file:
            while time.monotonic() < until:
                file.write(bytes(100))
                time.sleep(0.05)
    hvd.allreduce(torch.ones(1))
print("done", flush=True)
""",
    "joins": """
for number in range(9 + 9 * hvd.rank()):
    step()
print("last", hvd.join(), flush=True)
""",
    "raises": """
step()
if hvd.rank() == 1:
    raise KeyError("its own")
step()
""",
    "sparse": """
table = torch.nn.Embedding(5, 3, sparse=True)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), named_parameters=table.named_parameters())
table(torch.tensor([hvd.rank()])).sum().backward()
optimizer.step()
print("done", flush=True)
""",
    # The second call does nothing. A watch of its own would leave the first one to see no progress, and to end the job.
    "asks twice": "import threading; hvd.init(); step(); print(*(each.name for each in threading.enumerate()), flush=True)",
    "starts twice": "step(); hvd.shutdown(); hvd.init(); print(hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), flush=True)",
}


def run(name, tmp_path, launcher="mpirun", ranks=2, flags="", **options):
    script = tmp_path / "script.py"
    script.write_text(MODEL + SCRIPTS[name])
    start = LAUNCHERS[launcher].format(ranks=ranks)
    return launch(f"{start} {TUNED} {flags} {script}", **options)


def hash_of(done) -> str:
    assert done.code == 0, done
    return re.search(r"parameters [0-9a-f]{64}", done.stdout)[0]


# Trap: torch imports its compiler where a plain script makes its optimizer, which takes longer than its training.
SLOWLY = [pytest.param(launcher, True, marks=pytest.mark.slow) for launcher in ("horovodrun", "mpirun", "gloo")]


@pytest.mark.parametrize(("launcher", "compared"), [("starter", False), *SLOWLY])
def test_a_plain_script_ends_as_without_us(launcher, compared):
    start = LAUNCHERS[launcher].format(ranks=2)
    done = launch(f"{start} {TUNED} {PLAIN}")
    assert hash_of(done)
    if (
        compared
    ):  # waiting ranks of the plain one give their core away, or it takes ten times as long beside other tests
        plain = launch(f"{start} {PYTHON} {PLAIN}", OMP_NUM_THREADS="1", OMPI_MCA_mpi_yield_when_idle="1")
        assert hash_of(done) == hash_of(plain)  # a sum of two has one order
    assert f"on this host 2 x {max(1, len(os.sched_getaffinity(0)) // 2)} thread" in done.stderr, done
    assert len([line for line in done.stderr.splitlines() if "hvdtrain" in line]) == 1, done


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "gloo"])
def test_repeatable_gives_the_same_bits_on_three_ranks(launcher):
    start = LAUNCHERS[launcher].format(ranks=3)
    hashes = {hash_of(launch(f"{start} {TUNED} --repeatable {PLAIN}")) for _ in range(2)}
    assert len(hashes) == 1, hashes


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "gloo"])
def test_the_rank_that_does_not_come_is_named_with_its_place(launcher, tmp_path):
    done = run("stuck", tmp_path, launcher, flags="--watch 3", timeout=180)
    assert done.code == 1, done
    blamed = [line for line in done.stderr.splitlines() if "hvdtrain: error: " in line]
    assert len(blamed) == 1, done
    assert "hvdtrain: error: rank 1 on " in blamed[0], done
    assert "keeps the others waiting, at script.py:13, sleepy; no step for " in blamed[0]
    assert "time.sleep(1000)" in done.stderr
    assert "hvdtrain/" not in done.stderr  # none of our frames


@pytest.mark.slow
def test_a_rank_at_work_alone_is_not_ended(tmp_path):
    done = run("works alone", tmp_path, "gloo", flags="--watch auto")
    assert (done.code, done.stdout.count("done")) == (0, 2), done
    assert "warning: rank 1 on" in done.stderr, done
    assert ", at script.py:" in done.stderr, done


@pytest.mark.slow
def test_a_watched_script_ends_as_without_us(tmp_path):
    done = run("joins", tmp_path, "gloo", flags="--watch 30")
    assert done.code == 0, done
    assert done.stdout.count("last 1") == 2
    done = run("asks twice", tmp_path, "gloo", flags="--watch 30")
    assert (done.code, done.stdout.count("watch")) == (0, 2), done
    done = run("starts twice", tmp_path, "gloo", flags="--watch 30")
    assert (done.code, done.stdout.count("2.0")) == (0, 2), done


@pytest.mark.slow
def test_its_own_error_is_its_own_traceback(tmp_path):
    done = run("raises", tmp_path, flags="--watch 30")
    assert done.code != 0
    assert "KeyError: 'its own'" in done.stderr, done
    assert 'script.py", line 14, in <module>' in done.stderr
    assert "hvdtrain/" not in done.stderr  # nor in that of the rank which then finds Horovod shut down


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [("joins", "calls hvd.join"), ("sparse", "no buckets for sparse gradients")])
def test_repeatable_is_refused_where_it_cannot_be(name, said, tmp_path):
    done = run(name, tmp_path, flags="--repeatable")
    assert done.code == 2, done
    lines = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain.tuned: error: ")]
    assert len(lines) == 1, done
    assert said in lines[0]
    assert "Traceback" not in done.stderr
    assert run(name, tmp_path).code == 0  # without it, both are allowed


@pytest.mark.slow
def test_ranks_that_do_not_find_each_other_are_refused_in_one_line(tmp_path):
    (tmp_path / "script.py").write_text(MODEL)
    done = launch(f"{TUNED} {tmp_path}/script.py", PMI_RANK="0", PMI_SIZE="2")
    assert done.code == 2, done
    (line,) = [line for line in done.stderr.splitlines() if "hvdtrain.tuned: error: " in line]
    assert "mpirun (MPICH or Intel MPI) announced 2 ranks, but horovod sees 1: " in line
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/run.md", "containers/README.md"])
def test_the_line_of_a_page_runs_a_script_that_knows_nothing_of_us(page, tmp_path):
    """On two ranks, and without the image around it."""
    ending = "step()\nif hvd.rank() == 0:\n    sys.stdout.write(f'ranks:{hvd.size()}\\n')\n"
    (tmp_path / "train.py").write_text(MODEL + ending)
    form = r"((?:horovodrun|mpirun) -np \d python -m hvdtrain\.tuned [\w/]*train\.py)`"
    (line,) = re.findall(form, (ROOT / page).read_text())
    words = line.replace("-np 8", "-np 2").replace("/scripts/", "")
    done = launch(re.sub("^mpirun", "mpirun --oversubscribe --allow-run-as-root", words), cwd=tmp_path)
    assert (done.code, done.stdout.count("ranks:2")) == (0, 1), done
