"""Images from folders of JPEG files, cropped at random to 224 pixels and flipped.

`jpeg`: per second and core, normalized, of hvdtrain.imagenet, the same with --reduced-decode, and torchvision as its
tutorials have it. `image_workers`: as people load them, two ranks, each with a loading worker, batches of uint8, beside
torchvision's data set with its own decoder in a DataLoader.
"""

import json
import os
import subprocess
import sys

from tests.bench.measurements import SECONDS, Left, Setting, in_process, job, once, users_environment

IMAGES = """
import sys, torch
from pathlib import Path
from PIL import Image
height, width, count = map(int, sys.argv[2:])
generator = torch.Generator().manual_seed(1)
for split in ("train", "val"):
    for label in ("a", "b"):
        directory = Path(sys.argv[1], split, label)
        directory.mkdir(parents=True)
        for number in range(count // 2 if split == "train" else 1):
            coarse = torch.rand(1, 3, 24, 32, generator=generator)
            image = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[0]
            image = (image + 0.05 * torch.rand(3, height, width, generator=generator)).clamp(0, 1)
            Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy()).save(directory / f"{number}.jpg", quality=90)
"""
SIZES = {"": (375, 500, 200), "-2000": (1500, 2000, 32)}  # by the end of a row's key: height, width, number of images
EPOCHS = """
import sys, time
def images_per_second(epoch):
    epoch()
    began = time.perf_counter()
    for _ in range(5):
        epoch()
    return 5 * int(sys.argv[2]) / (time.perf_counter() - began)
"""
FOLDERS = {
    "torchvision": """
import sys, torch
torch.set_num_threads(1)
from torchvision import datasets, transforms
transform = transforms.Compose([
    transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
    transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
])
folder = datasets.ImageFolder(sys.argv[1] + "/train", transform)
batches = torch.utils.data.DataLoader(folder, batch_size=32, shuffle=True)
print(images_per_second(lambda: [None for batch in batches]))
""",
    "ours": """
import sys, torch
from pathlib import Path
from hvdtrain.datasets.images import open_folders
from hvdtrain.imagenet import scaled_images
from hvdtrain.engines.choice import start_engine
pixels = 255 * torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 1, 3, 1, 1)
with start_engine("serial", threads=1) as engine:
    folder, _, _ = open_folders(engine, Path(sys.argv[1]), 224, reduced=REDUCED)
    batches = torch.utils.data.DataLoader(folder, batch_size=32, shuffle=True)
    def epoch():
        for images, _ in batches:
            scaled_images(images, pixels, torch.contiguous_format)
    print(images_per_second(epoch))
""",
}
FOLDERS["reduced"] = FOLDERS["ours"].replace("REDUCED", "True")
FOLDERS["ours"] = FOLDERS["ours"].replace("REDUCED", "False")


def jpeg(setting: Setting) -> dict[str, float]:
    """Images per second over torchvision's, by size, each side in a process of its own."""
    found = {}
    for size, (height, width, count) in SIZES.items():
        images = setting.scratch / f"images{size}"
        job([sys.executable, "-c", IMAGES, *map(str, (images, height, width, count))], setting.scratch / "images.log")
        where = str(images), str(count)
        rates = once(FOLDERS, lambda side, where=where: in_process(EPOCHS + FOLDERS[side], *where, log=setting.scratch))
        for key, side in (("jpeg", "ours"), ("jpeg-reduced", "reduced")):
            found[f"{key}{size}"] = rates[side] / rates["torchvision"]
    return found


# ---- with workers

OF_WORKERS = {"500": (375, 500, 256, 24), "2000": (1500, 2000, 64, 8)}  # height, width, images, batches of each rank
# Of `IMAGES`, and for files of 105 kB at 500 x 375 pixels: ImageNet's mean.
NOISE = ("0.05 * torch.rand", "0.25 * torch.rand")
MEASURE = """
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
SIDES = {
    "folder": """
from hvdtrain.inputs import loading
from hvdtrain.datasets.images import open_folders
from hvdtrain.engines.choice import start_engine
from hvdtrain.inputs.fetching import Samples
from torch.utils.data import DataLoader
if __name__ == "__main__":
    loading.start_workers_early()
    with start_engine("serial", threads=1) as engine:
        samples = Samples(DataLoader(open_folders(engine, root, 224)[0], BATCH), 1)
        torch.manual_seed(rank)
        jobs = [(0, some) for some in torch.randint(samples.count, (count, BATCH)).tolist()]
        measure(fetched.batch[0] for fetched in loading.loader(samples, 1, engine.device, jobs))
""",
    "torchvision": """
from torch.utils.data import DataLoader, RandomSampler
from torchvision import io
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
transform = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])
folder = ImageFolder(root / "train", transform, loader=lambda path: io.decode_image(path, io.ImageReadMode.RGB))
sampler = RandomSampler(folder, replacement=True, num_samples=count * BATCH)
measure(images for images, _ in DataLoader(folder, BATCH, sampler=sampler, num_workers=1))
""",
}


def image_workers(setting: Setting) -> dict[str, float]:
    """Ours over torchvision's, in images per second; its CPU seconds per image over ours."""
    found = {}
    for size, (height, width, images, batches) in OF_WORKERS.items():
        root = setting.scratch / size
        arguments = [sys.executable, "-c", IMAGES.replace(*NOISE), *map(str, (root, height, width, images))]
        job(arguments, setting.scratch / "images.log")
        where = str(root), str(batches)
        both = once(SIDES, lambda side, where=where: loaded(setting, side, *where))
        said = "  ".join(f"{side} {rate:.0f}/s {1000 * cpu:.2f} ms" for side, (rate, cpu) in both.items())
        print(f"    {size} pixels, images/s and CPU per image: {said}", flush=True)
        (ours, our_cpu), (theirs, their_cpu) = both["folder"], both["torchvision"]
        found[f"folder-torchvision-{size}"], found[f"folder-torchvision-{size}-cpu"] = (
            ours / theirs,
            their_cpu / our_cpu,
        )
    return found


def loaded(setting: Setting, side: str, root: str, batches: str) -> tuple[float, float]:
    """Return images per second of both ranks, and CPU seconds per image."""
    log = (setting.scratch / f"{side}.log").open("w+")
    script = setting.scratch / f"load_{side}.py"
    script.write_text(MEASURE + SIDES[side])
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
