"""Plots: side by side with one legend; curves that can be told apart; a missing package."""

import struct

from hvdtrain.output import plotting


def lines(axes) -> None:
    for place, name in enumerate(("horovod $x$ & <co>", "ddp", "a name that is longer than the others")):
        axes.plot([1, 2], [place, 1], label=name, **plotting.look(place))


def size_of(png: bytes) -> tuple[int, int]:
    return struct.unpack(">II", png[16:24])


def test_two_plots_stand_side_by_side():
    (one, _), (two, _) = size_of(plotting.png([lines])), size_of(plotting.png([lines, lines]))
    assert (one, two) == (int(plotting.WIDTH * 200), int(2 * plotting.WIDTH * 200))


def test_curves_can_be_told_apart():
    looks = [plotting.look(place) for place in range(12)]
    assert len({(look["color"], look["linestyle"]) for look in looks}) == 12
    assert len({look["color"] for look in looks[:6]}) == len({look["marker"] for look in looks[:6]}) == 6
