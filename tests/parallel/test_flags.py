"""Flags that change what goes over the network: the type, the bytes and the values of what the engine sends."""

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import mnist
from hvdtrain.engines.compression import carries_bf16
from hvdtrain.engines.errors import Failure
from hvdtrain.loop import step as step_module
from hvdtrain.loop.start import started
from tests.parallel.test_loop import a_run
from tests.single.training.small import fit

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


def one_step(engine, sent, *argv: str) -> tuple[Tensor, Tensor]:
    """Train a step; return what was sent for it, and the reduced gradient of the weights."""
    x = torch.full((2 * engine.size, 3), GRADIENT)
    found: list[Tensor] = []
    with a_run(engine, *argv, epochs=1, batch_size=2) as run:
        net = nn.Linear(3, 1, bias=False)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        for _ in run.epochs(1):
            for step in run.steps(x):
                del sent[:]
                for (inputs,) in step.batches():
                    step.backward(model(inputs).mean())
                step.update()
                found += [tensor for tensor in sent if tensor.numel() == WEIGHTS]
                gradient = net.weight.grad.clone().flatten()
    (wire,) = found
    return wire, gradient


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
    with a_run(engine, "--check-steps", str(every), epochs=1, batch_size=2) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

        def loss_of(step, inputs):
            if "guard.replicas" in asked:
                found.append(step.number - 1)
            del asked[:]
            return model(inputs).mean()

        fit(run, [torch.ones(10 * engine.size, 3)], loss_of)
    assert found == compared


def test_linear_scaling_and_its_warm_up_begin_at_the_rate_of_one_rank(engine, monkeypatch):
    words = (
        "--dataset digits --model convnet-nonorm --lr-scaling linear --lr-schedule constant --lr 1e-3 --warmup-epochs 1"
    )
    words += f" --batch-size 4 --train-samples {16 * engine.size} --epochs 2 --no-progress"
    flags = mnist.parse(["--engine", engine.name, *words.split()])
    rates = []
    update = step_module.Step.update
    monkeypatch.setattr(step_module.Step, "update", lambda step: (rates.append(step.lr), update(step))[1])
    with started(engine, flags, mnist.METRICS) as run:
        mnist.train(flags, run, mnist.load(flags, run))
    rise = [(1 + (engine.size - 1) * step / 4) for step in range(4)]
    assert rates == pytest.approx([1e-3 * factor for factor in [*rise, *[engine.size] * 4]])


def test_replicas_that_differ_end_the_run_on_every_rank(engine):
    if engine.size == 1:
        pytest.skip("one rank has nothing to be compared with")
    steps = []
    with pytest.raises(Failure, match=r"weights"), a_run(engine, "--check-steps", "2", epochs=1, batch_size=2) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

        def each(step):
            steps.append(step.number)
            if step.number == 3 and run.rank == run.size - 1:
                net.weight.data[0, 0] += 1.0

        fit(run, [torch.ones(20 * engine.size, 3)], lambda step, inputs: model(inputs).mean(), each=each)
    assert steps[-1] <= 4
