"""What the first loss of a run shows: that it is scaled or divided already, or is a mean over other items than samples.

The graph of the loss is read, which torch keeps for the backward pass, and the program's code for what a factor stands for.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvdtrain.checkpoint.shown import called, node_of, tree_of
from hvdtrain.checkpoint.uses import frame_of_program
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.loop.step import Step

LEAST_SCALE = 1024.0  # GradScaler begins with 65,536, and some programs with less
FACTOR_NODES = ("MulBackward0", "DivBackward0", "ToCopyBackward0", "ViewBackward0")  # with what autocast adds
ADDING_NODES = ("AddBackward0", "SubBackward0", "ToCopyBackward0")
SUM_NODES = (*ADDING_NODES, *FACTOR_NODES)
MOST_NODES = 50
MEAN, SUM = 1, 2  # of `reduction`, as torch saves it
# Names that programs give the number of micro-batches, not a loss that is accumulated; and that of ranks.
PASSES = re.compile(r"^(?!.*loss).*accum")
RANKS = re.compile(r"world_size|num_replicas|^(run|hvd|engine)\.size$")


def look_at(loss: Tensor, count: object, step: "Step", engine: Engine, say: Callable[[str], object] | None) -> None:
    """Look at the first loss of a run, which `step.backward` got. say: called with a warning;
    None: another loss of this step was looked at.

    Raises UserError if a GradScaler has multiplied it, or the program has divided it by the number of micro-batches or
    multiplied it by that of the ranks.
    """
    require_unscaled(loss)
    passes = step.micro_batches // len(engine.own)
    for number, pattern, what in ((passes, PASSES, "micro-batches of a step"), (engine.size, RANKS, "ranks")):
        if number > 1 and (how := scaled_by(loss, number)) and has_factor(pattern):
            message = f"step.backward() got a loss {how} {number}, the number of {what}"
            raise UserError(f"{message}: leave that out, gradients are means over all samples of the step")
    if say is None or count is not None or passes * engine.size == 1:
        return
    if getattr(loss.grad_fn, "_saved_reduction", MEAN) == SUM and step.batch.count > 1:
        remedy = "divide it by their number in the micro-batch, such as loss / len(labels)"
        say(f"warning: the loss is a sum over the samples, and not their mean: {remedy}")
    elif items := items_of(loss, step.batch.count):
        remedy = "give step.backward(loss, count=...) their number, or the sum of their weights"
        say(f"warning: the loss is a mean over {items}, and not over samples: {remedy}")


def require_unscaled(loss: Tensor) -> None:
    """Raise UserError if a GradScaler has multiplied this loss: by a power of two, at first by 65,536. Nothing would divide
    the gradients, and they would all be clipped."""
    multiplied = type(loss.grad_fn).__name__ == "MulBackward0"
    scale: Any = getattr(loss.grad_fn, "_saved_other", None) if multiplied else None
    # Of a number of Python, it is a tensor of float64 or int64.
    is_scale = (
        isinstance(scale, Tensor) and scale.numel() == 1 and scale.dtype == torch.float32 and not scale.requires_grad
    )
    factor = float(scale) if is_scale else 1.0
    if factor >= LEAST_SCALE and math.frexp(factor)[0] == 0.5:
        message = f"step.backward() got a loss times {factor:,.0f}, as of a GradScaler"
        raise UserError(f"{message}: leave the scaler out, --amp fp16 has its own")


def nodes_of_loss(loss: Tensor, passed: tuple[str, ...]) -> Iterator[Any]:
    """Yield the nodes of the graph from which a loss is computed by nodes of these kinds alone."""
    waiting, seen = [loss.grad_fn], 0
    while waiting and seen < MOST_NODES:
        if (node := waiting.pop(0)) is None:
            continue
        seen += 1
        yield node
        waiting += [inner for inner, _ in node.next_functions] if type(node).__name__ in passed else []


def factor_of(node: Any) -> float:
    """Return by which number this node multiplies; 1 if it does not."""
    kind, other = type(node).__name__, getattr(node, "_saved_other", None)
    if kind not in ("MulBackward0", "DivBackward0") or not isinstance(other, Tensor) or other.numel() != 1:
        return 1.0
    factor = float(other.detach())
    return factor if kind == "MulBackward0" else 1 / factor if factor else 1.0


def scaled_by(loss: Tensor, number: int) -> str:
    """Return in words whether a loss was multiplied or divided by a number; empty if not."""
    for factor in map(factor_of, nodes_of_loss(loss, FACTOR_NODES)):
        if math.isclose(factor, number, rel_tol=1e-6) or math.isclose(factor * number, 1, rel_tol=1e-6):
            return "times" if factor > 1 else "divided by"
    return ""


def has_factor(pattern: re.Pattern[str]) -> bool:
    """Return whether the loss that the program gives to `step.backward` is written as a product or a quotient with what has
    such a name. The number alone may mean another thing: half the sum of two losses is not divided by two micro-batches."""
    code = frame_of_program().f_code
    tree = tree_of(code.co_filename)
    function = None if tree is None else node_of(code, tree)
    if tree is None or function is None:
        return False
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    waiting = [(one.args[0], function) for one in ast.walk(function) if called(one) == "backward" and one.args]  # type: ignore[attr-defined] # a call
    seen = set[ast.AST]()
    while waiting:
        expression, within = waiting.pop()
        if expression in seen:
            continue
        seen.add(expression)
        if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Mult | ast.Div):
            sides = [expression.right, *[expression.left] * isinstance(expression.op, ast.Mult)]
            if any(is_number(side, pattern) for side in sides):
                return True
            waiting += [(side, within) for side in (expression.left, expression.right)]
        elif isinstance(expression, ast.Name):
            waiting += [(value, within) for value in values_of(expression.id, within)]
        elif (of := functions.get(called(expression))) is not None:
            waiting += [(one.value, of) for one in ast.walk(of) if isinstance(one, ast.Return) and one.value]
    return False


def values_of(name: str, function: ast.AST) -> Iterator[ast.expr]:
    """Yield what a function assigns to a variable; of `name /= value`, the quotient."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == name for one in node.targets):
            yield node.value
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            yield ast.BinOp(node.target, node.op, node.value)


def is_number(expression: ast.expr, pattern: re.Pattern[str]) -> bool:
    """Return whether an expression is a number of such a name, or one divided by it."""
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Div):
        return is_number(expression.right, pattern)
    if isinstance(expression, ast.Call):
        inner = expression.args[:1] if called(expression) in ("float", "int") else [expression.func]
        return any(is_number(one, pattern) for one in inner)
    return isinstance(expression, ast.Name | ast.Attribute) and bool(pattern.search(ast.unparse(expression)))


def is_masked_sum(node: Any) -> bool:
    """Return whether a node is a sum of products, as of (losses * mask).sum()."""
    return type(node).__name__ == "SumBackward0" and type(node.next_functions[0][0]).__name__ == "MulBackward0"


def items_of(loss: Tensor, samples: int) -> str:
    """Return in words over which items a loss is a mean, if these are not all values of its samples; empty if they are."""
    for node in nodes_of_loss(loss, SUM_NODES):
        if type(node).__name__.startswith("NllLoss") and node._saved_reduction == MEAN:
            if node._saved_weight is not None:
                return "weights of classes"
            counted, labels = float(node._saved_total_weight), node._saved_target.numel()
            if counted != labels:
                return f"{counted:g} of {labels} labels, without those of ignore_index"
    for node in nodes_of_loss(loss, ADDING_NODES):
        if type(node).__name__ == "DivBackward0" and is_masked_sum(node.next_functions[0][0]):
            items = 1 / factor_of(node)
            # A number of Python is float64 or int64: some other factor.
            if node._saved_other.dtype != torch.float64 and items == round(items) and round(items) % max(samples, 1):
                return f"{items:g} items, of {samples} samples"
    return ""
