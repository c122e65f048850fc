"""Tests of the documentation, and of the programs in docs/site that check and make it."""

import importlib.util
from pathlib import Path
from types import ModuleType

SITE = Path(__file__).resolve().parents[3] / "docs" / "site"


def program_of_the_site(name: str) -> ModuleType:
    """Import a program of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
