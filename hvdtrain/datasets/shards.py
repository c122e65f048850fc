"""Images in tar files ("shards"), which are faster to read from network file systems than millions of small files.

A sample consists of two consecutive members of the tar file: NAME.jpg (or .png, ...) and NAME.cls, the class as a number.

They are indexed (shard_index.py), numbered across all files, and read at their positions, in the order of any other data:
it does not depend on the number of ranks and workers, and a run resumes at the exact sample.
"""

import contextlib
import functools
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.datasets.corrupt import CorruptSample, why
from hvdtrain.datasets.decoding import Prepare
from hvdtrain.datasets.images import TEST_BATCH
from hvdtrain.datasets.shard_index import IMAGE_TYPES, LABEL, OFFSET, ShardIndex, key_at, obtain
from hvdtrain.engines import files, lines
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.loading import Loaded, Source, collate, loader
from hvdtrain.inputs.plan import Plan

Kind = TypeVar("Kind", dict[str, Any], list[Any])  # of a JSON file's content

SPLITS = ("train", "val")
IMAGENET_CLASSES = 1000
OPEN_FILES = 128  # per worker; the usual limit of a process is 1,024
LARGEST_FILE = 2**28  # bytes; a larger file is not an image
LONGEST_ROUND = 30.0  # maximum seconds of indexing between two collectives, so that no rank appears to hang


def open_shards(
    engine: Engine,
    data_dir: Path | None,
    patterns: tuple[str | None, str | None],
    *,
    side: int,
    seed: int,
    workers: int,
    classes: int | None,
    reduced: bool = False,
    test_batch: int = TEST_BATCH,
) -> Source:
    """Return the training and test sets in the shards of `patterns`, or in `data_dir`. A collective.

    classes: number of classes; None: from classes.json. reduced: see Prepare. Raises UserError on every rank.
    """
    found: list[object] = []
    with engine.raising_together("shards"):
        if engine.rank == 0:
            train_names, test_names = (find(*split, data_dir) for split in zip(SPLITS, patterns, strict=True))
            found = [train_names, test_names, choose_classes(train_names + test_names, classes)]
            found += map(expected_samples, (train_names, test_names))
    train_names, test_names, classes, *expected = engine.broadcast_object(found, "shards")
    train, facts = open_indexed(engine, train_names, expected[0])
    test, _ = open_indexed(engine, test_names, expected[1])
    total = len(train.table)
    if not total:
        raise UserError(f"{train_names[0]}: no samples in it: are these tar files?", everywhere=True)

    def train_batches(plan: Plan) -> Iterable[Loaded]:
        jobs = ((epoch, batch.indices.tolist()) for epoch, batch in plan)
        prepare = Prepare(side, seed, train=True, reduced=reduced)
        return loader(ShardBatches(train, prepare, classes), workers, engine.device, jobs)

    def test_batches() -> Iterable[Loaded]:
        mine = torch.arange(len(test.table)).tensor_split(engine.size)[engine.rank]  # consecutive samples
        jobs = [(0, some.tolist()) for some in mine.split(test_batch) if len(some)]
        prepare = Prepare(side, train=False, reduced=reduced)
        return loader(ShardBatches(test, prepare, classes), workers, engine.device, jobs)

    what = f"{len(train_names)} and {len(test_names)} shards, such as {train_names[0]}"
    reason = f"{what}: {total:,} images an epoch, {classes:,} classes"
    damaged = [*train.damaged, *test.damaged]
    return Source("shards", reason, classes, total, train_batches, test_batches, damaged=damaged, facts=facts)


def find(split: str, pattern: str | None, data_dir: Path | None) -> list[str]:
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
        gone = sorted(sizes.keys() - {path.name for path in directory.iterdir()})
        if gone:
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
            raise UserError(f"{directory}/classes.json lists no classes: create it again, or remove it")
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
            raise UserError(f"{message}: create it again, or remove it")
    return found


def json_next_to(names: list[str], file: str, kind: type[Kind]) -> dict[Path, Kind]:
    """Return the content of the JSON files named `file` next to the shards, by directory. Raises UserError."""
    directories = sorted({Path(name).parent for name in names})
    return {each: read_json(each / file, kind) for each in directories if (each / file).exists()}


def read_json(path: Path, kind: type[Kind]) -> Kind:
    """Return the content of a JSON file, an object of type `kind`. Raises UserError."""
    try:
        value = json.loads(files.read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({why(error)}): create it again, or remove it") from error
    if not isinstance(value, kind):
        raise UserError(f"{path} does not contain a {kind.__name__}: create it again, or remove it")
    return value


class Shards(NamedTuple):
    """Tar files on this host and the index of their samples, which are numbered across all files."""

    paths: list[str]
    sizes: Tensor  # int64 [k]: number of samples in each file
    table: Tensor  # int64 [n, 4]: the concatenated indexes
    damaged: list[CorruptSample]  # shards that could not be read to the end


class ShardBatches(Dataset[Loaded]):
    """A data set that maps (epoch, indices) to the batch of those images."""

    def __init__(self, shards: Shards, prepare: Prepare, classes: int):
        self.shards, self.prepare, self.classes = shards, prepare, classes
        self._ends = shards.sizes.cumsum(0)
        self._open: Callable[[int], OpenFile] | None = None  # in the process that reads

    def __getitem__(self, job: tuple[int, list[int]]) -> Loaded:
        epoch, indices = job
        samples, corrupt = [], []
        for index in indices:
            try:
                label = self.label(index)
                samples.append((self.prepare(self.content(index), epoch, str(index)), label, index))
            except Exception as error:  # any exception of a decoder
                corrupt.append(CorruptSample(self.name(index), why(error)))
        return collate(samples, corrupt, self.prepare.side)

    def label(self, index: int) -> int:
        """Return the class of a sample. Raises ValueError if there is no such class."""
        label = int(self.shards.table[index, LABEL])
        if label < 0:
            raise ValueError("no class (.cls) next to it")
        if label >= self.classes:
            raise ValueError(f"class {label} of {self.classes}: see --classes")
        return label

    def content(self, index: int) -> bytes:
        """Return a sample's image file. Raises OSError, ValueError."""
        offset, size, _, crc = self.shards.table[index].tolist()
        if size < 0:
            raise ValueError(f"no image in it ({', '.join(IMAGE_TYPES)})")
        if size > LARGEST_FILE:
            raise ValueError(f"{size:,} bytes are not an image")
        content = os.pread(self.opened(index).fd, size, offset)
        if len(content) != size or zlib.crc32(content) != crc:
            raise ValueError("has changed since it was indexed")
        return content

    def opened(self, index: int) -> "OpenFile":
        """Return the shard of a sample. Raises OSError."""
        if self._open is None:
            paths = self.shards.paths  # not self: files are closed with the last reference to the data set
            self._open = functools.lru_cache(OPEN_FILES)(lambda shard: OpenFile(paths[shard]))
        return self._open(self.shard_of(index))

    def shard_of(self, index: int) -> int:
        """Return the number of the shard of a sample."""
        return int(torch.searchsorted(self._ends, index, right=True))

    def name(self, index: int) -> str:
        """Return the name of a sample for messages: its file and key."""
        shard, key = self.shard_of(index), None
        with contextlib.suppress(OSError):
            key = key_at(self.opened(index).fd, int(self.shards.table[index, OFFSET]))
        number = index - int(self._ends[shard] - self.shards.sizes[shard])
        return f"{self.shards.paths[shard]}: {key or f'sample {number}'}"


class OpenFile:
    """A file that is closed when the last reference to it is dropped."""

    fd = -1

    def __init__(self, path: str):
        self.fd = files.open_regular(path)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Indexed(NamedTuple):
    """What all ranks know of one shard, besides its table."""

    number: int  # in the list of all shards
    samples: int
    size: int  # bytes
    problem: str | None
    digest: str


def open_indexed(engine: Engine, names: list[str], expected: list[int | None]) -> tuple[Shards, dict[str, object]]:
    """Return indexed shards and the facts that identify them. The ranks share the work of indexing. A collective.

    expected: the number of samples of each shard, where it is known. Raises UserError on every rank.
    """
    mine, made = index_share(engine.processes, names)
    shards, tables, made_in_all = gather(engine.processes, mine, made)
    damaged, identity = [], {}
    for shard, short in zip(shards, short_names(names), strict=True):
        name, wanted = names[shard.number], expected[shard.number]
        stated = shard.samples if wanted is None else wanted
        if shard.samples > stated:  # it may have lost samples, but not gained any
            given = f"sizes.json gives {name} {stated} samples, and it has {shard.samples:,}"
            raise UserError(f"{given}: create it again, or remove it", everywhere=True)
        if shard.problem is not None or shard.samples < stated:
            why_not = shard.problem or f"{shard.samples} samples of {stated}"
            damaged.append(CorruptSample(name, why_not, lost=max(1, stated - shard.samples)))
        identity[short] = f"{shard.samples} samples in {shard.size} bytes ({shard.digest[:16]})"
    if engine.rank == 0 and made_in_all:
        engine.notes.append(f"{made_in_all:,} of {len(names):,} shards indexed now, for this and later runs")
    sizes = torch.tensor([len(table) for table in tables], dtype=torch.int64)
    return Shards(names, sizes, torch.cat(tables), damaged), {"shards": len(names), **identity}


def index_share(engine: Engine, names: list[str]) -> tuple[dict[int, ShardIndex], int]:
    """Return the indexes of this rank's share of the shards, by number, and how many were created now.

    A collective in rounds, so that no rank appears to hang. Raises UserError on every rank.
    """
    mine: dict[int, ShardIndex] = {}
    made, waiting, seconds = 0, list(range(len(names)))[engine.rank :: engine.size], 2.0
    while True:
        with engine.raising_together("index"):
            until = time.monotonic() + seconds
            while waiting and time.monotonic() < until:
                number = waiting.pop(0)
                mine[number], new = obtain(Path(names[number]))
                made += new
        left = int(engine.sum(torch.tensor([len(waiting)]), "index.left").item())
        if left == 0:
            return mine, made
        if engine.rank == 0:
            lines.say(f"indexing shards, once: {left:,} of {len(names):,} to go")
        seconds = min(2 * seconds, LONGEST_ROUND)


def gather(engine: Engine, mine: dict[int, ShardIndex], made: int) -> tuple[list[Indexed], list[Tensor], int]:
    """Return what all ranks have indexed, in the order of the shards, the tables, and the sum of `made`. A collective."""
    rows = torch.cat([index.table for index in mine.values()]) if mine else torch.zeros(0, 4, dtype=torch.int64)
    facts = [Indexed(n, len(each.table), each.size, each.problem, each.digest()) for n, each in mine.items()]
    gathered = engine.all_gather_object([facts, made], "index.facts")
    shards = [[Indexed(*each) for each in theirs] for theirs, _ in gathered]
    lengths = [sum(each.samples for each in theirs) for theirs in shards]
    parts = engine.all_gather_rows(rows, lengths, "index.table") if any(lengths) else [rows] * engine.size
    tables: dict[Indexed, Tensor] = {}
    for theirs, part in zip(shards, parts, strict=True):
        tables |= zip(theirs, part.split([each.samples for each in theirs]), strict=True)
    in_order = sorted(tables, key=lambda each: each.number)
    return in_order, [tables[each] for each in in_order], sum(made for _, made in gathered)


def short_names(names: list[str]) -> list[str]:
    """Return the paths of files relative to their common directory, so that they do not depend on its location."""
    common = os.path.commonpath([os.path.dirname(name) for name in names])  # noqa: PTH120
    return [os.path.relpath(name, common) for name in names]
