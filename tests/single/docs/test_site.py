"""The site of `make docs`: it has every page, no broken link or anchor, and asks no other host for anything."""

import importlib.util
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from hvdtrain import training
from hvdtrain.loop.step import Step

ROOT = Path(__file__).resolve().parents[3]
SITE = ROOT / "docs" / "site"
API = ROOT / "docs" / "reference" / "api.md"
GENERATED = {"docs/reference/errors"}  # by `make docs`, not tracked
MISSING = [name for name in ("sphinx", "myst_parser", "furo", "nbconvert") if importlib.util.find_spec(name) is None]
built = pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: launch/setup --with docs")


def navigation() -> list[str]:
    """Return the paths in conf.py's NAVIGATION, without importing Sphinx."""
    listed = re.search(r"^NAVIGATION = (\{.*?^\})", (SITE / "conf.py").read_text(), re.M | re.S)
    assert listed is not None
    return [page for pages in eval(listed.group(1)).values() for page in pages]


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    flags = ["--quiet", "--fail-on-warning", "--keep-going", "-c", str(SITE), "-d", f"{target}-doctrees"]
    # No proxy answers there: the build must not need one.
    nowhere = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}
    command = [sys.executable, "-m", "sphinx", *flags, str(source), str(target)]
    return subprocess.run(command, env={**os.environ, **nowhere}, capture_output=True, text=True, timeout=250)


def test_the_navigation_lists_every_page_once():
    pages = navigation()
    assert len(pages) == len(set(pages))
    found = [path for kind in ("*.md", "reference/*.md", "*.ipynb") for path in (ROOT / "docs").glob(kind)]
    there = {str(path.relative_to(ROOT).with_suffix("")) for path in found}
    assert there <= set(pages)
    for page in pages:
        assert page in GENERATED or list(ROOT.glob(f"{page}.*")), page


def test_the_api_page_has_what_programs_import():
    named = set(re.findall(r"hvdtrain\.training\.(\w+)", API.read_text()))
    assert set(training.__all__) <= named


def test_the_api_page_has_the_batch_of_a_step():
    yielded = typing.get_type_hints(Step.batch.fget)["return"]
    assert f'<a id="{yielded.__module__}.{yielded.__qualname__}"></a>' in API.read_text()


@built
@pytest.mark.slow  # `make docs` builds it, too
def test_the_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path):
    site = tmp_path / "site"
    subprocess.run([sys.executable, str(SITE / "messages.py")], check=True)  # as `make docs` does
    done = build(ROOT, site)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for page in [*navigation(), "README", "search", "index"]:
        text = (site / f"{page}.html").read_text()
        fetched = re.findall(r"""<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=["']([^"']+)""", text)
        assert [url for url in fetched if "//" in url] == [], page
        files = [url.split("#")[0].split("?")[0] for url in fetched if not url.startswith("data:")]
        assert [name for name in files if name and not (site / page).parent.joinpath(name).exists()] == [], page
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", styles)
    assert "launcher" in (site / "searchindex.js").read_text()
    api = (site / "docs" / "reference" / "api.html").read_text()
    for name in ("hvdtrain.training.Run.steps", "hvdtrain.loop.step.Step.backward", "hvdtrain.training.positive"):
        assert f'id="{name}"' in api, name
    assert (site / "docs" / "ladder.html").read_text().count("data:image/svg+xml;base64,") >= 3
    assert "After the loop, the gradients are those of the global batch." in api
