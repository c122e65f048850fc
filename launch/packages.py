"""Whether the packages of an environment are complete, by their RECORD files: a set-up may have been killed."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path


def site_packages(prefix: Path) -> Path:
    """Return the site-packages directory of an environment."""
    found = sorted(prefix.glob("lib/python3*/site-packages"))
    return found[0] if found else prefix / "no-site-packages"


def is_whole(info: Path) -> bool:
    """Tell whether all files of a package are there. Bytecode may be absent; settings and scripts may have changed."""
    try:
        with (info / "RECORD").open(newline="") as file:
            for name, _, size in csv.reader(file):
                if not size or name.endswith(".pyc"):
                    continue
                found = (info.parent / name).stat().st_size
                if found != int(size) and not name.startswith(("../../../etc/", "../../../bin/")):
                    return False
    except (OSError, ValueError):
        return False
    return True


def has_pip(prefix: Path) -> bool:
    """Tell whether `python -m venv` completed."""
    return (prefix / "bin" / "python").exists() and any(map(is_whole, site_packages(prefix).glob("pip-*.dist-info")))


def forget_torn(prefix: Path) -> list[str]:
    """Remove packages that are installed only in part, so that they are installed again, and return their names."""
    torn = [info for info in site_packages(prefix).glob("*.dist-info") if not is_whole(info)]
    for path in [*torn, *site_packages(prefix).glob("~*")]:  # ~NAME: pip was replacing it
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return sorted(info.name.removesuffix(".dist-info") for info in torn)
