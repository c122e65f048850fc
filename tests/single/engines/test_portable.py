"""Nested values as JSON and back: exactly as they were, or refused by name and place when they are saved."""

import collections
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import typing

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from hvdtrain.engines import portable
from hvdtrain.engines.portable import (
    DEEPEST,
    NotStored,
    difference_of_values,
    flattened,
    from_json,
    to_json,
    unflattened,
)

Point = collections.namedtuple("Point", "n m")


class Pair(typing.NamedTuple):
    first: int
    second: str = ""


class Phase(enum.IntEnum):
    A = 0
    B = 1


class Word(enum.StrEnum):
    A = "a"


class Bits(enum.Flag):
    A = 1
    B = 2


class Rows(list):
    pass


class Table(dict):
    pass


DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.int16,
]  # fmt: skip
ARRAYS = ["f4", "f8", ">i4", "?", "c16", "M8[ns]", "U3", "S2"]
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**700), 10**700), st.floats(), st.text(), st.binary(),
    st.complex_numbers(), st.sampled_from([Phase.A, Word.A, Bits.B, torch.Size([2, 3]), np.float32(0.1), np.int8(-3)]),
    st.binary().map(bytearray),
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
tensors = st.builds(
    lambda shape, dtype, of: of((torch.arange(math.prod(shape)).reshape(shape) * 37).to(dtype)),
    st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES),
    st.sampled_from([lambda tensor: tensor, lambda tensor: tensor.t() if tensor.ndim == 2 else tensor]),
)  # fmt: skip
arrays = st.builds(lambda n, dtype: np.arange(n).astype("i8").astype(dtype), st.integers(0, 4), st.sampled_from(ARRAYS))


def collections_of(inner):
    some = st.lists(inner, max_size=4)
    mapping = st.dictionaries(keys, inner, max_size=4)
    return st.one_of(
        some, some.map(tuple), mapping, st.dictionaries(st.text(), inner, max_size=4),
        mapping.map(collections.OrderedDict), mapping.map(lambda value: collections.defaultdict(list, value)),
        st.lists(keys, max_size=3).map(collections.Counter), st.sets(keys, max_size=3), st.frozensets(keys, max_size=3),
        st.builds(collections.deque, some, st.sampled_from([None, 2])), st.builds(Point, inner, inner),
        inner.map(lambda one: [one, one]), inner.map(lambda one: {"a": one, "b": {"a": one}}),
    )  # fmt: skip


nested = st.recursive(st.one_of(scalars, tensors, arrays), collections_of, max_leaves=12)


def through_json(value):
    return from_json(json.loads(json.dumps(to_json(value))))


@settings(max_examples=300, deadline=None)
@given(value=nested)
def test_any_nested_values_come_back_exactly(value):
    assert difference_of_values(value, through_json(value)) is None
    packed, row = flattened(value)
    assert difference_of_values(value, unflattened(json.loads(json.dumps(packed)), row)) is None


def numbered(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


shared = [1]
tensor = torch.zeros(2)
of_module = collections.OrderedDict(a=1)
of_module._metadata = {"": {"version": 2}}
cycle: list = []
cycle.append(cycle)


@pytest.mark.parametrize(
    "value",
    [
        collections.Counter({0: 6}), Pair(1, "x"), [Phase.B, {Phase.A: 1}], {"__kind__": "int", "value": "0x1"},
        {"__tensor__": 1}, nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(2, requires_grad=True),
        of_module, {"a": tensor, "b": tensor, "c": tensor.detach()}, [shared, shared], numbered(DEEPEST), cycle,
        -0.0, [0.0, -0.0, math.nan], {1: True, 2: 1}, np.float64(0.1), np.array(3), list(range(300_000)),
        torch.ones(2, 3).t(), torch.ones(2, 3)[:1, 1], torch.zeros(3).expand(2, 3),
        torch.conj(torch.ones(2, dtype=torch.complex64) * 1j),
        {"queue": tensor.view(2)[:1], "other": tensor.view(2)[1:]}, "\ud800", {"": {"": {}}}, collections.Counter(a=6),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_was_lost_in_silence_comes_back(value):
    assert difference_of_values(value, through_json(value)) is None


def test_objects_that_were_one_are_one_again_and_others_are_not():
    back = through_json({"a": tensor, "b": tensor, "c": tensor.clone(), "d": shared, "e": [shared]})
    assert back["a"] is back["b"] is not back["c"]
    assert back["d"] is back["e"][0]


def local_tuple():
    return collections.namedtuple("Local", "x")(1)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"rates": [1, decimal.Decimal("0.1")]}, "Decimal at ['rates'][1]"),
        ([{3: fractions.Fraction(1, 2)}], "Fraction at [0][3]"),
        ({"v": Rows()}, "Rows at ['v']"), (Table(), "Table"), (pathlib.Path("x"), "PosixPath"), ([print], "builtin_"),
        (datetime.date(2026, 1, 1), "date"), ({"v": range(3)}, "range at ['v']"), (object(), "object"),
        (np.ma.array([1], mask=[True]), "MaskedArray"), (np.array([object()], object), "ndarray of object"),
        (np.zeros(1, [("a", "f4")]), r"ndarray of [('a', '<f4')]"), (Bits.A | Bits.B, "Bits"),
        (collections.defaultdict(lambda: 0), "defaultdict with <lambda> for missing keys"),
        (local_tuple(), "Local, whose class is not at the top of its module"),
        (torch.ones(2).to_sparse(), "sparse or quantized tensor"), (torch.ones(2, device="meta"), "meta tensor"),
        ([tensor, tensor[:1]], "view of a part of another tensor or array (store a copy) at [1]"),
        (numbered(DEEPEST + 1), "list in more than 100 others"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_come_back_is_refused_with_its_place(value, told):
    with pytest.raises(NotStored) as caught:
        to_json(value)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "read"),
    [
        (collections.Counter(a=1), {"a": 1}), (Phase.A, 0), (True, 1), (0.0, -0.0), ([1], (1,)), ({"a": 1}, {"a": 2}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (tensor, tensor.double()), (tensor, tensor + 1),
        ([shared, shared], [[1], [1]]),
        ([[1], [1]], [shared, shared]), (np.ones(2), np.ones(2, "f4")), ({1}, {True}), (b"", bytearray()),
        (collections.deque([1], 2), collections.deque([1])), (of_module, collections.OrderedDict(a=1)),
    ],
    ids=str,
)  # fmt: skip
def test_a_difference_is_noticed(saved, read):
    assert difference_of_values(saved, read)


@pytest.mark.parametrize(
    "forged",
    [
        {"__kind__": "enum", "value": "A", "more": ["os", "system"]}, {"__kind__": "same", "value": 3}, {"__kind__": "x"},
        {"__kind__": "namedtuple", "value": ["touch"], "more": ["subprocess", "Popen"]}, {"__kind__": "enum", "value": 1},
        {"__kind__": "enum", "value": "A", "more": ["not.there", "X"]}, {"__tensor__": "", "shape": [1], "dtype": "save"},
    ],
    ids=str,
)  # fmt: skip
def test_forged_values_run_no_code(forged):
    with pytest.raises((KeyError, TypeError, ValueError, IndexError)):
        from_json(forged)


def test_what_the_json_leaves_out_is_a_difference(monkeypatch):
    """Else a fault of saving would hide itself: the first checkpoint is compared with what it gives back."""
    monkeypatch.setitem(portable.TYPE_NAMES, collections.Counter, "dict")
    read = from_json(to_json(collections.Counter(a=1)))
    assert difference_of_values(collections.Counter(a=1), read) == "it is a Counter and comes back as a dict"
