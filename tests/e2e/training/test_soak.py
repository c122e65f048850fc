"""The soak's judgement of what grows, and a short one on two ranks."""

import pytest

from tests.chaos.soak import BOUNDS, Sample, judged, soak


def hour(*slopes_per_hour: float) -> list[Sample]:
    """An hour with a noisy start, and quantities that climb by so much in it."""
    noise = lambda second: 100.0 if second < 600 else (second * 7919) % 5 / 5  # noqa: E731
    begin = (200.0, 12.0, 30.0)
    values = lambda s: tuple(b + slope * s / 3600 for b, slope in zip(begin, slopes_per_hour, strict=True))  # noqa: E731
    return [Sample(s, (values(s)[0] + noise(s), *values(s)[1:])) for s in range(0, 3601, 5)]


def test_what_is_flat_passes_and_what_climbs_is_named():
    assert all(line.flat for line in judged(hour(0, 0, 0)).values())
    for place, name in enumerate(BOUNDS):
        slopes = [0.0, 0.0, 0.0]
        slopes[place] = 30.0
        assert [quantity for quantity, line in judged(hour(*slopes)).items() if not line.flat] == [name]
    assert judged(hour(-30, 0, 0))["RSS in MiB"].flat  # memory given back is no leak


@pytest.mark.slow
def test_a_short_soak_is_flat(tmp_path):
    ranks, did = soak(tmp_path / "out", minutes=0.5, ranks=2, launcher="mpirun", every=1.0)
    assert len(ranks) == 2
    assert "checkpoints" in did
    assert all(line.flat for quantities in ranks for name, line in quantities.items() if name != "RSS in MiB"), ranks
