"""What the tests' own tools notice: `make mutants`, the golden hashes, chaos; and that no test sees a GPU."""

import ast
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hvdtrain import training
from hvdtrain.checkpoint import contents
from hvdtrain.engines.portable import flattened
from tests import conftest
from tests.bench.calls import Call, calls_of_step
from tests.bench.simulated import RankZero, measure, simulated
from tests.chaos import attempts, test_environments
from tests.chaos.attempts import Attempt
from tests.e2e.cluster import SET_ENVIRONMENT
from tests.e2e.launchers import ROOT, environment, launch
from tests.golden import __main__ as golden
from tests.golden.table import RUNS
from tests.hidden_gpus import HIDDEN, KEPT
from tests.mutants import broken, mutations
from tests.torch_names import TABLE, is_there, names_in, names_used

# ---- make mutants


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", ["x = ((a) <= (b))"]),
        ("x = a is None", ["x = ((a) is not (None))"]),
        ("x = a and b", ["x = ((a) or (b))"]),
        ("é = not a", ["é = bool((a))"]),
        ("x = a - b", ["x = ((a) + (b))"]),
        ("f(1)", ["None"]),
        ("x = f'{a}' + 'b'", []),
        ("x = f(1)", []),
    ],
)
def test_each_kind(source, expected):
    assert [broken(source, each) for each in mutations(source)] == expected


def test_all_of_a_file_can_be_run():
    source = (ROOT / "hvdtrain" / "loop" / "step.py").read_text()
    found = list(mutations(source))
    assert len(found) > 50
    for mutation in found:
        ast.parse(broken(source, mutation))


# ---- the golden hashes: a changed value, and nothing that differs between two equal runs


def record(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return golden.digest(golden.metrics(path))


def test_a_loss_counts_and_a_time_does_not(tmp_path):
    train = {"event": "train", "step": 1, "epoch": 1, "loss": 0.5, "time": 1.0, "loading_seconds": 0.1}
    hashes = [
        record(tmp_path / "metrics.jsonl", line)
        for line in (train, train | {"time": 2.0, "loading_seconds": 0.2}, train | {"loss": 0.25})
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_of_a_step_that_was_taken_twice_the_last_counts(tmp_path):
    first, again = ({"event": "train", "step": 1, "epoch": 1, "loss": loss} for loss in (0.5, 0.25))
    killed = record(tmp_path / "metrics.jsonl", first, {"event": "resume", "step": 0}, again)
    assert killed == record(tmp_path / "metrics.jsonl", again)


def saved(out, step, **tensors):
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    named = {name.replace("__", "."): torch.as_tensor(value) for name, value in tensors.items()}
    save_file(named, out / "checkpoints" / f"step-{step:08d}.safetensors")
    return golden.checkpoint(out)["checkpoint"]


@pytest.mark.parametrize("name", ["model__weight", "optimizer__0", "registered__slow__3", "buffers"])
def test_each_bit_of_the_newest_checkpoint_counts(tmp_path, name):
    hashes = [saved(tmp_path, step, **{name: [value, 2.0]}) for step, value in enumerate((1.0, 1.0, 1.0 + 2**-23))]
    assert hashes[0] == hashes[1] != hashes[2]


def test_how_a_checkpoint_calls_and_joins_what_ranks_have_of_their_own_does_not_count(tmp_path):
    first = saved(tmp_path, 1, optimizer__0=[3.0], buffers=[[1.0, 2.0], [5.0, 6.0]])
    packed = [flattened({"mean": torch.tensor(one)}) for one in ([1.0, 2.0], [5.0, 6.0])]
    ranks = [{"buffers": (value, len(row))} for value, row in packed]
    own = {"own": contents.json_tensor(ranks), "own__bytes": torch.cat([row for _, row in packed])}
    assert first == saved(tmp_path, 2, optimizer__momentum=[3.0], **own)
    assert first != saved(tmp_path, 4, optimizer__momentum=[3.0], **own | {"own__bytes": own["own__bytes"] + 1})
    assert first != saved(tmp_path, 3, optimizer__0=[[3.0]], buffers=[[1.0, 2.0], [5.0, 6.0]])


def test_a_changed_a_missing_and_a_new_hash_are_named(capsys):
    expected = {"serial": {"parameters": "aa", "gone": "bb"}}
    assert golden.compare(expected, {"serial": {"parameters": "aa", "gone": "bb"}}) == 0
    assert golden.compare(expected, {"serial": {"parameters": "ab", "new": "cc"}}) == 1
    assert capsys.readouterr().out.count("CHANGED serial") == 3


def test_the_file_has_every_run_and_those_that_are_killed_end_as_those_that_are_not():
    pairs = {"killed": "gloo-2", "killed-ddp": "plain-ddp", "killed-schedule": "schedule", "killed-stream": "stream"}
    for entry in json.loads(golden.FILE.read_text()):
        assert list(entry["hashes"]) == list(RUNS)
        assert all(entry["hashes"][killed] == entry["hashes"][whole] for killed, whole in pairs.items())


def test_virtual_ranks_have_the_same_hashes_on_any_number_of_processes():
    """One process, two of MPI and three of torchrun; and one process, and eight that are killed and go on as three."""
    for entry in json.loads(golden.FILE.read_text()):
        rows = {name: hashes for name, hashes in entry["hashes"].items() if name.startswith("virtual")}
        if rows:  # not of a processor on which they were not run
            assert rows["virtual"] == rows["virtual-mpi-2"] == rows["virtual-ddp-3"]
            assert rows["virtual-schedule"] == rows["virtual-killed"]


# ---- chaos: what counts as held


def problems(tmp_path, command: str, expected: str = "", **options) -> list[str]:
    attempt = Attempt("it", "a kind", "something", command, **{"limit": 20, **options})
    return attempts.problems(attempt, tmp_path / "it", expected)


@pytest.mark.parametrize(
    ("command", "expected", "problem"),
    [
        ("true", {}, ""),
        ("false", {}, "exit code 1 instead of 0"),
        ("true", dict(says="wrong"), "does not say 'wrong'"),
        ("echo 'Traceback (most recent call last)'", {}, "says 'Traceback"),
        ("exit 2", dict(code=2), "0 lines of error instead of one"),
        ("echo error: a; echo error: b; exit 2", dict(code=2), "2 lines of error instead of one"),
        ("touch $TMPDIR/left", {}, "left in TMPDIR: left"),
        ("sleep 60", dict(limit=0.2), "not over after 0 s"),
        ("true", dict(check=lambda here, said: "this"), "this"),
        ("true", dict(expected="another"), "other bits: no summary.json"),
    ],
)
def test_what_does_not_hold_is_seen(command, expected, problem, tmp_path):
    found = problems(tmp_path, command, **expected)
    assert len(found) == bool(problem)
    assert "".join(found).startswith(problem)


def test_a_process_that_is_left_is_seen_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "GRACE_SECONDS", 0.2)
    assert problems(tmp_path, "sleep 300 > /dev/null 2>&1 &") == ["1 processes left"]


def test_every_attempt_is_sound():
    assert len({attempt.name for attempt in test_environments.ATTEMPTS}) == len(test_environments.ATTEMPTS) > 100
    for attempt in test_environments.ATTEMPTS:
        assert attempt.limit <= 300, attempt.name
        assert set(attempt.needs) <= {"root", "gcc", "setpriv", "unshare", "ip"}, attempt.name


# ---- on a node with GPUs, every test still trains on processors

SHOW = "import os; print([os.environ.get(name) for name in {!r}])"
NONE = "['', '', '']"


def test_no_process_of_a_test_sees_a_gpu():
    show = SHOW.format([*HIDDEN])
    assert {name: os.environ.get(name) for name in HIDDEN} == HIDDEN
    assert subprocess.check_output([sys.executable, "-c", show], text=True).strip() == NONE
    assert launch(f'{sys.executable} -c "{show}"').stdout.strip() == NONE


@pytest.mark.parametrize("name", HIDDEN)
def test_a_launch_hides_what_this_process_sees(name, monkeypatch):
    """Those that run without pytest, as make chaos does, start with `environment`, too."""
    monkeypatch.setenv(name, "0,1")
    assert environment()[name] == ""
    assert f" {name}=" in SET_ENVIRONMENT  # a login on another host begins with an environment of its own


def test_each_commit_draws_an_order_of_files(monkeypatch):
    """CI ends before all slow tests had their turn: two thirds of them never ran."""
    orders = []
    for commit in ("", "a", "a", "b"):
        monkeypatch.setenv("HVDTRAIN_TEST_ORDER", commit)
        items = [SimpleNamespace(nodeid=f"tests/{file}.py::{number}") for file in range(9) for number in range(2)]
        conftest.pytest_collection_modifyitems(items)
        orders.append([item.nodeid for item in items])
        assert "HVDTRAIN_TEST_ORDER" not in os.environ  # a suite that a test starts keeps its own: three ranks hung
    assert orders[0] == sorted(orders[0])  # no commit: as they were collected
    assert orders[1] == orders[2]
    assert len({tuple(order) for order in orders}) == 3
    assert all([one[-1] for one in order] == ["0", "1"] * 9 for order in orders)
    assert all(
        len({one[:-1] for one in order[place : place + 2]}) == 1 for order in orders for place in range(0, 18, 2)
    )


def test_pytest_hides_them_before_the_tests_are_imported(tmp_path):
    """And the tests for GPUs are given those that were there, however pytest was started."""
    show = "import os, sys, subprocess, tests.conftest, tests.hidden_gpus as gpus; "
    show += "print(os.environ['CUDA_VISIBLE_DEVICES'] + '.', gpus.GIVEN, flush=True); "
    worker = (
        "subprocess.run([sys.executable, '-c', sys.argv[1]])"  # as pytest-xdist starts one, with the same environment
    )
    bare = {name: value for name, value in os.environ.items() if name not in (*HIDDEN, KEPT)}
    for given in ({"CUDA_VISIBLE_DEVICES": "3"}, {}):
        shown = subprocess.check_output(
            [sys.executable, "-c", show + worker, show], text=True, cwd=ROOT, env=bare | given
        )
        assert shown.splitlines() == [f". {given}"] * 2


# ---- the route of a quiet step; what a training imports; what rank 0 of many receives

MOST_CALLS, MOST_FILES = 45, 10
UNUSED = {"torch._dynamo", "torch.utils.tensorboard", "tensorboard", "hvdtrain.output.tensorboard"}
UNUSED |= {"mlflow", "hvdtrain.output.tracking"}
PROGRAM = """
import json, sys
from tests.bench.calls import quiet_step
print(json.dumps([quiet_step(), list(sys.modules)]))
import tests.chaos.attacked
sys.argv = ["split", "--help"]
import tests.bench.split
"""


@pytest.fixture(scope="module")
def found() -> tuple[list[Call], set[str]]:
    """What a training of hvdtrain.mnist has called in a quiet step, and all that it has imported. Attacks and the split of
    a step replace functions of ours by name, and no other quick test starts both: their imports fail if one is not there."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    record, _, usage = done.stdout.partition("usage: ")
    assert usage
    calls, modules = json.loads(record.splitlines()[-1])
    return [Call(*call) for call in calls], set(modules)


def test_a_quiet_step_of_mnist_keeps_to_the_budget(found):
    calls, _ = found
    route = "\n".join(f"{call.file}: {call.function}" for call in calls)
    assert calls[0] == Call("loop/run.py", "Run._steps")
    assert Call("loop/step.py", "Step.backward") in calls
    assert len(calls) <= MOST_CALLS, route
    assert len({call.file for call in calls}) <= MOST_FILES, route


def test_training_does_not_import_what_it_does_not_use(found):
    """The compiler's import is 1.6 s on every rank: more than importing torch."""
    assert "hvdtrain.mnist" in found[1]
    assert not UNUSED & found[1]


def test_calls_of_other_packages_and_other_steps_are_not_counted():
    from hvdtrain.inputs.sharding import passes_per_step

    def steps() -> None:
        for _ in range(3):
            json.dumps(passes_per_step(64, 2, 8))

    assert calls_of_step(steps, 0) == [Call("inputs/sharding.py", "passes_per_step")] * 3
    assert calls_of_step(steps, 1) == []
    assert sys.getprofile() is None


# ---- what rank 0 of many receives


def started(ranks: int) -> RankZero:
    """Return the engine, which has counted, after `training.start` and `run.prepare`."""
    net = nn.Linear(10, 10)
    flags = training.parser("gathers", None).parse(["--engine", "serial", "--no-progress"])
    with simulated(ranks), training.start(flags) as run:
        run.prepare(net, torch.optim.Adam(net.parameters()))
    return run.engine


def test_start_up_takes_a_fixed_number_of_collectives_and_bytes_in_proportion_to_the_ranks():
    few, many = started(9), started(64)
    assert few.calls == many.calls <= 33
    assert (len(few.others), len(many.others)) == (8, 63)  # the watchdog's
    for name, size in few.received.items():
        assert name == "barrier" or many.received[name] / size < 1.3 * 63 / 8, name


def test_what_a_save_of_more_than_64_ranks_receives_does_not_grow_with_them(tmp_path):
    sizes = []
    for ranks in (65, 130):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
        sizes.append(measure(ranks, net, tmp_path / str(ranks))["saving step"][1])
    assert sizes[0] == sizes[1] < 2000


# ---- the names of torch: what the oldest PyTorch lacks ended each program at its first import


def test_the_oldest_torch_has_each_name_that_is_used():
    known, used = set(TABLE.read_text().split()), names_used()
    assert sorted(used - known) == [], "make them optional; or, with torch 2.3: python -m tests.torch_names"
    assert sorted(known - used) == [], "used no longer: take them out of tests/torch_names.txt"


def test_names_are_found_however_they_are_imported():
    source = (
        "import torch\nimport torch.fx as f\nfrom torch.utils import data as d, _pytree\ntorch.cuda.Event()\nd.Subset"
    )
    expected = {"torch", "torch.fx", "torch.cuda", "torch.cuda.Event", "torch.utils._pytree"}
    assert names_in(source) == expected | {"torch.utils.data", "torch.utils.data.Subset"}
    assert [is_there(name) for name in ("torch.utils.data.Subset", "torch.utils.data.Subset.none")] == [True, False]
