"""Whether a value only decides what a program prints, such as a warning that comes once, or an estimate by the clock.

What is printed itself, such as the best value so far, would be another one in a resumed run.

Unlike uses.py, this reads the program's source, which has its branches as they were written.
"""

import ast
import functools
from types import CodeType

from hvdtrain.program.uses import called, node_of, tree_of

SAYING = frozenset({"print", "say", "say_once", "debug", "info", "warning", "warn", "error", "log", "write", "flush"})
SAYING |= {"set_description", "set_postfix", "set_postfix_str", "add_scalar"}  # of tqdm and TensorBoard
CHANGING = frozenset({"add", "append", "update", "discard", "remove", "clear", "pop", "setdefault"})  # of collections
CLOCK_CALLS = frozenset({"time", "perf_counter", "monotonic", "now"})


def only_decides_prints(code: CodeType, name: str) -> bool:
    """Return whether all uses of a variable or an attribute of this name are such, in the file of this code."""
    tree = tree_of(code.co_filename)
    if tree is None or not uses(tree, name):
        return False
    if node_of(code, tree) is None:
        return False
    return all(is_harmless(statement, name) for statement in tree.body)


def is_use(node: ast.AST, name: str) -> bool:
    """Return whether a node reads a variable or an attribute of this name."""
    return name_read(node) == name


def name_read(node: ast.AST) -> str | None:
    """Return the name of the variable or the attribute that a node reads, if it does."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.id if isinstance(node, ast.Name) else node.attr
    return None


@functools.cache
def names_read(node: ast.AST) -> frozenset[str | None]:
    """Return the names that are read in a node. It is asked for each variable, and a tree is kept: `tree_of`."""
    return frozenset(map(name_read, ast.walk(node)))


def uses(node: ast.AST, name: str) -> bool:
    return name in names_read(node)


def is_harmless(node: ast.AST, name: str) -> bool:
    """Return whether a statement does no more with the name than to change it, and to decide by it what it prints."""
    if not uses(node, name):
        return True
    if isinstance(node, ast.FunctionDef) and is_text_by_the_clock(node):
        return True
    if isinstance(node, ast.If) and uses(node.test, name):
        return all(only_says(one, name) for one in (*node.body, *node.orelse))
    blocks = [part for field in ("body", "orelse", "finalbody", "handlers") for part in getattr(node, field, [])]
    if blocks and not isinstance(node, ast.IfExp | ast.Lambda):
        heads = [one for one in ast.iter_child_nodes(node) if one not in blocks]
        return not any(uses(one, name) for one in heads) and all(is_harmless(one, name) for one in blocks)
    # What follows from the clock is no part of a training.
    return only_says(node, name) or any(called(one) in CLOCK_CALLS for one in ast.walk(node))


def is_text_by_the_clock(function: ast.FunctionDef) -> bool:
    """Return whether a function only returns a text that it makes with the clock, such as the time that is left."""
    nodes = list(ast.walk(function))
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    stored = [
        node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store) and not isinstance(node, ast.Name)
    ]
    texts = bool(returned) and all(isinstance(value, ast.JoinedStr) for value in returned)
    return texts and not stored and any(called(one) in CLOCK_CALLS for one in nodes)


def only_says(node: ast.AST, name: str) -> bool:
    """Return whether a statement says something else, or changes the name's value alone."""
    if isinstance(node, ast.Pass):
        return True
    if isinstance(node, ast.If):
        return all(only_says(one, name) for one in (*node.body, *node.orelse))
    if isinstance(node, ast.Expr):
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and is_use(call.func.value, name):
            return call.func.attr in CHANGING
        return called(call) in SAYING and not uses(call, name)
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(getattr(one, "id", getattr(one, "attr", None)) == name for one in targets)
    return False
