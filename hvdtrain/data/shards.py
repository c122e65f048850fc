"""Images in tar files ("shards"), which are faster to read from network file systems than millions of small files.

A sample consists of two consecutive members of the tar file: NAME.jpg (or .png, ...) and NAME.cls, the class as a number.

They are indexed (shard_index.py) and read by index in a fixed order (shard_order.py). The order does not
depend on the number of ranks and workers, each sample occurs once per epoch, and a run resumes at the exact sample.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvdtrain.data.corrupt import CorruptSample, why
from hvdtrain.data.images import TEST_BATCH
from hvdtrain.data.loading import Loaded, Plan, Prepare, Source, loader
from hvdtrain.data.shard_index import ShardIndex, obtain
from hvdtrain.data.shard_order import ShardOrder, window_of
from hvdtrain.data.shard_reading import ShardBatches, Shards, jobs
from hvdtrain.engines import files
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError

Kind = TypeVar("Kind", dict[str, Any], list[Any])  # of a JSON file's content

SPLITS = ("train", "val")
IMAGENET_CLASSES = 1000
LONGEST_ROUND = 30.0  # maximum seconds of indexing between two collectives, so that no rank appears to hang
MOST_NOTES = 3  # maximum number of lines about changed shards


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
) -> Source:
    """Return the training and test sets in the shards of `patterns`, or in `data_dir`. A collective.

    classes: number of classes; None: from classes.json. reduced: see Prepare. Raises UserError on every rank.
    """
    found: list[object] = [None, None, None]
    with engine.raising_together("shards"):
        if engine.rank == 0:
            names = [find(split, pattern, data_dir) for split, pattern in zip(SPLITS, patterns, strict=True)]
            found = [*names, choose_classes(names[0] + names[1], classes)]
    train_names, test_names, classes = engine.broadcast_object(found, "shards")
    train, facts = open_indexed(engine, train_names)
    test, _ = open_indexed(engine, test_names)
    total = len(train.table)
    if not total:
        raise UserError(f"{train_names[0]}: no samples in it: are these tar files?", everywhere=True)
    order = ShardOrder(train.sizes, window_of(train.sizes))

    def batches(shards: Shards, prepare: Prepare, planned: Iterable[tuple[int, list[int]]]) -> Iterable[Loaded]:
        dataset = ShardBatches(shards, prepare, classes, reports=engine.rank == 0)
        return loader(dataset, workers, engine.device, jobs(planned, workers))

    def train_batches(plan: Plan) -> Iterable[Loaded]:
        planned = ((epoch, batch.indices.tolist()) for epoch, batch in replace(plan, order=order))
        return batches(train, Prepare(side, seed, train=True, reduced=reduced), planned)

    def test_batches() -> Iterable[Loaded]:
        mine = torch.arange(len(test.table)).tensor_split(engine.size)[engine.rank]  # consecutive samples
        planned = [(0, some.tolist()) for some in mine.split(TEST_BATCH)]  # one empty batch if there are no samples
        return batches(test, Prepare(side, train=False, reduced=reduced), planned)

    what = f"{len(train_names)} and {len(test_names)} shards, such as {train_names[0]}"
    reason = f"{what}: {total:,} images an epoch, {classes:,} classes"
    return Source("shards", reason, classes, total, train_batches, test_batches, order=order, facts=facts)


def find(split: str, pattern: str | None, data_dir: Path | None) -> list[str]:
    """Return the shards that match `pattern`; without a pattern, those of `split` in `data_dir`. Raises UserError if there
    are none."""
    flag = f"--{'train' if split == 'train' else 'test'}-shards"
    if pattern is not None:
        # Path.glob does not support absolute patterns. A name may have brackets.
        paths = [pattern] if os.path.exists(pattern) else sorted(glob(pattern))  # noqa: PTH110, PTH207
        if not paths:
            how = "give a path or a glob, such as '/data/train-*.tar' (in quotes, or the shell expands it)"
            raise UserError(f"{flag}: no file {pattern}: {how}")
        return [str(Path(path).absolute()) for path in paths]
    if data_dir is None:
        raise UserError(f"--dataset shards needs {flag} PATTERN, or --data-dir with {split}/*.tar")
    found = sorted((data_dir / split).glob("*.tar")) or sorted(data_dir.glob(f"{split}-*.tar"))
    if not found:
        said = "does not exist" if not data_dir.exists() else f"has neither {split}/*.tar nor {split}-*.tar"
        raise UserError(f"--data-dir: {data_dir} {said}: name the directory of the shards, or use {flag}")
    require_all(found[0].parent)
    return [str(path.absolute()) for path in found]


def require_all(directory: Path) -> None:
    """Raise UserError if sizes.json names a shard that is not in its directory."""
    if (directory / "sizes.json").exists():
        there = {path.name for path in directory.iterdir()}
        gone = sorted(name for name in read_json(directory / "sizes.json", dict) if name not in there)
        if gone:
            more = f" and {len(gone) - 1:,} more" if len(gone) > 1 else ""
            said = f"{directory}/sizes.json names {gone[0][:80]!r}{more}, which does not exist"
            raise UserError(f"{said}: restore it, or create sizes.json again, or remove it")


def choose_classes(names: list[str], asked: int | None) -> int:
    """Return the number of classes: `asked`, or from classes.json next to the shards, or that of ImageNet. Raises
    UserError."""
    listed = {
        directory: read_json(directory / "classes.json", list)
        for directory in sorted({Path(name).parent for name in names})
        if (directory / "classes.json").exists()
    }
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


def read_json(path: Path, kind: type[Kind]) -> Kind:
    """Return the content of a JSON file, an object of type `kind`. Raises UserError."""
    try:
        value = json.loads(files.read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({why(error)}): create it again, or remove it") from error
    if not isinstance(value, kind):
        raise UserError(f"{path} does not contain a {kind.__name__}: create it again, or remove it")
    return value


def open_indexed(engine: Engine, names: list[str]) -> tuple[Shards, dict[str, object]]:
    """Return indexed shards and the facts that identify them. The ranks share the work of indexing. A collective."""
    paths = [Path(name) for name in names]
    mine: dict[int, ShardIndex] = {}
    notes: list[str] = []
    expected = ExpectedSamples()
    made, waiting, seconds = 0, list(range(len(paths)))[engine.rank :: engine.size], 2.0
    while True:
        with engine.raising_together("index"):
            until = time.monotonic() + seconds
            while waiting and time.monotonic() < until:
                index = waiting.pop(0)
                mine[index], new = obtain(paths[index], notes)
                expected.check(paths[index], len(mine[index].table))
                made += new
        left = int(engine.sum(torch.tensor([len(waiting)]), "index.left").item())
        if left == 0:
            break
        if engine.rank == 0:
            print(f"indexing shards, once: {left:,} of {len(paths):,} to go", flush=True)
        seconds = min(2 * seconds, LONGEST_ROUND)

    rows = torch.cat([index.table for index in mine.values()]) if mine else torch.zeros(0, 4, dtype=torch.int64)
    facts = [
        [number, index.size, len(index.table), expected.of(paths[number]), index.problem, index.digest()]
        for number, index in mine.items()
    ]
    told = engine.all_gather_object([facts, made, notes], "index.facts")
    tables: list[Tensor] = [rows] * len(paths)
    lengths = [sum(fact[2] for fact in theirs) for theirs, _, _ in told]
    parts = engine.all_gather_rows(rows, lengths, "index.table") if any(lengths) else [rows] * len(told)
    for (theirs, _, _), part in zip(told, parts, strict=True):
        counts = [fact[2] for fact in theirs]
        for fact, table in zip(theirs, part.split(counts), strict=True):
            tables[fact[0]] = table
    by_number = {fact[0]: fact[1:] for theirs, _, _ in told for fact in theirs}
    damaged, identity = [], {}
    for number, short in enumerate(short_names(names)):
        size, samples, said, problem, digest = by_number[number]
        lost = (said or 0) - samples
        if problem is not None or lost > 0:
            damaged.append(CorruptSample(names[number], problem or f"{samples} samples of {said}", lost=max(1, lost)))
        identity[short] = f"{samples} samples in {size} bytes ({digest[:16]})"
    if engine.rank == 0:
        made_in_all = sum(made for _, made, _ in told)
        if made_in_all:
            engine.notes.append(f"{made_in_all:,} of {len(paths):,} shards indexed now, for this and later runs")
        changed = [line for _, _, lines in told for line in lines]
        engine.notes += changed[:MOST_NOTES]
        if len(changed) > MOST_NOTES:
            engine.notes.append(f"{len(changed) - MOST_NOTES:,} more")
    sizes = torch.tensor([len(table) for table in tables], dtype=torch.int64)
    return Shards(names, sizes, torch.cat(tables), damaged), {"shards": len(names), **identity}


def short_names(names: list[str]) -> list[str]:
    """Return the paths of files relative to their common directory, so that they do not depend on its location."""
    common = os.path.commonpath([os.path.dirname(name) for name in names])  # noqa: PTH120
    return [os.path.relpath(name, common) for name in names]


class ExpectedSamples:
    """The number of samples of each shard according to sizes.json ({"000000.tar": 1000, ...}) in its directory."""

    def __init__(self) -> None:
        self._read: dict[Path, dict[str, Any]] = {}

    def of(self, path: Path) -> int | None:
        """Return the number for shard `path`; None if it is not given."""
        if path.parent not in self._read:
            beside = path.parent / "sizes.json"
            self._read[path.parent] = read_json(beside, dict) if beside.exists() else {}
        return self._read[path.parent].get(path.name)

    def check(self, path: Path, samples: int) -> None:
        """Raise UserError if the number is not possible: a shard may have lost samples, but not gained any."""
        said = self.of(path)
        if said is not None and (type(said) is not int or not samples <= said <= path.stat().st_size):
            given = f"{path.parent}/sizes.json gives {path.name} {str(said)[:40]!r} samples, and it has {samples:,}"
            raise UserError(f"{given}: create it again, or remove it")
