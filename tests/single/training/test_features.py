"""The core works without each of its features, and a feature is one file and its lines in loop/start.py."""

import ast
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain import training
from hvdtrain.engines import errors
from hvdtrain.features import energy, memory
from hvdtrain.loop.feature import Feature
from hvdtrain.output import rank_times
from tests.e2e import launchers
from tests.single.training.small import X, Y, fit, flags_for

ROOT = Path(__file__).resolve().parents[3]
FEATURES = sorted(path.stem for path in (ROOT / "hvdtrain/features").glob("[a-z]*.py"))
START = "hvdtrain/loop/start.py"
PROGRAM = "tests/golden/program.py"
# Imports torch once, and forks: each child trains without another feature, with a start.py that does not use it.
RUNS = f"""
import importlib.util, os, runpy, sys, torch._dynamo
class Changed:
    def find_spec(self, name, path=None, target=None):
        if name == "hvdtrain.loop.start":
            return importlib.util.spec_from_file_location(name, directory + "/start.py")
sys.path.insert(0, {str(ROOT)!r})
sys.meta_path.insert(0, Changed())
for words in sys.argv[1:]:
    feature, directory = words.split("=", 1)
    if (child := os.fork()) == 0:
        if feature:
            sys.modules["hvdtrain.features." + feature] = None
        words = "--epochs 1 --engine serial --threads 1 --no-progress --log-steps 1 --output-dir"
        sys.argv = ["program.py", *words.split(), directory + "/out"]
        try:
            runpy.run_path({str(ROOT / PROGRAM)!r}, run_name="__main__")
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(0)  # at once: the end of the interpreter takes ten times as long as the training
    os.waitpid(child, 0)
"""


class Without(ast.NodeTransformer):
    """Removes the lines that import a feature, and those that use what they import."""

    def __init__(self, feature: str):
        self.module, self.names = f"hvdtrain.features.{feature}", set[str]()
        self.removed = 0

    def visit(self, node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.ImportFrom):
            before = self.module.rpartition(".")
            mine = [one for one in node.names if node.module == self.module or (node.module, one.name) == before[::2]]
            self.names |= {one.asname or one.name for one in mine}
            return self._remove() if mine else node
        if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Return):
            used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            return self._remove() if used & self.names else node
        self.generic_visit(node)
        if isinstance(node, ast.If) and not node.body:
            node.body = node.orelse or [ast.Pass()]
            node.test, node.orelse = ast.Constant(True), []
        elif isinstance(node, ast.If | ast.FunctionDef) and not node.body:
            node.body = [ast.Pass()]
        return node

    def _remove(self) -> None:
        self.removed += 1


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, object]]:
    """Summaries of one training by the feature that was removed; "": none."""
    places = {name: tmp_path_factory.mktemp(name or "whole") for name in ["", *FEATURES]}
    for name, place in places.items():
        without = Without(name)
        (place / "start.py").write_text(ast.unparse(without.visit(ast.parse((ROOT / START).read_text()))))
        assert without.removed or name in ("", "predictions")  # which evaluate_only imports
    words = [f"{name}={place}" for name, place in places.items()]
    done = subprocess.run([sys.executable, "-c", RUNS, *words], capture_output=True, text=True, timeout=600)
    summaries = {name: place / "out/summary.json" for name, place in places.items()}
    assert all(path.exists() for path in summaries.values()), done.stdout[-2000:] + done.stderr[-2000:]
    return {name: json.loads(path.read_text()) for name, path in summaries.items()}


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_a_training_that_does_not_use_a_feature_works_without_its_file(feature, results):
    names = ("parameters_sha256", "error", "steps", "samples", "best")
    assert {name: results[feature][name] for name in names} == {name: results[""][name] for name in names}


def test_no_file_of_the_core_imports_a_feature():
    core = [path for path in (ROOT / "hvdtrain/loop").glob("*.py") if path.name != "start.py"]
    assert not [path.name for path in core if "hvdtrain.features" in path.read_text()]


def trained(out: Path, *argv: str) -> str:
    """Train the regression, ten steps of which those of even numbers are logged. Return the hash of its weights."""
    with training.start(flags_for("--log-steps", "2", "--output-dir", str(out), *argv)) as run:
        net = nn.Linear(3, 5, bias=False)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        fit(run, [X, Y], lambda step, x, y: (model(x).mean(1, keepdim=True) - y).square().mean())
    return launchers.summary(out)["parameters_sha256"]


def test_the_operations_of_a_step_are_counted_and_change_no_bit(tmp_path, capsys):
    assert trained(tmp_path / "without") == trained(tmp_path / "with", "--mfu")
    events = launchers.events(tmp_path / "with", "utilization")
    assert [event["step"] for event in events] == [4, 5, 6, 8, 10]  # of ten steps; the second was counted
    assert all(event["flops_per_second"] > 0 and 0 < event["peak_share"] < 1 for event in events)
    assert "of a matrix product's" in capsys.readouterr().out


def test_the_peak_memory_of_each_part_is_recorded_on_a_cpu(tmp_path, capsys):
    assert trained(tmp_path / "without") == trained(tmp_path / "with", "--memory")
    events = launchers.events(tmp_path / "with", "memory")
    assert [event["step"] for event in events] == [1, 2, 4, 5, 6, 8, 10]
    assert all(0 < event["gradients_bytes"] <= event["update_bytes"] for event in events)  # of the process, so far
    assert [event["step"] for event in events if "between_epochs_bytes" in event] == [1, 6]
    assert "reserved_bytes" not in events[0]
    assert "peak memory of a process, so far: between epochs " in capsys.readouterr().out


def with_feature(monkeypatch, make) -> None:
    """Add a feature to those of the next training."""
    start = sys.modules["hvdtrain.loop.start"]  # training.start is the function
    usual = start.features_of
    monkeypatch.setattr(start, "features_of", lambda engine, *more: [*usual(engine, *more), make(engine)])


def test_the_peak_memory_of_each_part_is_read_and_set_back_on_a_gpu(tmp_path, monkeypatch):
    """A stand-in for torch.cuda's statistics: no GPU."""
    peak, asked = [7e9], []  # 7 GB: what was allocated before the first step
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(peak[0]))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 8_000_000_000)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: (asked.append(peak[0]), peak.clear(), peak.append(1e9))
    )
    monkeypatch.setattr(rank_times, "_set_back", {})

    class Allocates(Feature):
        def prepare(self, run):
            optimizer = run.shared().prepared.optimizers[0]
            optimizer.register_step_pre_hook(lambda *_: peak.__setitem__(0, 5e9))  # called after Memory's
            self._logged = asked

        def before_step(self, step):  # called after Memory's
            peak[0] = 3e9
            self.reads = len(asked)

        def after_step(self, step):
            assert step.logged or len(asked) == self.reads  # nothing is read in a quiet step
            peak[0] = 2e9  # by an evaluation

    with_feature(monkeypatch, lambda engine: memory.Memory(engine, gpu))
    with_feature(monkeypatch, lambda engine: Allocates())
    trained(tmp_path / "out")
    first, second, third = launchers.events(tmp_path / "out", "memory")[:3]
    parts = dict(between_epochs_bytes=7e9, gradients_bytes=3e9, update_bytes=5e9, reserved_bytes=8e9)
    assert {name: first[name] for name in parts} == parts
    assert "between_epochs_bytes" not in second
    assert third["unlogged_steps_bytes"] == 2e9
    assert rank_times.peak_memory(gpu)[1] == 7e9  # the record's peak of the process is not set back


class Nvml(types.ModuleType):
    """A stand-in for pynvml: a GPU that uses half a joule between two readings."""

    class NVMLError(Exception):
        """Of NVML."""

    def __init__(self):
        super().__init__("pynvml")
        self.millijoules, self.uuids = 1000, []

    def nvmlInit(self):
        """Nothing to do."""

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.uuids.append(uuid)
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self.millijoules += 500
        return self.millijoules


def test_joules_are_read_at_logged_steps_alone_and_told_with_each_epoch(tmp_path, monkeypatch, capsys):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1-2"))
    real = energy.counter
    monkeypatch.setattr(energy, "counter", lambda device: real(torch.device("cuda")))
    trained(tmp_path / "out", "--energy")
    events = launchers.events(tmp_path / "out", "energy")
    assert nvml.uuids == ["GPU-1-2"]
    assert [event["joules"] for event in events] == [0.5] * 7  # of ten steps, seven are logged
    assert [event["joules_per_sample"] for event in events] == [0.5 / 8 / steps for steps in (1, 1, 2, 1, 1, 2, 2)]
    said = capsys.readouterr().out
    assert said.count(" samples/s  2 J\n") == 2  # 4 readings in an epoch, 3 in the other, rounded
    assert "energy of 1 GPU: 4 J, 0.0437 J per sample" in said


def test_energy_without_a_gpu_or_without_its_package_is_one_line(monkeypatch):
    with pytest.raises(errors.UserError, match=r"no NVIDIA GPU here .*: leave --energy out"):
        energy.counter(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(errors.UserError, match=r"pip install 'hvdtrain\[energy\]'"):
        energy.counter(torch.device("cuda"))
    nvml = Nvml()
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(nvml.NVMLError("Driver Not Loaded"))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1-2"))
    with pytest.raises(errors.UserError, match=r"NVML counts none for GPU-1-2 \(Driver Not Loaded\)"):
        energy.counter(torch.device("cuda"))
