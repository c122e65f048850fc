"""Whether a value only decides what a program prints, such as a warning that comes once, or an estimate by the clock.
And whether a program sets it by what a resumed run has, too: the number of the epoch, or each key of a dictionary anew.

What is printed itself, such as the best value so far, would be another one in a resumed run.

Unlike uses.py, this reads the program's source, which has its branches as they were written.
"""

import ast
import functools
from collections.abc import Iterator, Set
from types import CodeType

from hvdtrain.program.source import assigned, called, functions_of, name_read, names_read, names_stored, syntax_of
from hvdtrain.program.uses import CHANGING, OF_VARIABLES, first_uses

SAYING = frozenset({"print", "say", "say_once", "debug", "info", "warning", "warn", "error", "log", "write", "flush"})
SAYING |= {"set_description", "set_postfix", "set_postfix_str", "add_scalar"}  # of tqdm and TensorBoard
CLOCK_CALLS = frozenset({"time", "perf_counter", "monotonic", "now"})
CHANGED_BY_EPOCHS = frozenset({"best", "evaluation", "state", "progress", "loss"})  # in `run`, and in its steps
ASKING = frozenset({"len", "range", "int", "callable", "isinstance"})


# ---- it only decides what is printed


def only_decides_prints(code: CodeType, name: str) -> bool:
    """Return whether all uses of a variable or an attribute of this name are such, in the file of this code."""
    tree, _ = syntax_of(code) or (None, None)
    return tree is not None and name in names_read(tree) and only_shown(tree, name)


@functools.cache  # it is asked in each epoch
def only_shown(tree: ast.Module, name: str) -> bool:
    clocks = clocks_of(tree)
    return is_of_the_clock(tree, name, clocks) or all(is_harmless(one, name, clocks) for one in tree.body)


def is_harmless(node: ast.AST, name: str, clocks: Set[str]) -> bool:
    """Return whether a statement does no more with the name than to change it, and to decide by it what it prints. clocks:
    the variables that have a time."""
    if name not in names_read(node):
        return True
    if isinstance(node, ast.FunctionDef) and is_text_by_the_clock(node):
        return True
    if isinstance(node, ast.If) and name in names_read(node.test):
        return all(only_says(one, name) for one in (*node.body, *node.orelse))
    blocks = [part for field in ("body", "orelse", "finalbody", "handlers") for part in getattr(node, field, [])]
    if blocks and not isinstance(node, ast.IfExp | ast.Lambda):
        heads = [one for one in ast.iter_child_nodes(node) if one not in blocks]
        return all(name not in names_read(one) for one in heads) and all(is_harmless(x, name, clocks) for x in blocks)
    # What follows from the clock is no part of a training.
    return only_says(node, name) or has_clock(node, set()) or only_by_time(node, name, clocks)


def only_says(node: ast.AST, name: str) -> bool:
    """Return whether a statement says something else, or changes the name's value alone."""
    match node:
        case ast.Pass():
            return True
        case ast.If():
            return all(only_says(one, name) for one in (*node.body, *node.orelse))
        case ast.Expr(ast.Call(ast.Attribute(held, attr))) if name_read(held) == name:
            return attr in CHANGING
        case ast.Expr(call):
            return called(call) in SAYING and name not in names_read(call)
    targets = [target for target, _ in assigned(node)]
    return bool(targets) and all(getattr(one, "id", getattr(one, "attr", None)) == name for one in targets)


def has_clock(node: ast.AST, clocks: Set[str]) -> bool:
    return any(called(one) in CLOCK_CALLS or getattr(one, "id", None) in clocks for one in ast.walk(node))


@functools.cache
def clocks_of(tree: ast.AST) -> frozenset[str]:
    """Return the variables that have a time: all that is assigned to them is computed by a call of a clock."""
    timed, others = set[str](), set[str]()
    for target, value in assigned(tree):
        if isinstance(target, ast.Name):
            (timed if has_clock(value, set()) else others).add(target.id)
    return frozenset(timed - others)


def only_by_time(node: ast.AST, name: str, clocks: Set[str]) -> bool:
    """Return whether a statement prints a value as a rate alone: divided by a time."""
    if not (isinstance(node, ast.Expr) and called(node.value) in SAYING):
        return False
    rates = [one for one in ast.walk(node) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div)]
    return uses_are_in(node, name, [one.left for one in rates if has_clock(one.right, clocks)])


def uses_are_in(node: ast.AST, name: str, parts: list[ast.expr]) -> bool:
    """Return whether a name is read in these parts of a node alone."""
    known = {id(inner) for part in parts for inner in ast.walk(part)}
    return all(id(one) in known for one in ast.walk(node) if name_read(one) == name)


def is_text_by_the_clock(function: ast.FunctionDef) -> bool:
    """Return whether a function only returns a text that it makes with the clock, such as the time that is left."""
    nodes = list(ast.walk(function))
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    texts = bool(returned) and all(isinstance(value, ast.JoinedStr) for value in returned)
    keeps = any(isinstance(getattr(x, "ctx", None), ast.Store) and not isinstance(x, ast.Name) for x in nodes)
    return texts and not keeps and has_clock(function, set())


def is_of_the_clock(tree: ast.AST, name: str, clocks: Set[str]) -> bool:
    """Return whether a value sums times, and the program else prints it alone."""
    writes = [(target, value) for target, value in assigned(tree) if name_written(target) == name]
    timed = [has_clock(value, clocks) for _, value in writes]
    own = [getattr(value, "right", value) if getattr(value, "left", 0) is target else value for target, value in writes]
    begins = [isinstance(value, ast.Constant | ast.Call | ast.Dict | ast.List) for value in own]
    if not any(timed) or not all(one or other for one, other in zip(timed, begins, strict=True)):
        return False
    says = [x.value for x in ast.walk(tree) if isinstance(x, ast.Expr) and called(x.value) in SAYING]
    return uses_are_in(tree, name, [*says, *(target for target, _ in writes)])


def name_written(target: ast.AST) -> str | None:
    """Return the name of a variable or an attribute, or of that of which this is a part."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return getattr(target, "id", getattr(target, "attr", None))


# ---- the best epochs set it, for the end


def is_left(code: CodeType, offset: int, variable: str) -> bool:
    """Return whether some epochs set a variable, as the best ones do, and it is used after the last epoch. offset: where the
    loop over the epochs begins."""
    if {"STORE", "END"} != first_uses(code, offset, variable, of=OF_VARIABLES):
        return False
    if "LOAD" not in first_uses(code, offset, variable, of=OF_VARIABLES, after=True):
        return False
    return not is_set_by_number(code, variable) and not only_decides_prints(code, variable)


@functools.cache
def is_set_by_number(code: CodeType, name: str) -> bool:
    """Return whether each branch in which epochs set a variable is taken by the number of the epoch or the step, or by what
    no epoch changes, such as a flag: the last epoch sets it, or none does."""
    tree, function = syntax_of(code) or (None, None)
    if tree is None or function is None:
        return False
    attributes = {one.attr for one in ast.walk(tree) if isinstance(one, ast.Attribute) and type(one.ctx) is ast.Store}
    loops = loops_over("epochs", function)
    for loop in loops:
        stored = set[str]().union(*map(names_stored, loop.body))
        stored -= set[str]().union(*(names_stored(one.target) for one in loops_over("steps", loop)))
        branches = [one for one in ast.walk(loop) if isinstance(one, ast.If | ast.While) and name in names_stored(one)]
        if any(changes(part, stored, attributes | CHANGED_BY_EPOCHS) for x in branches for part in ast.walk(x.test)):
            return False
    return bool(loops)


def changes(node: ast.AST, names: Set[str], attributes: Set[str]) -> bool:
    """Return whether a part of a condition is one of these names or attributes, or a call that may give something else."""
    if isinstance(node, ast.Call):
        return called(node) not in ASKING
    return getattr(node, "id", None) in names or getattr(node, "attr", None) in attributes


def loops_over(what: str, part: ast.AST) -> list[ast.For]:
    """Return the loops over `run.epochs(...)` or `run.steps(...)` in a part of a file."""
    loops = [one for one in ast.walk(part) if isinstance(one, ast.For)]
    return [one for one in loops if what in map(called, ast.walk(one.iter))]


# ---- each key of a dictionary is set anew


def only_sets_keys(code: CodeType, name: str, value: object) -> bool:
    """Return whether the function of this code, or a thread of the program, sets each key of a dictionary anew, and whoever
    else reads it is a thread or is not called, as a server of what is going on."""
    tree, main = syntax_of(code) or (None, None)
    if tree is None or main is tree or not isinstance(value, dict):
        return False
    threads, keys = threads_of(tree), dict[ast.AST, set[object]]()
    users = [one for one in functions_of(tree) if one is main or name in names_read(one)]
    if not uses_are_in(tree, name, users):  # type: ignore[arg-type] # of the module
        return False
    for function in users:
        if function is main or function.name in threads:
            keys[function], changes = keys_set(function, name)
            if changes:
                return False
        elif function.name in names_read(tree):
            return False
    of_others = len(keys) > 1
    return set[object]().union(*keys.values()) == set(value) and (bool(keys[main]) or of_others)  # type: ignore[index]


def keys_set(function: ast.FunctionDef, name: str) -> tuple[set[object], bool]:
    """Return which keys of a dictionary a function sets whenever it is called, and whether it does more: reads it, too, or
    changes it otherwise."""
    keys, known = set[object](), set[int]()
    for statement in statements_in(function):
        match statement:
            case ast.Assign([ast.Subscript(held, ast.Constant(key))]) if name_read(held) == name:
                keys, known = keys | {key}, known | {id(held)}
            case ast.Expr(ast.Call(ast.Attribute(held, "update"), [], words)) if name_read(held) == name:
                keys, known = keys | {one.arg for one in words}, known | {id(held)}
    if keys:
        return keys, any(name_read(one) == name and id(one) not in known for one in ast.walk(function))
    parts = [one for one in ast.walk(function) if isinstance(one, ast.Subscript | ast.Attribute)]
    parts = [one for one in parts if name_read(one.value) == name]
    return keys, any(not isinstance(x.ctx, ast.Load) or getattr(x, "attr", None) in CHANGING for x in parts)


def threads_of(tree: ast.AST) -> set[str]:
    """Return the names of functions that the program uses as the target of a thread alone."""
    words = [
        word for one in ast.walk(tree) if called(one) in ("Thread", "Timer") for word in getattr(one, "keywords", ())
    ]
    targets = [word.value for word in words if word.arg in ("target", "function")]
    return {one.id for one in targets if isinstance(one, ast.Name) and uses_are_in(tree, one.id, targets)}


def statements_in(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a function, but for those in branches and in other functions."""
    for one in getattr(node, "body", ()):
        yield one
        if isinstance(one, ast.For | ast.While | ast.With | ast.Try):
            yield from statements_in(one)
