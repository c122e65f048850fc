"""What the code of a program does with a name: whether it may use a variable or an attribute before it sets it."""

import bisect
import dis
import functools
import re
from types import CodeType, FunctionType

VARIABLES, ATTRIBUTES = ("_FAST", "_DEREF", "_NAME", "_GLOBAL"), ("_ATTR", "_METHOD")  # in names of instructions
ENDS = ("RETURN", "RAISE", "RERAISE")


@functools.cache
def first_uses(
    code: CodeType, start: int | None, name: str, *, of: tuple[str, ...], calls: tuple[str, ...] = (),
    stops: tuple[str, ...] = (),
) -> set[str]:  # fmt: skip
    """Return what may be the first use of `name`: LOAD, STORE, or END if there may be none. A loop within runs once.

    start: the body of the first loop from this offset on is read; None: a whole function. calls: names that count as STORE.
    stops: those that count as LOAD.
    """
    lines = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    offsets = [one.offset for one in lines]
    loops = [place for place, one in enumerate(lines) if one.opname == "FOR_ITER" and one.offset >= (start or 0)]
    loop = -1 if start is None else next(iter(loops), len(lines))
    found, known, waiting = set[str](), set[int](), [loop + 1]
    while waiting:
        if (place := waiting.pop()) in known or place >= len(lines):
            continue
        known.add(place)
        one = lines[place]
        used = one.argval if isinstance(one.argval, tuple) else (one.argval,)  # two in one, as of LOAD_FAST_LOAD_FAST
        verbs = re.findall("LOAD|STORE", one.opname)
        uses = [
            verb for verb, which in zip(verbs, used, strict=False) if which == name and any(k in one.opname for k in of)
        ]
        inner = one.argval if isinstance(one.argval, CodeType) and of is ATTRIBUTES else None  # such as a comprehension
        uses += ["LOAD"] if inner and name in inner.co_names else []
        if verbs and "_FAST" not in one.opname:  # a variable may have the name of a method
            uses += ["STORE"] if used[0] in calls else ["LOAD"] if used[0] in stops else []
        if uses or one.opname.startswith(ENDS):
            found.add(uses[0] if uses else "END")
            continue
        target = place
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            target = bisect.bisect_left(offsets, one.argval)
        if one.opname.startswith("JUMP_BACKWARD") and lines[target].opname == "FOR_ITER":
            found |= {"END"} if target == loop else set()
            waiting += [bisect.bisect_left(offsets, lines[target].argval)] if target != loop else []
        elif one.opname.startswith("JUMP"):
            waiting.append(target)
        else:
            waiting += [place + 1] if one.opname == "FOR_ITER" else [place + 1, target]
    return found


def of_batches(code: CodeType) -> list[tuple[CodeType, int]]:
    """Return where the loops over `step.batches` begin in this code."""
    return [(code, one.offset) for one in dis.get_instructions(code) if one.argval == "batches"]


def stores(function: object, attribute: str) -> set[str]:
    """Return the `first_uses` of an attribute in a function that sets it, but for __init__; empty if it does not."""
    function = getattr(function, "__func__", function)  # of a class method
    code = function.__code__ if isinstance(function, FunctionType) else None
    if code is None or code.co_name == "__init__" or attribute not in attributes_set(code):
        return set()
    return first_uses(code, None, attribute, of=ATTRIBUTES)


@functools.cache
def attributes_set(code: CodeType) -> set[str]:
    return {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"}
