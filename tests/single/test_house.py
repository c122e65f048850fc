"""The house: imports go one way, a name means one thing, and a file is found by its name."""

import ast
import functools
import re
import subprocess
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "hvdtrain"
FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
# Imports for annotations alone, against the direction: who makes an interface names what it is handed.
FOR_ANNOTATIONS = {
    ("hvdtrain.loop.feature", "hvdtrain.loop.run"),  # the run that a feature gets in `prepare`
    ("hvdtrain.loop.feature", "hvdtrain.loop.step"),  # the step that it gets
    ("hvdtrain.output.metrics_logger", "hvdtrain.loop.step"),  # the step that is recorded
}
EVERYWHERE = {"main", "parse", "RECIPES", "METRICS"}  # of each command


@functools.cache
def tops(path: Path) -> list[ast.stmt]:
    """Return the statements at the top of a file."""
    return ast.parse(path.read_text()).body


def imported(path: Path) -> set[str]:
    """Return the modules of hvdtrain that a file imports when it is imported, also for annotations."""
    nodes: list[ast.AST] = [*tops(path)]
    nodes += [inner for node in nodes if isinstance(node, ast.If) for inner in ast.walk(node)]
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in FILES else node.module for name in modules}
    return names & FILES.keys()


def test_imports_make_no_circle_annotations_included():
    graph = {
        name: {other for other in imported(path) if (name, other) not in FOR_ANNOTATIONS}
        for name, path in FILES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None
    unused = [pair for pair in FOR_ANNOTATIONS if pair[1] not in imported(FILES[pair[0]])]
    assert not unused, "take them out of FOR_ANNOTATIONS"


def test_what_reads_programs_knows_no_loop():
    """The loop, inputs and checkpoints ask it. Of checkpoints, it uses how states are read and compared."""
    used = set[str]().union(*(imported(path) for name, path in FILES.items() if name.startswith("hvdtrain.program.")))
    others = {name for name in used if not name.startswith(("hvdtrain.program.", "hvdtrain.engines."))}
    assert others == {f"hvdtrain.checkpoint.{name}" for name in ("own", "randomness", "sums")}


def top_names(path: Path) -> list[str]:
    """Return the constants, functions and classes that a module defines at its top, as often as it does."""
    names = []
    for node in tops(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        targets = [*getattr(node, "targets", []), *([node.target] if isinstance(node, ast.AnnAssign) else [])]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def test_a_public_name_has_one_meaning():
    places = defaultdict(list)
    for module, path in FILES.items():
        if module.startswith("hvdtrain.audit"):  # looks at any program from outside; its Run and Step are of that one
            continue
        for name in {name for name in top_names(path) if not name.startswith("_")} - EVERYWHERE:
            places[name].append(module)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def stem(name: str) -> str:
    """Return a file's name without the ending of a plural or a gerund."""
    ending = next((one for one in ("ing", "ed", "s", "e") if name.endswith(one) and len(name) > len(one) + 2), "")
    return name.removesuffix(ending)


def test_a_file_is_found_by_its_name():
    by_name, by_stem = defaultdict(list), defaultdict(set)
    for path in FILES.values():
        if path.stem not in ("__init__", "__main__"):
            by_name[path.stem].append(path)
            by_stem[stem(path.stem)].add(path.stem)
    assert not {name for name, paths in by_name.items() if len(paths) > 1}
    assert not [names for names in by_stem.values() if len(names) > 1]


def test_a_module_defines_a_name_once():
    """Where two files became one, the second MARK replaced the first: Open MPI read a line that was no comment."""
    root = PACKAGE.parent
    paths = [*FILES.values(), *(root / "launch").glob("*.py"), *(root / "tests").rglob("*.py"), root / "launch/setup"]
    twice = {str(path.relative_to(root)): Counter(top_names(path)).most_common(1) for path in paths}
    assert {name: most[0][0] for name, most in twice.items() if most and most[0][1] > 1} == {}


def test_files_that_contributing_names_exist():
    written = re.findall(r"(?<![\w.])[\w/]+\.(?:py|sh)\b", (PACKAGE.parent / "CONTRIBUTING.md").read_text())
    named = subprocess.run(["git", "ls-files"], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    known = {Path(name).name for name in named.stdout.split()}
    assert not {one for one in written if Path(one).name not in known}
