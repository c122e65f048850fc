"""Each class of hvdtrain has a name of its own."""

import ast
from collections import Counter
from pathlib import Path

import hvdtrain


def test_no_two_classes_have_one_name():
    trees = [ast.parse(path.read_text()) for path in Path(hvdtrain.__file__).parent.rglob("*.py")]
    counts = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert len(counts) > 100
    assert [name for name, count in counts.items() if count > 1] == []
