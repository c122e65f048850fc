"""docs/ladder.ipynb as it is committed: small, with outputs, with nothing of the machine that made them in it."""

import json
import re
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[3] / "docs" / "ladder.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
OUTPUTS = [output for cell in CODE for output in cell["outputs"]]


def test_it_is_small_and_its_cells_are_short():
    assert NOTEBOOK.stat().st_size < 200_000
    assert max(len(cell["source"]) for cell in CODE) <= 24
    words = [cell for cell in CELLS if cell["cell_type"] == "markdown"]
    assert len(words) >= len(CODE)


def test_it_was_run_from_top_to_bottom():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert {output["output_type"] for output in OUTPUTS} <= {"stream", "display_data", "update_display_data"}
    assert sum("image/svg+xml" in output.get("data", {}) for output in OUTPUTS) == 4
    assert {output["name"] for output in OUTPUTS if output["output_type"] == "stream"} == {"stdout"}


def test_outputs_name_no_place_of_the_machine():
    for output in OUTPUTS:
        said = "".join(output.get("text", [])) + "".join(output.get("data", {}).get("text/plain", []))
        assert not re.search(r"/(?:home|root|tmp|usr|work)\b", said), said
    assert all(not cell["metadata"] for cell in CELLS)
