"""Data sets and records that are no ordinary files, need much memory, or change while they are read.

What their content may be is in tests/single/data, tests/single/analysis and tests/single/test_bad_files.py.
"""

import gzip
import io
import os
import random
import struct
import tarfile
import zlib
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
    Attempt("text-pipe", "odd texts", "a FIFO as text", f"mkfifo text; {LM}", 2, "text", limit=60),
    Attempt("text-zero", "odd texts", "/dev/zero as text", LM.replace("--text text", "--text /dev/zero"), 2, "/dev/zero", limit=60),
    Attempt("text-link-loop", "odd texts", "a link to itself as text", f"ln -s text text; {LM}", 2, "symbolic links"),
    Attempt("text-growing", "odd texts", "a text that grows while it is read", "(while :; do head -c 100000 /dev/zero | tr '\\0' x; sleep 0.02; "
            f"done > text) & sleep 1; {LM} --context 1024; rc=$?; kill %1; exit $rc", limit=120),
]  # fmt: skip


def jpeg(width: int) -> bytes:
    out = io.BytesIO()
    Image.frombytes("RGB", (width, 40), random.Random(width).randbytes(width * 120)).save(out, "JPEG")
    return out.getvalue()


def png_bomb(side: int) -> bytes:
    """A sound PNG of side x side black pixels, of a few kilobytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    packer = zlib.compressobj(9)
    packed = b"".join([packer.compress(bytes(1 + side // 8)) for _ in range(side)]) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


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
    images("bomb", "a sound PNG of 30,000 x 30,000 pixels (900 MB of them)", content=lambda: {b"x.png": png_bomb(30_000)}, limit=120),
    images("names", "names with a line break, not UTF-8, with an escape code", says="skipped", unsaid="\x1b",
           content=lambda: {b"new\nline.jpg": b"x", b"\xff\xfe.jpg": b"x", b"\x1b[2J.jpg": b"x"}),
    images("pipe", "a FIFO called .jpg", EITHER, before="mkfifo data/train/a/x.jpg; ", limit=90),
    images("zero", "a link to /dev/zero called .jpg", EITHER, before="ln -s /dev/zero data/train/a/x.jpg; ulimit -v 30000000; ", limit=90),
    images("link-loop", "an image that is a link to itself, and a class that is a link to another", EITHER,
           before="ln -s x.jpg data/train/a/x.jpg; ln -s a data/train/c; ln -s a data/val/c; ", limit=90),
    images("removed", "the folder is removed while it trains", 2, "cannot be read", "--max-corrupt 4 --epochs 400", f"{TRAINS} rm -r data) & "),
    images("unreadable", "a class that an ordinary user may not read", 2, "no valid file for the classes a", needs=("root", "setpriv"),
           before="chmod 0 data/train/a; setpriv --bounding-set -dac_override,-dac_read_search --inh-caps -all "),
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


def linked(info: tarfile.TarInfo) -> None:
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"


def device(info: tarfile.TarInfo) -> None:
    info.type = (tarfile.CHRTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE)[int(info.name[0])]


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
    shards("gzip-bomb", "a gzip bomb called .tar", lambda: gzip.compress(bytes(1 << 28)), limit=90),
    shards("pax-bomb", "a pax header of 64 MiB", header_bomb, limit=90),
    shards("many-members", "100,000 empty members", lambda: tar([(f"{n}.txt", b"") for n in range(100_000)]), limit=120),
    shards("links", "members that are links to /etc/passwd", lambda: tar([(f"{n}.{e}", b"") for n in range(4) for e in ("jpg", "cls")], linked)),
    shards("devices", "members that are devices, directories, FIFOs", lambda: tar([(f"{n}.jpg", b"") for n in range(4)], device)),
    shards("pipe", "a FIFO called 2.tar", before="mkfifo data/train/2.tar; ", limit=60),
    shards("zero", "a link to /dev/zero called 2.tar", before="ln -s /dev/zero data/train/2.tar; ", limit=60),
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
    Attempt("record-pipe", "odd records", "metrics.jsonl and summary.json are FIFOs", f"mkdir out; mkfifo out/metrics.jsonl out/summary.json; {REPORT} out", 2, "pipe", limit=60),
    Attempt("record-zero", "odd records", "metrics.jsonl is a link to /dev/zero", f"mkdir out; ln -s /dev/zero out/metrics.jsonl; {REPORT} out", 2, "metrics.jsonl", limit=60),
    Attempt("record-odd-names", "odd records", "60 runs, some called <b>, $x$, a line break, not UTF-8, -x", f"{RUN}for d in '<b>x' '$\\frac$' $'a\\nb' $'\\xff' ' -x' $(seq 55); do "
            f"cp -r out \"$d\"; done; {REPORT} --output-dir report -- '<b>x' '$\\frac$' $'a\\nb' $'\\xff' ' -x' $(seq 55)", limit=240),
    Attempt("report-full-disk", "odd records", "no room for the page", f"{RUN}mkdir report; exec unshare -m bash -c 'mount -t tmpfs -o size=16k tmpfs report; {REPORT} out --output-dir report'",
            2, "No space left", needs=("root",)),
    Attempt("report-no-home", "odd records", "no HOME, MPLCONFIGDIR below /proc, no display, an odd matplotlibrc",
            f"{RUN}unset HOME; echo 'axes.prop_cycle: nonsense' > matplotlibrc; MPLCONFIGDIR=/proc/x MPLBACKEND=TkAgg DISPLAY=:99 {REPORT} out --output-dir report"),
]  # fmt: skip

DATA = [*TEXTS, *IMAGES, *SHARDS, *RECORDS]
