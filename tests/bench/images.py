"""Images per second and core from folders of JPEG files, cropped at random to 224 pixels, flipped and normalized:
hvdtrain.imagenet, the same with --reduced-decode, and torchvision as its tutorials have it."""

import sys

from tests.bench.measurements import Setting, in_process, job, once

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
