"""Energy, from counters of our own: what is counted, once, past the counters' ends; and what is said where nothing is."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvdtrain import training
from hvdtrain.analysis.reporting import page
from hvdtrain.analysis.reporting.runs import read_runs
from hvdtrain.engines.single import SerialEngine
from hvdtrain.output import energy
from hvdtrain.output.energy import Counter, Energy, Meter, packages, said


class Machine:
    """A folder as Linux' powercap has it."""

    def __init__(self, root: Path):
        self.root = root

    def zone(self, zone: str, name: str, joules: float, span: float = 262143.328850) -> None:
        folder = self.root / zone
        folder.mkdir(exist_ok=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{round(span * 1e6)}\n")
        (folder / "energy_uj").write_text(f"{round(joules * 1e6)}\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two packages with their parts, and what must not be counted beside them."""
    root = tmp_path / "powercap"
    root.mkdir()
    monkeypatch.setenv("HVDTRAIN_POWERCAP", str(root))
    found = Machine(root)
    zones = [("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core"), ("intel-rapl:0:1", "dram"),
             ("intel-rapl:1", "package-1"), ("intel-rapl:2", "psys"), ("intel-rapl-mmio:0", "package-0"),
             ("intel-rapl:1:0", "package-1-part")]  # fmt: skip
    for zone, name in zones:
        found.zone(zone, name, 100.0)
    (root / "intel-rapl").mkdir()  # the control type itself
    return found


def engine_of(rank: int = 0, size: int = 1) -> SerialEngine:
    engine = SerialEngine(tuning=False, rank=rank, size=size, launcher="none")
    engine.device = SimpleNamespace(type="cpu")
    engine.rank, engine.size, engine.local_rank = rank, size, rank
    return engine


def used(meter: Meter) -> Energy:
    """Return what this rank has measured."""
    meter.close()
    found = meter.total(engine_of())
    assert found is not None
    return found


def test_whole_packages_are_counted_once(machine):
    found, why = packages()
    assert (list(found), why) == (["intel-rapl:0", "intel-rapl:1"], "")
    meter = Meter(engine_of())
    for zone, name in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core"), ("intel-rapl:2", "psys"),
                       ("intel-rapl-mmio:0", "package-0")):  # fmt: skip
        machine.zone(zone, name, 130.0)
    machine.zone("intel-rapl:1", "package-1", 102.5)
    assert used(meter) == (pytest.approx(32.5), 0.0, True)
    assert meter.about == dict(cpu_packages=2, gpus=0, not_measured=[])
    assert said(meter.about) == "measured: 2 CPU packages"


def test_a_counter_that_begins_again_loses_nothing(machine):
    machine.zone("intel-rapl:0", "package-0", 262_140.0)
    meter = Meter(engine_of())
    for joules in (262_143.0, 10.0, 200.0):
        machine.zone("intel-rapl:0", "package-0", joules)
        energy_now = used(meter)
    assert energy_now.cpu == pytest.approx(262_143.328850 - 262_140 + 200, abs=1e-3)
    assert energy_now.complete


def test_a_counter_that_may_have_gone_round_twice_is_no_longer_complete(monkeypatch):
    values, now = iter([5, 6, 1]), [0.0]
    monkeypatch.setattr(energy.time, "monotonic", lambda: now[0])
    counter = Counter(lambda: next(values), 1.0, span=60_000)
    now[0] = 99.0  # at 600 W, 59,400 J
    counter.update()
    assert (counter.joules, counter.complete) == (1, True)
    now[0] = 200.0
    counter.update()
    assert (counter.joules, counter.complete) == (59_996, False)


def test_a_counter_that_is_gone_or_set_back_ends_no_training(machine):
    meter = Meter(engine_of())
    machine.zone("intel-rapl:0", "package-0", 107.0)
    (machine.root / "intel-rapl:1" / "energy_uj").unlink()
    assert used(meter) == (pytest.approx(7.0), 0.0, False)
    values = iter([50, 3])
    reset = Counter(lambda: next(values), 1.0)
    reset.update()
    assert (reset.joules, reset.complete) == (3, False)


def test_only_the_first_rank_of_a_host_reads_its_processors(machine, monkeypatch):
    engine = engine_of(rank=1, size=2)
    monkeypatch.setattr(engine, "all_gather_object", lambda mine, name: [["a", 2, [], "", ""], mine])
    meter = Meter(engine)
    machine.zone("intel-rapl:0", "package-0", 190.0)
    assert used(meter) == (0, 0, True)
    assert meter.measures, "so that its sums have the shape of the other rank's"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda root: [path.unlink() for path in root.glob("*/name")], "has no processor packages"),
        (lambda root: (root / "intel-rapl:1" / "energy_uj").write_text("?"), "intel-rapl:1 cannot be read"),
        (lambda root: root.rename(root.with_name("gone")), "has no processor packages"),
    ],
    ids=["nothing", "damaged", "no folder"],
)
def test_what_is_not_there_is_said(spoil, why, machine):
    spoil(machine.root)
    meter = Meter(engine_of())
    assert not meter.measures
    assert why in said(meter.about)
    assert meter.total(engine_of()) is None


def test_counters_for_root_alone_are_said_with_the_remedy(machine, monkeypatch):
    read = Path.read_text

    def refused(path, *args, **more):
        if path.parent.name == "intel-rapl:1" and path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **more)

    monkeypatch.setattr(Path, "read_text", refused)
    meter = Meter(engine_of())
    assert not meter.measures, "one of two packages would be a wrong sum"
    assert "can be read by root only (CVE-2020-8694): allow it with chmod a+r" in said(meter.about)


class Nvml:
    """NVML as far as it is asked. joules: by UUID."""

    def __init__(self, joules: dict[str, float]):
        self.joules, self.nvmlInit = joules, lambda: None

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.joules:
            raise RuntimeError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, uuid):
        return round(self.joules[uuid] * 1000)  # mJ


@pytest.fixture
def nvml(monkeypatch):
    found = Nvml({"GPU-a": 1e6, "GPU-b": 5.0})
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    return found


def on_a_gpu(rank: int = 0, size: int = 1) -> SerialEngine:
    engine = engine_of(rank, size)
    engine.device = SimpleNamespace(type="cuda")
    return engine


def test_each_rank_counts_its_own_gpu(machine, nvml):
    meter = Meter(on_a_gpu())
    nvml.joules |= {"GPU-a": 1e6 + 42.5, "GPU-b": 1e3}
    assert used(meter) == (0, pytest.approx(42.5), True)
    assert said(meter.about) == "measured: 2 CPU packages and 1 GPU"


def test_a_gpu_of_two_ranks_is_counted_by_the_first(machine, nvml, monkeypatch):
    engine = on_a_gpu(rank=1, size=2)
    monkeypatch.setattr(engine, "all_gather_object", lambda mine, name: [mine, mine])
    meter = Meter(engine)
    nvml.joules["GPU-a"] += 10
    assert used(meter).gpu == 0
    assert meter.about["gpus"] == 1


def test_a_gpu_that_cannot_be_asked_is_said(machine, nvml, monkeypatch):
    nvml.joules = {}
    assert "not measured: GPU: NVML: Not Found" in said(Meter(on_a_gpu()).about)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert "not measured: GPU: nvidia-ml-py is missing: pip install 'hvdtrain[energy]'" in said(Meter(on_a_gpu()).about)


def test_what_is_measured_as_text():
    about = dict(cpu_packages=1, gpus=0, not_measured=["CPU: no"])
    assert said(about) == "measured: 1 CPU package; not measured: CPU: no"
    assert said(None) == said("x") == said({"gpus": "many", "not_measured": 5}) == ""


def test_counters_are_read_while_nobody_asks(machine, monkeypatch):
    monkeypatch.setattr(energy, "READ_EVERY", 0.01)
    meter = Meter(engine_of())
    machine.zone("intel-rapl:0", "package-0", 101.0)
    deadline = time.monotonic() + 60
    while sum(counter.joules for counter in meter._cpu) < 0.9 and time.monotonic() < deadline:
        time.sleep(0.01)
    meter.close()
    assert sum(counter.joules for counter in meter._cpu) == pytest.approx(1.0)


def test_what_is_recorded():
    assert Energy(1.23456, 2.0).fields() == dict(energy_joules=3.235, energy_cpu_joules=1.235, energy_gpu_joules=2.0)
    assert Energy(1.0, 2.0, False).fields()["energy_incomplete"] is True
    assert json.dumps(Energy(1.0, 2.0).fields())


def program(out: Path, epochs: int, at_each_step=lambda step: None, **recorded: float) -> None:
    """A whole program that trains on 40 samples in steps of 8."""
    flags = training.parser("test", None, epochs=epochs, batch_size=8).parse(
        ["--engine", "serial", "--no-progress", "--threads", "1", "--log-steps", "1", "--output-dir", str(out)]
    )
    x = torch.ones(40, 1)
    metrics = {"accuracy": training.Metric("max", percent=True), "loss": training.Metric("min")}
    with training.start(flags, metrics=metrics) as run:
        net = nn.Linear(1, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(flags.epochs):
            for step in run.steps(x):
                for (batch,) in step.batches():
                    step.backward(model(batch).square().mean())
                    step.record(**recorded) if recorded else None
                step.update()
                at_each_step(step)
            with run.evaluating(40) as mine:
                run.record(accuracy=torch.full((len(x[mine]),), 0.5), loss=model(x[mine]).square().sum())


def test_a_run_records_what_it_cost(machine, tmp_path):
    now = [100.0]

    def works(step) -> None:
        now[0] += 3.0
        machine.zone("intel-rapl:1", "package-1", now[0])

    program(tmp_path, 2, works)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["energy"] == dict(cpu_packages=2, gpus=0, not_measured=[])
    assert [line["energy_joules"] for line in lines if line["event"] == "train"] == [3.0 * n for n in range(1, 11)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["energy_joules"], summary["energy_cpu_joules"], summary["energy_gpu_joules"]) == (30.0, 30.0, 0.0)
    (run,) = read_runs([tmp_path])
    assert page.figures(run)["energy"] == "30 J, 0.375 J per sample"
    assert "measured: 2 CPU packages" in page.history(run)


def test_where_nothing_is_measured_nothing_is_shown_but_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HVDTRAIN_POWERCAP", str(tmp_path / "none"))
    program(tmp_path / "out", 1)
    record = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert "joules" not in record
    (run,) = read_runs([tmp_path / "out"])
    assert "energy" not in page.figures(run)
    assert f"not measured: CPU: {tmp_path}/none has no processor packages" in page.history(run)
    told = capsys.readouterr()
    assert "energy" not in told.out + told.err, "each run would say it"


def test_a_scripts_own_value_of_that_name_goes_first(machine, tmp_path):
    program(tmp_path / "out", 1, energy_joules=7.0)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert {line["energy_joules"] for line in lines if line["event"] == "train"} == {7.0}
    assert {line["energy_cpu_joules"] for line in lines if line["event"] == "train"} == {0.0}
