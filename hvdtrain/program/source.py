"""The source of a program as a syntax tree: its functions, what is assigned in them, and which names they read and set."""

import ast
import functools
import linecache
from types import CodeType


@functools.cache
def tree_of(file: str) -> ast.Module | None:
    """Return the syntax tree of a file of a program; None if it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


@functools.cache
def all_statements(part: ast.AST) -> list[ast.AST]:
    """Return all statements in a part of a file, also those within others. Most nodes are in expressions, which are not
    walked."""
    found = [part]
    for node in found:
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            held = getattr(node, field, ())  # of a conditional expression, one
            found += held if isinstance(held, list) else ()
    return found


@functools.cache
def functions_of(part: ast.AST) -> list[ast.FunctionDef]:
    """Return all functions in a part of a file, also those within others."""
    return [node for node in all_statements(part) if isinstance(node, ast.FunctionDef)]


def syntax_of(code: CodeType) -> tuple[ast.Module, ast.AST] | None:
    """Return the file of this code, and the function in it, or the file again; None if it has become another one, or there
    is none."""
    if (tree := tree_of(code.co_filename)) is None:
        return None
    if code.co_name == "<module>":
        return tree, tree
    for node in functions_of(tree):
        begins = (node.lineno, *(one.lineno for one in node.decorator_list))
        if node.name == code.co_name and code.co_firstlineno in begins:
            return tree, node
    return None


def called(node: ast.AST) -> str:
    """Return the last part of the name of what an expression calls; empty if it is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@functools.cache
def assigned(part: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return what is assigned to, with its value; of tuples, each part; of `name /= value`, the quotient."""
    pairs = list[tuple[ast.expr, ast.expr]]()
    for node in all_statements(part):
        if isinstance(node, ast.AugAssign):
            pairs.append((node.target, ast.BinOp(node.target, node.op, node.value)))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs.append((node.target, node.value))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs += zip(target.elts, node.value.elts, strict=False)
                else:
                    pairs.append((target, node.value))
    return pairs


def values_of(name: str, function: ast.AST) -> list[ast.expr]:
    """Return what a function assigns to a variable."""
    return [value for target, value in assigned(function) if isinstance(target, ast.Name) and target.id == name]


def name_read(node: ast.AST) -> str | None:
    """Return the name of the variable or the attribute that a node reads, if it does."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.id if isinstance(node, ast.Name) else node.attr
    return None


# These are asked for each variable of a program, and its tree is kept.
@functools.cache
def names_read(part: ast.AST) -> frozenset[str | None]:
    """Return the names that are read in a part of a file."""
    if isinstance(part, ast.Module):  # each of its statements is asked for, too
        return frozenset().union(*map(names_read, part.body))
    return frozenset(map(name_read, ast.walk(part)))


@functools.cache
def names_stored(part: ast.AST) -> frozenset[str]:
    """Return the variables that are set in a part of a file."""
    return frozenset(one.id for one in ast.walk(part) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
