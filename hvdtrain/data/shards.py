"""Images in tar files ("shards"), each read from end to end with the webdataset library: what network file systems do best.

A sample is two neighbours in the tar file: NAME.jpg (or .png, ...) and NAME.cls, the class as a number.

Readers, that is each worker of each rank, take whole shards; where there are fewer shards than readers, several share one
and each takes every n-th sample of it. Training: each reader goes through a stream without end, one random order of all
shards after the other, so that every rank has as many batches as it is asked for, and on the long run every sample comes
equally often (drawing shards with replacement would leave out a third of them in each epoch). Test: every sample once.
"""

import itertools
import json
import random
import tarfile
from collections.abc import Iterable, Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from hvdtrain.data.corrupt import CorruptSample, why
from hvdtrain.data.images import TEST_BATCH
from hvdtrain.data.loading import Loaded, Plan, Prepare, Source, collate, loader, mixed_seed
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError

SHUFFLE_SAMPLES = 1000  # that each reader holds at most, as files, to draw the next from: about 100 MB of ImageNet
FRUITLESS_SHARDS = 10  # in a row: then a batch goes out as it is
IMAGE_TYPES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "tif", "tiff", "gif")
IMAGENET_CLASSES = 1000


class Shard(NamedTuple):
    url: str  # an absolute path, a URL, or pipe:COMMAND
    samples: int | None  # None: not known before it is read


class Sample(NamedTuple):
    name: str
    content: bytes  # of the image file
    label: int


def open_shards(
    engine: Engine,
    data_dir: Path | None,
    patterns: tuple[str | None, str | None],
    *,
    side: int,
    seed: int,
    workers: int,
    classes: int | None,
    train_count: int | None,
) -> Source:
    """Return the training and test set in the shards of `patterns`, or in `data_dir`. A collective.

    classes, train_count: None takes them from the files. Raises UserError, on every rank alike.
    """
    with engine.raising_together("webdataset"):
        try:
            import webdataset  # noqa: F401
        except ImportError as error:
            raise UserError(f"--dataset shards needs webdataset ({error}): pip install webdataset") from error
    found: list = [None, None, None]
    with engine.raising_together("shards"):
        if engine.rank == 0:
            train_urls, test_urls = (
                find(split, pattern, data_dir) for split, pattern in zip(SPLITS, patterns, strict=True)
            )
            found = [train_urls, test_urls, choose_classes(train_urls + test_urls, classes)]
    train_urls, test_urls, classes = engine.broadcast_object(found, "shards")
    train = count_samples(engine, train_urls, needed=train_count is None)
    test = count_samples(engine, test_urls, needed=False)
    total = train_count or sum(shard.samples or 0 for shard in train)
    if total == 0:
        raise UserError(f"{train_urls[0]}: not one sample in it: are these tar files?", everywhere=True)

    def batches(shards: list[Shard], train: bool, plan: Plan | None) -> Iterable[Loaded]:
        prepare = Prepare(side, seed, train=train)
        dataset = ShardBatches(shards, prepare, classes, seed, engine.rank, engine.size, plan)
        return loader(dataset, workers, engine.device)

    reason = (
        f"{len(train)} and {len(test)} shards, such as {train_urls[0]}: {total:,} images an epoch, {classes:,} classes"
    )
    return Source(
        "shards", reason, classes, total, lambda plan: batches(train, True, plan), lambda: batches(test, False, None)
    )


SPLITS = ("train", "val")


def find(split: str, pattern: str | None, data_dir: Path | None) -> list[str]:
    """Return the shards that `pattern` means, else those of `split` in `data_dir`. Raises UserError where there are none."""
    from braceexpand import braceexpand

    flag = f"--{'train' if split == 'train' else 'test'}-shards"
    if pattern is None:
        if data_dir is None:
            raise UserError(f"--dataset shards needs {flag} PATTERN, or --data-dir with {split}/*.tar")
        found = sorted((data_dir / split).glob("*.tar")) or sorted(data_dir.glob(f"{split}-*.tar"))
        if not found:
            said = "does not exist" if not data_dir.exists() else f"has neither {split}/*.tar nor {split}-*.tar"
            raise UserError(f"--data-dir: {data_dir} {said}: name the directory of the shards, or use {flag}")
        return [str(path.absolute()) for path in found]
    urls = []
    try:
        expanded = list(braceexpand(pattern))
    except ValueError as error:
        raise UserError(f"{flag} {pattern}: {error}") from error
    for url in expanded:
        if url.startswith("pipe:") or "://" in url:
            urls.append(url)
            continue
        # Path.glob takes no absolute pattern.
        paths = sorted(glob(url)) if has_magic(url) else [url] if Path(url).exists() else []  # noqa: PTH207
        if not paths:
            raise UserError(f"{flag}: no file {url}: check the pattern (in quotes, so that the shell leaves it alone)")
        urls += [str(Path(path).absolute()) for path in paths]
    return urls


def choose_classes(urls: list[str], asked: int | None) -> int:
    """Return the number of classes: as `asked`, else by classes.json beside the shards, else ImageNet's."""
    listed = {
        directory: read_json(directory / "classes.json", list)
        for directory in sorted({Path(url).parent for url in urls if url.startswith("/")})
        if (directory / "classes.json").exists()
    }
    for directory, names in listed.items():
        if not names:
            raise UserError(f"{directory}/classes.json lists no class: make it again, or remove it")
        first = next(iter(listed))
        if names != listed[first]:
            raise UserError(
                f"{directory}/classes.json and {first}/classes.json differ: make both from the same folders"
            )
        if asked is not None and asked != len(names):
            raise UserError(f"--classes {asked}, but {directory}/classes.json has {len(names)}: leave --classes out")
    return asked or (len(next(iter(listed.values()))) if listed else IMAGENET_CLASSES)


def read_json(path: Path, kind: type):
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({why(error)}): make it again, or remove it") from error
    if not isinstance(value, kind):
        raise UserError(f"{path} holds no {kind.__name__}: make it again, or remove it")
    return value


def count_samples(engine: Engine, urls: list[str], *, needed: bool) -> list[Shard]:
    """Return `urls` with their sizes: by sizes.json ({"000000.tar": 1000, ...}) beside them, else counted. A collective."""
    with engine.raising_together("sizes"):
        mine: dict[str, int] = {}
        announced: dict[Path, dict[str, int]] = {}
        for url in urls[engine.rank :: engine.size]:
            if not url.startswith("/"):
                if needed:
                    raise UserError(f"--train-samples N is needed: nobody can tell how many samples {url} has")
                continue
            path = Path(url)
            if path.parent not in announced:
                beside = path.parent / "sizes.json"
                announced[path.parent] = read_json(beside, dict) if beside.exists() else {}
            size = announced[path.parent].get(path.name)
            mine[url] = headers_count(path) if size is None else believable(size, path)
    sizes = {url: size for part in engine.all_gather_object(mine, "sizes") for url, size in part.items()}
    return [Shard(url, sizes.get(url)) for url in urls]


def believable(size: object, path: Path) -> int:
    """Return what sizes.json says of a shard, if its bytes have room for so many samples. Raises UserError."""
    try:
        room = path.stat().st_size  # a sample has two headers of 512 bytes, which compress to a byte at best
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check it") from error
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= room:
        said = f"{path.parent}/sizes.json gives {path.name} {str(size)[:40]!r} samples in {room:,} bytes"
        raise UserError(f"{said}: make it again, or remove it")
    return size


def headers_count(path: Path) -> int:
    """Return how many samples a tar file has, going from header to header; of a damaged one, as far as it can be read."""
    from webdataset.tariterators import base_plus_ext

    keys = set()
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                if member.isreg():
                    keys.add(base_plus_ext(member.name)[0])
                tar.members = []  # type: ignore[attr-defined]  # else it keeps them all
    except Exception:  # of tarfile, of each decompressor, of text that is none; whoever reads the shard will say so
        pass
    return len(keys - {None})


class ShardBatches(IterableDataset):
    """The batches of one reader: with a `plan`, the training batches that fall to it; without, its part of a test set."""

    def __init__(
        self, shards: list[Shard], prepare: Prepare, classes: int, seed: int, rank: int, size: int, plan: Plan | None
    ):
        self.shards, self.prepare, self.classes, self.seed = shards, prepare, classes, seed
        self.rank, self.size, self.plan = rank, size, plan
        self.corrupt: list[CorruptSample] = []  # since the last batch

    def __iter__(self) -> Iterator[Loaded]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        reader, readers = number * self.size + self.rank, workers * self.size
        # Parts of shards, at least one for each reader; a part is every n-th sample.
        parts = -(-readers // len(self.shards))
        units = [(shard, part, parts) for part in range(parts) for shard in self.shards]
        if self.plan is None:
            samples = itertools.chain.from_iterable(self.read(*unit) for unit in units[reader::readers])
            while (batch := self.fill(samples, TEST_BATCH, 0)).samples or batch.corrupt:
                yield batch
            return
        from webdataset.filters import _shuffle

        stream = self.endless(units, reader, readers)
        draw = random.Random(mixed_seed(self.seed, "draw", reader))
        held = min(SHUFFLE_SAMPLES, max(1, self.plan.per_epoch // readers))
        samples = _shuffle(stream, held, initial=min(held, 100), rng=draw)
        # A resumed run reads on in the same epoch's order of shards, past as many samples as were taken: near enough, and no
        # more, for a stream that other runs have shuffled and stretched across the ends of epochs.
        for _ in itertools.islice(samples, self.plan.taken // readers):
            pass
        for index, (epoch, planned) in enumerate(self.plan):
            if index % workers == number:  # a DataLoader asks its workers in turn
                yield self.fill(samples, len(planned.indices), epoch)

    def endless(self, units: list, reader: int, readers: int) -> Iterator[Sample | None]:
        """Yield this reader's samples, one random order of `units` after the other; None where many in a row are corrupt."""
        fruitless = 0
        first_epoch = self.plan.first_epoch if self.plan is not None else 0
        for position in itertools.count(reader + readers * -(-first_epoch * len(units) // readers), readers):
            turn, place = divmod(position, len(units))
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, "shards", turn))
            order = torch.randperm(len(units), generator=generator)
            fruitless += 1
            for sample in self.read(*units[order[place]]):
                fruitless = 0
                yield sample
            if fruitless >= FRUITLESS_SHARDS:
                yield None

    def fill(self, samples: Iterator[Sample | None], count: int, epoch: int) -> Loaded:
        """Return a batch of `count` samples; of fewer only where there are no more."""
        good = []
        for sample in samples:
            if sample is None:  # so that this rank goes on, and is told
                break
            try:
                good.append((self.prepare(sample.content, epoch, sample.name), sample.label))
            except Exception as error:  # whatever a decoder raises on bytes that are no image
                self.corrupt.append(CorruptSample(sample.name, why(error)))
            if len(good) == count:
                break
        corrupt, self.corrupt = self.corrupt, []
        return collate(good, corrupt, self.prepare.side)

    def read(self, shard: Shard, part: int, parts: int) -> Iterator[Sample]:
        """Yield every `parts`-th sample of a shard from number `part`, and note what is corrupt."""
        from webdataset.gopen import Pipe, gopen, set_options
        from webdataset.tariterators import group_by_keys, tar_file_expander

        met = 0
        failures: list[Exception] = []

        def on_error(error: Exception) -> bool:
            failures.append(error)
            return True  # go on

        stream = None
        try:
            stream = gopen(shard.url)
            # Else it raises as soon as a command has failed, and drops what that wrote before.
            set_options(stream, ignore_errors=True)
            files = tar_file_expander([{"url": shard.url, "stream": stream}], handler=on_error)
            for met, sample in enumerate(group_by_keys(files, handler=on_error), start=1):
                if (met - 1) % parts == part and (taken := self.take(sample)) is not None:
                    yield taken
            while stream.read(2**20):  # to the very end: then a command's exit code is its own
                pass
            if isinstance(stream, Pipe) and (code := stream.proc.wait()) not in stream.ignore_status:
                failures.append(OSError(f"its command ended with exit code {code}"))
        except Exception as error:
            failures.append(error)
        finally:
            if stream is not None:
                stream.close()
        missing = (shard.samples or 0) - met
        if failures or missing > 0:
            reason = why(failures[0]) if failures else f"{met} samples of {shard.samples}"
            self.corrupt.append(CorruptSample(shard.url, reason, lost=max(1, missing)))

    def take(self, sample: dict) -> Sample | None:
        name = f"{sample['__url__']}: {sample['__key__']}"
        image = next((sample[kind] for kind in IMAGE_TYPES if kind in sample), None)
        try:
            label = int(sample["cls"])
        except (KeyError, ValueError):
            label = -1
        if image is not None and 0 <= label < self.classes:
            return Sample(name, image, label)
        reason = f"class {label} of {self.classes}: see --classes" if label >= 0 else "no class (.cls) beside it"
        self.corrupt.append(
            CorruptSample(name, reason if image is not None else f"no image in it ({', '.join(IMAGE_TYPES)})")
        )
        return None
