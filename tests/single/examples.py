"""How often a property is tried: seldom in `make test`, HVDTRAIN_EXAMPLES times where that is set (`make chaos`)."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

MANY = int(os.environ.get("HVDTRAIN_EXAMPLES", "0"))
PAGE = os.sysconf("SC_PAGE_SIZE")
SLACK = (
    512 * 2**20
)  # bytes of addresses: threads' stacks and allocators' arenas take some, what is read next to nothing


def tried(times: int, *, share: int = 1) -> settings:
    """Try `times` examples; with HVDTRAIN_EXAMPLES so many, or that divided by `share` where one takes long."""
    return settings(
        max_examples=max(times, MANY // share), deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )  # fmt: skip


def one_line(error: Exception) -> None:
    assert len(str(error).splitlines()) == 1


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Whoever asks for as much as a lying header promises gets a MemoryError here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (used + SLACK, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# JSON as anything but this program would write it, and as it would.
WORDS = st.sampled_from(["event", "time", "step", "samples", "loss", "", "a\nb", "\ud800", "<b>", "0", "step-00000001"])
NUMBERS = st.one_of(
    st.integers(-3, 3), st.floats(), st.sampled_from([2**31, 2**63, -(2**63), 10**30, 10**308, -(10**308), 10**400])
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=5))
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=8
)


@st.composite
def spoilt(draw: st.DrawFn, sound: bytes) -> bytes:
    """`sound`, damaged as disks, networks and editors do it."""
    at = draw(st.integers(0, len(sound)))
    end = draw(st.integers(at, min(len(sound), at + 600)))
    some = draw(st.binary(max_size=40))
    how = draw(st.sampled_from(["cut", "flip", "zeros", "cut out", "put in", "overwrite", "append", "twice", "empty"]))
    flipped = bytearray(sound)
    if at < len(sound):
        flipped[at] ^= 1 << draw(st.integers(0, 7))
    return {
        "cut": sound[:at],
        "flip": bytes(flipped),
        "zeros": sound[:at] + bytes(end - at) + sound[end:],
        "cut out": sound[:at] + sound[end:],
        "put in": sound[:at] + some + sound[at:],
        "overwrite": sound[:at] + some + sound[at + len(some) :],
        "append": sound + some,
        "twice": sound + sound,
        "empty": b"",
    }[how]


@st.composite
def changed(draw: st.DrawFn, value: object) -> object:
    """A JSON value of which one part, at any depth, is another value or missing."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        if not draw(st.integers(0, 5)):
            return {k: v for k, v in value.items() if k != key}
        return value | {key: draw(changed(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(changed(value[at])), *value[at + 1 :]]
    return draw(JSON)
