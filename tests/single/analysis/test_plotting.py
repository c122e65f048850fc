"""Pictures for the screen and for papers: sizes, letters, what stands on them, and the same bytes every time."""

import re

import pytest

from hvdtrain.analysis import plotting

NAMES = ("horovod $x$ & <co>", "ddp", "a name that is longer than the others")


def lines(axes) -> None:
    for place, name in enumerate(NAMES):
        axes.errorbar([1, 2], [place, 1], yerr=0.1, label=name, **plotting.look(place))
    axes.set(xlabel="ranks", ylabel="samples/s")


def test_a_column_is_85_millimetres_wide_and_its_letters_are_text(tmp_path):
    written = plotting.write(tmp_path / "x.png", "about", [lines])
    assert [path.name for path in written] == ["x.png", "x.svg", "x.pdf"]
    svg = (tmp_path / "x.svg").read_text()
    assert float(re.search(r'<svg [^>]*width="([\d.]+)pt"', svg)[1]) == pytest.approx(plotting.COLUMN * 72)
    assert pytest.approx(85, abs=0.5) == plotting.COLUMN * 25.4
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", svg)
    assert {"ranks", "samples/s", "horovod $x$ &amp; &lt;co&gt;"} <= set(texts)
    sizes = [float(size) for size in re.findall(r"<text [^>]*?font(?:-size)?: (?:\w+ )*([\d.]+)px", svg)]
    assert min(sizes) >= 7
    assert b"/FontFile2" in (tmp_path / "x.pdf").read_bytes(), "TrueType is embedded"
    assert b"/Type3" not in (tmp_path / "x.pdf").read_bytes()


def test_two_plots_stand_side_by_side_with_one_legend():
    figure = plotting.figure_of([lines, lines])
    assert figure.get_figwidth() == 2 * plotting.COLUMN
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*NAMES]


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        plotting.write(tmp_path / name / "x.png", "about", [lines])
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert len(one) == 3


def test_of_36_curves_each_has_its_own_colour_and_dashes():
    looks = [plotting.look(place) for place in range(36)]
    assert len({(look["color"], str(look["linestyle"])) for look in looks}) == 36
    for key in ("color", "linestyle", "marker"):
        assert len({str(look[key]) for look in looks[:6]}) == 6, "without their colours, too"
