"""Whether a value only decides what a program prints, such as a warning that comes once, or an estimate by the clock.
And whether a program sets it by what a resumed run has, too: the number of the epoch, or each key of a dictionary anew.

What is printed itself, such as the best value so far, would be another one in a resumed run.

Unlike uses.py, this reads the program's source, which has its branches as they were written.
"""

import ast
import functools
from collections.abc import Iterator, Sequence, Set
from types import CodeType
from typing import TypeGuard

from hvdtrain.program.uses import VARIABLES, called, first_uses, node_of, tree_of

SAYING = frozenset({"print", "say", "say_once", "debug", "info", "warning", "warn", "error", "log", "write", "flush"})
SAYING |= {"set_description", "set_postfix", "set_postfix_str", "add_scalar"}  # of tqdm and TensorBoard
CHANGING = frozenset({"add", "append", "update", "discard", "remove", "clear", "pop", "setdefault"})  # of collections
CLOCK_CALLS = frozenset({"time", "perf_counter", "monotonic", "now"})
CHANGED_BY_EPOCHS = frozenset(
    {"best", "evaluation", "state", "progress", "loss"}
)  # what epochs change in `run`, and in its steps
ASKING = frozenset({"len", "range", "int", "callable", "isinstance"})


def only_decides_prints(code: CodeType, name: str) -> bool:
    """Return whether all uses of a variable or an attribute of this name are such, in the file of this code."""
    tree = tree_of(code.co_filename)
    if tree is None or not uses(tree, name):
        return False
    if node_of(code, tree) is None:
        return False
    clocks = clocks_of(tree)
    if is_of_the_clock(tree, name, clocks):
        return True
    return all(is_harmless(statement, name, clocks) for statement in tree.body)


def assigned(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what is assigned to, with its value; of tuples, each part."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value


@functools.cache
def clocks_of(tree: ast.AST) -> frozenset[str]:
    """Return the variables that have a time: all that is assigned to them is computed by a call of a clock."""
    timed, others = set[str](), set[str]()
    for target, value in assigned(tree):
        if isinstance(target, ast.Name):
            (timed if has_clock(value, set()) else others).add(target.id)
    return frozenset(timed - others)


def has_clock(node: ast.AST, clocks: Set[str]) -> bool:
    return any(called(one) in CLOCK_CALLS or getattr(one, "id", None) in clocks for one in ast.walk(node))


def name_written(node: ast.AST) -> str | None:
    """Return the name of a variable or an attribute, or of that of which this is a part."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return getattr(node, "id", getattr(node, "attr", None))


@functools.cache
def is_of_the_clock(tree: ast.AST, name: str, clocks: Set[str]) -> bool:
    """Return whether a value sums times, and the program else prints it alone."""
    writes = [(target, value) for target, value in assigned(tree) if name_written(target) == name]
    sums = [value for _, value in writes if has_clock(value, clocks)]
    fresh = [value for _, value in writes if isinstance(value, ast.Constant | ast.Call | ast.Dict | ast.List)]
    if not sums or len({id(value) for value in (*sums, *fresh)}) < len(writes):
        return False
    says = [one for one in ast.walk(tree) if isinstance(one, ast.Expr) and called(one.value) in SAYING]
    known = {id(part) for one in (*says, *(target for target, _ in writes)) for part in ast.walk(one)}
    return all(id(node) in known for node in ast.walk(tree) if is_use(node, name))


def is_left(code: CodeType, offset: int, variable: str) -> bool:
    """Return whether some epochs set a variable, as the best ones do, and it is used after the last epoch. offset: where the
    loop over the epochs begins."""
    if {"STORE", "END"} != first_uses(code, offset, variable, of=VARIABLES):
        return False
    if "LOAD" not in first_uses(code, offset, variable, of=VARIABLES, after=True):
        return False
    return not is_set_by_number(code, variable) and not only_decides_prints(code, variable)


@functools.cache
def is_set_by_number(code: CodeType, name: str) -> bool:
    """Return whether each branch in which epochs set a variable is taken by the number of the epoch or the step, or by what
    no epoch changes, such as a flag: the last epoch sets it, or none does."""
    tree = tree_of(code.co_filename)
    node = None if tree is None else node_of(code, tree)
    if tree is None or node is None:
        return False
    loops = [one for one in ast.walk(node) if isinstance(one, ast.For) and "epochs" in map(called, ast.walk(one.iter))]
    attributes = {
        one.attr for one in ast.walk(tree) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
    }
    for loop in loops:
        stored = set[str]().union(*map(names_stored, loop.body))
        stored -= set[str]().union(*(names_stored(one.target) for one in ast.walk(loop) if is_of_steps(one)))
        for one in (part for part in ast.walk(loop) if isinstance(part, ast.If | ast.While)):
            if name in names_stored(one) and not all(
                is_fixed(part, stored, attributes | CHANGED_BY_EPOCHS) for part in ast.walk(one.test)
            ):
                return False
    return bool(loops)


def is_of_steps(node: ast.AST) -> TypeGuard[ast.For]:
    return isinstance(node, ast.For) and "steps" in map(called, ast.walk(node.iter))


@functools.cache
def names_stored(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def is_fixed(node: ast.AST, names: set[str], attributes: Set[str]) -> bool:
    """Return whether a part of a condition is none of these names or attributes, and no call that may change."""
    if isinstance(node, ast.Call):
        return called(node) in ASKING
    return getattr(node, "id", None) not in names and getattr(node, "attr", None) not in attributes


def only_sets_keys(code: CodeType, name: str, value: object) -> bool:
    """Return whether the function of this code, or a thread of the program, sets each key of a dictionary anew, and whoever
    else reads it is a thread or is not called, as a server of what is going on."""
    tree = tree_of(code.co_filename)
    node = None if tree is None else node_of(code, tree)
    if tree is None or node is None or node is tree or not isinstance(value, dict):
        return False
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and (one is node or uses(one, name))]
    inside = {id(one) for function in functions for one in ast.walk(function)}
    keys, threads = dict[str, set[object]](), threads_of(tree)
    for function in functions:
        if function is not node and function.name not in threads:
            if uses(tree, function.name):
                return False
            continue
        found = [keys_set(one, name) for one in statements_in(function)]
        known = {id(held) for held, _ in found if held is not None}
        own = keys[function.name] = {key for _, some in found for key in some}
        parts = [one for one in ast.walk(function) if not known & {id(one), id(getattr(one, "value", None))}]
        if any(is_use(one, name) if own else is_changed(one, name) for one in parts):
            return False
    if any(is_use(one, name) and id(one) not in inside for one in ast.walk(tree)):
        return False
    readers = [one for one in functions if not keys.get(one.name, True)]  # of what others set
    return set[object]().union(*keys.values()) == set(value) and (node not in readers or len(keys) > 1)


def threads_of(tree: ast.AST) -> set[str]:
    """Return the names of functions that the program uses as the target of a thread alone."""
    targets = {
        word.value.id: id(word.value)
        for one in ast.walk(tree)
        if called(one) in ("Thread", "Timer")
        for word in getattr(one, "keywords", ())
        if word.arg in ("target", "function") and isinstance(word.value, ast.Name)
    }
    return {
        name for name, at in targets.items() if not any(is_use(one, name) and id(one) != at for one in ast.walk(tree))
    }


def is_changed(node: ast.AST, name: str) -> bool:
    """Return whether a node changes a part of a collection of this name."""
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load) and is_use(node.value, name)
    return isinstance(node, ast.Attribute) and node.attr in CHANGING and is_use(node.value, name)


def keys_set(statement: ast.stmt, name: str) -> tuple[object, Sequence[object]]:
    """Return the use of a dictionary of this name in a statement that sets some of its keys, and these."""
    held: ast.expr | None = None
    keys: list[object] = []
    match statement:
        case ast.Assign(targets=[ast.Subscript(value=held, slice=ast.Constant(key))]):
            keys = [key]
        case ast.Expr(ast.Call(func=ast.Attribute(value=held, attr="update"), args=[], keywords=words)):
            keys = [one.arg for one in words]
    return (held, keys) if held is not None and is_use(held, name) else (None, [])


def statements_in(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a function, but for those in branches and in other functions."""
    for one in getattr(node, "body", ()):
        yield one
        if isinstance(one, ast.For | ast.While | ast.With | ast.Try):
            yield from statements_in(one)


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


def is_harmless(node: ast.AST, name: str, clocks: Set[str]) -> bool:
    """Return whether a statement does no more with the name than to change it, and to decide by it what it prints. clocks:
    the variables that have a time."""
    if not uses(node, name):
        return True
    if isinstance(node, ast.FunctionDef) and is_text_by_the_clock(node):
        return True
    if isinstance(node, ast.If) and uses(node.test, name):
        return all(only_says(one, name) for one in (*node.body, *node.orelse))
    blocks = [part for field in ("body", "orelse", "finalbody", "handlers") for part in getattr(node, field, [])]
    if blocks and not isinstance(node, ast.IfExp | ast.Lambda):
        heads = [one for one in ast.iter_child_nodes(node) if one not in blocks]
        return not any(uses(one, name) for one in heads) and all(is_harmless(one, name, clocks) for one in blocks)
    # What follows from the clock is no part of a training.
    return only_says(node, name) or has_clock(node, set()) or only_by_time(node, name, clocks)


def only_by_time(node: ast.AST, name: str, clocks: Set[str]) -> bool:
    """Return whether a statement prints a value as a rate alone: divided by a time."""
    if not (isinstance(node, ast.Expr) and called(node.value) in SAYING):
        return False
    rates = [one for one in ast.walk(node) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div)]
    known = {id(part) for one in rates if has_clock(one.right, clocks) for part in ast.walk(one.left)}
    return all(id(one) in known for one in ast.walk(node) if is_use(one, name))


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
