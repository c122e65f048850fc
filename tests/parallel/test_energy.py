"""Energy over ranks: the processors of a host are counted once, however many ranks it has."""

import socket

import pytest

from hvdtrain.output.energy import Meter


def test_a_package_is_counted_once_per_host(engine, tmp_path, monkeypatch):
    """Each rank has a folder of its own, of which only the first rank's of each host may count."""
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, content in (("name", "package-0"), ("max_energy_range_uj", "65532610987"), ("energy_uj", "1000000")):
        (zone / name).write_text(content)
    monkeypatch.setenv("HVDTRAIN_POWERCAP", str(tmp_path))
    meter = Meter(engine)
    (zone / "energy_uj").write_text("8500000")
    hosts = len(set(engine.all_gather_object(socket.gethostname(), "test.hosts")))
    used = meter.total(engine)
    assert used is not None
    assert (used.cpu, used.gpu, used.complete) == (pytest.approx(7.5 * hosts), 0.0, True)
    assert meter.about == dict(cpu_packages=hosts, gpus=0, not_measured=[])


def test_where_no_rank_measures_nobody_waits(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_POWERCAP", str(tmp_path))
    meter = Meter(engine)
    assert not meter.measures
    assert meter.total(engine) is None
    assert f"CPU: {tmp_path} has no processor packages" in meter.about["not_measured"] or engine.local_rank
