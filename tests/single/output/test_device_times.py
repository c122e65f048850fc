"""On a GPU, the phases are those of the device. A GPU in Python runs what is queued, while the host goes on."""

from types import SimpleNamespace

import pytest
import torch

from hvdtrain.engines.single import SerialEngine
from hvdtrain.output import clock
from hvdtrain.output.clock import CPU, Clock

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
