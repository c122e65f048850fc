"""docs/site/readability.py finds what it is for in bad samples, and nothing in good ones. (`make docs` runs it.)"""

import pytest

from tests.single.docs import program_of_the_site

readability = program_of_the_site("readability")
LONG = "word " * 26

BAD = {
    "a long sentence": (f"Short.\n\n{LONG}.\n", 3, "26 words"),
    "in a list": (f"- short\n- {LONG}\n", 2, "26 words"),
    "over lines of an item": (f"- {'word ' * 13}\n  {'word ' * 13}\n", 1, "26 words"),
    "in a cell": (f"| a | b |\n|---|---|\n| c | {LONG} |\n", 3, "26 words"),
    "a paragraph in an item": (f"1. Short.\n\n    {LONG}\n", 3, "26 words"),
    "a word": ("It survives an attack.\n", 1, "'attack': injected fault"),
    "a word in capitals": ("Undisturbed runs.\n", 1, "uninterrupted"),
    "the rate of what": ("A larger rate diverges.\n", 1, "learning rate"),
    "a file name": ("Short.\n\nSee [run.md](run.md).\n", 3, "'run.md' as a link's text"),
    "a share": ("# Speed\n\nIt reaches 91 % of the bound.\n", 3, "'91 %' without its command"),
    "a ratio": ("# Speed\n\nIt is 1.35 times as fast.\n", 3, "without its command"),
    "how long": ("# A\n\n`make run` is here.\n\n# B\n\nThis takes 6 s.\n", 7, "'takes 6 s' without its command"),
}
GOOD = {
    "at most 25": "word " * 25 + ".\n",
    "two sentences": f"{'Word ' * 20}. {'Word ' * 20}.\n",
    "code": f"```\n{LONG}\n```\n\n    {LONG}\n\n`{LONG}`\n",
    "code in two backticks": f"``{LONG} `code` {LONG}``\n",
    "a program": "See [augment.py](programs/augment.py) and [how to run](run.md).\n",
    "an address": f"[here](http://a/{LONG.replace(' ', '-')})\n",
    "with its command": "# Speed\n\nIt reaches 91 %.\n\n    make bench\n",
    "with its evidence": "# Speed\n\nIt is 1.35 times as fast ([evidence](evidence/speed.md)).\n",
    "words of the field": "The standard deviation. A learning rate. A rate of 5 per second. `attack` in code. Attacker.\n",
    "chosen": "# Limits\n\nA rank is ended after 30 s.\n",
}


@pytest.mark.parametrize("name", BAD)
def test_it_finds(name):
    text, line, what = BAD[name]
    ((number, said),) = readability.problems(text)
    assert number == line
    assert what in said


@pytest.mark.parametrize("name", GOOD)
def test_it_leaves(name):
    assert list(readability.problems(GOOD[name])) == []


def test_pages_that_are_too_long_are_named():
    assert readability.lengths({"README.md": 500, "a.md": 14_000}) == []
    assert "601 words" in readability.lengths({"README.md": 601})[0]
    assert "399 words" in readability.lengths({"README.md": 399})[0]
    assert "more than 15,000; most are on b.md, README.md" in readability.lengths({"README.md": 500, "b.md": 14_501})[0]


def test_the_command_prints_where_and_fails(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(BAD["a word"][0])
    monkeypatch.setattr("sys.argv", ["readability.py", str(page)])
    assert readability.main() == 1
    assert capsys.readouterr().out == f"{page}:1: 'attack': injected fault\n"
    page.write_text(GOOD["chosen"])
    assert readability.main() == 0
