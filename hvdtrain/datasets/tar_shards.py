"""Images in tar files ("shards"), which are faster to read from network file systems than millions of small files: an
ordinary data set, whose order does not depend on the number of ranks and workers.

A sample consists of two consecutive members of the tar file: NAME.jpg (or .png, ...) and NAME.cls, the class as a number.
Each tar file is read once from beginning to end, and an index of it stored beside it, as FILE.tar.index: a line of JSON,
then a table with offset, size and CRC-32 of each sample's image, and its class. It is valid for one size and modification
time. webdataset's `wids` has no offsets: its reader parses all headers of a shard whenever a process opens it.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from hvdtrain.datasets.decoding import Prepare
from hvdtrain.datasets.images import Images
from hvdtrain.engines import atomic, files
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError, why

IMAGENET_CLASSES = 1000
OPEN_FILES = 128  # per worker; the usual limit of a process is 1,024
LARGEST_FILE = 2**28  # bytes; a larger file is not an image
INDEX_SECONDS = 3600.0  # for a single shard
REMAKE = "create it again, or remove it"
# ---- of an index
FORMAT = 4
BLOCK = 512  # bytes: the unit of tar files
LONGEST_LINE = 4096  # bytes
CHUNK = 2**20  # bytes read at a time
ROW_BYTES = 4 * 8
NO_IMAGE = NO_CLASS = -1  # as size and as class
EMPTY = torch.zeros(0, 4, dtype=torch.int64)
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
    table: Tensor  # int64 [n, 4]: offset, size, class, CRC-32

    def digest(self) -> str:
        """Return a hash of the content. It does not depend on the file's location or modification time."""
        content = f"{self.size} {self.problem is None} ".encode() + self.table.numpy().tobytes()
        return hashlib.sha256(content).hexdigest()

    def header(self) -> dict[str, object]:
        """Return the first line of the index file, as JSON."""
        facts = dict(size=self.size, mtime_ns=self.mtime_ns, problem=self.problem)
        return dict(format=FORMAT, **facts, digest=self.digest())


# ---- the data set


class Shards(Images):
    """The images of tar files, numbered across all of them."""

    def __init__(self, paths: list[str], indexes: Sequence[ShardIndex], prepare: Prepare, classes: int):
        super().__init__(prepare)
        self.paths, self.classes = paths, classes
        self.table = torch.cat([EMPTY, *(index.table for index in indexes)])
        self._ends = torch.tensor([len(index.table) for index in indexes]).cumsum(0)
        self._open: Callable[[int], OpenFile] | None = None  # in the process that reads

    def __len__(self) -> int:
        return len(self.table)

    def read(self, index: int) -> tuple[bytes, int]:
        offset, size, label, crc = self.table[index].tolist()
        if label < 0:
            raise ValueError("no class (.cls) next to it")
        if label >= self.classes:
            raise ValueError(f"class {label} of {self.classes}: see --classes")
        if size < 0:
            raise ValueError(f"no image in it ({', '.join(IMAGE_TYPES)})")
        if size > LARGEST_FILE:
            raise ValueError(f"{size:,} bytes are not an image")
        if self._open is None:
            paths = self.paths  # not self: files are closed with the last reference to the data set
            self._open = functools.lru_cache(OPEN_FILES)(lambda shard: OpenFile(paths[shard]))
        content = os.pread(self._open(self._shard_of(index)).fd, size, offset)
        if len(content) != size or zlib.crc32(content) != crc:
            raise ValueError("has changed since it was indexed")
        return content, label

    def _shard_of(self, index: int) -> int:
        return int(torch.searchsorted(self._ends, index, right=True))

    def name(self, index: int) -> str:
        shard = self._shard_of(index)
        return f"{self.paths[shard]}: sample {index - (int(self._ends[shard - 1]) if shard else 0)}"


class OpenFile:
    """A file that is closed when the last reference to it is dropped."""

    fd = -1

    def __init__(self, path: str):
        self.fd = files.open_regular(path)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Opened(NamedTuple):
    """A training and a test set in shards."""

    train: Shards
    test: Shards
    classes: int
    facts: dict[str, object]  # what identifies the training samples, as JSON
    damaged: list[tuple[str, int]]  # of shards that have lost samples: name and why, and how many


def open_shards(
    engine: Engine,
    data_dir: Path | None,
    patterns: tuple[str | None, str | None],
    side: int,
    *,
    classes: int | None,
    reduced: bool = False,
) -> Opened:
    """Return the training and test sets in the shards of `patterns`, or in `data_dir`. A collective.

    classes: number of classes; None: from classes.json. reduced: see Prepare. Raises UserError on every rank.
    """
    found: object = None
    with engine.raising_together("shards"):
        if engine.rank == 0:
            train_names, test_names = (
                find_shards("train", patterns[0], data_dir),
                find_shards("val", patterns[1], data_dir),
            )
            names = train_names + test_names
            found = [names, len(train_names), choose_classes(names, classes), expected_samples(names)]
    names, count, classes, expected = engine.broadcast_object(found, "shards")
    indexes = indexed(engine, names)
    damaged = []
    for name, index, stated in zip(names, indexes, expected, strict=True):
        samples = len(index.table)
        if stated is not None and samples > stated:  # it may have lost samples, but not gained any
            message = f"sizes.json gives {name} {stated} samples, and it has {samples:,}"
            raise UserError(f"{message}: {REMAKE}", everywhere=True)
        if index.problem is not None or samples < (stated or 0):
            lost = max(1, (stated or 0) - samples)
            damaged.append((f"{name}: {index.problem or f'{samples} samples of {stated}'}", lost))
    common = os.path.commonpath([os.path.dirname(name) for name in names[:count]])  # noqa: PTH120
    facts: dict[str, object] = {"shards": count}
    for name, index in zip(names[:count], indexes, strict=False):
        # By its path below the common directory, so that it does not matter where that is.
        identity = f"{len(index.table)} samples in {index.size} bytes ({index.digest()[:16]})"
        facts[os.path.relpath(name, common)] = identity
    train = Shards(names[:count], indexes[:count], Prepare(side, train=True, reduced=reduced), classes)
    if not len(train):
        raise UserError(f"{names[0]}: no samples in it: are these tar files?", everywhere=True)
    test = Shards(names[count:], indexes[count:], Prepare(side, train=False, reduced=reduced), classes)
    return Opened(train, test, classes, facts, damaged)


def find_shards(split: str, pattern: str | None, data_dir: Path | None) -> list[str]:
    """Return the shards that match `pattern`; without a pattern, those of `split` in `data_dir`. Raises UserError if there
    are none."""
    flag = f"--{'train' if split == 'train' else 'test'}-shards"
    if pattern is not None:
        # Path.glob does not support absolute patterns. A name may have brackets.
        paths = [pattern] if os.path.exists(pattern) else sorted(glob(pattern))  # noqa: PTH110, PTH207
        if not paths:
            remedy = "give a path or a glob, such as '/data/train-*.tar' (in quotes, or the shell expands it)"
            raise UserError(f"{flag}: no file {pattern}: {remedy}")
        return [str(Path(path).absolute()) for path in paths]
    if data_dir is None:
        raise UserError(f"--dataset shards needs {flag} PATTERN, or --data-dir with {split}/*.tar")
    found = sorted((data_dir / split).glob("*.tar")) or sorted(data_dir.glob(f"{split}-*.tar"))
    if not found:
        problem = "does not exist" if not data_dir.exists() else f"has neither {split}/*.tar nor {split}-*.tar"
        raise UserError(f"--data-dir: {data_dir} {problem}: name the directory of the shards, or use {flag}")
    names = [str(path.absolute()) for path in found]
    for directory, sizes in json_next_to(names, "sizes.json", dict).items():
        if gone := sorted(sizes.keys() - {path.name for path in directory.iterdir()}):
            more = f" and {len(gone) - 1:,} more" if len(gone) > 1 else ""
            message = f"{directory}/sizes.json names {gone[0][:80]!r}{more}, which does not exist"
            raise UserError(f"{message}: restore it, or create sizes.json again, or remove it")
    return names


def choose_classes(names: list[str], asked: int | None) -> int:
    """Return the number of classes: `asked`, or from classes.json next to the shards, or that of ImageNet. Raises
    UserError."""
    listed = json_next_to(names, "classes.json", list)
    for directory, theirs in listed.items():
        if not theirs:
            raise UserError(f"{directory}/classes.json lists no classes: {REMAKE}")
        first = next(iter(listed))
        if theirs != listed[first]:
            raise UserError(
                f"{directory}/classes.json and {first}/classes.json differ: make both from the same folders"
            )
        if asked is not None and asked != len(theirs):
            raise UserError(f"--classes {asked}, but {directory}/classes.json has {len(theirs)}: leave --classes out")
    return asked or (len(next(iter(listed.values()))) if listed else IMAGENET_CLASSES)


def expected_samples(names: list[str]) -> list[int | None]:
    """Return the samples of each shard according to sizes.json ({"000000.tar": 1000, ...}) in its directory; None where it
    does not say. Raises UserError."""
    sizes = json_next_to(names, "sizes.json", dict)
    found = [sizes.get(Path(name).parent, {}).get(Path(name).name) for name in names]
    for name, samples in zip(names, found, strict=True):
        if samples is not None and not isinstance(samples, int):
            message = f"{Path(name).parent}/sizes.json gives {Path(name).name} {str(samples)[:40]!r} samples"
            raise UserError(f"{message}: {REMAKE}")
    return found


def json_next_to(names: list[str], file: str, kind: type) -> dict[Path, Any]:
    """Return the content of the JSON files named `file` next to the shards, by directory. Raises UserError."""
    content = {}
    for directory in sorted({Path(name).parent for name in names}):
        if (path := directory / file).exists():
            try:
                content[directory] = json.loads(files.read_bytes(path))
            except (OSError, ValueError, RecursionError) as error:
                raise UserError(f"{path} cannot be read ({why(error)}): {REMAKE}") from error
            if not isinstance(content[directory], kind):
                raise UserError(f"{path} does not contain a {kind.__name__}: {REMAKE}")
    return content


# ---- indexes: the ranks share the work, and have all of them afterwards


def indexed(engine: Engine, names: list[str]) -> list[ShardIndex]:
    """Return the index of each shard. A collective. Raises UserError on every rank."""
    engine = engine.processes
    own, made = list[ShardIndex](), 0
    with engine.raising_together("index"), engine.activity.during("indexing shards", INDEX_SECONDS):
        for name in names[engine.rank :: engine.size]:
            index, new = obtain(Path(name))
            own, made = [*own, index], made + new
            engine.activity.heartbeat()
    gathered = engine.all_gather_object([made, [[*index[:3], len(index.table)] for index in own]], "index.facts")
    lengths = [sum(samples for *_, samples in theirs) for _, theirs in gathered]
    rows = torch.cat([EMPTY, *(index.table for index in own)])
    parts = engine.all_gather_rows(rows, lengths, "index.table") if any(lengths) else [rows] * engine.size
    indexes: dict[int, ShardIndex] = {}
    for rank, (part, (_, theirs)) in enumerate(zip(parts, gathered, strict=True)):
        tables = part.split([samples for *_, samples in theirs])
        for place, ((size, mtime_ns, problem, _), table) in enumerate(zip(theirs, tables, strict=True)):
            # Rank r has made the indexes r, r + size, and so on.
            indexes[rank + place * engine.size] = ShardIndex(size, mtime_ns, problem, table)
    if made_in_all := sum(made for made, _ in gathered) if engine.rank == 0 else 0:
        engine.notes.append(f"{made_in_all:,} of {len(names):,} shards indexed now, for this and later runs")
    return [indexes[number] for number in range(len(names))]


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
    directory = files.cache_directory("shards")
    if directory is not None:
        yield directory / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.index"


def save(path: Path, index: ShardIndex) -> None:
    """Write the index of shard `path` atomically to the first writable place, if there is one."""
    content = json.dumps(index.header()).encode() + b"\n" + index.table.numpy().tobytes()
    for place in places(path):
        with contextlib.suppress(OSError):
            atomic.write_atomically(place, content)
            return


def load(path: Path, shard: os.stat_result) -> ShardIndex | None:
    """Return the index at `path`; None if there is none, if it is damaged, or not valid for `shard`."""
    # The file of an index may be a stranger's: memory is limited to that of a valid one.
    most = shard.st_size // BLOCK  # samples: each has at least one tar header
    try:
        with files.opened_for_reading(path) as file:
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
    return torch.frombuffer(rows, dtype=torch.int64).view(-1, 4) if len(rows) else EMPTY


def scan(path: Path) -> ShardIndex:
    """Read a tar file from beginning to end and return its index. Raises OSError; UserError if it is compressed."""
    rows, problem = array("q"), None
    odd: list[str] = []
    with files.opened_for_reading(path) as file:
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
    """A file whose reads are limited to its size."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size = file, size
        self.tell, self.seek = file.tell, file.seek

    def read(self, count: int) -> bytes:
        """Return at most `count` bytes, not past the end."""
        # A tar header may claim any size.
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
            of_sample = named is not None and named[2].lower() in ("cls", *IMAGE_TYPES)
            if of_sample and (member.islnk() or member.issym()):
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
