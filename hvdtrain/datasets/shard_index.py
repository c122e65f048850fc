"""The index of a tar file: the position of each sample. It is created by reading the file once, and stored next to it.

FILE.tar.index contains a line of JSON, then a table with offset, size and CRC-32 of each sample's image, and its class. An
index is valid for one size and modification time. If either differs, the tar file is indexed again.

webdataset's `wids` (a separate package, version 0.1.11; not part of webdataset 1.0) is not suitable: its index has the
number of samples and an MD5 of each shard, but no offsets. Its reader parses all headers of a shard whenever a process
opens it, which reads most of the file on a slow disk; and it ignores names longer than 100 bytes.
"""

import codecs
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import tarfile
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from hvdtrain.datasets import cache
from hvdtrain.datasets.corrupt import why
from hvdtrain.engines import atomic, files
from hvdtrain.engines.errors import UserError

FORMAT = 4
BLOCK = 512  # bytes: the unit of tar files
LONGEST_LINE = 4096  # bytes
CHUNK = 2**20  # bytes read at a time
OFFSET, SIZE, LABEL, CRC = range(4)  # columns of a table
ROW_BYTES = 4 * 8
NO_IMAGE = -1  # in SIZE
NO_CLASS = -1  # in LABEL
IMAGE_TYPES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff", "gif")
# Key and type, as webdataset has them: up to the first dot, and after.
MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
# Magic bytes of gzip, bzip2, xz, zstandard
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class ShardIndex(NamedTuple):
    """The index of one shard."""

    size: int  # bytes of the tar file
    mtime_ns: int
    problem: str | None  # why not every sample of the file is in the table
    table: Tensor  # int64 [n, 4]: see OFFSET, SIZE, LABEL, CRC

    def digest(self) -> str:
        """Return a hash of the content. It does not depend on the file's location or modification time."""
        content = f"{self.size} {self.problem is None} ".encode() + self.table.numpy().tobytes()
        return hashlib.sha256(content).hexdigest()

    def header(self) -> dict[str, object]:
        """Return the first line of the index file, as JSON."""
        facts = dict(size=self.size, mtime_ns=self.mtime_ns, problem=self.problem)
        return dict(format=FORMAT, **facts, digest=self.digest())


def obtain(path: Path) -> tuple[ShardIndex, bool]:
    """Return the index of a shard, and whether it was created now. Raises UserError if `path` cannot be read."""
    try:
        stat = path.stat()
        for place in places(path):
            if (found := load(place, stat)) is not None:
                return found, False
        index = scan(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check it") from error
    save(path, index)
    return index, True


def places(path: Path) -> Iterator[Path]:
    """Yield the possible paths of a shard's index: next to it, or in the cache directory."""
    yield path.with_name(path.name + ".index")
    directory = cache.directory("shards")
    if directory is not None:
        yield directory / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.index"


def save(path: Path, index: ShardIndex) -> None:
    """Write the index of shard `path` atomically to the first writable place, if there is one."""
    content = json.dumps(index.header()).encode() + b"\n" + index.table.numpy().tobytes()
    for place in places(path):
        with contextlib.suppress(OSError):
            atomic.write(place, content)
            return


def load(path: Path, shard: os.stat_result) -> ShardIndex | None:
    """Return the index at `path`; None if there is none, if it is damaged, or not valid for `shard`.

    The file may be malicious: memory use is limited to that of a valid index.
    """
    most = shard.st_size // BLOCK  # samples: each has at least one tar header
    try:
        with files.opened(path) as file:
            header = json.loads(file.readline(LONGEST_LINE))
            rows = bytearray(file.read(most * ROW_BYTES + 1))
    except (OSError, ValueError, RecursionError):
        return None
    problem = header.get("problem") if isinstance(header, dict) else None
    if len(rows) % ROW_BYTES or not isinstance(problem, str | None):
        return None
    index = ShardIndex(shard.st_size, shard.st_mtime_ns, problem, table_of(rows))
    return index if header == index.header() else None


def table_of(rows: "bytearray | array[int]") -> Tensor:
    """Return the rows as int64 [n, 4]."""
    return torch.frombuffer(rows, dtype=torch.int64).view(-1, 4) if len(rows) else torch.zeros(0, 4, dtype=torch.int64)


def scan(path: Path) -> ShardIndex:
    """Read a tar file from beginning to end and return its index. Raises OSError; UserError if it is compressed."""
    rows, problem = array("q"), None
    odd: list[str] = []
    with files.opened(path) as file:
        stat = os.fstat(file.fileno())
        if file.read(6).startswith(COMPRESSED):
            raise UserError(f"{path} is compressed: unpack it")
        file.seek(0)
        try:
            # Like webdataset: a sample is consecutive members with the same key.
            for _, sample in itertools.groupby(
                members(Bounded(file, stat.st_size), odd), key=lambda member: member.key
            ):
                rows.extend(row_of(sample, odd))
        except OSError:  # a disk error
            raise
        except Exception as error:  # tarfile's errors, and errors of text decoding; the unfinished sample is dropped
            problem = why(error) if isinstance(error, tarfile.TarError) else f"damaged header ({type(error).__name__})"
    return ShardIndex(stat.st_size, stat.st_mtime_ns, problem or next(iter(odd), None), table_of(rows))


class Bounded:
    """A file whose reads are limited to its size, because a tar header may contain any size."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size = file, size
        self.tell, self.seek = file.tell, file.seek

    def read(self, count: int) -> bytes:
        """Return at most `count` bytes, not past the end."""
        return self.file.read(max(0, min(count, self.size - self.file.tell())))


class Member(NamedTuple):
    """A file in a tar file."""

    key: str
    kind: str  # in lower case
    name: str
    offset: int  # of its content
    size: int
    crc: int  # CRC-32
    start: bytes  # of its content, at most CHUNK


def members(file: Bounded, odd: list[str]) -> Iterator[Member]:
    """Yield the members of a tar file that belong to samples. Raises tarfile's errors, also if its end is missing.

    odd: receives why samples are missing in a file that is read to its end.
    """
    with tarfile.open(fileobj=file, mode="r:") as tar:  # type: ignore[call-overload] # needs no more than it has
        while (member := tar.next()) is not None:
            tar.members = []  # tarfile would keep all members in memory
            named = MEMBER.fullmatch(member.name)
            if named is not None and (member.islnk() or member.issym()) and is_of_sample(named[2].lower()):
                odd.append(f"{member.name} is a link: create it with tar --hard-dereference -h")
            if named is None or not member.isreg() or member.issparse():  # sparse: as large as it says
                continue
            start, crc = b"", 0
            for chunk in iter(functools.partial(tar.extractfile(member).read, CHUNK), b""):
                start, crc = start or chunk, zlib.crc32(chunk, crc)
            yield Member(named[1], named[2].lower(), member.name, member.offset_data, member.size, crc, start)
        # tarfile stops silently at a damaged header and at the end of a truncated file.
        file.seek(tar.offset)
        block = file.read(BLOCK)
        if any(block):
            raise tarfile.ReadError(f"no tar header at byte {tar.offset:,}")
        if not block:
            raise tarfile.ReadError("unexpected end of data")
        if any(map(any, iter(functools.partial(file.read, CHUNK), b""))):
            odd.append("more follows the end of the archive: join tar files with tar --concatenate")


def is_of_sample(kind: str) -> bool:
    """Return whether a member of this type, in lower case, is an image or a class."""
    return kind == "cls" or kind in IMAGE_TYPES


def row_of(sample: Iterable[Member], odd: list[str]) -> tuple[int, int, int, int]:
    """Return the row of a table for the members of a sample. odd: see `members`."""
    of_kind: dict[str, Member] = {}
    for member in sample:
        if of_kind.setdefault(member.kind, member) is not member and of_kind[member.kind].name == member.name:
            odd.append(f"{member.name} is in it twice in a row: give each sample its own name")  # the first is used
    label = class_in(of_kind["cls"].start) if "cls" in of_kind else NO_CLASS
    for kind in IMAGE_TYPES:
        if (image := of_kind.get(kind)) is not None:
            return image.offset, image.size, label, image.crc
    return next(iter(of_kind.values())).offset, NO_IMAGE, label, 0


def class_in(content: bytes) -> int:
    """Return the class in a .cls file, or NO_CLASS."""
    with contextlib.suppress(ValueError):
        if 0 <= (label := int(content.removeprefix(codecs.BOM_UTF8))) < 2**31:
            return label
    return NO_CLASS


def key_at(fd: int, offset: int) -> str | None:
    """Return the key of the sample with a member at `offset`, from the tar header before it; None if that is damaged."""
    try:
        header = os.pread(fd, BLOCK, offset - BLOCK)
        name = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name
    except (OSError, tarfile.TarError, ValueError):
        return None
    return re.sub(r"\.[^/]*$", "", name)
