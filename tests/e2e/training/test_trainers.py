"""exact_loader in the loops of others, as they are: the programs of tests/peers with the diffs of docs/loader.md."""

import json
import sys

import pytest

from tests.peers import __main__ as peers

WITH = {peer.words.split("_")[0]: peer for peer in peers.LOADERS if peer.with_loader}
# SIGKILL after a step, within one, in an evaluation. A file that is cut in the middle, and SIGTERM, are the trainer's own.
KILLS = {5: ("--kills", "3", "--signals", "one,all")}
# HF Trainer and Lightning do not repeat an evaluation before which the epoch was saved.
KILLS[13] = ("--kills", "2", "--signals", "one,all")
WITHIN = ("--only-kill", "2", "--signals", "one,all")  # alone: mpirun imports torch in each run
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.leaves("vader_segment", "ompi.")]


def interpreter(peer):
    """Return a Python that has the trainer: this one, or that of `make peers`. CI has no time for more than the first."""
    if not peer.environment:
        return sys.executable
    program = peers.ROOT / f".venv-{peer.environment}/bin/python"
    if not (program.parents[1] / "complete").exists():
        pytest.skip(f"{peer.package} is not installed: make peers makes an environment with it")
    return str(program)


def audited(peer, ranks, folder, options, **variables):
    """Return the exit code of the audit, the guarantees that fail, with what is said of them, and those that always hold."""
    code = peers.audit(peer, interpreter(peer), ranks, folder / "audit", *options, **variables)
    kills = json.loads((folder / "audit/audit.json").read_text())["kills"]
    assert all(kill["verdicts"] for kill in kills), kills
    wrong = {f"{kill['kill']}, {name}": verdict["text"] for kill in kills for name, verdict in kill["verdicts"].items()
             if verdict["status"] == "fails"}  # fmt: skip
    holds = ({name for name, verdict in kill["verdicts"].items() if verdict["status"] == "ok"} for kill in kills)
    return code, wrong, set.intersection(*holds)


# Saved within an epoch of 13 steps, and at its end.
@pytest.mark.parametrize(("ranks", "steps"), [(1, 5), (2, 5), (1, 13)])
@pytest.mark.parametrize("name", WITH)
def test_a_trainer_that_is_killed_ends_with_the_same_bits(name, ranks, steps, tmp_path):
    kills = WITHIN if WITH[name].launcher else KILLS[steps]
    code, wrong, holds = audited(WITH[name], ranks, tmp_path, kills, SAVE_EVERY=str(steps))
    assert (code, wrong) == (0, {})
    assert holds >= {"resumes", "samples", "random numbers", "final weights", "number of steps"}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["torch", "horovod"])
def test_two_ranks_go_on_as_one_or_three(name, ranks, tmp_path):
    """A step keeps its 16 samples, and each is used as often: 6, 5 and 5 of them on three ranks. Bits are not compared."""
    kills = WITHIN if WITH[name].launcher else KILLS[5]
    code, wrong, holds = audited(WITH[name], 2, tmp_path, kills, then=ranks, BATCH="8")
    assert (code, wrong) == (0, {})
    assert holds >= {"resumes", "samples", "learning rates", "number of steps"}


@pytest.mark.parametrize("name", WITH)
def test_without_the_loader_it_ends_with_others(name, tmp_path):
    code, wrong, _ = audited(WITH[name]._replace(with_loader=False), 1, tmp_path, WITHIN)
    assert code == 1
    assert any(said.endswith("final weights") for said in wrong), wrong
