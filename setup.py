"""pyproject.toml says what hvdtrain is. Only here: what lies beside the package goes into the wheel (`hvdtrain.unpack`)."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# All that a checkout needs beside the package to be set up, to launch, and to become a container.
CHECKOUT = ("launch", "containers", "docs", "Makefile", "README.md", "LICENSE", "pyproject.toml", "setup.py")
LEFT = ("__pycache__", "ladder-runs", ".ipynb_checkpoints")  # by programs, git-ignored


class BuildWithCheckout(build_py):
    """Copy CHECKOUT to hvdtrain/_checkout of what is built, executable bits kept. An editable install has the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "hvdtrain" / "_checkout"
        if target.exists():  # an earlier build's, with files that may be gone since
            shutil.rmtree(target)
        target.mkdir()
        for name in CHECKOUT:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns(*LEFT))
            else:
                shutil.copy2(ROOT / name, target / name)


setup(cmdclass={"build_py": BuildWithCheckout})
