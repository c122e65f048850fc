"""`hvdtrain.lm` on several ranks: one loss whatever their number, a killed run's bits, refusals, and the published loss."""

import os
from pathlib import Path

import pytest

from tests.audited import audit
from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, Done, events, launch, summary
from tests.single.output.test_run_output import scalars

SHAKESPEARE = Path(
    os.environ.get("HVDTRAIN_TEST_TEXT", str(ROOT.parent / "shared" / "data" / "text" / "tinyshakespeare.txt"))
)
# 337 windows to train on, 12 in a step: the first epoch ends at step 29, with one window.
TINY = "--layers 1 --heads 2 --width 16 --context 8 --steps 34 --warmup-steps 2 --threads 1 --no-progress"


def lm(ranks: int, flags: str, **options) -> Done:
    start = LAUNCHERS["mpirun"].format(ranks=ranks)
    return launch(f"{start} {PYTHON} -m hvdtrain.lm {TINY} {flags}", **options)


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall, take one down\n" for n in range(99, 0, -1))[:3000])
    return path


@pytest.mark.slow
def test_the_loss_does_not_depend_on_the_ranks(book, tmp_path):
    curves = {}
    for ranks in (1, 2, 3):
        directory = tmp_path / str(ranks)
        done = lm(ranks, f"--text {book} --amp off --log-steps 1 --sample-tokens 0 --output-dir {directory}")
        assert done.code == 0, done
        lines = events(directory, "train")
        curves[ranks] = [(line["step"], line["samples"], line["learning_rate"]) for line in lines]
        losses = [*(line["loss"] for line in lines), summary(directory)["validation_loss"]]
        assert summary(directory)["validation_count"] == 299
        if ranks == 1:
            alone = losses
        assert losses == pytest.approx(alone, rel=1e-4)
    assert curves[1] == curves[2] == curves[3]
    assert (len(curves[1]), curves[1][28][1]) == (34, 337)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(book, tmp_path):
    """With dropout, and samples drawn in between: neither shifts the random numbers of what follows."""
    flags = f"--text {book} --dropout 0.1 --checkpoint-steps 10"
    words = f"{TINY} {flags} --sample-tokens 9 --output-dir {{out}}"
    done = audit(tmp_path, f"-np 2 --launcher mpirun --signals one --only-kill 1 --keep -- -m hvdtrain.lm {words}")
    assert done.returncode == 0, done
    assert len(events(tmp_path / "audit/out/kill-1", "sample")) == 2
    silent = lm(2, f"{flags} --sample-tokens 0 --output-dir {tmp_path / 'silent'}")
    assert silent.code == 0, silent
    both = [summary(path)["parameters_sha256"] for path in (tmp_path / "silent", tmp_path / "audit/out/whole")]
    assert both[0] == both[1]


@pytest.mark.slow
def test_a_compiled_model_learns_the_same_and_tensorboard_shows_it(book, tmp_path):
    """A step of the epoch's end has fewer windows: compiled for each shape."""
    pytest.importorskip("tensorboard")

    for name, how in {"eager": "", "compiled": "--compile --tensorboard"}.items():
        done = lm(2, f"--text {book} --amp off --sample-tokens 5 {how} --output-dir {tmp_path / name}", timeout=600)
        assert done.code == 0, done
    losses = [summary(tmp_path / name)["validation_loss"] for name in ("eager", "compiled")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    shown = scalars(tmp_path / "compiled" / "tensorboard")["validation/loss"]
    assert shown[-1] == (337 + 60, pytest.approx(losses[1]))


@pytest.mark.slow
@pytest.mark.timeout(1900)  # two minutes on quiet cores; fourteen were seen beside other tests
@pytest.mark.skipif(not SHAKESPEARE.is_file(), reason=f"no {SHAKESPEARE}; name the text by HVDTRAIN_TEST_TEXT")
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_shakespeare_reaches_the_published_loss_over_the_whole_held_out_part(amp, tmp_path):
    """On two ranks: that the loss does not depend on their number is another test's."""
    start = LAUNCHERS["mpirun"].format(ranks=2)
    flags = f"--text {SHAKESPEARE} --amp {amp} --threads 1 --no-progress --output-dir {tmp_path}"
    done = launch(f"{start} {PYTHON} -m hvdtrain.lm {flags}", timeout=1800)
    assert done.code == 0, done
    assert summary(tmp_path)["validation_count"] == 111_539
    assert summary(tmp_path)["validation_loss"] <= 1.88  # nanoGPT's README, for an estimate from 240 windows
