"""launch/packages apply the patches of launch/patches: all of them, in their order, and those of this commit."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "launch"))

import horovod_source

PACKAGES = Path(horovod_source.__file__).parent / "packages"
EASYCONFIG = next(PACKAGES.glob("easybuild/*.eb"))
RECIPE = PACKAGES / "conda" / "recipe.yaml"
SPACK = next(PACKAGES.glob("spack/**/package.py"))
NAMES = [path.name for path in horovod_source.patches(mpi=True)]


def evaluated(easyconfig: Path) -> dict:
    """An easyconfig is Python, with constants of EasyBuild's."""
    values: dict = {"PYPI_LOWER_SOURCE": ""}
    exec(easyconfig.read_text(), values)
    return values


@pytest.mark.parametrize("package", [EASYCONFIG, RECIPE, SPACK], ids=lambda path: path.name)
def test_the_source_is_the_released_one(package: Path) -> None:
    text = package.read_text()
    assert horovod_source.SDIST_SHA256 in text
    assert f'"{horovod_source.VERSION}"' in text or f"'{horovod_source.VERSION}'" in text


def test_easybuild_has_the_patches_and_their_checksums() -> None:
    values = evaluated(EASYCONFIG)
    assert values["patches"] == [f"../../patches/{name}" for name in NAMES]
    wanted = {name: hashlib.sha256((horovod_source.PATCHES / name).read_bytes()).hexdigest() for name in NAMES}
    lines = "".join(f"    {{'{name}':\n     '{digest}'}},\n" for name, digest in wanted.items())
    found = [next(iter(entry.items())) for entry in values["checksums"][1:]]
    assert found == list(wanted.items()), f"checksums in {EASYCONFIG.name} should be:\n{lines}"
    assert (
        EASYCONFIG.name
        == f"Horovod-{values['version']}-foss-{values['toolchain']['version']}{values['versionsuffix']}.eb"
    )


def test_conda_has_the_patches() -> None:
    assert re.findall(r"^    - \.\./\.\./patches/(\S+)", RECIPE.read_text(), re.M) == NAMES


def test_spack_takes_the_patches_of_the_folder() -> None:
    """Its package lists the folder; here with stand-ins for Spack's names."""
    applied: list[str] = []
    scope = {"__file__": str(SPACK), "PythonPackage": object, "patch": lambda path: applied.append(Path(path).name)}
    text = re.sub(r"^from spack.*\n", "", SPACK.read_text(), flags=re.M)
    body = text[: text.index('    depends_on("c"')]
    exec(body, scope | {"license": lambda _: None, "version": lambda _, sha256: None})
    assert applied == NAMES
