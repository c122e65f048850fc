"""What the code of a program does with a name: whether it may use a variable or an attribute before it sets it. And where
its variables and its source are."""

import bisect
import contextlib
import dis
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any

OF_VARIABLES = ("_FAST", "_DEREF", "_CLOSURE", "_NAME", "_GLOBAL")  # in names of instructions
OF_ATTRIBUTES = ("_ATTR", "_METHOD")
ENDS = ("RETURN", "RAISE", "RERAISE")
# Methods that set all that is in a value.
EMPTYING = {"clear", "fill", "fill_", "zero_", "reset", "load_state_dict", "copy_", "resize_", "resize_as_"}
EMPTYING |= {"normal_", "uniform_", "random_", "bernoulli_"}
CHANGING = frozenset({"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "put", "remove"})
CHANGING |= {"setdefault", "update"}  # of collections
OF_PARTS = ("values", "parameters", "buffers")  # methods, of which a loop takes what is in a value
OF_PACKAGE = r"hvdtrain\.|contextlib$"  # modules between a program and what it has called
SHOWN = 3  # names in a line
OF_ALL_NAMES = {"vars", "__dict__", "asdict", "astuple"}  # these read all attributes
# Around what reads values and code of the program: none of them may end a training, which runs without a warning, too.
OF_THE_PROGRAM = contextlib.suppress(Exception)


def warn_if(question: Callable[..., str | None], *asked: Any, say: Callable[[str], object]) -> None:
    """Say what a question about a program returns, if it returns something."""
    with OF_THE_PROGRAM:
        if line := question(*asked):
            say(f"warning: {line}")


def uses_of(one: dis.Instruction, name: str, of: tuple[str, ...]) -> list[str]:
    """Return what an instruction does with `name`: LOAD or STORE. Some do two things, as STORE_FAST_LOAD_FAST."""
    names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    verbs = re.findall("LOAD|STORE", one.opname) if any(kind in one.opname for kind in of) else []
    return [verb for verb, which in zip(verbs, names, strict=False) if which == name]


def is_read_again(following: list[dis.Instruction], name: str) -> bool:
    """Return whether a statement goes on to use this name: `value.copy_(0.9 * value + x)` sets nothing anew."""
    rest = itertools.takewhile(lambda one: not one.opname.startswith(("POP_TOP", "STORE")), following)
    return any(name in (one.argval if isinstance(one.argval, tuple) else (one.argval,)) for one in rest)


def is_emptied(following: list[dis.Instruction], constants: tuple[object, ...]) -> bool:
    """Return whether these instructions, after a value is loaded, set all that is in it: `value.clear()`, `value[:] = 0`;
    or all of a part: `value[0][:] = 0`; or of each: `for one in value: one.zero_()`. Also by `out=value`, as the last one.
    """
    if following and following[0].opname in ("KW_NAMES", "LOAD_CONST"):  # in Python 3.11, the first has no argval
        words = constants[following[0].arg or 0]
        if isinstance(words, tuple) and words[-1:] == ("out",):
            return True
    loop = next((place for place, one in enumerate(following) if one.opname == "FOR_ITER"), len(following))
    if {one.argval for one in following[:loop]} <= {*OF_PARTS, None, 0} and len(following) > loop + 3:
        one, *others = following[loop + 1 : loop + 4]  # of some versions, STORE_FAST_LOAD_FAST
        pair = one.argval if isinstance(one.argval, tuple) else (one.argval, others.pop(0).argval)
        return len({*pair}) == 1 and others[0].argval in EMPTYING and not is_read_again(following[loop + 3 :], pair[0])
    if len(following) > 2 and (following[1].opname == "BINARY_SUBSCR" or following[1].argrepr == "[]"):
        following = following[2:]
    if following and following[0].argval in EMPTYING:
        return following[0].opname.startswith("LOAD")
    whole = [repr(one.argval) for one in following[:2]]
    if whole[0] in ("Ellipsis", "slice(None, None, None)") and following[1].opname == "STORE_SUBSCR":
        return True
    return whole == ["None", "None"] and any(one.opname in ("STORE_SUBSCR", "STORE_SLICE") for one in following[2:4])


@functools.cache
def instructions_of(code: CodeType) -> list[dis.Instruction]:
    """Return the instructions of a function."""
    # A jump to an instruction with a large argument leads to the
    # EXTENDED_ARG before it: `bisect_left` finds what follows.
    return [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]


@functools.cache
def first_uses(
    code: CodeType, start: int | None, name: str, *, of: tuple[str, ...], calls: tuple[str, ...] = (),
    stops: tuple[str, ...] = (), emptied: bool = False, after: bool = False,
) -> set[str]:  # fmt: skip
    """Return what may be the first use of `name`: LOAD, STORE, or END if there may be none. A loop within runs once.

    start: the body of the first loop from this offset on is read; None: a whole function. calls: names that count as STORE.
    stops: those that count as LOAD. emptied: what empties a collection or fills an array counts as STORE, too. after: what
    follows that loop is read.
    """
    names = {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}
    if of is OF_VARIABLES and not (calls or stops) and name not in names:  # a program may have thousands
        return {"END"}
    lines = instructions_of(code)
    offsets = [one.offset for one in lines]
    loops = [place for place, one in enumerate(lines) if one.opname == "FOR_ITER" and one.offset >= (start or 0)]
    loop = -1 if start is None else next(iter(loops), len(lines))
    found, known, waiting = set[str](), set[int](), [loop + 1]
    if after and loop < len(lines):
        loop, waiting = -1, [bisect.bisect_left(offsets, lines[loop].argval)]
    while waiting:
        if (place := waiting.pop()) in known or place >= len(lines):
            continue
        known.add(place)
        one = lines[place]
        uses = uses_of(one, name, of)
        # Such as a comprehension.
        inner = one.argval if isinstance(one.argval, CodeType) and of is OF_ATTRIBUTES else None
        uses += ["LOAD"] if inner and name in inner.co_names else []
        if one.opname.startswith("LOAD") and "_FAST" not in one.opname:  # a variable may have the name of a method
            uses += ["STORE"] if one.argval in calls else ["LOAD"] if one.argval in stops else []
        if uses == ["LOAD"] and emptied:
            following = lines[place + 1 : place + 60]
            is_anew = is_emptied(following, code.co_consts) and not is_read_again(following, name)
            uses = ["STORE"] if is_anew else uses
        if uses or one.opname.startswith(ENDS):
            found.add(uses[0] if uses else "END")
            continue
        target = place
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            target = bisect.bisect_left(offsets, one.argval)
        if one.opname.startswith("JUMP_BACKWARD") and lines[target].opname == "FOR_ITER":
            # At the end of the loop itself, nothing follows. One within runs once: what comes after it is next.
            found |= {"END"} if target == loop else set()
            waiting += [bisect.bisect_left(offsets, lines[target].argval)] if target != loop else []
        elif one.opname.startswith("JUMP"):
            waiting.append(target)
        else:
            waiting += [place + 1] if one.opname == "FOR_ITER" else [place + 1, target]
    return found


@functools.cache
def is_closed_over(code: CodeType, start: int, name: str) -> bool:
    """Return whether a function that was made before the loop from this offset on has a variable of this code."""
    made = [one for one in instructions_of(code) if one.opname in ("LOAD_CLOSURE", "LOAD_FAST") and one.argval == name]
    return name in code.co_cellvars and any(one.offset < start for one in made)


@functools.cache
def words_from(code: CodeType, start: int) -> set[str]:
    """Return the names of attributes and of variables of the module that this code has from this offset on."""
    names = {one.argval for one in dis.get_instructions(code) if one.offset >= start}
    return names & set(code.co_names)


@functools.cache
def of_batches(code: CodeType) -> list[tuple[CodeType, int]]:
    """Return where the loops over `step.batches` begin in this code."""
    return [(code, one.offset) for one in dis.get_instructions(code) if one.argval == "batches"]


def stores(function: object, attribute: str) -> set[str]:
    """Return the `first_uses` of an attribute in a function that sets it, but for __init__; empty if it does not."""
    function = getattr(function, "__func__", function)  # of a class method
    code = function.__code__ if isinstance(function, FunctionType) else None
    if code is None or code.co_name == "__init__" or attribute not in code.co_names:  # a program may have thousands
        return set()
    if attribute not in attributes_set(code):
        return set()
    asked = {"getattr", "hasattr"} & set(code.co_names) and attribute in code.co_consts
    return first_uses(code, None, attribute, of=OF_ATTRIBUTES) | ({"LOAD"} if asked else set())


@functools.cache
def attributes_set(code: CodeType) -> set[str]:
    return {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"}


@functools.cache
def attributes_changed(code: CodeType) -> set[str]:
    """Return the attributes that this code sets, or changes in place by `self.NAME[...] = values`; of __init__, none."""
    if code.co_name == "__init__":
        return set()
    lines = [one for one in dis.get_instructions(code) if one.opname not in ("PRECALL", "CACHE", "COPY", "SWAP")]
    filled = {
        one.argval
        for place, one in enumerate(lines)
        if one.opname == "LOAD_ATTR"
        and any(x.opname in ("STORE_SUBSCR", "STORE_SLICE") for x in lines[place + 1 : place + 6])
    }
    return filled | attributes_set(code)


@functools.cache
def looks_for_keys(code: CodeType, name: str) -> bool:
    """Return whether the first use of a dictionary in this code is `key in NAME` or NAME.setdefault: it is a cache."""
    lines = list(dis.get_instructions(code))
    place = next((place for place, one in enumerate(lines) if one.argval == name), len(lines))
    return any(one.opname == "CONTAINS_OP" or one.argval == "setdefault" for one in lines[place + 1 : place + 2])


@functools.cache
def only_sets(code: CodeType, name: str) -> bool:
    """Return whether all uses of a collection in this code set what is in it: `NAME[key] = value`, NAME.update(...)."""
    lines = list(dis.get_instructions(code))
    places = [place for place, one in enumerate(lines) if one.argval == name]
    methods = [lines[place + 1].argval in ("update", "__setitem__") for place in places]
    adds = any(one.opname in ("BINARY_SUBSCR", "BINARY_OP", "BINARY_SLICE") for one in lines)
    return bool(places) and (all(methods) or (not adds and any(one.opname == "STORE_SUBSCR" for one in lines)))


@functools.cache
def reads(code: CodeType, attribute: str) -> bool:
    """Return whether this code, or a function in it, reads an attribute of this name, also by getattr."""
    loads = [one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return attribute in (*loads, *code.co_consts) or any(reads(one, attribute) for one in inner)


def named(names: Sequence[str], code: CodeType) -> str:
    """Return the first of these names, and whose they are."""
    what = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return f"{what} of {'the program' if code.co_name == '<module>' else f'{code.co_name}()'}"


def variables_of(frame: FrameType, kind: type = object) -> dict[str, Any]:
    """Return the variables in a frame, of this type."""
    held = frame.f_locals
    names = {name: value for name, value in held.items() if isinstance(value, kind)}
    # Of a function, before Python 3.13, a copy that would stay; of others, the program's own names.
    if type(held) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        held.clear()
    return names


def frame_of_program() -> FrameType:
    """Return the frame of the program that has called hvdtrain."""
    frame = sys._getframe()
    while frame.f_back is not None and re.match(OF_PACKAGE, str(frame.f_globals.get("__name__"))):
        frame = frame.f_back
    return frame


def codes_of_program(frame: FrameType) -> list[CodeType]:
    """Return the code in this frame, and that of the functions and classes of its module."""
    codes = {frame.f_code}
    for held in frame.f_globals.values():
        if isinstance(held, FunctionType | type) and held.__module__ == frame.f_globals.get("__name__"):
            codes.update(codes_of(held))
    return list(codes)


def codes_of(what: object) -> list[CodeType]:
    """Return the code of a function and of what it wraps, of a property, a class method, or all that a class has."""
    parts: list[object] = []
    if isinstance(what, type):
        parts = [one for one in vars(what).values() if not isinstance(one, type)]
    elif isinstance(what, property):
        parts = [what.fget, what.fset]
    elif isinstance(what, classmethod | staticmethod):
        parts = [what.__func__]
    elif isinstance(what, FunctionType):
        parts = [vars(what).get("__wrapped__")]
    own = [what.__code__] if isinstance(what, FunctionType) else []
    return own + [code for one in parts for code in codes_of(one)]
