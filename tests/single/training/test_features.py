"""The core works without each of its features, and a feature is one file and its lines in loop/start.py."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain import training
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
        assert without.removed or not name
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
