"""What the first loss of a run shows: that it is scaled or divided already, or is a mean over other items than samples.

The graph of the loss is read, which torch keeps for the backward pass, and the program's code for what a factor stands for.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hvdtrain.engines.errors import UserError
from hvdtrain.program.source import called, functions_of, syntax_of, values_of
from hvdtrain.program.uses import OF_THE_PROGRAM, frame_of_program

LEAST_SCALE = 1024.0  # GradScaler begins with 65,536, and some programs with less
FACTOR_NODES = ("MulBackward0", "DivBackward0", "ToCopyBackward0", "ViewBackward0")  # with what autocast adds
UNDIVIDED_NODES = ("AddBackward0", "SubBackward0", "MulBackward0", "ToCopyBackward0")
SUM_NODES = ("AddBackward0", "SubBackward0", *FACTOR_NODES)
MOST_NODES = 50
MEAN, SUM = 1, 2  # of `reduction`, as torch saves it
OF_CLASSES = "weights of classes"
# Names that programs give the number of micro-batches, not a loss that is accumulated; and that of ranks.
PASSES = re.compile(r"^(?!.*loss).*accum")
RANKS = re.compile(r"world_size|num_replicas|^(run|hvd|engine)\.size$")


def look_at(
    loss: Tensor, counted: bool, samples: int, passes: int, ranks: int, say: Callable[[str], object] | None
) -> list[float]:
    """Look at a loss of the first step, which `step.backward` got. counted: whether it got a count, too. samples: of this
    micro-batch. passes: micro-batches of a rank in a step. say: called with a warning; None: another loss of this step was
    looked at. Return the number of samples, and of how many items each of its terms is a mean, for `unequal_items`.

    Raises UserError if a GradScaler has multiplied it, or the program has divided it by the number of micro-batches or
    multiplied it by that of the ranks.
    """
    require_unscaled(loss)
    wrong = odd = ""
    items: list[float] = []
    # Whatever graph and source the program has, they may not end it: it trains without these lines, too.
    with OF_THE_PROGRAM:
        wrong = factor_in_words(loss, passes, ranks)
        if say is not None and not counted and passes * ranks > 1 and samples:
            odd = what_else(loss, samples)
        items = [samples, *(number for number, _ in means_in(loss, samples))] if not (counted or odd) else []
    if wrong:
        raise UserError(f"{wrong}: leave that out, gradients are means over all samples of the step")
    if odd and say is not None:
        say(f"warning: {odd}")
    return items


def means_in(loss: Tensor | SimpleNamespace, samples: int) -> Iterator[tuple[float, str]]:
    """Yield over how many items the terms of a loss are means; and in words over which, if the data choose them."""
    for node, _ in nodes_of_loss(loss, SUM_NODES):
        kind, inner = type(node).__name__, next(iter(node.next_functions), (None,))[0]
        if getattr(node, "_saved_reduction", None) == MEAN and hasattr(node, "_saved_target"):
            items, labels, words = 0.0, node._saved_target.numel(), ""
            if kind.startswith("NllLoss") and node._saved_weight is None:
                items = float(node._saved_total_weight)
                words = f"{items:g} of {labels} labels, without those of ignore_index" if items != labels else ""
            elif kind.startswith("NllLoss"):
                words = OF_CLASSES
            yield items or labels, words
        elif kind == "MeanBackward0":
            items = node._saved_self_sym_numel
            yield items, f"{items:g} items, of {samples} samples" if is_by_mask(inner) else ""
        elif kind == "DivBackward0":
            items, is_sum = 1 / factor_of(node), getattr(inner, "_saved_reduction", MEAN) == SUM
            masked = is_sum or math.isclose(items, mask_of(inner))
            if masked or type(inner).__name__ == "SumBackward0":
                words = f"{items:g} items, of {samples} samples" if masked else ""
                yield round(items) if math.isclose(items, round(items)) else 1, words


def unequal_items(of_ranks: Sequence[Sequence[Sequence[float]]]) -> str:
    """Return a warning if micro-batches of as many samples are means over unequal numbers of items, such as of triplets that
    were found in them; else an empty text. of_ranks: of each, what `look_at` has returned of its micro-batches."""
    of_all = [one for theirs in of_ranks for one in theirs if one]
    for samples in {one[0] for one in of_all if one[0]}:
        for items in zip(*(numbers for count, *numbers in of_all if count == samples), strict=False):
            # A multiple of the samples may be pixels, also where these are as many as the largest picture has.
            if len(set(items)) > 1 and any(number % samples for number in items):
                one, other = items[0], next(number for number in items if number != items[0])
                what = f"a mean over {one:g} items of {samples:g} samples, and {other:g} of as many others"
                return f"the loss is {what}: give step.backward(loss, count=...) their number"
    return ""


def factor_in_words(loss: Tensor, passes: int, ranks: int) -> str:
    """Return that the program has divided a loss by the number of micro-batches, or multiplied it by that of the ranks;
    empty if it has not."""
    for number, pattern, what in ((passes, PASSES, "micro-batches of a step"), (ranks, RANKS, "ranks")):
        if number > 1 and (how := scaled_by(loss, number)) and has_factor(pattern):
            return f"step.backward() got a loss {how} {number}, the number of {what}"
    return ""


def what_else(loss: Tensor, samples: int) -> str:
    """Return what a loss is, if it is no mean over samples, and what to do; empty if it may be one."""
    if is_sum_over(loss, samples):
        remedy = "divide it by their number in the micro-batch, such as loss / len(labels)"
        return f"the loss is a sum over the samples, and not their mean: {remedy}"
    # Where each sample may have as many items, it is their mean, too.
    means = [words for items, words in means_in(loss, samples) if words == OF_CLASSES or items % samples]
    for words in filter(None, means):
        remedy = "give step.backward(loss, count=...) their number, or the sum of their weights"
        return f"the loss is a mean over {words}, and not over samples: {remedy}"
    return ""


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


def nodes_of_loss(loss: Tensor | SimpleNamespace, passed: tuple[str, ...]) -> Iterator[tuple[Any, float]]:
    """Yield the nodes of the graph from which a loss is computed by nodes of these kinds alone, with their factors in it."""
    waiting, seen = [(loss.grad_fn, 1.0)], 0
    while waiting and seen < MOST_NODES:
        node, factor = waiting.pop(0)
        if node is None:
            continue
        seen += 1
        yield node, factor
        if type(node).__name__ in passed:
            waiting += [(inner, factor * factor_of(node)) for inner, _ in node.next_functions]


def factor_of(node: Any) -> float:
    """Return by which number this node multiplies; 1 if it does not."""
    kind, other = type(node).__name__, getattr(node, "_saved_other", None)
    if kind not in ("MulBackward0", "DivBackward0") or not isinstance(other, Tensor) or other.numel() != 1:
        return 1.0
    factor = float(other.detach())
    return factor if kind == "MulBackward0" else 1 / factor if factor else 1.0


def scaled_by(loss: Tensor, number: int) -> str:
    """Return in words whether a loss was multiplied or divided by a number; empty if not."""
    for node, _ in nodes_of_loss(loss, FACTOR_NODES):
        factor = factor_of(node)
        if math.isclose(factor, number, rel_tol=1e-6) or math.isclose(factor * number, 1, rel_tol=1e-6):
            return "times" if factor > 1 else "divided by"
    return ""


def has_factor(pattern: re.Pattern[str]) -> bool:
    """Return whether the loss that the program gives to `step.backward` is written as a product or a quotient with what has
    such a name. The number alone may mean another thing: half the sum of two losses is not divided by two micro-batches."""
    tree, function = syntax_of(frame_of_program().f_code) or (None, None)
    if tree is None or function is None:
        return False
    functions = {node.name: node for node in functions_of(tree)}
    waiting = [(one.args[0], function) for one in ast.walk(function) if called(one) == "backward" and one.args]  # type: ignore[attr-defined] # a call
    seen = set[ast.AST]()
    while waiting:
        expression, within = waiting.pop()
        if expression in seen:
            continue
        seen.add(expression)
        if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Mult | ast.Div):
            sides = [expression.right, *[expression.left] * isinstance(expression.op, ast.Mult)]
            if any(is_number(side, pattern, within) for side in sides):
                return True
            waiting += [(side, within) for side in (expression.left, expression.right)]
        elif called(expression) in ("div", "mul", "div_", "mul_") and isinstance(expression.func, ast.Attribute):
            if any(is_number(one, pattern, within) for one in expression.args):
                return True
            waiting += [(expression.func.value, within)]
        elif isinstance(expression, ast.Name):
            waiting += [(value, within) for value in values_of(expression.id, within)]
        elif (of := functions.get(called(expression))) is not None:
            waiting += [(one.value, of) for one in ast.walk(of) if isinstance(one, ast.Return) and one.value]
    return False


def is_number(expression: ast.expr, pattern: re.Pattern[str], function: ast.AST, *, follow: bool = True) -> bool:
    """Return whether an expression is a number of such a name, one divided by it, or a variable that is assigned such."""
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Div):
        return is_number(expression.right, pattern, function)
    if isinstance(expression, ast.Call):
        inner = expression.args[:1] if called(expression) in ("float", "int") else [expression.func]
        return any(is_number(one, pattern, function) for one in inner)
    if not isinstance(expression, ast.Name | ast.Attribute):
        return False
    values = values_of(expression.id, function) if follow and isinstance(expression, ast.Name) else ()
    named = any(is_number(one, pattern, function, follow=False) for one in values)
    return named or bool(pattern.search(ast.unparse(expression)))


def is_sum_over(loss: Tensor, samples: int) -> bool:
    """Return whether a loss has a sum over the samples, which nothing divides by their number."""
    for node, factor in nodes_of_loss(loss, UNDIVIDED_NODES):
        sizes = getattr(node, "_saved_self_sym_sizes", ())
        whole = type(node).__name__ == "SumBackward0" and node is root_of_loss(loss) and list(sizes[:1]) == [samples]
        if (whole and not is_weighted(node) and not is_of_tasks(node, samples)) or getattr(
            node, "_saved_reduction", MEAN
        ) == SUM:
            return samples > 1 and abs(factor) * samples > 1.5
    return False


def root_of_loss(loss: Tensor) -> Any:
    """Return the node of a loss without its factors."""
    return next((node for node, _ in nodes_of_loss(loss, FACTOR_NODES) if factor_of(node) == 1.0), None)


def factors_in(node: Any) -> Tensor | None:
    """Return by what a node, such as a sum of weighted losses, has multiplied its values; None: by nothing."""
    inner = next(iter(node.next_functions), (None,))[0]
    factors = getattr(inner, "_saved_other", None) if type(inner).__name__ == "MulBackward0" else None
    return factors.detach() if isinstance(factors, Tensor) else None


def is_weighted(node: Any) -> bool:
    """Return whether a sum is of products with weights that add up to 1."""
    weights = factors_in(node)
    return weights is not None and math.isclose(float(weights.sum()), 1.0, rel_tol=1e-3)


def is_of_tasks(node: Any, samples: int) -> bool:
    """Return whether a sum is of losses that were stacked, each of which is a mean over the samples: of as many tasks."""
    nodes = nodes_of_loss(SimpleNamespace(grad_fn=node), ("SumBackward0", "MulBackward0"))
    parts = [part for one, _ in nodes if type(one).__name__ == "StackBackward0" for part, _ in one.next_functions]
    means = [[items for items, _ in means_in(SimpleNamespace(grad_fn=part), samples)] for part in parts]
    return bool(means) and all(any(number % samples == 0 for number in items) for items in means)


def mask_of(node: Any) -> float:
    """Return how many values a sum such as (losses * mask).sum() is of; 0 if there is no mask."""
    mask = factors_in(node) if type(node).__name__ == "SumBackward0" else None
    if mask is None or mask.numel() < 2 or not bool(((mask == 0) | (mask == 1)).all()):
        return 0.0
    return float(mask.sum())


def is_by_mask(node: Any) -> bool:
    """Return whether a node has chosen values by a mask: how many, depends on the data."""
    indices = getattr(node, "_saved_indices", ())
    by_index = any(one is not None and one.dtype is torch.bool for one in indices)
    return by_index or type(node).__name__ == "MaskedSelectBackward0"
