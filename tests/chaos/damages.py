"""Spoil the newest checkpoint of a real run, load as a restart does, and see that the one before is taken, to the bit.

In this process alone: a damage takes milliseconds.
"""

import json
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

from hvdtrain.checkpoint import checkpoint, reading
from tests.chaos.outcomes import Outcome

KINDS = ("cut", "flip", "empty", "zeroed", "swapped", "appended", "put in", "header")
HEADERS = (
    "facts",
    "tensor renamed",
    "tensor removed",
    "another type",
    "another shape",
    "offsets",
    "length",
    "no checksum",
)


def damaged(chance: random.Random, sound: bytes) -> tuple[str, bytes]:
    """Return what was done, and bytes that differ from `sound` in more than the white space of the header."""
    kind = chance.choice(KINDS)
    if kind == "header":
        return edited(chance, sound)
    first, second, third = sorted(chance.sample(range(1, len(sound)), 3))
    some = chance.randbytes(chance.randint(1, 4096))
    flipped = bytearray(sound)
    flipped[first] ^= 1 << chance.randrange(8)
    result = {
        "cut": sound[:first],
        "flip": bytes(flipped),
        "empty": b"",
        "zeroed": sound[:first] + bytes(second - first) + sound[second:],
        "swapped": sound[:first] + sound[second:third] + sound[first:second] + sound[third:],
        "appended": sound + some,
        "put in": sound[:first] + some + sound[first:],
    }[kind]
    return (kind, result) if result != sound else damaged(chance, sound)


def edited(chance: random.Random, sound: bytes) -> tuple[str, bytes]:
    """Return a file whose header is well-formed and says something else."""
    length = struct.unpack("<Q", sound[:8])[0]
    header, body = json.loads(sound[8 : 8 + length]), sound[8 + length :]
    metadata = header["__metadata__"]
    tensor = chance.choice([name for name in header if name != "__metadata__"])
    kind = chance.choice(HEADERS)
    if kind == "facts":
        facts = json.loads(metadata["facts"])
        state = facts["state"]
        state[chance.choice([name for name, value in state.items() if isinstance(value, int)])] += chance.randint(1, 9)
        metadata["facts"] = json.dumps(facts)
    elif kind == "no checksum":
        metadata["sha256"] = chance.choice(("", "0" * 64))
    elif kind == "tensor renamed":
        header[f"{tensor}.x"] = header.pop(tensor)
    elif kind == "tensor removed":
        del header[tensor]
    elif kind == "another type":
        header[tensor]["dtype"] = "I32" if header[tensor]["dtype"] == "F32" else "F64"
    elif kind == "another shape":
        header[tensor]["shape"] = [1, *header[tensor]["shape"]]
    elif kind == "offsets":
        header[tensor]["data_offsets"][1] += chance.choice((-4, 4, 2**31, 2**62))
    text = json.dumps(header).encode()
    promised = len(text) + (chance.choice((-1, 1, 8, 10**8, 2**40)) if kind == "length" else 0)
    return f"header: {kind}", struct.pack("<Q", promised) + text + body


def damages(run: Path, scratch: Path, number: int, chance: random.Random) -> Iterator[Outcome]:
    """Yield the outcome of each of `number` damages to the newest checkpoint of the run in `run`, which stays as it is."""
    newest, before = checkpoint.listed(run / "checkpoints")[:2]
    sound = newest.read_bytes()
    expected_facts, expected = reading.read(before)
    directory = scratch / "damaged"
    directory.mkdir()
    shutil.copy(before, directory)
    for _ in range(number):
        what, data = damaged(chance, sound)
        (directory / newest.name).write_bytes(data)
        said: list[str] = []
        found = reading.newest(directory, said.append)
        aside = directory / f"{newest.name}.damaged"
        rejected = aside.exists() and len(said) == 1 and f"{newest.name} is damaged" in said[0]
        equal = (
            found is not None
            and found[0] == expected_facts
            and found[1].keys() == expected.keys()
            and all(same_bits(tensor, expected[name]) for name, tensor in found[1].items())
        )
        for left in (aside, directory / newest.name):
            left.unlink(missing_ok=True)
        kind = "checkpoint damaged: " + what.partition(":")[0]
        yield Outcome(kind, f"checkpoint damaged: {what}", rejected, equal, note="; ".join(said))


def same_bits(mine: torch.Tensor, other: torch.Tensor) -> bool:
    if mine.dtype != other.dtype or mine.shape != other.shape:
        return False
    return torch.equal(mine.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
