"""The core works without each of its features, and a feature is one file and its lines in training/start.py."""

import ast
import json
import shutil
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
FEATURES = sorted(path.stem for path in (ROOT / "hvdtrain/training/features").glob("[a-z]*.py"))
START, FOLDER = "hvdtrain/training/start.py", "hvdtrain/training/features"
PROGRAM = "tests/golden/program.py"
# Imports torch once, and forks: each child trains with the package in another directory.
RUNS = f"""
import os, runpy, sys, torch
for directory in sys.argv[1:]:
    if (child := os.fork()) == 0:
        sys.path.insert(0, directory)
        words = "--epochs 1 --engine serial --threads 1 --no-progress --log-steps 1 --output-dir"
        sys.argv = ["program.py", *words.split(), directory + "/out"]
        runpy.run_path({str(ROOT / PROGRAM)!r}, run_name="__main__")
        raise SystemExit(9)
    os.waitpid(child, 0)
"""


class Without(ast.NodeTransformer):
    """Removes the lines that import a feature, and those that use what they import."""

    def __init__(self, feature: str):
        self.module, self.names = f"hvdtrain.training.features.{feature}", set[str]()
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
        shutil.copytree(ROOT / "hvdtrain", place / "hvdtrain", ignore=shutil.ignore_patterns("__pycache__"))
        if name:
            (place / FOLDER / f"{name}.py").unlink()
            without = Without(name)
            text = ast.unparse(without.visit(ast.parse((place / START).read_text())))
            (place / START).write_text(text)
            assert without.removed or name == "predictions"  # which evaluate_only imports
    done = subprocess.run(
        [sys.executable, "-c", RUNS, *map(str, places.values())], capture_output=True, text=True, timeout=600
    )
    summaries = {name: place / "out/summary.json" for name, place in places.items()}
    assert all(path.exists() for path in summaries.values()), done.stdout[-2000:] + done.stderr[-2000:]
    return {name: json.loads(path.read_text()) for name, path in summaries.items()}


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_a_training_that_does_not_use_a_feature_works_without_its_file(feature, results):
    names = ("parameters_sha256", "error", "steps", "samples", "best")
    assert {name: results[feature][name] for name in names} == {name: results[""][name] for name in names}


def test_no_file_of_the_core_imports_a_feature():
    core = [path for path in (ROOT / "hvdtrain/training").glob("*.py") if path.name != "start.py"]
    assert not [path.name for path in core if "training.features" in path.read_text()]


def test_the_operations_of_a_step_are_counted_and_change_no_bit(tmp_path, capsys):
    hashes, events = [], []
    for flag in ([], ["--mfu"]):
        out = tmp_path / "-".join(["out", *flag])
        argv = ["--log-steps", "2", "--output-dir", str(out), *flag]
        with training.start(flags_for(*argv)) as run:
            net = nn.Linear(3, 5, bias=False)
            model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            fit(run, [X, Y], lambda step, x, y, model=model: (model(x).mean(1, keepdim=True) - y).square().mean())
        hashes.append(launchers.summary(out)["parameters_sha256"])
        events = launchers.events(out, "utilization")
    assert hashes[0] == hashes[1]
    assert [event["step"] for event in events] == [4, 5, 6, 8, 10]  # of ten steps; the second was counted
    assert all(event["flops_per_second"] > 0 and 0 < event["peak_share"] < 1 for event in events)
    assert "of a matrix product's" in capsys.readouterr().out
