"""A run that was killed, started again: the same bits as one that was not; and what stands in the way of a restart."""

import socket

import pytest

from tests.chaos.lineage import all_struck, assert_equal_up_to_rounding, attacked, results, tally
from tests.e2e.launchers import events


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run that nothing disturbed: two ranks have one order of sums, whoever starts them."""
    directory = tmp_path_factory.mktemp("whole")
    done = attacked(directory, launcher="starter")
    assert done.code == 0, done
    return directory


@pytest.mark.slow  # test_restarts.py has the same, started again by the wrapper
def test_a_killed_run_ends_as_if_nothing_had_been(whole, tmp_path):
    """Other launchers, other places and a checkpoint that is half written: tests/e2e/commands/test_audit.py."""
    killed = attacked(tmp_path, attack=dict(rank=1, point="backward", count=5, kind="kill"), launcher="starter")
    assert (killed.code, killed.left_behind) == (137, 0), killed
    assert f"rank 1 on {socket.gethostname()} was killed by SIGKILL" in killed.stderr, killed
    assert all_struck(tmp_path), killed
    done = attacked(tmp_path, launcher="starter")
    assert done.code == 0, done
    assert results(tmp_path) == results(whole)
    assert tally(tmp_path) == (0, 0)  # samples lost, samples repeated
    (resumed,) = events(tmp_path, "resume")
    assert 0 < resumed["step"] < 16
    lines = events(tmp_path)
    assert [line["event"] for line in lines][0 :: len(lines) - 1] == ["start", "end"]  # one record of both parts
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_on_other_ranks_the_global_batch_and_every_sample_stay(tmp_path):
    """Two ranks, then three, on which the global batch of 64 cannot be dealt out evenly; one is killed; then two."""
    flags = "--model convnet-nonorm"
    for directory, parts in (("apart", ((2, "term"), (3, "kill"), (2, None))), ("whole", ((2, None),))):
        for ranks, kind in parts:
            attack = dict(rank=0, point="update", count=5, kind=kind, saved=kind == "kill") if kind else None
            done = attacked(tmp_path / directory, ranks=ranks, flags=flags, attack=attack)
            assert done.code == {"term": 75, None: 0}.get(kind, done.code or 137), done
            if ranks == 3:
                assert "global batch kept at 64: the run began on 2 ranks; now up to 22 per rank" in done.stdout, done
    assert tally(tmp_path / "apart") == (0, 0)
    assert_equal_up_to_rounding(tmp_path / "apart", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(600)  # five starts of a launcher
def test_virtual_ranks_have_the_same_bits_on_each_engine_although_single_ranks_were_killed(tmp_path):
    """One process, whole; three over MPI, two over Gloo, two under torchrun, of which one is killed each; then one."""
    flags = "--virtual-ranks 3 --model convnet"
    parts = (("mpirun", 3, 1, 5), ("gloo", 2, 0, 5), ("torchrun", 2, 1, 9), ("starter", 1, None, 0))
    done = attacked(tmp_path / "whole", ranks=1, batch=22, flags=flags, launcher="starter")
    assert done.code == 0, done
    for launcher, ranks, rank, count in parts:
        attack = None if rank is None else dict(rank=rank, point="backward", count=count, kind="kill", saved=True)
        done = attacked(tmp_path / "apart", ranks=ranks, batch=22, flags=flags, attack=attack, launcher=launcher)
        assert (done.code == 0) == (rank is None), done
    resumed = [line["step"] for line in events(tmp_path / "apart", "resume")]
    assert len(resumed) == 3, resumed
    assert 0 < resumed[0] <= resumed[1] <= resumed[2], resumed
    assert tally(tmp_path / "apart") == (0, 0)
    assert results(tmp_path / "apart") == results(tmp_path / "whole")


@pytest.mark.slow
def test_a_full_disk_is_said_and_training_goes_on(whole, tmp_path):
    done = attacked(tmp_path, attack=dict(rank=0, point="fsync", count=3, kind="full"))
    assert done.code == 0, done
    assert "No space left on device): training continues; the last good one is step-00000003" in done.stderr, done
    assert events(tmp_path, "error")[0]["kind"] == "checkpoint"
    assert results(tmp_path) == results(whole)
