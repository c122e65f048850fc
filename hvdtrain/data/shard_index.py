"""The index of a tar file: the position of each sample. It is created by reading the file once, and stored next to it.

FILE.tar.index contains one line of JSON, then a table with offset, size and CRC-32 of each sample's image, and its class. An
index is valid for one size and modification time. If either differs, the tar file is indexed again; the digest of the index
distinguishes a file that was only copied from one that was replaced or damaged.

webdataset's `wids` (a separate package, version 0.1.11; not part of webdataset 1.0) is not suitable: its index has the
number of samples and an MD5 of each shard, but no offsets. Its reader parses all headers of a shard whenever a process
opens it, which reads most of the file on a slow disk; and it ignores names longer than 100 bytes.
"""

import contextlib
import hashlib
import json
import os
import re
import tarfile
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from hvdtrain.data import cache
from hvdtrain.data.corrupt import why
from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError

FORMAT = b"hvdtrain shard index 1 "
BLOCK = 512  # bytes: the unit of tar files
LONGEST_LINE = 4096  # bytes
CHUNK = 2**20  # bytes read at a time
OFFSET, SIZE, LABEL, CRC = range(4)  # columns of a table
ROW_BYTES = 4 * 8
NO_IMAGE = -1  # in SIZE
NO_CLASS = -1  # in LABEL
IMAGE_TYPES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff", "gif")
MEMBER = re.compile(
    r"((?:.*/|)[^.]+)[.]([^/]*)"
)  # key and type, as webdataset has them: up to the first dot, and after
CUT = "unexpected end of data"  # the wording of tarfile
# Magic bytes of gzip, bzip2, xz, zstandard
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class ShardIndex(NamedTuple):
    """The index of one shard."""

    size: int  # bytes of the tar file
    mtime_ns: int
    problem: str | None  # why the file could not be read to its end
    table: Tensor  # int64 [n, 4]: see OFFSET, SIZE, LABEL, CRC

    def digest(self) -> str:
        """Return a hash of the content. It does not depend on the file's location or modification time."""
        return hashlib.sha256(
            f"{self.size} {self.problem is None} ".encode() + self.table.numpy().tobytes()
        ).hexdigest()


class Header(NamedTuple):
    """The first line of an index file, as JSON."""

    size: int
    mtime_ns: int
    problem: str | None
    samples: int
    digest: str


class Unsound(Exception):
    """The index file is invalid. The message is a clause without the name of the file."""


def obtain(path: Path, notes: list[str]) -> tuple[ShardIndex, bool]:
    """Return the index of a shard, and whether it was created now. Raises UserError if `path` cannot be read.

    notes: receives a line if an index was invalid or the shard has changed.
    """
    try:
        stat = path.stat()
        earlier = None
        for place in places(path):
            try:
                found = load(place, stat)
            except FileNotFoundError:
                continue
            except (OSError, Unsound) as error:
                notes.append(f"{place} {why(error)}: created again")
                continue
            if isinstance(found, ShardIndex):
                return found, False
            earlier = found
        index = scan(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check it") from error
    if earlier is not None and earlier.digest != index.digest():
        before = f"{earlier.samples:,} samples in {earlier.size:,} bytes"
        now = f"{len(index.table):,} in {index.size:,}"
        notes.append(f"{path} has changed since it was indexed ({before} then, {now} now)")
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
    header = Header(index.size, index.mtime_ns, index.problem, len(index.table), index.digest())
    content = FORMAT + json.dumps(header._asdict()).encode() + b"\n" + index.table.numpy().tobytes()
    for place in places(path):
        with contextlib.suppress(OSError):
            files.write(place, content)
            return


def load(path: Path, shard: os.stat_result) -> ShardIndex | Header:
    """Return the index at `path`, or only its header if the index is not valid for `shard`.

    Raises OSError or Unsound. The file may be malicious: memory use is limited to that of a valid index.
    """
    with files.opened(path) as file:
        line = file.readline(LONGEST_LINE)
        header = read_header(line)
        if (header.size, header.mtime_ns) != (shard.st_size, shard.st_mtime_ns):
            return header
        length = header.samples * ROW_BYTES
        # Each sample has at least one tar header.
        if header.samples > shard.st_size // BLOCK or os.fstat(file.fileno()).st_size != len(line) + length:
            raise Unsound("does not have the number of samples in its header")
        rows = bytearray(file.read(length))
    index = ShardIndex(header.size, header.mtime_ns, header.problem, table_of(rows))
    if index.digest() != header.digest:
        raise Unsound("is damaged")
    return index


def read_header(line: bytes) -> Header:
    """Parse the first line of an index file. Raises Unsound."""
    try:
        header = Header(**json.loads(line.removeprefix(FORMAT)))
        numbers = (header.size, header.mtime_ns, header.samples)
        sound = line.startswith(FORMAT) and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
        sound = sound and isinstance(header.digest, str) and isinstance(header.problem, str | None)
    except (ValueError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise Unsound("is not an index of this version")
    return header


def table_of(rows: "bytearray | array[int]") -> Tensor:
    """Return the rows as int64 [n, 4]."""
    return torch.frombuffer(rows, dtype=torch.int64).view(-1, 4) if len(rows) else torch.zeros(0, 4, dtype=torch.int64)


def scan(path: Path) -> ShardIndex:
    """Read a tar file from beginning to end and return its index. Raises OSError; UserError if it is compressed."""
    with files.opened(path) as file:
        stat = os.fstat(file.fileno())
        if file.read(6).startswith(COMPRESSED):
            raise UserError(f"{path} is compressed: unpack it")
        file.seek(0)
        samples = TarSamples()
        problem = samples.read(Bounded(file, stat.st_size))
    return ShardIndex(stat.st_size, stat.st_mtime_ns, problem, table_of(samples.rows))


class Bounded:
    """A file whose reads are limited to its size, because a tar header may contain any size."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size = file, size
        self.tell, self.seek = file.tell, file.seek

    def read(self, count: int) -> bytes:
        """Return at most `count` bytes, not past the end."""
        return self.file.read(max(0, min(count, self.size - self.file.tell())))


class TarSamples:
    """Groups the members of a tar file like webdataset: consecutive members whose names are equal up to the first dot."""

    def __init__(self) -> None:
        self.rows = array("q")
        self._key: str | None = None
        self._first = 0  # offset of the group's first member
        self._images: dict[str, tuple[int, int, int]] = {}  # by type: offset, size, CRC-32
        self._label = NO_CLASS
        self._seen: set[str] = set()

    def read(self, file: Bounded) -> str | None:
        """Read all members. Return why the end was not reached, or None."""
        problem = None
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:  # type: ignore[call-overload] # needs no more than it has
                while problem is None and (member := tar.next()) is not None:
                    tar.members = []  # tarfile would keep all members in memory
                    if member.isreg():
                        problem = self._add(file, member.name, member.offset_data, member.size)
                if problem is None:
                    # tarfile stops silently at a damaged header and at the end of a truncated file.
                    file.seek(tar.offset)
                    block = file.read(BLOCK)
                    if any(block):
                        problem = f"no tar header at byte {tar.offset:,}"
                    elif not block and self._key is not None and not self._whole():
                        problem = CUT
        except OSError:  # a disk error
            raise
        except Exception as error:  # tarfile's errors, and errors of text decoding
            problem = why(error) if isinstance(error, tarfile.TarError) else f"damaged header ({type(error).__name__})"
        # A truncated sample is dropped.
        if self._key is not None and (problem is None or self._whole()):
            self._close()
        return problem

    def _whole(self) -> bool:
        return bool(self._images) and self._label != NO_CLASS

    def _add(self, file: Bounded, name: str, offset: int, size: int) -> str | None:
        named = MEMBER.fullmatch(name)
        if named is None or re.match(r"__[^/]*__($|/)", name):  # webdataset's metadata, not a sample
            return None
        key, kind = named.groups()
        file.seek(offset)
        content, crc, left = b"", 0, size
        while left > 0:
            chunk = file.read(min(left, CHUNK))
            if not chunk:
                return CUT
            content, crc, left = content or chunk, zlib.crc32(chunk, crc), left - len(chunk)
        if key != self._key:
            if self._key is not None:
                self._close()
            self._key, self._first = key, offset
        kind = kind.lower()
        if kind in self._seen:
            return None  # like webdataset, use the first
        self._seen.add(kind)
        if kind in IMAGE_TYPES:
            self._images[kind] = (offset, size, crc)
        elif kind == "cls" and size <= 20:
            with contextlib.suppress(ValueError):
                label = int(content)
                self._label = label if 0 <= label < 2**31 else NO_CLASS
        return None

    def _close(self) -> None:
        offset, size, crc = next(
            (self._images[kind] for kind in IMAGE_TYPES if kind in self._images), (self._first, NO_IMAGE, 0)
        )
        self.rows.extend((offset, size, self._label, crc))
        self._key, self._images, self._label, self._seen = None, {}, NO_CLASS, set()


def key_at(fd: int, offset: int) -> str | None:
    """Return the key of the sample with a member at `offset`, from the tar header before it; None if that is damaged."""
    try:
        header = os.pread(fd, BLOCK, offset - BLOCK)
        name = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name
    except (OSError, tarfile.TarError, ValueError):
        return None
    return re.sub(r"\.[^/]*$", "", name)
