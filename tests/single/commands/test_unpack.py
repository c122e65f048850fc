"""`hvdtrain.unpack`: what it writes over, and what it leaves alone. (With a real wheel: tests/e2e/launch/test_wheel.py.)"""

import os

import pytest

from hvdtrain import unpack
from hvdtrain.engines.errors import UserError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with what setup.py puts into the wheel."""
    package = tmp_path / "site" / "hvdtrain"
    (package / "_checkout" / "launch").mkdir(parents=True)
    (package / "_checkout" / "launch" / "__pycache__").mkdir()
    (package / "_checkout" / "launch" / "__pycache__" / "steps.pyc").write_text("")
    script = package / "_checkout" / "launch" / "mpirun.sh"
    script.write_text("#!/bin/bash\n")
    script.chmod(0o755)
    (package / "_checkout" / "launch" / "slurm.sbatch").write_text("how=starter\n")
    (package / "mnist.py").write_text("pass\n")
    monkeypatch.setattr(unpack, "INSTALLED", package)
    monkeypatch.setattr(unpack, "CHECKOUT", package / "_checkout")
    return package


def written(directory):
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


def test_files_lie_as_in_a_clone_and_can_be_started(package, tmp_path):
    unpack.unpack_files(tmp_path / "new" / "there")
    assert written(tmp_path / "new" / "there") == {"launch/mpirun.sh", "launch/slurm.sbatch", "hvdtrain/mnist.py"}
    assert os.access(tmp_path / "new" / "there" / "launch" / "mpirun.sh", os.X_OK)


def test_what_is_there_is_left_alone(package, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    with pytest.raises(UserError, match="there exists and is not empty: name another DIR"):
        unpack.unpack_files(tmp_path / "there")
    assert written(tmp_path / "there") == {"mine"}
    (tmp_path / "there" / "mine").unlink()
    unpack.unpack_files(tmp_path / "there")
    assert "launch/mpirun.sh" in written(tmp_path / "there")


def test_a_checkout_has_them_already():
    with pytest.raises(UserError, match="runs from a checkout, which has launch/ and containers/: /"):
        unpack.unpack_files(unpack.INSTALLED)


def test_where_it_cannot_write_it_is_one_line(package, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["unpack", str(tmp_path / "file" / "below")])
    with pytest.raises(UserError, match="cannot be written"):
        unpack.main()
