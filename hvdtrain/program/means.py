"""Notices numbers that a program records as sums over samples, and that are means, or follow from means.

Ranks and batches have unequal numbers of samples, so that only sums and counts can be added up.
"""

import ast
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
from hvdtrain.program.source import called, names_read, syntax_of, values_of
from hvdtrain.program.uses import OF_THE_PROGRAM, frame_of_program

# What a sum may go through and still be one.
LINEAR = frozenset({"detach", "clone", "cpu", "to", "float", "double", "item", "__float__", "numpy", "sub", "__rsub__"})
LINEAR |= {"clamp", "clamp_min", "maximum"}
SUMS = frozenset({"sum", "nansum", "count_nonzero"})
PRODUCTS = frozenset({"mul", "mul_", "__imul__"})
ADDING = frozenset({"add", "add_", "__iadd__", "__radd__"})
# Which argument of a quotient divides.
DIVISORS = {"div": 1, "div_": 1, "__itruediv__": 1, "true_divide": 1, "__rdiv__": 0}
# Names of metrics of many samples, whatever library has computed them. Such values of each sample may be summed up.
SHARES = "accuracy|acc|f1|fbeta|precision|recall|iou|miou|dice|jaccard|auc|auroc|map|mcc|kappa|bleu|rmse"
OF_MANY = re.compile(rf"(^|_)({SHARES})(_|$)")
PERPLEXITY = re.compile(r"(^|_)(ppl|perplexity)(_|$)")
COUNTS = re.compile(rf"(^|_)(correct|right|hits|errors|mistakes|wrong|{SHARES})(_|$)")  # among samples
SUMMING, AVERAGING = {"sum", "nansum", "fsum"}, {"mean", "nanmean", "fmean", "average"}  # calls, of any library
KEEPING = {"float", "item", "float64", "round"}  # what they are given, or called of, is the number itself
OF_SAMPLES = re.compile(r"len\(|size\(0|size\(\)\[0|shape\[0\]|batch")  # in what divides by their number
UNITS = (1.0, 100.0, 10.0, -10.0)  # factors of a mean: a percentage, decibels
MOST_KEPT = 10_000  # scalars of a test set
MOST_EXPONENT = 700.0  # of which exp is a number of float64
OF_MEANS: Sequence[Callable[[float], float]] = (
    lambda mean: 100 * mean, math.exp, math.sqrt, lambda mean: -10 * math.log10(mean),
    lambda mean: 10 * math.log10(255**2 / mean),
)  # fmt: skip


class Noted(NamedTuple):
    """What is known of a scalar: it was a sum over a batch, or a mean, or follows from these.

    value: kept, so that no other object gets its id. factor, divisor: numbers of Python by which it was multiplied and
    divided since. terms: how many were added up to it, which may be those of single samples. rows: what a sum is of.
    """

    value: Any
    is_sum: bool
    factor: float = 1.0
    divisor: float = 1.0
    terms: int = 1
    is_quotient: bool = False
    rows: object = None

    def adds_up(self, samples: int) -> bool:
        """Return whether this is a sum over so many samples, whatever it began as."""
        if not self.is_sum:  # also a mean times the number of samples, or of their values
            return self.terms == samples or (not self.is_quotient and self.factor / self.divisor % samples == 0)
        if isinstance(self.rows, Tensor) and self.rows.is_floating_point():
            # Ones, and each divided by their number, add up to a share.
            apart = self.rows[self.rows > 0] * samples - 1
            if len(apart) and bool((apart.abs() < 1e-6).all()):
                return False
        # Times `1 / batch_size`, or `100.0 / batch_size`, a percentage.
        shares = (1.0, 100.0) if self.divisor == 1 else (self.divisor,)
        return not any(math.isclose(self.factor * samples, one) for one in shares)


class Means(TorchFunctionMode):
    """Notes which scalars are means over a batch, or follow from such: `run.record` would take them for sums, and 0.67 of 8
    samples for 0.08.

    Up to the first `run.record`, and not in a program that has used torch.compile.
    """

    def __init__(self, say: Callable[[str], object], known: Collection[str]):
        """say: called with a warning. known: names of values that were recorded before, in another evaluation."""
        super().__init__()
        self.say, self.known = say, known
        self._noted: dict[int, Noted] = {}  # by id
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
        if len(self._noted) > MOST_KEPT:
            self.stop()
        elif name == "mean" or is_mean_loss(func, args, kwargs or {}):
            self._noted[id(result)] = Noted(result, is_sum=False)
        elif name in SUMS:
            self._noted[id(result)] = Noted(result, is_sum=True, rows=next(iter(args), None))
        elif noted := [self._noted[id(one)] for one in args if id(one) in self._noted]:
            self._noted.pop(id(result), None)  # of a function that works in place
            if (known := self._followed(name, args, noted)) is not None:
                self._noted[id(result)] = known._replace(value=result)
        return result

    def _followed(self, name: str, args: Sequence[Any], noted: Sequence[Noted]) -> Noted | None:
        """Return what is known of the result of a function of scalars; None: nothing. noted: of these arguments."""
        known = next((one for one in noted if not one.is_sum), noted[0])
        number = next((one for one in args if type(one) in (int, float)), 0)
        divisor = args[DIVISORS[name]] if name in DIVISORS and len(args) == 2 else None
        if id(divisor) in self._noted:
            return Noted(None, is_sum=False, is_quotient=True)
        if number and name in DIVISORS:
            return known._replace(divisor=known.divisor * number, terms=1)
        if number and name in PRODUCTS and not (known.is_sum and type(number) is int):  # such as twice the sum
            return known._replace(factor=known.factor * number, terms=1)
        if name in ADDING:
            return known._replace(terms=sum(one.terms for one in noted if not one.is_sum))
        # A mean times a tensor, such as the number of tokens, may be anything, and so may the root of a sum.
        goes_on = name in LINEAR | PRODUCTS if known.is_sum else name not in PRODUCTS
        return known if goes_on else None

    def _means(self) -> list[Noted]:
        """Return what is known of the means that the program has as numbers of Python."""
        return [one for one in self._noted.values() if isinstance(one.value, float) and not one.is_sum]

    def is_sum(self, value: float | Tensor, samples: int) -> bool:
        """Return whether a number is known to be a sum over this number of samples, though it may look like a share."""
        if (known := self._noted.get(id(value))) is not None:
            return known.adds_up(samples)
        last = [one.value for one in self._means()[-samples:]]  # each sample's
        return len(last) == samples and math.isclose(float(value), sum(last), rel_tol=1e-9)

    def of(self, value: object, samples: int, *, by_value: bool) -> Noted | None:
        """Return from which mean or quotient `value` follows, unless it is a sum over this number of samples. by_value: also
        if it is a function of a mean, by which Python may have computed it."""
        known = self._noted.get(id(value))
        if known is None and isinstance(value, float) and by_value and not self.is_sum(value, samples):
            known = next((one for one in self._means() if is_function_of(one.value, value, samples)), None)
        return None if known is None or known.adds_up(samples) else known

    def is_average(self, value: object, batches: int) -> bool:
        """Return whether a number is between the means that the program has taken of batches, as an average of them is; or
        their sum by the number of all ranks' batches."""
        means = [one.value for one in self._means() if one.factor in UNITS]
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


@functools.lru_cache(maxsize=4096)
def kind_as_written(code: CodeType, line: int, name: str, samples: int) -> str:
    """Return `kind_of_value` of what the call of `run.record` in this line of a function gives for a name."""
    _, function = syntax_of(code) or (None, None)
    kinds = set[str]()
    for call in ast.walk(function) if function is not None else ():
        if isinstance(call, ast.Call) and called(call) == "record" and call.lineno <= line <= (call.end_lineno or 0):
            kinds |= {kind_of_value(one.value, function, call, samples) for one in call.keywords if one.arg == name}  # type: ignore[arg-type] # a function
    return kinds.pop() if len(kinds) == 1 else ""


def kind_of_value(value: ast.expr, function: ast.AST, call: ast.Call, samples: int) -> str:
    """Return what an expression is: a "sum", a "mean", "added" in a loop without this `call` of `run.record`; or ""."""
    match value:
        case ast.Call(ast.Attribute(inner, "item")) | ast.Call(_, [inner, *_]) if called(value) in KEEPING:
            return kind_of_value(inner, function, call, samples)
        case ast.Call() if called(value) in AVERAGING:
            return "mean"
        case ast.Call() if called(value) in SUMMING:
            return "" if divides_by_samples(value) else "sum"
        case ast.BinOp(left, ast.Div(), ast.Constant(divisor)):
            kind = kind_of_value(left, function, call, samples)
            return "" if kind == "sum" and divisor == samples else kind
        case ast.BinOp(left, ast.Mult(), right):
            for side, factor in ((left, right), (right, left)):
                if kind_of_value(side, function, call, samples) == "mean":
                    if isinstance(factor, ast.Constant):  # such as 100, for a share in percent
                        return "mean" if factor.value % samples else "sum"  # type: ignore[operator] # a number
                    return "sum" if OF_SAMPLES.search(ast.unparse(factor)) else ""
        case ast.Name(name):
            return kind_of_variable(name, function, call, samples)
    return ""


def kind_of_variable(name: str, function: ast.AST, call: ast.Call, samples: int) -> str:
    """Return the same of a variable of a function."""
    nodes, values = list(ast.walk(function)), values_of(name, function)
    stores = [one for one in nodes if isinstance(one, ast.Name) and one.id == name and type(one.ctx) is ast.Store]
    if len(values) != len(stores):
        return ""  # also set by a loop, or as what a call returns
    added = [one for one in nodes if isinstance(one, ast.AugAssign) and ast.unparse(one.target) == name]
    if not added:
        first = [one for one in values if name not in names_read(one)]  # not from itself
        kinds = {kind_of_value(one, function, call, samples) for one in first}
        return kinds.pop() if len(kinds) == 1 else ""
    loops = [list(ast.walk(one)) for one in nodes if isinstance(one, ast.For)]
    apart = [loop for loop in loops if call not in loop]
    adds = all(isinstance(one.op, ast.Add) and any(one in loop for loop in apart) for one in added)
    begins = all(isinstance(one, ast.Constant | ast.BinOp) for one in values)
    return "added" if adds and begins and not any(map(divides_by_samples, added)) else ""


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
    default = parameters["reduction"].default if "reduction" in parameters else "none"
    return given.get("reduction", default) in ("mean", "batchmean")


def require_no_counts(values: Mapping[str, object], samples: int) -> None:
    """Raise UserError if a whole number that `step.record` got is a count among the samples of this micro-batch: it takes
    their mean."""
    for name, value in values.items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        is_count = type(number) is int and 1 < number <= samples
        if is_count and COUNTS.search(name):
            message = f"step.record({name}={number}) got a count of {samples} samples, and takes a mean"
            raise UserError(f"{message}: give it a value for each sample, such as (predicted == labels).float()")


def require_sum(
    means: Means, name: str, value: Any, samples: int, count: object, *, first: bool, ended: bool, batches: int
) -> None:
    """Raise UserError if a number that the program gives for several samples is no sum over them. first: of this name.
    ended: after the last batch. batches: of all ranks; 0: that is not known."""
    written = ""
    if first:
        with OF_THE_PROGRAM:
            frame = frame_of_program()
            written = kind_as_written(frame.f_code, frame.f_lineno, name, samples)
            # After the last batch, what was added up may be means of batches.
            written = written.replace("added", "" if ended else "sum")
    # The means of later batches are not noted.
    derived = means.of(value, samples, by_value=first and written != "sum")
    first = first and name not in means.known
    if derived and derived.factor != 1 and count is not None:  # the mean over tokens, times their number
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
