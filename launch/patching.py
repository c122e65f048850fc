"""What a patch is: an exact text, replaced a known number of times, and the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    reason: str
    file: str
    old: str
    new: str  # @CXX_STANDARD@ is replaced by the standard this torch asks for, @MPI@ by True or False
    count: int = 1
