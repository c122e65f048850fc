"""What a program computes its losses from, and what of that each step sets anew. By its source: see source.py.

Of an attribute, the name begins with a dot: whose it is, the source does not say.
"""

import ast
import functools
import re
from collections.abc import Iterator

from hvdtrain.program.source import all_statements, assigned, called, name_read, names_read, names_stored, values_of
from hvdtrain.program.uses import CHANGING, EMPTYING

# In names of what a resumed run would compute otherwise.
ANOTHER = re.compile("rand|shuffle|perm|sample|normal|choice|multinomial|bernoulli|uniform|seed|time|now|clock|next")


def attributes_within(part: ast.AST) -> list[ast.Attribute]:
    return [one for one in ast.walk(part) if isinstance(one, ast.Attribute)]


def is_empty(value: ast.expr) -> bool:
    """Return whether an expression is None, or an empty collection."""
    return ast.unparse(value) in ("None", "[]", "{}", "()", "dict()", "list()", "set()")


def names_within(part: ast.AST) -> frozenset[str]:
    """Return the variables and attributes in a part of a file."""
    of_attributes = {f".{one.attr}" for one in attributes_within(part)}
    return frozenset(of_attributes | {one.id for one in ast.walk(part) if isinstance(one, ast.Name)})


def set_by(target: ast.AST) -> Iterator[str]:
    """Yield the variables and attributes that are set, also in a part, where a target is assigned to."""
    match target:
        case ast.Name(name):
            yield name
        case ast.Attribute(_, attribute):
            yield f".{attribute}"
        case ast.Subscript(whole) | ast.Starred(whole):
            yield from set_by(whole)
        case ast.Tuple(parts) | ast.List(parts):
            yield from (name for part in parts for name in set_by(part))


def effect_of(node: ast.AST) -> tuple[frozenset[str], frozenset[str]]:
    """Return what a statement sets, and what that is computed from."""
    match node:
        case ast.Assign(targets, value):
            return frozenset(name for target in targets for name in set_by(target)), names_within(value)
        case ast.AugAssign(target) | ast.AnnAssign(target):
            return frozenset(set_by(target)), names_within(node)
        case ast.For(target, values):
            return frozenset(set_by(target)), names_within(values)
        case ast.Expr(ast.Call(ast.Attribute(whole, method))) if method in CHANGING:
            return frozenset(set_by(whole)), names_within(node)
        case ast.If(test) | ast.While(test):
            inner = [effect_of(one)[0] for one in all_statements(node) if not isinstance(one, ast.If | ast.While)]
            return frozenset[str]().union(*inner), names_within(test)
        case ast.FunctionDef(name):
            returned = [names_within(one) for one in all_statements(node) if isinstance(one, ast.Return)]
            return frozenset({name, f".{name}"}), frozenset[str]().union(*returned)
    return frozenset(), frozenset()


@functools.cache
def computed_from(part: ast.AST) -> frozenset[str]:
    """Return the variables and attributes from which a part of a file computes what it differentiates, and the rates of
    optimizers, also in branches that they decide."""
    calls = [one for one in ast.walk(part) if isinstance(one, ast.Call) and called(one) == "backward"]
    waiting = {name for call in calls for argument in call.args for name in names_within(argument)}
    for node in all_statements(part):
        match node:
            case ast.Assign([ast.Subscript(slice=ast.Constant("lr" | "momentum" | "weight_decay"))], value):
                waiting |= names_within(value)
            case ast.FunctionDef("__call__" | "forward"):  # of an object of any name
                waiting |= effect_of(node)[1]
    effects, found = [effect_of(node) for node in all_statements(part) if node is not part], set[str]()
    while new := waiting - found:
        found |= new
        waiting = {name for sets, reads in effects if sets & new for name in reads}
    return frozenset(found)


def is_asked_again(function: ast.AST, name: str) -> bool:
    """Return whether a variable is set where `if NAME or ...` holds, and constant otherwise: a resumed run asks the rest."""
    asking = [
        one for one in all_statements(function)
        if isinstance(one, ast.If) and isinstance(one.test, ast.BoolOp) and isinstance(one.test.op, ast.Or)
        and name_read(one.test.values[0]) == name
    ]  # fmt: skip
    constant = all(isinstance(value, ast.Constant) for value in values_of(name, function))
    return constant and any(name in names_stored(one) for one in asking)


@functools.cache
def computed_once_from(tree: ast.Module, name: str) -> frozenset[str] | None:
    """Return the attributes from which a file computes a variable or an attribute that was empty, or a key in it, if it does
    so from the key, constants of the file, and libraries alone: a resumed run computes the same. None: from others."""
    parts = [one for one in ast.walk(tree) if isinstance(one, ast.Global | ast.arg | ast.FunctionDef)]
    others = {word for one in parts for word in getattr(one, "names", ())}
    others |= {word for word in names_stored(tree) if not word.isupper()}
    others |= {one.arg for one in parts if isinstance(one, ast.arg)} - {"self", "cls"}
    functions = [one for one in parts if isinstance(one, ast.FunctionDef)]
    others |= {word for one in functions for word in (one.name, f".{one.name}")}
    pairs = [pair for one in functions if one.name != "__init__" for pair in assigned(one)]
    others |= {f".{one.attr}" for target, _ in pairs for one in attributes_within(target)}
    if any(one.attr in CHANGING and name_read(one.value) == name for one in attributes_within(tree)):
        return None
    found = frozenset[str]()
    # Also what decides whether it is set, such as `if key not in held`.
    for part in (tree, *(one for one in ast.walk(tree) if isinstance(one, ast.If | ast.While))):
        for target, value in assigned(part):
            whole, key = (target.value, target.slice) if isinstance(target, ast.Subscript) else (target, ast.Tuple([]))
            if name in (getattr(whole, "id", None), getattr(whole, "attr", None)) and not is_empty(value):
                read = names_within(getattr(part, "test", value)) - names_within(key) - names_stored(value)
                read -= {name, f".{name}"} if part is not tree else set()
                if read & (others | {name, f".{name}"}) or any(map(ANOTHER.search, read)):
                    return None
                found |= read
    return frozenset(one.removeprefix(".") for one in found) or None


@functools.cache
def is_overwritten(function: ast.AST, name: str) -> bool:
    """Return whether the rows of a batch are set in an array that is as long as the longest: `NAME[:n].copy_(x)`, also by
    another name, `rows = NAME[:n]`. No other part of it is used."""
    nodes, pairs = list(ast.walk(function)), assigned(function)
    uses = [one for one in nodes if isinstance(one, ast.Name) and name_read(one) == name]
    parts = [x for x in nodes if isinstance(x, ast.Subscript) and x.value in uses and isinstance(x.slice, ast.Slice)]
    if len(uses) != len(parts) or any(one.slice.lower is not None for one in parts):  # type: ignore[attr-defined] # a slice
        return False
    others = {target.id for target, value in pairs if value in parts and isinstance(target, ast.Name)}
    calls = [one for one in nodes if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)]
    filled = [(one.func.value, one) for one in calls if called(one) in EMPTYING]  # type: ignore[attr-defined] # a method
    filled = [(held, call) for held, call in filled if held in parts or getattr(held, "id", None) in others]
    sets = [value for target, value in pairs if target in parts] + [one for _, call in filled for one in call.args]
    return bool(sets or filled) and not any(name in names_read(one) for one in sets)
