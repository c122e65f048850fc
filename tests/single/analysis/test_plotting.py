"""Pictures for the screen and for papers: sizes, letters, what stands on them, and the same bytes every time."""

import re

import pytest

from hvdtrain.analysis import plotting

NAMES = ("horovod $x$ & <co>", "ddp", "a name that is longer than the others")


def lines(axes) -> None:
    for place, name in enumerate(NAMES):
        style = dict(color=plotting.COLOURS[place], linestyle=plotting.STYLES[place], label=name)
        axes.errorbar([1, 2], [place, 1], yerr=0.1, marker=plotting.MARKERS[place], **style)
    axes.set(xlabel="ranks", ylabel="samples/s")


PANELS = [plotting.Panel("left", "Left", lines, ("busy machine: as it was " * 5,)), plotting.Panel("", "Right", lines)]


def test_a_column_is_85_millimetres_wide_and_its_letters_are_text(tmp_path):
    written = plotting.write(tmp_path / "x.png", "about", PANELS)
    assert [path.name for path in written] == ["x.png", "x-left.svg", "x-left.pdf", "x.svg", "x.pdf"]
    svg = (tmp_path / "x-left.svg").read_text()
    assert float(re.search(r'<svg [^>]*width="([\d.]+)pt"', svg)[1]) == pytest.approx(plotting.COLUMN * 72)
    assert pytest.approx(85, abs=0.5) == plotting.COLUMN * 25.4
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", svg)
    assert {"ranks", "samples/s", "horovod $x$ &amp; &lt;co&gt;"} <= set(texts)
    assert sum("as it was" in text for text in texts) > 1, "a long note is broken into lines"
    sizes = [float(size) for size in re.findall(r"<text [^>]*?font(?:-size)?: (?:\w+ )*([\d.]+)px", svg)]
    assert min(sizes) >= 7
    assert b"/FontFile2" in (tmp_path / "x.pdf").read_bytes(), "TrueType is embedded"
    assert b"/Type3" not in (tmp_path / "x.pdf").read_bytes()


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        plotting.write(tmp_path / name / "x.png", "about", PANELS)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert len(one) == 5


def test_lines_differ_without_their_colours():
    assert len(set(plotting.MARKERS)) == len(set(plotting.STYLES)) == len(plotting.COLOURS)


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ([], ""),
        ([(0.5, 1.0)], ""),
        ([(0.5, 0.9), (0.9, 1.2)], "within the spread of the rounds"),
        ([(0.9, 1.2), (1.01, 1.2)], "the bound was slower in all rounds"),
    ],
)
def test_a_share_above_1_is_explained(ranges, said):
    found = plotting.above_one(ranges)
    assert len(found) == bool(said)
    assert all(said in note and note.startswith("above 1") for note in found)
