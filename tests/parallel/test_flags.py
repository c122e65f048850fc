"""Flags that change what goes over the network: the type, the bytes and the values of what the engine sends."""

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import mnist
from hvdtrain.engines.compression import carries_bf16
from hvdtrain.engines.errors import Failure
from hvdtrain.loop import step as step_module
from hvdtrain.loop.start import started
from tests.parallel.test_loop import trained

WEIGHTS = 3  # of nn.Linear(3, 1, bias=False)
GRADIENT = 6.0  # of each weight, on every rank


@pytest.fixture
def sent(engine, monkeypatch) -> list[Tensor]:
    """What the engine gives to the library below it, as it is: one entry for each group of gradients."""
    found: list[Tensor] = []
    if engine.size == 1:
        pytest.skip("one rank sends nothing")
    if engine.name == "horovod":
        import horovod.torch
        import horovod.torch.optimizer

        for library in (horovod.torch, horovod.torch.optimizer):  # compressed buckets are sent by our own call
            for name in ("allreduce_async_", "grouped_allreduce_async_"):
                monkeypatch.setattr(library, name, seen(found, getattr(library, name)))
    else:
        monkeypatch.setattr(torch.distributed, "all_reduce", seen(found, torch.distributed.all_reduce))
    return found


def seen(found: list[Tensor], call):
    def noted(what, *rest, **options):
        tensors = [what] if isinstance(what, Tensor) else what
        if all(tensor.is_floating_point() for tensor in tensors):
            found.append(torch.cat([tensor.detach().flatten() for tensor in tensors]))
        return call(what, *rest, **options)

    return noted


def mean(t, inputs):
    return t.model(inputs).mean()


def one_step(engine, sent, *argv: str) -> tuple[Tensor, Tensor]:
    """Train a step; return what was sent for it, and the reduced gradient of the weights."""
    found: list[Tensor] = []
    net = trained(
        engine, *argv, epochs=1, batch_size=2, net=nn.Linear(3, 1, bias=False), lr=0.0, loss=mean,
        data=[torch.full((2 * engine.size, 3), GRADIENT)], at_step=lambda t: sent.clear(),
        each=lambda t: found.extend(tensor for tensor in sent if tensor.numel() == WEIGHTS),
    ).net  # fmt: skip
    (wire,) = found
    return wire, net.weight.grad.flatten()


@pytest.mark.parametrize("flag", ["--compression fp16", "--fp16-allreduce"])
def test_compression_halves_the_bytes_on_the_wire(engine, sent, flag):
    wire, gradient = one_step(engine, sent, *flag.split())
    assert (wire.dtype, wire.numel() * wire.element_size()) == (torch.float16, 2 * WEIGHTS)
    assert wire.tolist() == pytest.approx([GRADIENT / engine.size] * 3, rel=1e-3)  # divided before the sum
    assert gradient.tolist() == pytest.approx([GRADIENT] * 3, rel=1e-3)


def test_bf16_halves_the_bytes_on_the_wire_without_a_division(engine, sent):
    if engine.name == "horovod" and not carries_bf16():
        pytest.skip("this Horovod was built without launch/patches/25")
    wire, gradient = one_step(engine, sent, "--compression", "bf16")
    assert (wire.dtype, wire.numel() * wire.element_size()) == (torch.bfloat16, 2 * WEIGHTS)
    assert wire.tolist() == gradient.tolist() == pytest.approx([GRADIENT] * 3, rel=4e-3)


@pytest.mark.parametrize("flag", ["--compression none", "--compression auto"])
def test_nothing_is_compressed_within_a_host(engine, sent, flag):
    wire, _ = one_step(engine, sent, *flag.split())
    assert (wire.dtype, wire.numel() * wire.element_size()) == (torch.float32, 4 * WEIGHTS)


def test_predivision_makes_smaller_what_is_sent_and_not_the_mean(engine, sent):
    wire, gradient = one_step(engine, sent, "--gradient-predivide-factor", "4")
    assert wire.tolist() == [GRADIENT / 4] * 3
    assert gradient.tolist() == pytest.approx([GRADIENT] * 3)


def test_reduction_sum_is_the_sum(engine, sent):
    wire, gradient = one_step(engine, sent, "--reduction", "sum")
    assert wire.tolist() == [GRADIENT] * 3
    assert gradient.tolist() == pytest.approx([GRADIENT * engine.size] * 3)


@pytest.mark.parametrize(("every", "compared"), [(2, [1, 2, 4]), (0, [])])
def test_replicas_are_compared_at_check_steps(engine, every, compared, monkeypatch):
    asked: list[str] = []
    all_gather = type(engine).all_gather
    monkeypatch.setattr(
        type(engine), "all_gather", lambda self, t, name: (asked.append(name), all_gather(self, t, name))[1]
    )
    if engine.size == 1:
        pytest.skip("one rank has nothing to be compared with")
    found = []

    def at_step(t):
        if "guard.replicas" in asked:
            found.append(t.step.number - 1)
        del asked[:]

    trained(engine, "--check-steps", str(every), epochs=1, batch_size=2, data=[torch.ones(10 * engine.size, 3)], loss=mean,
            at_step=at_step)  # fmt: skip
    assert found == compared


def test_linear_scaling_and_its_warm_up_begin_at_the_rate_of_one_rank(engine, monkeypatch):
    words = "--dataset digits --model convnet-nonorm --lr-scaling linear --lr-schedule constant --lr 1e-3"
    words += f" --warmup-epochs 1 --batch-size 4 --train-samples {16 * engine.size} --epochs 2 --no-progress"
    flags = mnist.parse(["--engine", engine.name, *words.split()])
    rates = []
    update = step_module.Step.update
    monkeypatch.setattr(step_module.Step, "update", lambda step: (rates.append(step.lr), update(step))[1])
    with started(engine, flags, mnist.METRICS) as run:
        mnist.train_mnist(flags, run, mnist.load_images(flags, run))
    rise = [(1 + (engine.size - 1) * step / 4) for step in range(4)]
    assert rates == pytest.approx([1e-3 * factor for factor in [*rise, *[engine.size] * 4]])


def test_replicas_that_differ_end_the_run_on_every_rank(engine):
    if engine.size == 1:
        pytest.skip("one rank has nothing to be compared with")
    steps = []

    def each(t):
        steps.append(t.step.number)
        if t.step.number == 3 and engine.rank == engine.size - 1:
            t.net.weight.data[0, 0] += 1.0

    with pytest.raises(Failure, match=r"weights"):
        trained(engine, "--check-steps", "2", epochs=1, batch_size=2, data=[torch.ones(20 * engine.size, 3)], loss=mean,
                each=each)  # fmt: skip
    assert steps[-1] <= 4


def test_another_compression_at_a_resume_is_said(engine, shared_directory, capsys):
    """The resumed run had other bits, without a word."""
    for epochs, flags in ((1, ()), (2, () if engine.size == 1 else ("--compression", "fp16"))):
        capsys.readouterr()
        trained(engine, "--output-dir", shared_directory, *flags, epochs=epochs)
    said = "--compression fp16 instead of none: gradients may be rounded differently" in capsys.readouterr().out
    assert said == (engine.size > 1 and engine.rank == 0)
