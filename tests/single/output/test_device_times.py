"""On a GPU, the phases are those of the device: a GPU in Python runs what is queued meanwhile. And --profile."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from hvdtrain.engines.single import SerialEngine
from hvdtrain.features.profile import Profile
from hvdtrain.loop.feature import Features
from hvdtrain.output import clock
from hvdtrain.output.clock import CPU, Clock
from hvdtrain.output.run_output import RunOutput
from tests.single.unwritable import no_room

GPU = torch.device("cuda", 0)
STEPS = 60


class Gpu:
    """Its stream and the host, in seconds. Work that is queued begins when the work before has ended."""

    def __init__(self) -> None:
        self.host = self.free = 0.0

    def run(self, seconds: float) -> None:
        self.free = max(self.free, self.host) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.free)

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu

    def record(self, stream: object = None) -> None:
        self.at = max(self.gpu.free, self.gpu.host)

    def synchronize(self) -> None:
        self.gpu.host = max(self.gpu.host, self.at)

    def query(self) -> bool:
        return self.gpu.host >= self.at

    def elapsed_time(self, end: "Event") -> float:
        assert self.query()
        assert end.query(), "cudaErrorNotReady"
        return (end.at - self.at) * 1000


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: made.host))
    return made


def train(gpu: Gpu, device: torch.device, read: float, compute: float, communicate: float, every: int) -> clock.Window:
    """Train: the host reads data and queues the rest, and waits for the GPU in every step, or in each of `every`."""
    seconds = Clock(device)
    for number in range(1, STEPS + 1):
        gpu.host += read
        seconds.mark("loading")
        gpu.host += 0.001  # to start the kernels
        gpu.run(compute)
        seconds.mark("compute")
        gpu.run(communicate)
        if number % every == 0:
            gpu.wait()
        seconds.mark("communication")
        seconds.end_step(8, 8)
    engine = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
    engine.device = device
    return seconds.measure(engine)


def longest(window: clock.Window) -> str:
    share = clock.shares(window.ranks)
    return max(share, key=lambda name: share[name]).removesuffix("_share")


@pytest.mark.parametrize(
    ("read", "compute", "communicate", "expected"),
    [
        (0.001, 0.1, 0.01, "compute"),
        (0.001, 0.1, 0.2, "communication"),
        (0.4, 0.1, 0.01, "loading"),
    ],
    ids=["computes", "communicates", "waits for data"],
)
@pytest.mark.parametrize("every", [1, STEPS], ids=["reads each step", "reads late"])
def test_the_phases_are_what_the_device_does(gpu, read, compute, communicate, expected, every):
    window = train(gpu, GPU, read, compute, communicate, every)
    assert longest(window) == expected, window
    (rank,) = window.ranks
    assert rank.compute + rank.communication == pytest.approx(STEPS * (compute + communicate), rel=0.02)


def test_the_host_alone_would_take_computing_for_communication(gpu):
    window = train(gpu, CPU, 0.001, 0.1, 0.01, every=1)
    assert longest(window) == "communication"


def test_what_the_device_has_not_done_yet_counts_in_the_next_window_and_is_not_waited_for(gpu):
    engine = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
    engine.device = GPU
    seconds = Clock(GPU)
    gpu.run(3)
    seconds.mark("compute")
    gpu.host = 1
    assert seconds.measure(engine).ranks[0].compute == 0
    assert gpu.host == 1
    gpu.wait()
    assert seconds.measure(engine).ranks[0].compute == 3
    gpu.run(5)  # an evaluation
    gpu.wait()
    seconds.leave_out(5)
    gpu.run(2)
    seconds.mark("compute")
    gpu.wait()
    assert seconds.measure(engine).ranks[0].compute == 2


def test_a_matrix_product_is_timed_without_the_time_to_start_it_and_to_learn_of_its_end(gpu):
    def product() -> None:
        gpu.run(0.002)
        gpu.host += 0.0005

    gpu.host = 1.0
    assert clock.seconds_of(GPU, product) == pytest.approx(0.002)
    assert gpu.host == pytest.approx(1.002)


def test_events_do_not_pile_up_in_a_long_window(gpu):
    times = clock.DeviceTimes(GPU)
    for _ in range(5 * clock.MOST_EVENTS):
        gpu.run(0.5)
        gpu.wait()
        times.mark("compute")
        assert len(times._spans) <= clock.MOST_EVENTS
    assert times.take() == {"compute": pytest.approx(2.5 * clock.MOST_EVENTS)}
    assert times.take() == {}


# ---- --profile


def profiled(profile: Profile, steps: range, *, products: int = 1, failed: bool = False) -> None:
    """Call the feature as a run does."""
    features = Features([profile])
    profile.prepare(SimpleNamespace(clock=Clock(), features=features))
    for number in steps:
        for _ in range(products):
            torch.ones(2) @ torch.ones(2)
        for after_step in features.after_step:
            after_step(SimpleNamespace(number=number))
    for feature in features.all:
        feature.close(failed=failed)


@pytest.mark.parametrize(
    ("trained", "recorded", "said"),
    [
        (9, 2, "profile: steps 106 to 107, a file per rank: {out}/profile (open one at ui.perfetto.dev)"),
        (6, 1, "profile: only 1 of 2 steps: the run is over (--profile 2 begins after 5 steps)"),
        (4, 0, "profile: only 0 of 2 steps: the run is over (--profile 2 begins after 5 steps)"),
        (None, 0, ""),
    ],
    ids=["whole", "cut", "short", "failed"],
)
def test_steps_are_recorded_after_five(trained, recorded, said, engine, tmp_path, capsys):
    flags, alive = Namespace(profile=2, output_dir=tmp_path), []
    output = RunOutput(engine, tmp_path, progress=False)

    profile = Profile(engine, flags, output, lambda: alive.append(True))
    profiled(profile, range(101, 101 + (trained or 6)), failed=trained is None)
    assert said.format(out=tmp_path) in capsys.readouterr().out
    path = tmp_path / "profile" / "rank-0.json"
    assert path.exists() == bool(recorded)
    if recorded:
        names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
        assert names.count("aten::dot") == recorded
        assert alive


@pytest.mark.parametrize("most", [1000, 40_000])
def test_without_room_an_earlier_profile_stays_and_no_file_is_said_to_be_there(most, engine, tmp_path, capfd):
    """torch's library tells nobody."""
    path = tmp_path / "profile" / "rank-0.json"
    path.parent.mkdir()
    path.write_text("of an earlier run")
    profile = Profile(engine, Namespace(profile=1, output_dir=tmp_path), RunOutput(engine, tmp_path, progress=False))
    with no_room(most):
        profiled(profile, range(8), products=100)
    said = capfd.readouterr()
    assert "open one at" not in said.out
    assert f"warning: rank 0 has no profile (no room for {path}, with " in said.err
    assert path.read_text() == "of an earlier run"
    assert list(path.parent.iterdir()) == [path]
