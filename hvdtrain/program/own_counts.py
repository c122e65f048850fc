"""What a program computes by itself with the length of its loader or its data set, as for one process, and with its rank.

Its source is read: where it multiplies or divides by `len(loader)`, and knows nothing of ranks there.
"""

import ast
import functools
import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from hvdtrain.program.shown import SAYING
from hvdtrain.program.source import assigned, called, functions_of, names_stored, syntax_of, tree_of
from hvdtrain.program.uses import variables_of

OF_ROWS = re.compile("arange|label|target|offset")  # where the rows of a rank are sought
# In what makes a length that of all ranks, or of samples; and in a speed.
OF_ALL = re.compile("size|world|accum|ranks|replicas|batch|total_steps|time|second|clock|per_step")


def scopes_of(frame: FrameType, what: Any) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield the functions of the program's file in which names stand for this object, with these names."""
    tree, own = syntax_of(frame.f_code) or (None, None)
    if tree is None or own is None:
        return
    local = {name for name, value in variables_of(frame).items() if value is what}
    outer = {name for name, value in frame.f_globals.items() if value is what}
    if not (known := local | outer):
        return
    yield own, known
    calls = [one for one in ast.walk(own) if isinstance(one, ast.Call)]
    inner = set(functions_of(own))
    for node in functions_of(tree):
        if node is not own:
            arguments = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
            given = [one for one in calls if called(one) == node.name]
            pairs = [pair for one in given for pair in zip(node.args.args, one.args, strict=False)]
            others = {parameter.arg for parameter, value in pairs if ast.unparse(value) not in known}
            # Not one that is given another loader elsewhere.
            if names := {parameter.arg for parameter, _ in pairs} - others:
                yield node, names
            if names := (known if node in inner else outer) - arguments - names_stored(node):
                yield node, names


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions in it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        yield (node := waiting.pop(0))
        waiting += [] if isinstance(node, ast.FunctionDef | ast.ClassDef) else ast.iter_child_nodes(node)


def statements_of(function: ast.AST) -> Iterator[list[ast.AST]]:
    """Yield what each statement computes, without the statements in it."""
    for node in inside(function):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield [part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.stmt | ast.ExceptHandler)]


def identifiers(node: ast.AST) -> set[str]:
    return {getattr(one, "id", getattr(one, "attr", "")) for one in ast.walk(node)} - {""}


def is_length_of(node: ast.AST, names: set[str]) -> bool:
    """Return whether a node is `len(NAME)`."""
    return isinstance(node, ast.Call) and called(node) == "len" and ast.unparse(node.args[0]) in names


def steps_of_one_process(frame: FrameType, loader: object, steps: int) -> str:
    """Return a warning if the program computes with the length of the loader that it trains on, as `step / len(loader)`, and
    an epoch of this run has fewer steps; else an empty text. steps: in an epoch."""
    if not isinstance(loader, DataLoader) or len(loader) == steps:
        return ""
    for function, names in scopes_of(frame, loader):
        values = [(target.id, value) for target, value in assigned(function) if isinstance(target, ast.Name)]
        lengths = {name: ast.unparse(value) for name, value in values if is_length_of(value, names)}
        computed = [(name, value) for name, value in values if isinstance(value, ast.BinOp | ast.Attribute)]
        of_ranks = {name for name, value in computed if any(map(OF_ALL.search, identifiers(value)))}
        for parts in statements_of(function):
            words = set[str]().union(*map(identifiers, parts))
            if words & of_ranks or any(map(OF_ALL.search, words)) or any(called(one) in SAYING for one in parts):
                continue
            for factor in (one for part in parts for one in ast.walk(part) if isinstance(one, ast.BinOp)):
                sides = [one for side in (factor.left, factor.right) for one in ast.walk(side)]
                found = [ast.unparse(one) for one in sides if is_length_of(one, names)]
                found += [lengths[one.id] for one in sides if isinstance(one, ast.Name) and one.id in lengths]
                if found and isinstance(factor.op, ast.Mult | ast.Div):
                    name = found[0]
                    message = f"{name} is {len(loader)}, the steps of one process, and an epoch has {steps}"
                    return f"{message}: compute with run.total_steps({name[4:-1]}, 1), or with run.progress"
    return ""


def epochs_of_its_own(frame: FrameType, count: int | None, given: int) -> str:
    """Return a warning if the program writes another number of epochs into `run.epochs` than the command has given, and
    reads that nowhere; else an empty text."""
    tree = tree_of(frame.f_code.co_filename) if count not in (None, given) else None
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Attribute)] if tree else []
    calls = [node for node in nodes if isinstance(node, ast.Call) and called(node) == "epochs"]
    reads = {node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "epochs"}
    reads -= {node.func for node in calls}
    written = [one.args[0].value for one in calls if one.args and isinstance(one.args[0], ast.Constant)]
    if written != [count] or reads:
        return ""
    return f"--epochs {given} has no effect, the program trains {count} epochs: write run.epochs(flags.epochs)"


def sum_of_one_rank(frame: FrameType, loader: object) -> str:
    """Return a warning if the program adds up values of its steps, and divides by the length of the loader or of its data
    set, as for the mean loss of an epoch; else an empty text. Where there are several ranks, it has a part of them."""
    if not isinstance(loader, DataLoader):
        return ""
    for function, names in scopes_of(frame, loader):
        adding = [one for one in inside(function) if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Add)]
        sums = {ast.unparse(one.target) for one in adding}
        lengths = names | {f"{name}.dataset" for name in names}
        lengths |= {name for name, value in variables_of(frame).items() if value is loader.dataset}
        quotients = [one for one in inside(function) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div)]
        for one in [one for one in quotients if is_length_of(one.right, lengths)]:
            parts = {ast.unparse(part) for part in ast.walk(one.left) if isinstance(part, ast.expr)}
            if found := sorted(sums & parts):
                message = f"{found[0]} / {ast.unparse(one.right)} has the samples of this rank alone"
                return f"{message}: step.record() and step.loss are of all ranks"
    return ""


@functools.cache  # it is asked in each step
def rows_by_the_rank(tree: ast.Module) -> str:
    """Return a warning if the program of this file finds the rows of this rank by a product with its number, such as
    `arange(n) + n * run.rank`; else an empty text. Ranks may have unequal numbers of rows."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Module)]
    for parts in (parts for function in functions for parts in statements_of(function)):
        factors = [one for part in parts for one in ast.walk(part) if isinstance(one, ast.BinOp)]
        by_rank = any(isinstance(one.op, ast.Mult) and "rank" in identifiers(one) for one in factors)
        if by_rank and any(map(OF_ROWS.search, set[str]().union(*map(identifiers, parts)))):
            message = "run.gather() got unequal numbers of rows, and the program multiplies by its rank"
            return f"{message}: the rows of a rank begin at step.batch.first"
    return ""
