"""What a program computes its losses from, and what of that each step sets anew. By its source: see source.py.

Of an attribute, the name begins with a dot: whose it is, the source does not say.
"""

import ast
import functools
import re
from collections.abc import Iterator

from hvdtrain.program.source import all_statements, assigned, called, functions_of, name_read, names_stored, values_of
from hvdtrain.program.uses import EMPTYING

FILLING = frozenset(
    {"add", "append", "appendleft", "extend", "insert", "pop", "put", "setdefault", "update"}
)  # of collections
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
        case ast.Expr(ast.Call(ast.Attribute(whole, method))) if method in FILLING:
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
    others |= {word for one in parts if isinstance(one, ast.FunctionDef) for word in (one.name, f".{one.name}")}
    changing = [function for function in functions_of(tree) if function.name != "__init__"]
    others |= {f".{x.attr}" for one in changing for target, _ in assigned(one) for x in attributes_within(target)}
    if any(one.attr in FILLING and name_read(one.value) == name for one in attributes_within(tree)):
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


def is_overwritten(function: ast.AST, name: str) -> bool:
    """Return whether the rows of a batch are set in an array that is as long as the longest: `NAME[:n].copy_(x)`."""
    for node in all_statements(function):
        match node:
            case ast.Assign([ast.Subscript(ast.Name(whole), ast.Slice(lower=None))]) if whole == name:
                return True
            case ast.Assign([ast.Name(part)], ast.Subscript(ast.Name(whole), ast.Slice(lower=None))) if whole == name:
                filled = tuple(f"{part}.{method}(" for method in EMPTYING)
                texts = [ast.unparse(one) for one in all_statements(function) if isinstance(one, ast.Expr)]
                if any(text.startswith(filled) for text in texts):
                    return True
            case (
                ast.Expr(ast.Call(ast.Attribute(ast.Subscript(ast.Name(whole), ast.Slice(lower=None)), method)))
                | ast.Assign(
                    value=ast.Call(ast.Attribute(ast.Subscript(ast.Name(whole), ast.Slice(lower=None)), method))
                )
            ) if whole == name and method in EMPTYING:
                return True
    return False
