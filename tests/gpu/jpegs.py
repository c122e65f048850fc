"""JPEG files of 500 x 375 pixels, about 110 KB each, as the mean of ImageNet's: python -m tests.gpu.jpegs DIR TRAIN VAL"""

import os
import sys
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 16


def make(path: Path, number: int) -> int:
    """Write an image, and return its size in bytes."""
    draw, label = np.random.default_rng([number, *path.parts[-3].encode()]), number % CLASSES
    whole = np.full((375, 500, 3), 12.0 * (label // 3) - 18, np.float32) * (np.arange(3) == label % 3)  # to learn
    for side, share in ((8, 0.45), (60, 0.3), (250, 0.22)):  # coarse and fine structure
        field = draw.integers(0, 256, (side * 3 // 4, side, 3), dtype=np.uint8)
        whole += share * np.asarray(Image.fromarray(field).resize((500, 375), Image.Resampling.BICUBIC), np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(whole.clip(0, 255).astype(np.uint8)).save(path, "JPEG", quality=95)
    return path.stat().st_size


def main() -> None:
    root, part = Path(sys.argv[1]), Path(f"{sys.argv[1]}.part")
    counts = {"train": int(sys.argv[2]), "val": int(sys.argv[3])}
    jobs = [
        (part / split / f"class{n % CLASSES:02d}" / f"{n:06d}.jpg", n) for split in counts for n in range(counts[split])
    ]
    with Pool(len(os.sched_getaffinity(0))) as pool:
        sizes = pool.starmap(make, jobs, chunksize=16)
    part.rename(root)
    print(f"{len(sizes)} files, mean {sum(sizes) / len(sizes) / 1000:.0f} KB")


if __name__ == "__main__":
    main()
