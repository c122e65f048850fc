"""Images per second and core from folders of JPEG files, cropped at random to 224 pixels, flipped and normalized:
hvdtrain.imagenet, the same with --reduced-decode, torchvision as its tutorials have it, and NVIDIA DALI's CPU pipeline."""

import importlib.util
import sys

from tests.bench.measurements import Left, Setting, in_process, job
from tests.bench.paired import once

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
SIZES = {500: (375, 500, 200), 2000: (1500, 2000, 32)}  # height, width, number of images
EPOCHS = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # DALI computes in a thread of its own
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
from hvdtrain.data.images import open_folder
from hvdtrain.data.loading import Plan
from hvdtrain.imagenet import scaled
from hvdtrain.engines.start import start
pixels = 255 * torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 1, 3, 1, 1)
with start("serial", threads=1) as engine:
    source = open_folder(engine, Path(sys.argv[1]), side=224, seed=1, workers=0, reduced=REDUCED)
    plan = Plan(source.train_count, source.train_count, 1, 1, 0, 1, 32)
    def epoch():
        for loaded in source.train(plan):
            scaled(loaded.images, pixels, torch.contiguous_format)
    print(images_per_second(epoch))
""",
    "dali": """
from nvidia.dali import fn, pipeline_def, types
@pipeline_def(batch_size=32, num_threads=1, device_id=None, seed=1)
def pipeline():
    files, labels = fn.readers.file(file_root=sys.argv[1] + "/train", random_shuffle=True)
    images = fn.decoders.image_random_crop(files, device="cpu", output_type=types.RGB)  # decodes no rows below the crop
    images = fn.resize(images, resize_x=224, resize_y=224)
    mean, std = [123.7, 116.3, 103.5], [58.4, 57.1, 57.4]
    return fn.crop_mirror_normalize(images, mirror=fn.random.coin_flip(), mean=mean, std=std, output_layout="CHW"), labels
batches, count = pipeline(), int(sys.argv[2])
batches.build()
print(images_per_second(lambda: [batches.run() for _ in range(count // 32)]) * (count // 32) * 32 / count)
""",
}
FOLDERS["reduced"] = FOLDERS["ours"].replace("REDUCED", "True")
FOLDERS["ours"] = FOLDERS["ours"].replace("REDUCED", "False")


def jpeg(setting: Setting) -> dict[str, float]:
    found = compared(setting, "torchvision")
    return {"jpeg": found["ours", 500], "jpeg-2000": found["ours", 2000],
            "jpeg-reduced": found["reduced", 500], "jpeg-reduced-2000": found["reduced", 2000]}  # fmt: skip


def dali(setting: Setting) -> dict[str, float]:
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        raise Left("needs DALI: pip install nvidia-dali-cuda130")
    found = compared(setting, "dali")
    return {"dali": found["ours", 500], "dali-reduced-2000": found["reduced", 2000]}


def compared(setting: Setting, peer: str) -> dict[tuple[str, int], float]:
    """Return the images per second of (side, width in pixels) over the peer's, each side in a process of its own."""
    found = {}
    for width, size in SIZES.items():
        images = setting.scratch / f"images-{width}"
        if not images.exists():
            job([sys.executable, "-c", IMAGES, str(images), *map(str, size)], setting.scratch / "images.log")
        where = str(images), f"{size[2]}"
        rates = once(
            ("ours", "reduced", peer),
            lambda side, where=where: in_process(EPOCHS + FOLDERS[side], *where, log=setting.scratch),
        )
        found |= {(side, width): rates[side] / rates[peer] for side in ("ours", "reduced")}
    return found
