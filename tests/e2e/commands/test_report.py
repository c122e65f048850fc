"""The report of a real run that was killed and started again, opened in a real browser as a phone and a desk would."""

import json

import pytest

from tests.chaos.lineage import attacked
from tests.e2e.browser import CHROMIUM, Browser
from tests.e2e.launchers import PYTHON, events, launch, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: two ranks, killed in step 6 and started again; and a shorter one on one rank."""
    restarted, alone = (tmp_path_factory.mktemp(name) for name in ("restarted", "alone"))
    flags = "--log-steps 2"
    killed = attacked(restarted, flags=flags, attack=dict(rank=1, point="backward", count=6, kind="kill"))
    assert killed.code not in (0, 2, 75), killed
    done = attacked(restarted, flags=flags)
    assert done.code == 0, done
    done = train("alone", 1, f"--output-dir {alone}")
    assert done.code == 0, done
    return restarted, alone


@pytest.fixture(scope="module")
def made(runs, tmp_path_factory):
    """The directory of their report."""
    output_dir = tmp_path_factory.mktemp("report")
    done = launch(f"{PYTHON} -m hvdtrain.report {runs[0]} {runs[1]} --output-dir {output_dir}")
    assert done.code == 0, done
    assert done.stdout == f"{output_dir}/report.html: open it in a browser\n"
    return output_dir


@pytest.mark.slow
def test_the_record_counts_every_sample_of_the_test_set(runs):
    for directory in runs:
        record, last = json.loads((directory / "mistakes.json").read_text()), events(directory, "evaluate")[-1]
        right = sum(row[label] for label, row in enumerate(record["confusion"]))
        assert sum(map(sum, record["confusion"])) == last["count"]
        assert right / last["count"] == pytest.approx(last["accuracy"])
        assert all(mistake["label"] != mistake["predicted"] for mistake in record["mistakes"])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)")
@pytest.mark.leaves("org.chromium.")  # the browser's own
def test_in_a_browser(made, tmp_path):
    browser = Browser(tmp_path / "profile")
    try:
        for width in (390, 1280):
            grounds = {}
            for dark in (False, True):
                page = browser.open(made / "report.html", width=width, dark=dark)
                case = f"{width} px, {'dark' if dark else 'light'}"
                assert page["width"] == width, case
                assert page["wide"] <= width, case  # nothing to scroll sideways
                assert len(page["images"]) > 10, case
                assert all(page["images"]), case
                assert len(page["pictures"]) == 8, case
                assert all(0 <= left < right <= width and height > 50 for left, right, height in page["pictures"]), case
                assert page["letters"] >= 9, case  # pixels: what the smallest letter of a picture takes
                assert browser.errors == [], case
                assert [url for url in browser.requests if not url.startswith(("data:", "file:///"))] == [], case
                assert sum(url.startswith("file:") for url in browser.requests) == 1, case  # the page alone
                assert "after step 3 (192 samples)" in page["text"], case
                grounds[dark] = page["ground"], page["ink"]
            light, dark = ([sum(map(int, c[4:-1].split(","))) for c in grounds[scheme]] for scheme in (False, True))
            assert light[0] > light[1], "dark letters on a light ground"
            assert dark[0] < dark[1], "light letters on a dark ground"
    finally:
        browser.close()


def test_what_is_no_run_ends_in_one_line(tmp_path):
    done = launch(f"{PYTHON} -m hvdtrain.report {tmp_path}/none --output-dir {tmp_path}/report")
    assert done.code == 2, done
    assert done.stderr.startswith(f"hvdtrain.report: error: {tmp_path}/none is not a directory: name"), done
    assert done.stderr.count("\n") == 1, done
