"""A value that only decides what is printed is no state of a training: program/shown.py."""

import pytest

from hvdtrain.program.shown import only_decides_prints

CHANGES_ONLY = "for step in steps:\n    kept = kept + 1\n    kept += 1"
PRINTS = {
    "a change of phase": "for step in steps:\n    if kept != phase:\n        print(phase)\n    kept = phase",
    "a warning that comes once": "def once(key):\n    if key not in kept:\n        kept.add(key)\n        log.warning(key)",
    "an estimate by the clock": "def rate():\n    return kept / (time.time() - start)\nkept = 1",
    "a text by the clock": (
        "def __str__(self):\n    rate = kept / (time.time() - start)\n    return f'{rate:.1f} it/s, {kept} done'\nkept = 1"
    ),
    "printed now and then": "if kept % 10 == 0:\n    print(step)\nelse:\n    pass\nkept += 1",
    "in a loop, and in a try": "for one in all:\n    try:\n        kept.append(one)\n    finally:\n        kept.clear()",
    "changed alone": CHANGES_ONLY,
    "an attribute": "class A:\n    def tick(self):\n        self.kept += 1\n        if self.kept > 3:\n            print(1)",
}
TRAINS = {
    "printed itself": "print(kept)",
    "printed where it decides": "if acc > kept:\n    kept = acc\n    print(kept)",
    "a rate": "if kept > 3:\n    step.lr = 0.1",
    "a call": "if kept > 3:\n    save(net)",
    "an else": "if kept > 3:\n    print(1)\nelse:\n    step.lr = 1",
    "returned": "def f():\n    return kept",
    "a condition of a loop": "while kept < 3:\n    kept += 1",
    "another variable": "other = kept",
    "in another condition": "if other:\n    step.lr = kept",
    "a part of it": "if first:\n    print(1)\nfor one in kept:\n    use(one)",
    "a method that tells": "if kept.pop():\n    step.lr = 0",
    "in a function that has the time": (
        "def main():\n    began = time.time()\n    step.lr = kept\n    print(time.time() - began)"
    ),
    "in a method that has the time": (
        "def update(self):\n    self.at = time.time()\n    loss = loss * self.kept\n    return f'{loss}'"
    ),
    "a lambda": "f = lambda: kept",
    "no use": "kept = 1",
    "within": "for step in steps:\n    if kept:\n        for x in xs:\n            print(x)",
}


def only_prints(source, path):
    path.write_text(source)
    return only_decides_prints(compile(source, str(path), "exec"), "kept")


@pytest.mark.parametrize("case", PRINTS)
def test_what_only_decides_what_is_printed(case, tmp_path):
    assert only_prints(PRINTS[case], tmp_path / "program.py")


@pytest.mark.parametrize("case", TRAINS)
def test_what_may_decide_more(case, tmp_path):
    assert not only_prints(TRAINS[case], tmp_path / "program.py")


def test_a_file_that_is_not_the_codes_says_nothing(tmp_path):
    (path := tmp_path / "program.py").write_text("# a line more\n@cache\ndef main():\n    if kept:\n        print(1)\n")
    code = compile(path.read_text(), str(path), "exec").co_consts
    (main,) = [one for one in code if hasattr(one, "co_name")]
    assert only_decides_prints(main, "kept")
    assert not only_decides_prints(main.replace(co_firstlineno=1), "kept")
    assert not only_decides_prints(main.replace(co_filename=str(tmp_path / "none.py")), "kept")
