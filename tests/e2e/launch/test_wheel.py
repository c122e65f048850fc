"""The wheel and the source distribution: complete, and enough to train and launch from without a checkout."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

import hvdtrain
from tests.e2e.launchers import PYTHON, ROOT, Done, launch, summary

PIP = f"{PYTHON} -m pip --disable-pip-version-check -q"
BUILD = f"{PIP} wheel --no-deps --no-build-isolation --no-index"


def tree(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def built(directory: Path, source: Path) -> Path:
    done = launch(f"{BUILD} -w {directory} {source}", cwd=directory)
    assert done.code == 0, done
    (wheel,) = directory.glob("*.whl")
    return wheel


def in_wheel(wheel: Path) -> dict[str, int]:
    """Return the files' modes by name."""
    return {info.filename: stat.S_IMODE(info.external_attr >> 16) for info in zipfile.ZipFile(wheel).infolist()}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of this checkout without what is generated in it: building leaves files behind."""
    generated = {".git", *(line.strip("/") for line in (ROOT / ".gitignore").read_text().split())}

    def left_out(directory: str, names: list[str]) -> list[str]:
        here = generated if Path(directory) == ROOT else {"__pycache__"}
        return [name for name in names if name.endswith(".egg-info") or any(fnmatch(name, each) for each in here)]

    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "hvdtrain", ignore=left_out))


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"), source)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A directory into which pip installed the wheel; in front of the checkout on Python's path."""
    directory = tmp_path_factory.mktemp("installed")
    done = launch(f"{PIP} install --no-deps --no-index --target {directory} {wheel}", cwd=directory)
    assert done.code == 0, done
    return directory


@pytest.fixture(scope="module")
def unpacked(installed, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("unpacked") / "with a blank"
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.unpack", directory], cwd=directory.parent, text=True, capture_output=True,
        timeout=120, env={**os.environ, "PYTHONPATH": str(installed)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done
    return directory


def test_the_wheel_has_all_that_the_checkout_has_but_tests(wheel, source):
    names = in_wheel(wheel)
    package = {f"hvdtrain/{name}" for name in tree(source / "hvdtrain")}
    beside = {
        f"hvdtrain/_checkout/{name}" for name in tree(source) if name.split("/")[0] in ("launch", "containers", "docs")
    }
    assert package | beside <= set(names)
    assert {"hvdtrain/py.typed", "hvdtrain/_checkout/pyproject.toml", "hvdtrain/_checkout/Makefile"} <= set(names)
    assert not [name for name in names if "tests/" in name or "__pycache__" in name]
    for name, mode in names.items():
        if name.startswith("hvdtrain/_checkout/"):
            original = source / name.removeprefix("hvdtrain/_checkout/")
            assert bool(mode & 0o100) == os.access(original, os.X_OK), name


def test_the_version_is_that_of_the_package_everywhere(wheel):
    version = hvdtrain.__version__
    assert wheel.name == f"hvdtrain-{version}-py3-none-any.whl"
    cited = re.findall(r"^version: (\S+)\ndate-released: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert re.findall(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[:1] == cited
    pages = [*(ROOT / "launch/kubernetes").glob("*.yaml"), ROOT / "containers/Containerfile", ROOT / "README.md"]
    found = [{*re.findall(r"(?:/hvdtrain:|: version )([^\s,]+)", path.read_text())} for path in pages]
    assert [{cited[0][0]}, *found] == [{version}] * (1 + len(pages))


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(source, wheel, tmp_path):
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (whole,) = tmp_path.glob("hvdtrain-*/")
    assert {name for name in tree(source) if "egg-info" not in name and not name.startswith("build/")} <= tree(whole)
    assert in_wheel(built(tmp_path, whole)).keys() == in_wheel(wheel).keys()


@pytest.mark.slow
def test_what_is_unpacked_builds_the_same_wheel(unpacked, wheel, tmp_path):
    copy = shutil.copytree(unpacked, tmp_path / "copy")
    assert in_wheel(built(tmp_path, copy)) == in_wheel(wheel)


def installed_launch(command: str, directory: Path, installed: Path) -> Done:
    return launch(command, cwd=directory, PYTHONPATH=str(installed))


@pytest.mark.slow
def test_every_module_loads_from_the_wheel(installed, tmp_path):
    code = (
        "import pkgutil, importlib, hvdtrain; "
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(hvdtrain.__path__, 'hvdtrain.')]; "
        "print(hvdtrain.__file__)"
    )
    done = installed_launch(f'{PYTHON} -c "{code}"', tmp_path, installed)
    assert done.code == 0, done
    assert done.stdout == f"{installed}/hvdtrain/__init__.py\n"


@pytest.mark.slow
def test_training_from_the_wheel_in_an_empty_directory(installed, tmp_path):
    work = tmp_path / "empty"
    work.mkdir()
    flags = f"--dataset digits --epochs 1 --no-progress --threads 1 --output-dir {tmp_path / 'out'}"
    done = installed_launch(f"{PYTHON} -m hvdtrain.mnist {flags}", work, installed)
    assert done.code == 0, done
    assert summary(tmp_path / "out")["test_count"] == 382
    assert list(work.iterdir()) == []
    done = installed_launch(
        f"{PYTHON} -m hvdtrain.report {tmp_path / 'out'} --output-dir {tmp_path / 'report'}", work, installed
    )
    assert done.code == 0, done
    assert "<style>" in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.slow
def test_two_ranks_by_the_unpacked_script(installed, unpacked, tmp_path):
    flags = f"--dataset digits --epochs 1 --no-progress --threads 1 --output-dir {tmp_path / 'out'}"
    done = installed_launch(
        f"'{unpacked}/launch/mpirun.sh' -np 2 {PYTHON} -m hvdtrain.mnist {flags}", tmp_path, installed
    )
    assert done.code == 0, done
    assert summary(tmp_path / "out")["world_size"] == 2
