"""docs/ladder.ipynb, run from top to bottom by a kernel of its own."""

import importlib.util
import json

import pytest

from tests.e2e.launchers import ROOT, events, summary

MISSING = [name for name in ("nbclient", "ipykernel") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: launch/setup --with notebook"),
]
CELL_SECONDS = 300


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run the notebook in a folder of its own; return it with its outputs, and the folder of its runs."""
    import nbformat
    from nbclient import NotebookClient

    directory = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(ROOT / "docs" / "ladder.ipynb", as_version=4)
    NotebookClient(notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": str(directory)}}).execute()
    return notebook, directory / "ladder-runs"


def test_its_cells_draw_and_tell(ran):
    notebook, _ = ran
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) == 4
    said = "".join(output.get("text", "") for output in outputs)
    assert "after 3 data 10" in said
    assert said.count("epoch 5/5") == 6
    assert "4 ranks on 1 host, horovod" in said


def test_engines_draw_one_curve_in_it(ran):
    _, runs = ran
    names = ("serial", "dataparallel", "ddp", "ddp-bf16", "horovod-2", "horovod-4")
    ended = {name: summary(runs / name) for name in names}
    weights = {name: end["parameters_sha256"] for name, end in ended.items()}
    assert weights["serial"] == weights["dataparallel"]
    assert weights["ddp"] == weights["horovod-2"] != weights["ddp-bf16"]
    losses = {name: [event["loss"] for event in events(runs / name, "train")] for name in names}
    assert {len(curve) for curve in losses.values()} == {ended["serial"]["steps"]}
    for name in ("ddp", "horovod-2", "horovod-4"):
        assert losses[name][:12] == pytest.approx(losses["serial"][:12], rel=1e-3), name
    sweep = json.loads((runs / "sweep" / "benchmark.json").read_text())
    assert len(sweep["rows"]) == 15
