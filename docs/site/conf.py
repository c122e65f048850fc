"""Sphinx builds the site (`make docs`) out of the pages that the repository has.

Its source directory is the repository itself, so a relative link means the same on the site and in the checkout; one to a
file that is no page becomes a copy of that file.
"""

import base64
import mimetypes
import os
import re
import sys
from pathlib import Path

import nbformat
from myst_parser.parsers.sphinx_ import MystParser
from nbconvert import MarkdownExporter
from sphinx.errors import ExtensionError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hvdtrain import __version__  # noqa: E402

# The navigation, and with it the pages of the site (paths without their ending). A page that is missing here fails a test.
NAVIGATION = {
    "Start": ["docs/index", "docs/install", "docs/quickstart", "docs/ladder", "docs/convert"],
    "Train": [
        "docs/training",
        "docs/data",
        "docs/techniques",
        "docs/choosing",
        "docs/loader",
        "docs/restarts",
        "docs/audit",
        "docs/watching",
        "docs/troubleshooting",
    ],
    "Run": ["docs/run", "docs/slurm", "containers/README", "docs/gpus"],
    "Horovod": ["docs/tuned", "docs/migrate", "docs/how-it-works", "docs/compared"],
    "Reference": [
        "docs/reference/api",
        "docs/reference/flags",
        "docs/reference/metrics",
        "docs/reference/environment",
        "docs/reference/exit-codes",
        "docs/reference/launchers",
        "docs/reference/errors",
        "docs/reference/limits",
        "docs/reference/security",
    ],
    "Project": ["CONTRIBUTING", "docs/reference/extending", "CHANGELOG"],
}
MOVED = {
    "docs/examples": "docs/gpus",
    "docs/reference/patches": "docs/evidence/horovod",
}  # addresses that others may have
EVIDENCE = "docs/evidence/"  # pages that others link to, and no navigation lists

project, version, release = "hvdtrain", __version__, __version__
html_title = f"hvdtrain {__version__}"
root_doc = "README"
include_patterns = [f"{page}.*" for pages in NAVIGATION.values() for page in pages]
include_patterns += ["README.md", f"{EVIDENCE}*.md"]
exclude_patterns = [".*", "data", "runs", "site", "**/ladder-runs", "**/__pycache__"]  # not even searched

extensions = ["myst_parser"]
myst_heading_anchors = 4  # named as the repository's own host names them
highlight_language, smartquotes = "none", False  # -- is the beginning of a flag
pygments_style, pygments_dark_style = "default", "github-dark"

html_theme = "furo"  # light and dark, narrow windows; nothing from another host
html_extra_path, html_static_path, html_css_files = ["root"], ["static"], ["site.css"]
html_copy_source = False
html_show_copyright = False


class NotebookParser(MystParser):
    """A notebook as a page: its text, its code, and the outputs that it was committed with. Nothing is run."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document) -> None:
        text, resources = MarkdownExporter().from_notebook_node(nbformat.reads(inputstring, as_version=4))
        for name, picture in resources["outputs"].items():
            address = f"data:{mimetypes.guess_type(name)[0]};base64,{base64.b64encode(picture).decode()}"
            image = f'<img alt="drawn by the code above" src="{address}">'  # as Markdown, SVG would be refused
            text = re.sub(rf"!\[\w+\]\({re.escape(name)}\)", image, text)
        super().parse(text, document)


def add_navigation(app, page: str, source: list[str]) -> None:
    """README has no table of contents of its own: it must read well without Sphinx."""
    if page.startswith(EVIDENCE):
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    if page == root_doc:
        for caption, pages in NAVIGATION.items():
            listed = "".join(f"/{each}\n" for each in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}```\n"


def redirect(app, failure: Exception | None) -> None:
    """Write a page for each address that has moved."""
    for old, new in MOVED.items() if failure is None else ():
        page, target = Path(app.outdir, f"{old}.html"), Path(app.outdir, f"{new}.html")
        if old in app.env.found_docs or not target.exists():  # not the file: an earlier build has written it
            raise ExtensionError(f"MOVED of conf.py: {old} is a page, or {new} is none")
        page.parent.mkdir(parents=True, exist_ok=True)
        link = os.path.relpath(target, page.parent)
        page.write_text(f'<meta http-equiv="refresh" content="0; url={link}"><a href="{link}">moved</a>\n')


def setup(app) -> None:
    app.connect("build-finished", redirect)
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    app.connect("source-read", add_navigation)
