"""docs/ladder.ipynb runs as its first cell says: by pip alone, without Horovod, from its first cell to its last."""

import json
import shutil

import pytest

from tests.e2e.launchers import PYTHON, ROOT, launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("ipykernel", reason="needs ipykernel: launch/setup --with notebook")
pytest.importorskip("nbconvert", reason="needs nbconvert: launch/setup --with notebook")


def test_the_notebook_runs_without_horovod_and_its_kill_changes_no_bit(tmp_path):
    absent = tmp_path / "absent" / "horovod"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('not here')\n")
    shutil.copy(ROOT / "docs" / "ladder.ipynb", tmp_path)
    done = launch(
        f"{PYTHON} -m nbconvert --to notebook --execute --output executed ladder.ipynb", cwd=tmp_path, timeout=800,
        PYTHONPATH=f"{absent.parent}",
    )  # fmt: skip
    assert done.code == 0, done
    said = {}
    for cell in json.loads((tmp_path / "executed.ipynb").read_text())["cells"]:
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error", output
            said[cell["id"]] = said.get(cell["id"], "") + "".join(output.get("text", []))
    text = "\n".join(said.values())
    assert text.count("ddp over Gloo") >= 3, text
    assert "resumed after step" in text, text
    weights = [line.split()[-1] for line in text.splitlines() if "  weights " in line]
    assert len(weights) == 2, text
    assert len(set(weights)) == 1, text
