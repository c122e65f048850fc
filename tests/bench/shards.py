"""Images/s from tar shards: read by index in the agreed order, against the stream that they were before, interleaved.

python -m tests.bench.shards                  a disk as it is, its cache emptied before each run
python -m tests.bench.shards --slow           100 MB/s (the kernel's blkio throttle: root, cgroup v1) and 5 ms per open
python -m tests.bench.shards --read-only      without decoding: what reading alone can do

Each repeat runs one epoch of both, in random order, on `--ranks` processes of `--workers` workers. The time goes from the
first rank's first batch to the last rank's last. The images are random JPEG files of 500 x 375 pixels and about 100 kB, as
ImageNet's are. With `--workers 0` it also prints CPU time per image, which another program's load hardly changes.
"""

import argparse
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset
from webdataset import gopen

from hvdtrain.data import shard_reading, shards
from hvdtrain.data.loading import Plan, Prepare, loader, start_workers_early
from hvdtrain.data.shard_reading import ShardBatches, jobs
from hvdtrain.data.shard_stream import StreamBatches
from hvdtrain.engines.single import SerialEngine
from tests.bench.measurements import ROOT

CGROUP = Path("/sys/fs/cgroup/blkio/hvdtrain-bench-shards")
OPEN_SECONDS = 0.005
BYTES_PER_SECOND = 100_000_000


class Unchanged:
    """In place of `Prepare`: decodes nothing."""

    side = 1

    def __call__(self, content: bytes, epoch: int, name: str) -> torch.Tensor:
        return torch.zeros(3, 1, 1, dtype=torch.uint8)


def slow_opens() -> None:
    """Let each open take longer, of both kinds of readers, in the process that calls this."""
    if hasattr(gopen, "slowed"):
        return
    gopen.slowed = True
    by_index = shard_reading.OpenFile.__init__

    def slow_open(path: str, *arguments, **options):
        time.sleep(OPEN_SECONDS)
        return Path(path).open(*arguments, **options)

    def slow_init(self, path: str) -> None:
        time.sleep(OPEN_SECONDS)
        by_index(self, path)

    gopen.open = slow_open
    shard_reading.OpenFile.__init__ = slow_init


class SlowBatches(Dataset):
    def __init__(self, inner: ShardBatches):
        self.inner = inner

    def __getitem__(self, job):
        slow_opens()
        return self.inner[job]


class SlowStream(IterableDataset):
    def __init__(self, inner: StreamBatches):
        self.inner = inner

    def __iter__(self):
        slow_opens()
        return iter(self.inner)


def write_shards(directory: Path, count: int, per_shard: int) -> None:
    generator = torch.Generator().manual_seed(0)
    contents = []
    for _ in range(64):
        coarse = torch.rand(1, 3, 94, 125, generator=generator)
        pixels = torch.nn.functional.interpolate(coarse, (375, 500), mode="bilinear")[0]
        pixels = (pixels + 0.2 * torch.rand(3, 375, 500, generator=generator)).clamp(0, 1)
        file = io.BytesIO()
        Image.fromarray((pixels * 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy()).save(
            file, "JPEG", quality=86
        )
        contents.append(file.getvalue())
    (directory / "train").mkdir()
    for first in range(0, count, per_shard):
        with tarfile.open(directory / "train" / f"{first // per_shard:06d}.tar", "w") as tar:
            for number in range(first, min(first + per_shard, count)):
                for name, content in ((f"{number}.cls", b"0"), (f"{number}.jpg", contents[number % 64])):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    os.sync()
    print(
        f"{count:,} images of {statistics.mean(map(len, contents)) / 1000:.0f} kB, {per_shard} in a shard", flush=True
    )


def read(flags: argparse.Namespace) -> None:
    """One rank of one run: say when the first and the last batch came, and with how many images."""
    engine = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
    engine.device = torch.device("cpu")
    torch.set_num_threads(1)
    start_workers_early()
    files = sorted(str(path) for path in (flags.directory / "train").glob("*.tar"))
    prepare = Unchanged() if flags.read_only else Prepare(224, 1, train=True)
    plan = Plan(flags.images, flags.images, 1, 1, flags.rank, flags.ranks, flags.batch_size)
    if flags.side == "stream":
        stream = StreamBatches(files, prepare, 1, 1, flags.rank, flags.ranks, plan)
        batches = loader(SlowStream(stream) if flags.slow else stream, flags.workers, engine.device)
    else:
        opened, _ = shards.open_indexed(engine, files)
        order = shards.ShardOrder(opened.sizes, flags.window or shards.window_of(opened.sizes))
        planned = ((epoch, batch.indices.tolist()) for epoch, batch in shards.replace(plan, order=order))
        dataset = ShardBatches(opened, prepare, 1, reports=False)
        wanted = jobs(planned, flags.workers)
        batches = loader(SlowBatches(dataset) if flags.slow else dataset, flags.workers, engine.device, wanted)
    began, images, cpu = None, 0, 0.0
    for batch in batches:
        images += batch.samples if began else 0
        began, cpu = began or time.time(), cpu or time.process_time()
    print(json.dumps([began, time.time(), images, time.process_time() - cpu]))


def run(flags: argparse.Namespace, side: str) -> tuple[float, float]:
    """Return images/s of all ranks, and CPU microseconds per image of the ranks themselves."""
    for path in (flags.directory / "train").iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [
        sys.executable,
        "-m",
        "tests.bench.shards",
        *sys.argv[1:],
        "--side",
        side,
        "--directory",
        flags.directory,
    ]
    if flags.slow:  # the shell enters the group, and what it becomes stays there
        command = ["sh", "-c", f'echo $$ > {CGROUP}/cgroup.procs; exec "$@"', "sh", *command]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(flags.ranks)
    ]
    told = [json.loads(each.communicate(timeout=600)[0].splitlines()[-1]) for each in ranks]
    began, ended, images, cpu = zip(*told, strict=True)
    return sum(images) / (max(ended) - min(began)), 1e6 * sum(cpu) / sum(images)


def throttle(directory: Path) -> None:
    device = directory.stat().st_dev
    CGROUP.mkdir(exist_ok=True)
    limit = f"{os.major(device)}:{os.minor(device)} {BYTES_PER_SECOND}\n"
    (CGROUP / "blkio.throttle.read_bps_device").write_text(limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--per-shard", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--window", type=int, help="shards (default: as in training)")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--side", choices=("stream", "index"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.side is not None:
        read(flags)
        return
    with tempfile.TemporaryDirectory() as name:
        flags.directory = Path(name)
        write_shards(flags.directory, flags.images, flags.per_shard)
        for path in (flags.directory / "train").glob("*.tar"):
            shards.obtain(path, [])
        if flags.slow:
            throttle(flags.directory)
        try:
            ratios = []
            for _ in range(flags.repeats):
                rates = {side: run(flags, side) for side in random.sample(("stream", "index"), 2)}
                ratios.append(rates["index"][0] / rates["stream"][0])
                told = [f"{side} {rates[side][0]:,.0f} images/s" for side in ("stream", "index")]
                if flags.workers == 0:
                    told += [f"CPU {rates['stream'][1]:.0f} and {rates['index'][1]:.0f} microseconds per image"]
                print("  ".join(told), flush=True)
        finally:
            if flags.slow:
                time.sleep(5)  # until the readers' workers are gone, too
                CGROUP.rmdir()
        print(f"index over stream: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
