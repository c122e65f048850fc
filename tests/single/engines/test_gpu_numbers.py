"""What is computed for GPUs, on a CPU: the gradients on the wire, the comparison of replicas, what --deterministic sets."""

import math
import os
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.checkpoint import sums
from hvdtrain.engines import accelerators
from hvdtrain.engines.choice import choose_amp, default_predivision, start_engine
from hvdtrain.engines.compression import GradientCompressor, in_memory_order
from hvdtrain.engines.ddp import DdpEngine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.horovod import HorovodEngine
from hvdtrain.engines.single import SerialEngine
from hvdtrain.guards import limits
from hvdtrain.guards.activity import Activity
from hvdtrain.inputs.sharding import seed_generators

# ---- gradients on the wire


def relative_error(ranks: int, predivide: float) -> float:
    """Return the error of the mean of small gradients (root mean square 4.5e-5), summed in float16, two by two."""
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(4000, generator=generator) * 4.5e-5  # the same on all ranks: no error averages out
    compressor = GradientCompressor(torch.float16, predivide, predivide / ranks)
    sums = [compressor.compress(gradient)[0] for _ in range(ranks)]
    while len(sums) > 1:
        sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
    sent, part = compressor.compress(gradient)
    mean = compressor.decompress(sent.copy_(sums[0]), part)
    return float((mean - gradient).norm() / gradient.norm())


@pytest.mark.parametrize(
    ("ranks", "factor", "largest"), [(2, 2, 65_504), (8, 8, 65_504), (64, 8, 8_188), (512, 16, 2_047)]
)
def test_small_gradients_survive_fp16_on_many_ranks_and_large_ones_do_not_overflow(ranks, factor, largest):
    assert default_predivision("fp16", ranks) == factor
    assert relative_error(ranks, factor) < 2.1 * relative_error(8, 8.0) < 0.007
    compressor = GradientCompressor(torch.float16, factor, factor / ranks)
    sent, part = compressor.compress(torch.tensor([float(largest)]))
    sent.copy_(sent.double() * ranks)
    assert sent.isfinite()
    assert compressor.decompress(sent, part).item() == pytest.approx(largest, rel=2e-3)


@pytest.mark.parametrize("wire", [None, torch.float16, torch.bfloat16])
def test_a_bucket_has_the_bits_that_its_gradients_have_one_by_one_and_takes_few_kernels(wire):
    shapes = [(3,), (4, 3, 3, 3), (2, 5)] * 20
    gradients = [torch.randn(shape) * 3 for shape in shapes]
    gradients[1] = gradients[1].to(memory_format=torch.channels_last)
    gradients[2] = gradients[2].double()
    compressor = GradientCompressor(wire, 4.0, 4.0 / 8)
    with Counted() as counted:
        sent, parts = compressor.together(gradients)
        seen = [tensor.clone() for tensor in sent]
        restored = [compressor.decompress(tensor, part) for tensor, part in zip(sent, parts, strict=True)]
    for gradient, tensor, back in zip(gradients, seen, restored, strict=True):
        alone = in_memory_order(gradient).div(4.0).to(wire or gradient.dtype)
        assert tensor.is_contiguous()
        assert torch.equal(tensor, alone)
        expected = alone.to(gradient.dtype).mul(0.5).as_strided(gradient.shape, gradient.stride())
        assert (back.dtype, back.stride()) == (gradient.dtype, gradient.stride())
        assert torch.equal(back, expected)
    made = ("clone", "empty_like", "as_strided", "permute")  # memory and views: no kernels
    assert sum(count for name, count in counted.calls.items() if name not in made) <= 4


class Counted(TorchDispatchMode):
    """Counts operations; each of a GPU starts at least one kernel, but those on lists few for all of their tensors."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


def test_the_divisor_is_a_power_of_two_on_many_ranks_and_one_without_fp16():
    for ranks in [*range(1, 70), 511, 1024, 5000]:
        factor = default_predivision("fp16", ranks)
        assert factor == ranks if ranks <= 8 else math.log2(factor) % 1 == 0 and 8 <= factor <= max(8, math.sqrt(ranks))
        assert default_predivision("none", ranks) == default_predivision("bf16", ranks) == 1.0


# ---- broadcasts and comparisons


def test_horovod_broadcasts_what_nccl_cannot_carry_as_bytes_of_the_same_memory():
    got: dict[str, Tensor] = {}
    engine: Any = object.__new__(HorovodEngine)
    engine.activity = Activity()
    engine.hvd = SimpleNamespace(
        broadcast_parameters=lambda tensors, root_rank: got.update(tensors),
        broadcast_=lambda tensor, root_rank, name: got.update({name: tensor}),
    )
    sent = {
        "mask": torch.tensor([True, False]),
        "int16": torch.tensor([[1, -2]], dtype=torch.int16),
        "scalar": torch.tensor(True),
        "channels_last": torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last),
        "columns": torch.randn(2, 3).t(),
    }
    model = torch.nn.Module()
    for name, tensor in sent.items():
        model.register_buffer(name, tensor)
    engine.broadcast_model(model)
    in_model = dict(got)
    for name, tensor in sent.items():
        engine.broadcast_(tensor, name)
        for seen in (in_model[name], got[name]):
            assert seen.is_contiguous()
            assert seen.data_ptr() == tensor.data_ptr()
            assert seen.dtype == (torch.uint8 if name in ("mask", "int16", "scalar") else tensor.dtype)


class Largest(TorchDispatchMode):
    """Records the largest tensor in bytes that an operation returns in memory of its own."""

    bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            old = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
            if result.untyped_storage().data_ptr() not in old:
                self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


PARAMETERS = {
    "float32": torch.randn(2**21 + 3),
    "bf16": torch.randn(2**21).to(torch.bfloat16),
    "channels_last": torch.randn(512, 512, 3, 3).to(memory_format=torch.channels_last),
    "tall": torch.randn(2, 2**20).t(),
    "wide": torch.randn(2**20, 2).t(),
    "complex": torch.randn(2**20 + 3, dtype=torch.complex64),
    "float64": torch.randn(2**19, 3, dtype=torch.float64).t(),
    "complex128": torch.randn(2**18 + 3, dtype=torch.complex128),
    "scalar": torch.tensor(3.5),
    "one of a column": torch.randn(4, 3, dtype=torch.float64)[:1, 1],
    "empty": torch.randn(0),
    "empty columns": torch.randn(4, 0).t(),
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_replicas_are_compared_in_chunks_with_the_same_sums(kind):
    parameter = PARAMETERS[kind]
    word = torch.int16 if parameter.dtype == torch.bfloat16 else torch.int32
    bits = parameter.clone(memory_format=torch.contiguous_format).reshape(-1).view(word)
    whole = (bits * torch.arange(1, len(bits) + 1)).sum()
    with Largest() as largest:
        assert sums.tensor_checksum(parameter) == whole
    assert largest.bytes <= 2**22


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.int64, torch.int8, torch.complex64]
)
def test_each_sign_of_a_replica_counts(dtype):
    """Of numbers of 8 bytes at even places, none did."""
    values = torch.ones(6, dtype=dtype)
    seen = [sums.tensor_checksum(torch.where(torch.arange(6) == place, -values, values)) for place in range(7)]
    assert len(set(map(int, [*seen, sums.tensor_checksum(-values)]))) == 8


def test_replicas_are_compared_on_a_gpu_by_few_kernels():
    """GPT-2's parameters, and ResNet's of many small ones. The device is `meta`, in place of a GPU."""
    for shapes in ([(50304, 768), (1024, 768), *[(768,), (3072, 768), (768, 3072)] * 48], [(64,)] * 160):
        parameters = [torch.empty(shape, device="meta") for shape in shapes]
        with Counted() as counted, Largest() as largest:
            sums.checksums(parameters)
        kernels = sum(counted.calls[name] for name in ("arange", "mul", "sum", "add", "add_", "zeros", "stack", "cat"))
        chunks = sum(parameter.numel() for parameter in parameters) // 2**22
        assert kernels <= 2 * len(parameters) + 3 * chunks + 5
        assert largest.bytes <= 2**26


# ---- the state of a resumed optimizer


@pytest.mark.parametrize("fused", [False, True])
def test_step_of_a_resumed_adam_stays_where_rank_zero_has_it(fused, monkeypatch):
    """Rank 1's device is `meta`, in place of a GPU."""
    made: list[tuple[str, torch.device]] = []

    class Ranks(SerialEngine):
        plan: object = None

        def broadcast_object(self, value: object, name: str) -> Any:
            Ranks.plan = value if self.rank == 0 else Ranks.plan
            return Ranks.plan

        def broadcast_(self, tensor: Tensor, name: str) -> None:
            made.append((name, tensor.device))

    def rank(number: int, device: str) -> tuple[Ranks, torch.optim.Optimizer]:
        engine = Ranks(tuning=False, rank=0, size=1, launcher="none")
        engine.rank, engine.device = number, torch.device(device)
        weight = torch.nn.Parameter(torch.ones(3, device=device))
        return engine, torch.optim.Adam([weight])

    monkeypatch.setattr(SerialEngine, "broadcast_optimizer_state", SerialEngine.__base__.broadcast_optimizer_state)
    engine, optimizer = rank(0, "cpu")
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    for name in ("exp_avg", "exp_avg_sq", *(["step"] if fused else [])):  # as on a GPU
        state[name] = state[name].to("meta")
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)  # meta tensors have no values
    engine.device = torch.device("meta")
    engine.broadcast_optimizer_state(optimizer)
    made.clear()
    engine, optimizer = rank(1, "meta")
    engine.broadcast_optimizer_state(optimizer)
    expected = {"step": "meta" if fused else "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert {name: value.device.type for name, value in state.items()} == expected
    assert [device.type for _, device in made] == list(expected.values())


# ---- precision


@pytest.mark.parametrize(
    ("device", "able", "asked", "more", "expected"),
    [
        ("cpu", True, None, (), "off"),
        ("cpu", True, "auto", (), "bf16"),
        ("cuda", True, None, (), "bf16"),
        ("cuda", False, None, (), "off"),
        ("cuda", True, "off", (), "off"),
        ("cuda", True, "fp16", (), "fp16"),
        ("cpu", True, None, ("auto",), "bf16"),
        ("cpu", False, None, ("auto",), "off"),
        ("cpu", True, "off", ("auto",), "off"),
        # A run that is resumed stays as it began.
        ("cpu", True, None, ("auto", "off"), "off"),
        ("cpu", False, None, ("off", "bf16"), "bf16"),
        ("cuda", True, None, ("off", "off"), "off"),
        ("cpu", True, "bf16", ("off", "off"), "bf16"),
    ],
)
def test_gpus_compute_in_bf16_unless_told_otherwise_and_some_programs_on_cpus(
    device, able, asked, more, expected, monkeypatch
):
    monkeypatch.setattr("hvdtrain.engines.choice.computes_in_bf16", lambda device: able)
    engine = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
    engine.device = torch.device(device)
    assert choose_amp(engine, asked, *more) == expected
    automatic = device == "cuda" or asked == "auto" or more[:1] == ("auto",)
    assert bool(engine.notes) == (asked in (None, "auto") and (expected == "bf16" or (automatic and len(more) < 2)))


@pytest.fixture
def settings():
    """Give torch's settings back afterwards."""
    deterministic, fill = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    cudnn = {name: getattr(torch.backends.cudnn, name) for name in ("benchmark", "allow_tf32", "deterministic")}
    precision = torch.get_float32_matmul_precision()
    environment = dict(os.environ)
    for name in accelerators.REPEATABLE:
        os.environ.pop(name, None)
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.set_float32_matmul_precision(precision)
    for name, value in cudnn.items():
        setattr(torch.backends.cudnn, name, value)
    os.environ.clear()
    os.environ.update(environment)


class Gpu(SerialEngine):
    """Has a GPU, and remembers the variables that were there when it started."""

    seen: dict[str, str]

    def __init__(self, **options: Any):
        super().__init__(**options)
        Gpu.seen = dict(os.environ)

    def choose_device(self, wanted: str) -> torch.device:
        return torch.device("cpu" if wanted == "cpu" else "cuda")


REPEATABLE = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple",
}  # fmt: skip


@pytest.mark.parametrize(
    ("deterministic", "tuning", "device", "algorithms", "benchmark", "tf32", "notes"),
    [
        (True, True, "auto", True, False, True, ["deterministic: algorithms", "products of float32 in TF32"]),
        (True, False, "auto", True, False, False, ["deterministic: algorithms"]),
        (False, True, "auto", False, True, True, ["cuDNN times its algorithms", "products of float32 in TF32"]),
        (False, False, "auto", False, False, False, []),
        (False, True, "cpu", False, False, False, []),
        (True, True, "cpu", False, False, False, ["--deterministic changes nothing on CPUs"]),
    ],
)
def test_deterministic_and_fast_arithmetic_are_set_before_the_engine_starts_and_said(
    settings, monkeypatch, deterministic, tuning, device, algorithms, benchmark, tf32, notes
):
    compared: list[object] = []
    monkeypatch.setattr("hvdtrain.engines.choice.engine_class", lambda name: Gpu)
    monkeypatch.setattr("hvdtrain.engines.gpu.require_own", compared.append)
    monkeypatch.setattr("hvdtrain.engines.gpu.pci_address", lambda device: "0000:00:00.0")
    threads = torch.get_num_threads()
    engine = start_engine("serial", tuning=tuning, device=device, threads=threads, deterministic=deterministic)
    assert compared == [engine]  # with the GPUs of the other ranks
    assert engine.activity.asynchronous == (device != "cpu")
    assert torch.are_deterministic_algorithms_enabled() == algorithms
    assert torch.utils.deterministic.fill_uninitialized_memory != algorithms
    assert torch.backends.cudnn.benchmark == benchmark
    assert (torch.get_float32_matmul_precision() == "high") == tf32
    set_ = {name: Gpu.seen.get(name) for name in REPEATABLE}
    assert set_ == (REPEATABLE if algorithms else dict.fromkeys(REPEATABLE))
    said = [note for note in engine.notes if not note.startswith("malloc")]
    assert [note[: len(start_)] for note, start_ in zip(said, notes, strict=True)] == notes


def test_dataparallel_seeds_all_its_gpus_each_differently(monkeypatch):
    generators = [torch.Generator() for _ in range(4)]
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: generators[0].manual_seed(seed))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = torch.get_rng_state()
    seed_generators(2**63 + 5, torch.device("cuda", 0))
    torch.set_rng_state(before)
    seeds = [generator.initial_seed() % 2**64 for generator in generators]
    assert seeds[0] == 2**63 + 5
    assert len(set(seeds)) == 4


# ---- start of the engines


@pytest.mark.parametrize(("nccl", "gpus", "tuning", "waits", "expected"), [(1, 8, True, 1, "1"), (0, 8, True, 1, None),
                         (1, 0, True, 1, None), (1, 8, False, 1, None), (1, 8, True, 0, None)])  # fmt: skip
def test_sums_complete_on_a_gpu_if_their_caller_waits(nccl, gpus, tuning, waits, expected, settings, monkeypatch):
    seen: list[str | None] = []
    hvd: Any = SimpleNamespace(nccl_built=lambda: nccl, mpi_enabled=lambda: True, gloo_built=lambda: True)
    hvd.init = lambda: seen.append(os.environ.get(name))
    hvd.mpi_ops = SimpleNamespace(mpi_lib=SimpleNamespace(**{"horovod_torch_caller_waits": bool} if waits else {}))
    hvd.rank = hvd.local_rank = lambda: 0
    hvd.size = hvd.local_size = lambda: 1
    name = "HOROVOD_ENABLE_ASYNC_COMPLETION"
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=hvd))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    HorovodEngine(tuning=tuning, rank=0, size=1, launcher="none")
    assert seen == [expected]


def test_no_time_limit_of_ddp_or_of_nccl_ends_a_job(settings, monkeypatch):
    """Ranks meet at the store once more, when NCCL connects in the first collective on GPUs."""
    given: dict[str, Any] = {}

    def started(backend: str, **options: Any) -> None:
        given.update(options, backend=backend, monitoring=os.environ.get("TORCH_NCCL_ENABLE_MONITORING"))
        raise ValueError("far enough")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", started)
    with pytest.raises(UserError, match="far enough"):
        DdpEngine(tuning=True, rank=0, size=1, launcher="none")
    assert (given["backend"], given["monitoring"]) == ("cpu:gloo,cuda:nccl", "0")
    assert min(given["timeout"].days, given["store"].timeout.days) >= 30


def test_the_engines_shutdown_has_a_time_limit_whatever_it_does(monkeypatch):
    """hvd.shutdown may spin for ever, where a GPU waits for a rank that has ended."""
    watch = limits.Leaving("rank 0", 1000.0)
    monkeypatch.setattr(limits, "_current", watch)
    seen: list[bool] = []

    class Ends(SerialEngine):
        def shutdown(self) -> None:
            seen.append(watch.disconnects)

    monkeypatch.setattr("hvdtrain.engines.choice.engine_class", lambda name: Ends)
    with start_engine("serial", tuning=False, device="cpu"):
        seen.append(watch.disconnects)
    assert (seen, watch.disconnects) == ([False, True], False)
