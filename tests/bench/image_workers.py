"""Images as people load them: two ranks, each with a loading worker, random crops to 224 pixels in batches of uint8.

hvdtrain's folders and shards beside torchvision's data set with its own decoder in a DataLoader, spdl's threads, and
webdataset. Each gives images per second, and CPU seconds per image of all its processes. spdl needs FFmpeg's libraries
(LD_LIBRARY_PATH).
"""

import importlib.util
import json
import os
import subprocess
import sys

from hvdtrain.datasets import make_shards
from tests.bench.images import IMAGES
from tests.bench.measurements import SECONDS, Left, Setting, job, once, users_environment

SIZES = {"500": (375, 500, 256, 24), "2000": (1500, 2000, 64, 8)}  # height, width, images, batches of each rank
PAIRS = (("folder", "torchvision"), ("folder", "spdl"), ("shards", "webdataset"))
NOISE = (
    "0.05 * torch.rand",
    "0.25 * torch.rand",
)  # of `IMAGES`, and for files of 105 kB at 500 x 375 pixels: ImageNet's mean
HEAD = """
import json, os, sys, time, psutil, torch
from pathlib import Path
root, rank, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
BATCH, WARM_UP = 32, 4
torch.set_num_threads(1)
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
def cpu():
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))
def measure(batches):
    images = 0
    for number, batch in enumerate(batches):
        if number == WARM_UP:
            began, used = time.time(), cpu()
        if number >= WARM_UP:
            images += len(batch)
        if number == count - 1:
            print(json.dumps(dict(images=images, began=began, ended=time.time(), cpu=cpu() - used)), flush=True)
"""
TORCHVISION = """
from torchvision import io
from torchvision.transforms import v2
transform = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])
"""
OURS = """
from hvdtrain.inputs import loading
from hvdtrain.datasets.images import open_folders
from hvdtrain.datasets.tar_shards import open_shards
from hvdtrain.engines.choice import start_engine
from hvdtrain.inputs.fetching import Samples
from torch.utils.data import DataLoader
def ours(open_data):
    loading.start_workers_early()
    with start_engine("serial", threads=1) as engine:
        samples = Samples(DataLoader(open_data(engine)[0], BATCH), 1)
        torch.manual_seed(rank)
        jobs = [(0, some) for some in torch.randint(samples.count, (count, BATCH)).tolist()]
        measure(fetched.batch[0] for fetched in loading.loader(samples, 1, engine.device, jobs))
"""
SIDES = {
    "folder": OURS + """
if __name__ == "__main__":
    ours(lambda engine: open_folders(engine, root, 224))
""",
    "shards": OURS + """
if __name__ == "__main__":
    ours(lambda engine: open_shards(engine, root / "shards", (None, None), 224, classes=None))
""",
    "torchvision": TORCHVISION + """
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
folder = ImageFolder(root / "train", transform, loader=lambda path: io.decode_image(path, io.ImageReadMode.RGB))
sampler = RandomSampler(folder, replacement=True, num_samples=count * BATCH)
measure(images for images, _ in DataLoader(folder, BATCH, sampler=sampler, num_workers=1))
""",
    "webdataset": TORCHVISION + """
import webdataset
from torch.utils.data import DataLoader
def image(content):
    return transform(io.decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), io.ImageReadMode.RGB))
urls = sorted(map(str, (root / "shards/train").glob("*.tar")))[rank::2]
data = webdataset.WebDataset(urls, shardshuffle=len(urls), nodesplitter=None, workersplitter=None).repeat()
data = data.shuffle(100).to_tuple("jpg", "cls").map_tuple(image, int).batched(BATCH)
def first():
    yield from zip(range(count), (images for images, _ in DataLoader(data, None, num_workers=1)))
measure(images for _, images in first())
""",
    "spdl": """
import random
import spdl.io
from spdl.pipeline import PipelineBuilder
from hvdtrain.datasets.decoding import random_box
files = sorted((root / "train").glob("*/*.jpg"))
draw = random.Random(rank)
torch.manual_seed(rank)
def load(path):
    packets = spdl.io.demux_image(str(path))
    top, left, height, width = random_box(packets.height, packets.width)
    flip = ",hflip" if draw.random() < 0.5 else ""
    crop = f"crop={width}:{height}:{left}:{top},scale=224:224:flags=bilinear{flip},format=pix_fmts=rgb24"
    return spdl.io.decode_packets(packets, filter_desc=crop)
def batched(frames):
    return spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2)
pipeline = (
    PipelineBuilder().add_source(draw.choice(files) for _ in range(count * BATCH)).pipe(load, concurrency=1)
    .aggregate(BATCH).pipe(batched).add_sink(2).build(num_threads=2)
)
with pipeline.auto_stop():
    measure(pipeline.get_iterator(timeout=600))
""",
}  # fmt: skip


def image_workers(setting: Setting) -> dict[str, float]:
    """Ours over each other, in images per second; the others' CPU seconds per image over ours."""
    sides = [name for name in SIDES if name not in ("spdl", "webdataset") or importlib.util.find_spec(name)]
    found = {}
    for size, (height, width, images, batches) in SIZES.items():
        root = setting.scratch / size
        arguments = [sys.executable, "-c", IMAGES.replace(*NOISE), *map(str, (root, height, width, images))]
        job(arguments, setting.scratch / "images.log")
        for split in ("train", "val"):
            make_shards.make_shards(root / split, root / "shards" / split, images // 8, 1)
        arguments = [str(root), str(batches)]
        both = once(sides, lambda side, arguments=arguments: loaded(setting, side, *arguments))
        said = "  ".join(f"{side} {rate:.0f}/s {1000 * cpu:.2f} ms" for side, (rate, cpu) in both.items())
        print(f"    {size} pixels, images/s and CPU per image: {said}", flush=True)
        for ours, theirs in PAIRS:
            if theirs in both:
                found[f"{ours}-{theirs}-{size}"] = both[ours][0] / both[theirs][0]
                found[f"{ours}-{theirs}-{size}-cpu"] = both[theirs][1] / both[ours][1]
    return found


def loaded(setting: Setting, side: str, root: str, batches: str) -> tuple[float, float]:
    """Return images per second of both ranks, and CPU seconds per image."""
    log = (setting.scratch / f"{side}.log").open("w+")
    script = setting.scratch / f"load_{side}.py"
    script.write_text(HEAD + SIDES[side])
    env = users_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), root, str(rank), batches],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=env,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    log.seek(0)
    if any(rank.returncode for rank in ranks):
        raise Left(f"{side} failed: {' '.join(log.read().split())[-300:]}")
    both = [json.loads(text.splitlines()[-1]) for text in said]
    images = sum(each["images"] for each in both)
    seconds = max(each["ended"] for each in both) - min(each["began"] for each in both)
    return images / seconds, sum(each["cpu"] for each in both) / images
