"""Data sets and records that are no ordinary files, need much memory, or change while they are read.

What their content may be is in tests/single/data, tests/single/analysis and tests/single/test_bad_files.py.
"""

import io
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from tests.chaos.attempts import Attempt

LM = "python -m hvdtrain.lm --engine serial --steps 2 --no-progress --sample-tokens 0 --threads 1 --layers 1 --heads 1 --width 8 --context 8 --text text"
IMAGENET = ("python -m hvdtrain.imagenet --engine serial --model shufflenet_v2_x0_5 --image-size 32 --workers 0 --epochs 1 "
            "--batch-size 4 --lr 1e-4 --threads 1 --no-progress --output-dir out --data-dir")  # fmt: skip
REPORT = "python -m hvdtrain.report"
EITHER = (0, 2)
TRAINS = "(sleep 1; until grep -qs train out/metrics.jsonl; do sleep 0.1; done;"

TEXTS = [
    Attempt("text-zero", "odd texts", "/dev/zero as text", LM.replace("--text text", "--text /dev/zero"), 2, "/dev/zero", limit=60),
    Attempt("text-growing", "odd texts", "a text that grows while it is read", "(while :; do head -c 100000 /dev/zero | tr '\\0' x; sleep 0.02; "
            f"done > text) & sleep 1; {LM} --context 1024; rc=$?; kill %1; exit $rc", limit=120),
]  # fmt: skip


def jpeg(width: int) -> bytes:
    out = io.BytesIO()
    Image.frombytes("RGB", (width, 40), random.Random(width).randbytes(width * 120)).save(out, "JPEG")
    return out.getvalue()


def images(
    name: str, what: str, code: int | tuple[int, ...] = 0, says: str = "", flags: str = "--max-corrupt 4", before: str = "",
    content: Callable[[], dict[bytes, bytes]] = dict, **more,
) -> Attempt:  # fmt: skip
    """An attempt with 16 sound images in two classes, and the files of `content` in train/a."""

    def prepare(here: Path) -> None:
        for split, count in (("train", 8), ("val", 2)):
            for label in ("a", "b"):
                (here / "data" / split / label).mkdir(parents=True)
                for number in range(count):
                    (here / "data" / split / label / f"{number}.jpg").write_bytes(
                        jpeg(40 + number + 8 * (label == "b"))
                    )
        for file, written in content().items():
            Path(os.fsdecode(os.fsencode(here) + b"/data/train/a/" + file)).write_bytes(written)

    return Attempt(
        f"image-{name}", "odd images", what, f"{before}{IMAGENET} data {flags}", code, says, prepare=prepare, **more
    )


IMAGES = [
    images("names", "names with a line break, not UTF-8, with an escape code", says="skipped", unsaid="\x1b",
           content=lambda: {b"new\nline.jpg": b"x", b"\xff\xfe.jpg": b"x", b"\x1b[2J.jpg": b"x"}),
    images("removed", "the folder is removed while it trains", 2, "cannot be read", "--max-corrupt 4 --epochs 400", f"{TRAINS} rm -r data) & "),
]  # fmt: skip


def tar(members: list[tuple[str, bytes]], change: Callable[[tarfile.TarInfo], None] = lambda info: None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            change(info)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def sound() -> bytes:
    pairs = (((f"{n}.jpg", jpeg(40 + n)), (f"{n}.cls", str(n % 2).encode())) for n in range(8))
    return tar([member for pair in pairs for member in pair])


def header_bomb() -> bytes:
    """A pax header of 64 MiB, before sound members."""
    return tar([("x", b"x" * (64 << 20))], lambda info: setattr(info, "type", tarfile.XHDTYPE)) + sound()


def shards(
    name: str, what: str, content: Callable[[], bytes] = sound, code: int | tuple[int, ...] = EITHER, says: str = "",
    flags: str = "--max-corrupt 100", before: str = "", **more,
) -> Attempt:  # fmt: skip
    """An attempt with a sound shard for training and one for the test, and another one with `content`."""

    def prepare(here: Path) -> None:
        for split in ("train", "val"):
            (here / "data" / split).mkdir(parents=True)
            (here / "data" / split / "0.tar").write_bytes(sound())
        (here / "data" / "train" / "1.tar").write_bytes(content())

    command = f"{before}{IMAGENET} data --dataset shards {flags}"
    return Attempt(f"shard-{name}", "odd shards", what, command, code, says, prepare=prepare, **more)


SHARDS = [
    shards("pax-bomb", "a pax header of 64 MiB", header_bomb, limit=90),
    shards("many-members", "100,000 empty members", lambda: tar([(f"{n}.txt", b"") for n in range(100_000)]), limit=120),
    shards("index-pipe", "a FIFO, a directory, a link to /dev/zero as indices", code=0, limit=60,
           before="mkfifo data/train/0.tar.index; mkdir data/train/1.tar.index; ln -s /dev/zero data/val/0.tar.index; "),
    shards("cut-during", "shards are cut while they are read", code=2, says="read", flags="--max-corrupt 4 --epochs 400",
           before=f"{TRAINS} : > data/train/1.tar; : > data/train/0.tar) & "),
    shards("replaced-during", "shards are replaced by others of the same size while they are read", code=2, says="read", flags="--max-corrupt 4 --epochs 400",
           before=f"{TRAINS} head -c $(stat -c %s data/train/1.tar) /dev/zero > z; mv z data/train/1.tar; "
           "head -c $(stat -c %s data/train/0.tar) /dev/zero > data/train/0.tar) & "),
]  # fmt: skip

RUN = "python -m hvdtrain.mnist --engine serial --dataset digits --epochs 1 --train-samples 256 --model convnet --no-progress --output-dir out; "
RECORDS = [
    Attempt("record-odd-names", "odd records", "60 runs, some called <b>, $x$, a line break, not UTF-8, -x", f"{RUN}for d in '<b>x' '$\\frac$' $'a\\nb' $'\\xff' ' -x' $(seq 55); do "
            f"cp -r out \"$d\"; done; {REPORT} --output-dir report -- '<b>x' '$\\frac$' $'a\\nb' $'\\xff' ' -x' $(seq 55)", limit=240),
    Attempt("report-no-home", "odd records", "no HOME, MPLCONFIGDIR below /proc, a notebook's MPLBACKEND, an odd matplotlibrc with LaTeX",
            f"{RUN}unset HOME; printf 'axes.prop_cycle: nonsense\\ntext.usetex: True\\n' > matplotlibrc; MPLCONFIGDIR=/proc/x MPLBACKEND=module://no.such {REPORT} out --output-dir report"),
]  # fmt: skip

DATA = [*TEXTS, *IMAGES, *SHARDS, *RECORDS]
