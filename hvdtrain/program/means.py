"""Notices numbers that a program records as sums over samples, and that are means, or follow from means.

Ranks and batches have unequal numbers of samples, so that only sums and counts can be added up.
"""

import ast
import contextlib
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hvdtrain.engines.errors import UserError
from hvdtrain.program.losses import values_of
from hvdtrain.program.uses import called, frame_of_program, node_of, tree_of

# What a sum may go through and still be one.
STILL_SUMS = frozenset(
    {"detach", "clone", "cpu", "to", "float", "double", "item", "__float__", "numpy", "add", "add_", "sub", "__rsub__"}
) | {"clamp", "clamp_min", "maximum"}
SUMS = frozenset({"sum", "nansum", "count_nonzero"})
PRODUCTS = frozenset({"mul", "mul_", "__imul__"})
LOGARITHMS = frozenset({"log", "log10"})
ADDING = frozenset({"add", "add_", "__iadd__", "__radd__"})
DIVISORS = {
    "div": 1,
    "div_": 1,
    "__itruediv__": 1,
    "true_divide": 1,
    "__rdiv__": 0,
}  # which argument of a quotient divides
# Names of metrics of many samples, whatever library has computed them. Such values of each sample may be summed up.
OF_MANY = re.compile(
    r"(^|_)(accuracy|acc|f1|fbeta|precision|recall|iou|miou|dice|jaccard|auc|auroc|map|mcc|kappa|bleu|rmse)(_|$)"
)
PERPLEXITY = re.compile(r"(^|_)(ppl|perplexity)(_|$)")
COUNTS = re.compile(
    r"(^|_)(correct|right|hits|errors|mistakes|wrong)(_|$)"
)  # with OF_MANY: what is counted among samples
SUMMING, AVERAGING = {"sum", "nansum", "fsum"}, {"mean", "nanmean", "fmean", "average"}  # calls, of any library
KEEPING = {"float", "item", "float64", "round"}  # what they are given, or called of, is the number itself
OF_SAMPLES = re.compile(r"len\(|size\(0|size\(\)\[0|shape\[0\]|batch")  # in what divides by their number
MOST_KEPT = 10_000  # scalars of a test set
MOST_EXPONENT = 700.0  # of which exp is a number of float64
OF_MEANS: Sequence[Callable[[float], float]] = (
    lambda mean: 100 * mean, math.exp, math.sqrt, lambda mean: -10 * math.log10(mean),
    lambda mean: 10 * math.log10(255**2 / mean),
)  # fmt: skip


class Derived(NamedTuple):
    """A scalar that is computed from means over a batch, or from quotients of its sums. value: kept, so that no other
    object gets its id. adds_up: whether it is a sum over this number of samples all the same. terms: of how many it is the
    sum, which may be those of single samples. is_multiplied: by a number, which may be the one of its items."""

    value: object
    is_quotient: bool
    adds_up: Callable[[int], bool]
    terms: int = 1
    is_multiplied: bool = False
    is_logarithm: bool = False  # so that a factor is that of decibels


class Means(TorchFunctionMode):
    """Notes which scalars are means over a batch, or follow from such: `run.record` would take them for sums, and 0.67 of 8
    samples for 0.08.

    Up to the first `run.record`, and not in a program that has used torch.compile.
    """

    def __init__(self, say: Callable[[str], object], known: Collection[str]):
        """say: called with a warning. known: names of values that were recorded before, in another evaluation."""
        super().__init__()
        self.say, self.known = say, known
        self._derived: dict[int, Derived] = {}  # by id
        self._sums: dict[int, tuple[object, object]] = {}  # with what it is the sum of
        self._depth: int | None = None  # of the stack of such modes, with this one; None: it is not there

    def __enter__(self) -> "Means":
        # A function that was compiled without this mode would be compiled again with it.
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None or not dynamo.counters["frames"]:
            super().__enter__()  # type: ignore[no-untyped-call] # torch's own
            self._depth = torch._C._len_torch_function_stack()
        return self

    def __exit__(self, *error: object) -> None:
        if self._depth is not None:
            self._depth = None
            super().__exit__(*error)  # type: ignore[no-untyped-call] # torch's own

    def stop(self) -> None:
        """Watch no longer. Does nothing where the program has entered such a mode, too, and not left it."""
        if self._depth == torch._C._len_torch_function_stack():
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if not isinstance(result, float) and not (isinstance(result, Tensor) and result.numel() == 1):
            return result
        if len(self._derived) + len(self._sums) > MOST_KEPT:
            self.stop()
            return result
        if name == "mean" or is_mean_loss(func, args, kwargs or {}):
            self._derived[id(result)] = Derived(result, False, lambda samples: False)
        elif name in SUMS:
            self._sums[id(result)] = result, next(iter(args), None)
        else:
            self._follow(name, args, result)
        return result

    def _follow(self, name: str, args: Sequence[Any], result: object) -> None:
        """Note what a function of scalars returns."""
        of_sums = any(id(one) in self._sums for one in args)
        before = next((self._derived[id(one)] for one in args if id(one) in self._derived), None)
        divisor = args[DIVISORS[name]] if name in DIVISORS and len(args) == 2 else None
        if id(divisor) in self._sums or id(divisor) in self._derived:
            self._derived[id(result)] = Derived(result, True, lambda samples: False)
        elif of_sums and type(divisor) is int:
            self._derived[id(result)] = Derived(result, False, lambda samples: samples != divisor)
        elif of_sums and name in PRODUCTS and (factor := next((one for one in args if type(one) is float), None)):
            # By `100.0 / batch_size`, a percentage.
            self._derived[id(result)] = Derived(
                result, False, lambda samples: not any(math.isclose(factor * samples, one) for one in (1.0, 100.0))
            )
        elif before is not None and name in PRODUCTS:
            number = next((one for one in args if type(one) in (int, float)), None)
            if number is not None and not before.is_quotient:  # a mean times the number of samples, or of their values
                adds_up = before.adds_up
                self._derived[id(result)] = Derived(
                    result, False, lambda samples: number % samples == 0 or adds_up(samples),
                    is_multiplied=not before.is_logarithm, is_logarithm=before.is_logarithm,
                )  # fmt: skip
            elif number is None:  # a tensor, such as the number of tokens
                self._derived.pop(id(result), None)
            else:
                self._derived[id(result)] = before._replace(value=result)
        elif before is not None:
            terms = sum(self._derived[id(one)].terms for one in args if id(one) in self._derived)
            logarithm = before.is_logarithm or name in LOGARITHMS
            terms = terms if name in ADDING else 1
            self._derived[id(result)] = before._replace(value=result, terms=terms, is_logarithm=logarithm)
        elif of_sums and name in STILL_SUMS | PRODUCTS:
            self._sums[id(result)] = result, next(self._sums[id(one)][1] for one in args if id(one) in self._sums)

    def is_sum(self, value: float | Tensor, samples: int) -> bool:
        """Return whether a number is known to be a sum over this number of samples, though it may look like a share."""
        if id(value) in self._sums:
            rows = self._sums[id(value)][1]
            # Ones, and each divided by their number, add up to a share.
            apart = rows[rows > 0] * samples - 1 if isinstance(rows, Tensor) and rows.is_floating_point() else None
            return apart is None or not bool((apart.abs() < 1e-6).all())
        if (known := self._derived.get(id(value))) is not None:
            return known.terms == samples or known.adds_up(samples)
        means = [one.value for one in self._derived.values() if isinstance(one.value, float)]
        return len(means) >= samples and math.isclose(
            float(value), sum(means[-samples:]), rel_tol=1e-9
        )  # each sample's

    def of(self, value: object, samples: int, *, by_value: bool) -> Derived | None:
        """Return what `value` follows from, unless it is a sum over this number of samples. by_value: also if it is a
        function of a mean, by which Python may have computed it."""
        known = self._derived.get(id(value))
        if known is None and isinstance(value, float) and by_value and not self.is_sum(value, samples):
            known = next((one for one in self._derived.values() if is_function_of(one.value, value, samples)), None)
        return None if known is None or known.terms == samples or known.adds_up(samples) else known

    def is_average(self, value: object, batches: int) -> bool:
        """Return whether a number is between the means that the program has taken of batches, as an average of them is; or
        their sum by the number of all ranks' batches."""
        means = [one.value for one in self._derived.values() if isinstance(one.value, float) and not one.is_multiplied]
        if not isinstance(value, float) or not means:
            return False
        by_all = batches > 0 and math.isclose(value * batches, sum(means), rel_tol=1e-9)
        return by_all or (len(means) > 1 and min(means) <= value <= max(means))


def is_function_of(mean: object, value: float, samples: int) -> bool:
    """Return whether a number is one of OF_MEANS, as Python's own functions compute it."""
    if not isinstance(mean, float) or not 0 < mean < MOST_EXPONENT:
        return False
    functions = OF_MEANS if 100 % samples else OF_MEANS[1:]  # a hundred times the mean may be a sum
    return any(math.isclose(function(mean), value, rel_tol=1e-9) for function in functions)


def as_written(name: str, samples: int, *, ended: bool) -> str:
    """Return "sum" or "mean" if the program writes the value of this name as one where it calls `run.record`; else an empty
    text. ended: after the last batch, so that what was added up may be means of batches."""
    frame = frame_of_program()
    return kind_as_written(frame.f_code, frame.f_lineno, name, samples, ended)


@functools.lru_cache(maxsize=4096)
def kind_as_written(code: CodeType, line: int, name: str, samples: int, ended: bool) -> str:
    """Return the same of the call of `run.record` in this line of a function."""
    tree = tree_of(code.co_filename)
    function = None if tree is None else node_of(code, tree)
    if function is None:
        return ""
    calls = [one for one in ast.walk(function) if isinstance(one, ast.Call) and called(one) == "record"]
    calls = [one for one in calls if one.lineno <= line <= (one.end_lineno or one.lineno)]
    kinds = {
        kind_of_value(one.value, function, call, samples) for call in calls for one in call.keywords if one.arg == name
    }
    kind = kinds.pop() if len(kinds) == 1 else ""
    return "" if kind == "added" and ended else kind.replace("added", "sum")


def kind_of_value(value: ast.expr, function: ast.AST, call: ast.Call, samples: int) -> str:
    """Return what an expression is: a "sum", a "mean", "added" in a loop without this `call` of `run.record`; or ""."""
    if called(value) in KEEPING:
        inner = value.func.value if called(value) == "item" else value.args[0]  # type: ignore[attr-defined] # a call
        return kind_of_value(inner, function, call, samples)
    if called(value) in AVERAGING:
        return "mean"
    if called(value) in SUMMING:
        return "" if divides_by_samples(value) else "sum"
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) and isinstance(value.right, ast.Constant):
        left = kind_of_value(value.left, function, call, samples)
        return "" if left == "sum" and value.right.value == samples else left
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        sides = [(kind_of_value(value.left, function, call, samples), value.right)]
        sides += [(kind_of_value(value.right, function, call, samples), value.left)]
        factor = next((other for kind, other in sides if kind == "mean"), None)
        if isinstance(factor, ast.Constant) and isinstance(
            factor.value, int | float
        ):  # such as 100, for a share in percent
            return "mean" if factor.value % samples else "sum"
        return "sum" if factor is not None and OF_SAMPLES.search(ast.unparse(factor)) else ""
    if not isinstance(value, ast.Name):
        return ""
    nodes, parts = list(ast.walk(function)), list(values_of(value.id, function))
    if len(parts) != sum(
        isinstance(one, ast.Name) and one.id == value.id and type(one.ctx) is ast.Store for one in nodes
    ):
        return ""  # also set as one of several, or by a loop
    sums = [one for one in nodes if isinstance(one, ast.AugAssign) and ast.unparse(one.target) == value.id]
    if not sums:
        named = [{getattr(part, "id", "") for part in ast.walk(one)} for one in parts]
        others = [one for one, names in zip(parts, named, strict=True) if value.id not in names]
        kinds = {kind_of_value(one, function, call, samples) for one in others}
        return kinds.pop() if len(kinds) == 1 else ""
    loops = [list(ast.walk(one)) for one in nodes if isinstance(one, ast.For)]
    apart = [loop for loop in loops if call not in loop]
    adds = all(isinstance(one.op, ast.Add) and any(one in loop for loop in apart) for one in sums)
    begins = all(isinstance(one, ast.Constant | ast.BinOp) for one in parts)
    return "added" if adds and begins and not any(map(divides_by_samples, sums)) else ""


def divides_by_samples(part: ast.AST) -> bool:
    """Return whether something in an expression is divided by the number of samples, as it is mostly written."""
    quotients = [one for one in ast.walk(part) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div)]
    return any(OF_SAMPLES.search(ast.unparse(one.right)) for one in quotients)


def is_share(value: object, samples: int) -> bool:
    """Return whether a number, which another library may have made, is a share of the samples, such as an accuracy."""
    # A share k / n times n is whole up to the rounding of float64, which is far below 1e-9.
    return isinstance(value, float) and 0 < value < 1 and abs(value * samples - round(value * samples)) < 1e-9


def is_percentage(name: str, value: object, samples: int) -> bool:
    """Return whether a number of this name is a share of the samples in percent."""
    # A whole number may be a sum: half of the samples are 50 percent.
    is_sum = not isinstance(value, float) or value == round(value) or not 1 < value < 100
    return not is_sum and bool(OF_MANY.search(name.lower())) and is_share(value / 100, samples)  # type: ignore[operator]


def is_mean_loss(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether this call of a loss in torch.nn.functional takes the mean."""
    if getattr(func, "__module__", "") != "torch.nn.functional":
        return False
    parameters = inspect.signature(func).parameters
    given = dict(zip(parameters, args, strict=False)) | named
    return "reduction" in parameters and given.get("reduction", parameters["reduction"].default) in (
        "mean",
        "batchmean",
    )


def require_no_counts(values: Mapping[str, object], samples: int) -> None:
    """Raise UserError if a whole number that `step.record` got is a count among the samples of this micro-batch: it takes
    their mean."""
    for name, value in values.items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        is_count = type(number) is int and 1 < number <= samples
        if is_count and (COUNTS.search(name) or OF_MANY.search(name)):
            message = f"step.record({name}={number}) got a count of {samples} samples, and takes a mean"
            raise UserError(f"{message}: give it a value for each sample, such as (predicted == labels).float()")


def require_sum(
    means: Means, name: str, value: Any, samples: int, count: object, *, first: bool, ended: bool, batches: int
) -> None:
    """Raise UserError if a number that the program gives for several samples is no sum over them. first: of this name.
    ended: after the last batch. batches: of all ranks; 0: that is not known."""
    written = ""
    if first:
        with contextlib.suppress(Exception):  # any: the source is the author's
            written = as_written(name, samples, ended=ended)
    # The means of later batches are not noted.
    derived = means.of(value, samples, by_value=first and written != "sum")
    first = first and name not in means.known
    if derived and derived.is_multiplied and count is not None:  # the mean over tokens, times their number
        derived = None
    number = float(value) if first and count is None and isinstance(value, float | Tensor) else 0.0
    # A perplexity is 1 or more, and so is that of each sample.
    if (derived and derived.is_quotient) or (1 < number < samples and PERPLEXITY.search(name.lower())):
        remedy = "give the sums, with count=; F1 and such need all samples: run.gather() after the loop, then record it"
        raise UserError(f"run.record({name}=...) got a quotient of this batch, and batches do not add up: {remedy}")
    averages = ended and count is None and means.is_average(value, batches)
    adds_up = first and (written == "sum" or (isinstance(value, float | Tensor) and means.is_sum(value, samples)))
    shares = first and not adds_up and (is_share(value, samples) or is_percentage(name, value, samples))
    by_hand = written == "mean" and not isinstance(value, Tensor)  # of numpy or of Python: torch's are known
    if derived or averages or by_hand or (count is None and shares):
        remedy = 'give a value for each sample (reduction="none"), or their sum; count= is how many a sum is of'
        raise UserError(f"run.record({name}=...) got a mean, and parts may have unequal numbers: {remedy}")
    if 0 < number < 1 and not adds_up and OF_MANY.search(name.lower()):
        remedy = "if it is that of the batch, run.gather() what it is computed from, and record it after the loop"
        means.say(f"warning: run.record({name}={number:.4g}) is taken for a sum over {samples} samples: {remedy}")
