"""Programs as people write them, on all ranks: as in plain PyTorch, and killed and resumed to the same bits."""

import contextlib

import pytest
import torch

from hvdtrain import training
from hvdtrain.loop.start import started
from hvdtrain.output.metric_names import Metric
from tests.parallel import programs
from tests.single.training.small import Killed, kill_at
from tests.twins.twin import digest

ALL = [*programs.FAST, *(pytest.param(program, marks=pytest.mark.slow) for program in programs.SLOW)]
# Steps: within an epoch, or at its end; at a head, which has what an epoch leaves.
KILLS, KILLS_OF_SLOW = (2, 4), (4, 6)


def trained(engine, program, *argv, accumulate=1, kill=None):
    """Return what the program returns. kill: the step in which it is killed, once it has done all of it but its end."""
    batch = programs.GLOBAL // engine.size // accumulate
    parser = training.parser("program", None, epochs=1, batch_size=batch)
    argv = ["--engine", engine.name, "--no-progress", "--accumulate", str(accumulate), *argv]
    flags = parser.parse(argv)
    with started(engine, flags, {"loss": Metric("min")}) as run:
        steps = run.steps

        def until_killed(*data, **options):
            for step in steps(*data, **options):
                yield step
                kill_at(kill)(step)

        run.steps = until_killed
        return program(run)


def expected(engine, program):
    if program is programs.batch_that_grows:
        return programs.batch_that_grows_plain(engine.size)
    plain = programs.PLAIN.get(program)
    return plain() if plain else program(programs.Alone("loss", "min"))


@pytest.mark.parametrize("program", ALL, ids=lambda program: program.__name__)
def test_a_program_equals_plain_pytorch_and_resumes_to_the_bit(engine, program, shared_directory):
    whole = trained(engine, program)
    torch.testing.assert_close(whole, expected(engine, program), rtol=1e-6, atol=1e-8)
    assert len(set(engine.all_gather_object(digest(whole), "digest"))) == 1
    kept = "--output-dir", shared_directory, "--checkpoint-steps", "1"
    for kill in KILLS if program in programs.FAST else KILLS_OF_SLOW:
        with contextlib.suppress(Killed):
            assert trained(engine, program, *kept, kill=kill) is None, "was not killed"
    assert digest(trained(engine, program, *kept)) == digest(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [p for p in [*programs.FAST, *programs.SLOW] if p not in programs.WHOLE], ids=lambda p: p.__name__
)
def test_a_program_equals_plain_pytorch_with_two_micro_batches(engine, program):
    if program is programs.batch_that_grows:
        pytest.skip("its batches stay whole: two of them make another step")
    torch.testing.assert_close(trained(engine, program, accumulate=2), expected(engine, program), rtol=1e-6, atol=1e-8)
