"""What a rank says that it is doing."""

import pytest
import torch

from hvdtrain.guards.activity import Activity


@pytest.fixture(autouse=True)
def dynamo():
    import torch._dynamo.callback  # as torch.compile does

    yield
    torch._dynamo.reset()


def test_a_compilation_is_a_phase_of_its_own_at_each_new_shape():
    seen, activity = [], Activity()
    activity.hear_of_compilations()
    activity.begin_step(0)
    activity.finish_step(1)

    def backend(graph, example):
        seen.append(activity.phase.name)
        return graph.forward

    compiled = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
    for size in (2, 3, 2):
        compiled(torch.ones(size))
        seen.append(activity.phase.name)
    assert seen == ["compilation", "step", "compilation", "step", "step"]


def test_compilations_are_heard_of_after_a_reset_of_the_compiler():
    """Which removes the callbacks of all others. One may have begun before the watch looks again."""
    activity, seen = Activity(), []

    def backend(graph, example):
        activity.hear_of_compilations()
        seen.append(activity.phase.name)
        return graph.forward

    for _ in range(3):
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
        seen.append(activity.phase.name)
        torch._dynamo.reset()
    assert seen == ["compilation", "start-up"] * 3


def test_the_phases_of_two_epochs_in_their_order():
    activity, seen = Activity(), []

    def then(*calls) -> None:
        for call, *arguments in calls:
            call(*arguments)
            seen.append(activity.phase.name)

    a = activity
    then((a.begin_step, 0), (a.compute,), (a.update,), (a.finish_step, 1), (a.begin_step, 1), (a.compute,), (a.update,))
    assert seen == ["first step"] * 3 + ["step"] * 3 + ["the end of a step"]
    seen.clear()
    then((a.compute,), (a.update,), (a.finish_step, 2), (a.leave_steps,), (a.begin_step, 2))  # a second update
    assert seen == ["step", "the end of a step", "step", "between epochs", "step"]


def test_what_makes_progress_begins_the_limit_anew():
    activity, moves = Activity(), []
    for call in (lambda: activity.begin_step(0), lambda: activity.finish_step(1), activity.update, activity.heartbeat,
                 activity.leave_steps):  # fmt: skip
        before = activity.moves
        call()
        moves.append(activity.moves - before)
    assert moves == [1] * 5
    with activity.during("checkpoint", 3.0):
        assert (activity.moves, activity.phase) == (6, ("checkpoint", 3.0))
    assert activity.moves == 7


def test_a_collective_inside_another_leaves_that():
    activity = Activity()
    with activity.waiting("outer"):
        with pytest.raises(KeyError), activity.waiting("inner"):
            raise KeyError
        assert activity.collective == "outer"
    assert activity.collective is None
