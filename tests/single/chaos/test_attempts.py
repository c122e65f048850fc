"""What counts as held, and that what does not hold is seen."""

import pytest

from tests.chaos import attempts, test_environments
from tests.chaos.attempts import Attempt


def problems(tmp_path, command: str, expected: str = "", **options) -> list[str]:
    attempt = Attempt("it", "a kind", "something", command, **{"limit": 20, **options})
    return attempts.problems(attempt, tmp_path / "it", expected)


@pytest.mark.parametrize(
    ("command", "expected", "problem"),
    [
        ("true", {}, ""),
        ("false", {}, "exit code 1 instead of 0"),
        ("true", dict(says="wrong"), "does not say 'wrong'"),
        ("echo 'Traceback (most recent call last)'", {}, "says 'Traceback"),
        ("exit 2", dict(code=2), "0 lines of error instead of one"),
        ("echo error: a; echo error: b; exit 2", dict(code=2), "2 lines of error instead of one"),
        ("touch $TMPDIR/left", {}, "left in TMPDIR: left"),
        ("sleep 60", dict(limit=0.2), "not over after 0 s"),
        ("true", dict(check=lambda here, said: "this"), "this"),
        ("true", dict(expected="another"), "other bits: no summary.json"),
    ],
)
def test_what_does_not_hold_is_seen(command, expected, problem, tmp_path):
    found = problems(tmp_path, command, **expected)
    assert len(found) == bool(problem)
    assert "".join(found).startswith(problem)


def test_a_process_that_is_left_is_seen_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "GRACE_SECONDS", 0.2)
    assert problems(tmp_path, "sleep 300 > /dev/null 2>&1 &") == ["1 processes left"]


def test_every_attempt_is_sound():
    assert len({attempt.name for attempt in test_environments.ATTEMPTS}) == len(test_environments.ATTEMPTS) > 100
    for attempt in test_environments.ATTEMPTS:
        assert attempt.limit <= 300, attempt.name
        assert set(attempt.needs) <= {"root", "gcc", "setpriv", "unshare", "ip"}, attempt.name
