"""The site of `make docs` in a real browser: nothing is cut off, on a phone and on a desk, and no other host is asked."""

import importlib.util
import subprocess
import sys

import pytest

from tests.e2e.browser import CHROMIUM, Browser
from tests.e2e.launchers import ROOT

MISSING = [name for name in ("sphinx", "myst_parser", "furo", "nbconvert") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,  # tests/single/docs/test_site.py builds it in `make test`
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: launch/setup --with docs"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)"),
]
PAGES = ("README", "docs/script", "docs/errors", "docs/ladder", "docs/site/api")


@pytest.mark.leaves("org.chromium.")  # the browser's own
def test_the_site_fits_every_window(tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "--quiet", "-c", str(ROOT / "docs" / "site"), str(ROOT), str(site)]
    subprocess.run([*command, "-d", str(tmp_path / "doctrees")], check=True, timeout=250)
    browser = Browser(tmp_path / "profile")
    try:
        for page in PAGES:
            grounds = set()
            for width in (420, 1020, 1280, 1600):
                look = browser.open(site / f"{page}.html", width=width, dark=width == 420)
                assert "hvdtrain" in look["text"]  # and not the browser's page about a missing file
                assert look["wide"] == look["width"] == width, (page, width)
                assert all(look["images"]), page
                assert browser.errors == [], page
                assert all(url.startswith(("file:", "data:")) for url in browser.requests), browser.requests
                grounds.add(look["ground"])
            assert len(grounds) == 2  # dark and light
    finally:
        browser.close()
