"""A value that only decides what is printed is no state of a training: program/shown.py."""

import pytest

from hvdtrain.program.shown import only_decides_prints, only_sets_keys

CHANGES_ONLY = "for step in steps:\n    kept = kept + 1\n    kept += 1"
PRINTS = {
    "a change of phase": "for step in steps:\n    if kept != phase:\n        print(phase)\n    kept = phase",
    "a warning that comes once": "def once(key):\n    if key not in kept:\n        kept.add(key)\n        log.warning(key)",
    "an estimate by the clock": "def rate():\n    return kept / (time.time() - start)\nkept = 1",
    "a text by the clock": (
        "def __str__(self):\n    rate = kept / (time.time() - start)\n    return f'{rate:.1f} it/s, {kept} done'\nkept = 1"
    ),
    "a rate between two times": "now = time.time()\nprint(kept / (now - last))\nkept, last = 0, now",
    "sums of times": (
        "kept = {}\ndef timed(name):\n    t = time.time()\n    kept[name] += time.time() - t\n"
        "print(', '.join(f'{k} {v}' for k, v in kept.items()))"
    ),
    "printed now and then": "if kept % 10 == 0:\n    print(step)\nelse:\n    pass\nkept += 1",
    "in a loop, and in a try": "for one in all:\n    try:\n        kept.append(one)\n    finally:\n        kept.clear()",
    "changed alone": CHANGES_ONLY,
    "an attribute": "class A:\n    def tick(self):\n        self.kept += 1\n        if self.kept > 3:\n            print(1)",
}
TRAINS = {
    "printed itself": "print(kept)",
    "printed beside a rate": "now = time.time()\nprint(kept, kept / (now - last))",
    "divided by another number": "now = time.time()\nnow = 3\nprint(kept / now)",
    "in what divides": "now = time.time()\nprint(1 / (now - kept))",
    "a divisor": "now = time.time()\nprint(now / kept)",
    "a rate that is kept": "now = time.time()\nrate = kept / (now - last)",
    "a sum of times that decides": "kept = 0\nkept += time.time() - t\nif kept > 60:\n    stop()",
    "a sum of times and others": "kept = 0\nkept += time.time() - t\nkept += loss\nprint(kept)",
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


SERVED = """
kept = {}
def reader():
    return json.dumps(kept)
def main():
    for epoch in epochs:
        kept["epoch"] = epoch
        for step in steps:
            kept.update(loss=step.loss, step=step.number)
"""
KEYS = {
    "as it is": ("", "", True),
    "with another key": ("kept.update(loss=step.loss, step=step.number)", "kept.update(loss=step.loss)", False),
    "read": ("kept.update(", "print(kept['loss'])\n            kept.update(", False),
    "from itself": ("loss=step.loss", "loss=0.9 * kept['loss']", False),
    "in a branch": ('kept["epoch"] = epoch', "if epoch:\n            kept['epoch'] = epoch", False),
    "of another dictionary": ("kept.update(", "kept.update({}, ", False),
    "by a key that changes": ('kept["epoch"]', "kept[epoch]", False),
    "read where it is called": ("for epoch in epochs:", "for epoch in epochs:\n        reader()", False),
    "read outside": ("kept = {}", "kept = {}\nprint(kept)", False),
}


@pytest.mark.parametrize("case", KEYS)
def test_a_dictionary_of_which_each_key_is_set_anew(case, tmp_path):
    """What is going on, as a server shows it, was said to be lost."""
    old, new, only = KEYS[case]
    (path := tmp_path / "program.py").write_text(source := SERVED.replace(old, new))
    (main,) = [one for one in compile(source, str(path), "exec").co_consts if getattr(one, "co_name", "") == "main"]
    assert only_sets_keys(main, "kept", dict(epoch=0, loss=None, step=0)) == only
