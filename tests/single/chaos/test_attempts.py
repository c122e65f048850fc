"""What counts as held, and that what does not hold is seen."""

import pytest

from tests.chaos import attempts, environments
from tests.chaos.attempts import Attempt


def problems(tmp_path, command: str, **expected) -> list[str]:
    made = attempts.run(Attempt("it", "a kind", "something", command, **{"limit": 20, **expected}), tmp_path, str)
    assert not made.skipped
    return made.problems


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("true", {}),
        ("echo error: wrong; exit 2", dict(code=2, says="wrong")),
        ("exit 3", dict(code=(2, 3))),
        ("test $HOME = $PWD/home && test -z ${GONE+x}", dict(prepare=lambda here: {"GONE": None})),
        ("echo said > file; cat file", dict(check=lambda here, said: "" if (here / "file").exists() else "other")),
    ],
)  # fmt: skip
def test_held(command, expected, tmp_path):
    assert problems(tmp_path, command, **expected) == []


@pytest.mark.parametrize(
    ("command", "expected", "problem"),
    [
        ("false", {}, "exit code 1 instead of 0"),
        ("true", dict(says="wrong"), "does not say 'wrong'"),
        ("echo 'Traceback (most recent call last)'", {}, "says 'Traceback"),
        ("exit 2", dict(code=2), "0 lines of error instead of one"),
        ("echo error: a; echo error: b; exit 2", dict(code=2), "2 lines of error instead of one"),
        ("touch $TMPDIR/left", {}, "left in TMPDIR: left"),
        ("sleep 60", dict(limit=0.2), "not over after 0 s"),
        ("true", dict(check=lambda here, said: "this"), "this"),
        ("true", dict(bits_of="another command"), "other bits: no summary.json"),
    ],
)
def test_not_held(command, expected, problem, tmp_path):
    (found,) = problems(tmp_path, command, **expected)
    assert found.startswith(problem)


def test_a_process_that_is_left_is_seen_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "GRACE_SECONDS", 0.2)
    assert problems(tmp_path, "sleep 300 > /dev/null 2>&1 &") == ["1 processes left"]


def test_what_is_missing_here_is_skipped(tmp_path):
    attempt = Attempt("it", "a kind", "something", "true", needs=("no-such-program",))
    made = attempts.run(attempt, tmp_path, str)
    assert (made.skipped, made.held) == ("needs no-such-program", False)


def test_what_does_not_hold_is_said_and_ends_with_one(monkeypatch, capsys):
    made = [
        Attempt("one", "a kind", "it holds", "true", limit=20),
        Attempt("two", "a kind", "it does not", "exit 3", limit=20),
    ]
    assert attempts.main(made, "attempts", ["--only", "one"]) == 0
    assert attempts.main(made, "attempts", []) == 1
    said = capsys.readouterr().out
    assert "| all | 2 | 1 | 0 |" in said
    assert said.splitlines()[-2] == "did not hold: 1"
    assert "two  exit code 3 instead of 0" in said.splitlines()[-1]


def test_every_attempt_is_sound():
    assert len({attempt.name for attempt in environments.ATTEMPTS}) == len(environments.ATTEMPTS) > 150
    for attempt in environments.ATTEMPTS:
        assert attempt.limit <= 300, attempt.name
        assert set(attempt.needs) <= {"root", "gcc", "setpriv", "unshare", "ip"}, attempt.name
