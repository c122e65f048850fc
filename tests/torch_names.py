"""The names of torch and torchvision that hvdtrain uses, each of which the oldest PyTorch must have.

python -m tests.torch_names     where that PyTorch is installed: write tests/torch_names.txt anew, and name what it lacks

`tests/single/test_tools.py` compares the table with the source, with whatever PyTorch is there.
"""

import ast
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "torch_names.txt"
OLDEST = "2.3."


def names_in(source: str) -> set[str]:
    """Return what a source imports of torch and torchvision, and the attributes of these that it writes out."""
    tree, known, found = ast.parse(source), dict[str, str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "torchvision"):
            known |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            ours = [one for one in node.names if one.name.split(".")[0] in ("torch", "torchvision")]
            known |= {one.asname: one.name for one in ours if one.asname}
            known |= {one.name.split(".")[0]: one.name.split(".")[0] for one in ours if not one.asname}
            found |= {one.name for one in ours}
    for node in ast.walk(tree):
        parts, inner = list[str](), node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in known:
            found.add(".".join([known[inner.id], *parts]))
    return found | set(known.values())


def names_used() -> set[str]:
    return set().union(*(names_in(path.read_text()) for path in (ROOT / "hvdtrain").rglob("*.py")))


def is_there(name: str) -> bool:
    """Return whether the PyTorch that is installed has this module, or attribute of a module."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def main() -> None:
    import torch

    if not torch.__version__.startswith(OLDEST):
        sys.exit(f"torch {torch.__version__} is here: the table is of the oldest that hvdtrain takes, {OLDEST}x")
    there = {name: is_there(name) for name in sorted(names_used())}
    TABLE.write_text("".join(f"{name}\n" for name, found in there.items() if found))
    sys.exit("".join(f"not in torch {torch.__version__}: {name}\n" for name, found in there.items() if not found) or 0)


if __name__ == "__main__":
    main()
