"""JPEG files of 500 x 375 pixels, about 110 KB each, as the mean of ImageNet's: python -m tests.gpu.jpegs DIR TRAIN VAL"""

import io
import os
import sys
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 16


def make(job: tuple[str, str, int]) -> int:
    """Write an image, and return its size in bytes."""
    root, split, number = job
    draw, label = np.random.default_rng([number, split == "val"]), number % CLASSES
    whole = np.zeros((375, 500, 3), np.float32)
    for side, share in ((8, 0.45), (60, 0.3), (250, 0.22)):  # coarse and fine structure
        field = draw.integers(0, 256, (side * 3 // 4, side, 3), dtype=np.uint8)
        whole += share * np.asarray(Image.fromarray(field).resize((500, 375), Image.Resampling.BICUBIC), np.float32)
    whole[:, :, label % 3] += 12 * (label // 3 + 1) - 30  # something to learn
    file = io.BytesIO()
    Image.fromarray(whole.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=95)
    Path(root, split, f"class{label:02d}", f"{number:06d}.jpg").write_bytes(file.getvalue())
    return file.tell()


def main() -> None:
    root, train, val = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    part = f"{root}.part"
    for split in ("train", "val"):
        for label in range(CLASSES):
            Path(part, split, f"class{label:02d}").mkdir(parents=True, exist_ok=True)
    jobs = [(part, "train", n) for n in range(train)] + [(part, "val", n) for n in range(val)]
    with Pool(len(os.sched_getaffinity(0))) as pool:
        sizes = pool.map(make, jobs, chunksize=16)
    Path(part).rename(root)
    print(f"{len(sizes)} files, mean {sum(sizes) / len(sizes) / 1000:.0f} KB")


if __name__ == "__main__":
    main()
