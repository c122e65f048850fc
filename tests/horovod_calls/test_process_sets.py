"""Process sets, named in `hvd.init` or added and removed later: collectives among their members only."""

import pytest
import torch


@pytest.fixture
def parts(hvd, sets):
    """Return the sets of even and odd ranks, and the one that has this rank."""
    if sets.kind == "none":
        pytest.skip("a job without process sets")
    if sets.kind == "static":
        even, odd = sets.even, sets.odd
    else:
        even, odd = (hvd.add_process_set(list(range(first, hvd.size(), 2))) for first in (0, 1))
    yield even, odd, (even, odd)[hvd.rank() % 2]
    hvd.barrier()
    if sets.kind == "dynamic":
        assert hvd.remove_process_set(even)
        assert hvd.remove_process_set(odd)
        assert (even.process_set_id, even.size()) == (None, None)


def test_who_is_in_which(hvd, parts):
    even, odd, own = parts
    assert (even.size(), odd.size()) == ((hvd.size() + 1) // 2, hvd.size() // 2)
    assert own.included()
    assert own.rank() == hvd.rank() // 2
    other = odd if own is even else even
    assert not other.included()
    with pytest.raises(ValueError, match="is not a member of the provided process set"):
        hvd.allreduce(torch.ones(1), process_set=other, name="foreign")


def test_a_collective_and_a_group_among_the_members(hvd, parts):
    _, _, own = parts
    members, options = own.ranks, {"process_set": own}
    x = torch.full((4,), float(hvd.rank() + 1))
    total = sum(rank + 1.0 for rank in members)
    for turn in range(3):
        assert hvd.allreduce(x, op=hvd.Sum, name="sum", **options).tolist() == [total] * 4, turn
        grouped = hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, name="group", **options)
        assert [tensor[0].item() for tensor in grouped] == [total, 2 * total], turn
        rows = hvd.allgather(torch.full((hvd.rank() + 1,), hvd.rank()), name="rows", **options)
        assert rows.tolist() == [rank for rank in members for _ in range(rank + 1)], turn
    hvd.barrier(process_set=own)


def test_members_of_one_set_do_not_wait_for_the_other(hvd, parts):
    even, odd, own = parts
    for first, second in ((even, odd), (odd, even)):
        if own is first:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="alone", process_set=own).item() == own.size()
        hvd.barrier()
        if own is second:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="alone", process_set=own).item() == own.size()


def test_the_global_set_goes_on_beside_them(hvd, parts):
    _, _, own = parts
    everyone = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="everyone")
    few = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="few", process_set=own)
    assert hvd.synchronize(few).item() == own.size()
    assert hvd.synchronize(everyone).item() == hvd.size()


def test_sets_are_added_and_removed_again_and_again(hvd, sets):
    if sets.kind != "dynamic":
        pytest.skip("a job without dynamic process sets")
    for turn in range(10):
        added = hvd.add_process_set([0, 1] if hvd.size() > 2 else [turn % 2])
        if added.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="added", process_set=added).item() == added.size()
        with pytest.raises(ValueError, match="duplicate"):
            hvd.add_process_set(added.ranks)
        hvd.barrier()
        assert hvd.remove_process_set(added)
        assert not hvd.remove_process_set(added)
