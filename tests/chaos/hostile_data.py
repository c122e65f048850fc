"""Texts, images, shards, MNIST files and mirrors as an enemy or a bad disk would make them."""

import gzip
import io
import os
import random
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from tests.chaos.attempts import Attempt

LM = "python -m hvdtrain.lm --engine serial --steps 2 --no-progress --sample-tokens 0 --threads 1 --layers 1 --heads 1 --width 8 --context 8 --text text"
IMAGENET = ("python -m hvdtrain.imagenet --engine serial --model shufflenet_v2_x0_5 --image-size 32 --workers 0 --epochs 1 "
            "--batch-size 4 --lr 1e-4 --threads 1 --no-progress --output-dir out --data-dir")  # fmt: skip
TEXT = b"All work and no play makes Jack a dull boy.\n" * 200


def text(content: bytes) -> Callable[[Path], None]:
    return lambda here: (here / "text").write_bytes(content) and None


def lm(name: str, what: str, content: bytes, code: int = 0, says: str = "", flags: str = "", **more) -> Attempt:
    return Attempt(f"text-{name}", "hostile texts", what, f"{LM} {flags}", code, says, prepare=text(content), **more)


TEXTS = [
    lm("nuls", "a text of NULs", b"\0" * 5000),
    lm("nuls-between", "NULs between the words", TEXT.replace(b" ", b"\0")),
    lm("not-utf8", "one byte that is not UTF-8, at the end", TEXT + b"\xff", 2, "not UTF-8"),
    lm("not-utf8-bytes", "the same with --tokens bytes", TEXT + b"\xff", flags="--tokens bytes"),
    lm("half-a-character", "half a character at the end", TEXT + "é".encode()[:1], 2, "not UTF-8"),
    lm("surrogates", "surrogates in UTF-8 (CESU)", TEXT + b"\xed\xa0\x80", 2, "not UTF-8"),
    lm("bom", "a byte order mark", b"\xef\xbb\xbf" + TEXT),
    lm("utf16", "UTF-16", TEXT.decode().encode("utf-16"), 2, "not UTF-8"),
    lm("one-line", "one line of 2 MB", b"abc " * 500_000, flags="--context 1024"),
    lm("one-character", "a text of one character", b"x", 2, "too short"),
    lm("two-characters", "a text of two characters", b"xy", 2, "too short"),
    lm("empty", "an empty text", b"", 2, "empty"),
    lm("one-token", "one character, 5,000 times: a vocabulary of one", b"x" * 5000),
    lm("newlines", "only line ends", b"\r\n" * 5000),
    lm("pairs-one-token", "one character with --tokens pairs", b"x" * 5000, 2, "too short", flags="--tokens pairs --vocabulary-size 300"),
    lm("pairs-nuls", "NULs with --tokens pairs", b"\0" * 5000, 2, "too short", flags="--tokens pairs --vocabulary-size 300"),
    lm("pairs-small", "a vocabulary of one byte pair: it has the 256 bytes at least", TEXT, flags="--tokens pairs --vocabulary-size 1"),
    lm("every-character", "20,000 different characters, each once",
       "".join(map(chr, [*range(0xD800 - 10_000, 0xD800), *range(0xE000, 0xE000 + 10_000)])).encode(), flags="--width 4"),
    lm("context-huge", "a context longer than the text", TEXT, 2, "too short", flags="--context 100000"),
    lm("tokenizer-deep", "a tokenizer.json of 100,000 brackets", TEXT, 2, "tokenizer", flags="--tokens pairs --tokenizer deep",
       ) ,
    Attempt("text-pipe", "hostile texts", "a FIFO as text", f"mkfifo text; {LM}", 2, "text", limit=60),
    Attempt("text-zero", "hostile texts", "/dev/zero as text", LM.replace("--text text", "--text /dev/zero"), 2, "/dev/zero", limit=60),
    Attempt("text-link-loop", "hostile texts", "a link to itself as text", f"ln -s text text; {LM}", 2, "symbolic links"),
    Attempt("text-proc", "hostile texts", "/proc/self/environ as text: it has another length each time", LM.replace("--text text", "--text /proc/self/environ"), (0, 2)),
    Attempt("text-1000-files", "hostile texts", "a thousand texts with odd names", "mkdir t; for i in $(seq 1000); do echo All work $i > t/\"$i"
            " é\"; done; " + LM.replace("--text text", "--text t/*")),
    Attempt("text-growing", "hostile texts", "a text that grows while it is read", "(while :; do head -c 100000 /dev/zero | tr '\\0' x; sleep 0.02; done > text) & "
            f"sleep 1; {LM} --context 1024; rc=$?; kill %1; exit $rc", limit=120),
    Attempt("text-cache-poisoned", "hostile texts", "tokens in the cache that lie outside of the vocabulary",
            f"{LM} > /dev/null; for f in cache/hvdtrain/datasets/text/*.tokens; do head -c $(stat -c %s $f) /dev/zero | tr '\\0' '\\377' > $f; done; {LM}",
            (0, 2), prepare=text(TEXT)),
]  # fmt: skip


def deep_tokenizer(here: Path) -> None:
    (here / "text").write_bytes(TEXT)
    (here / "deep").write_text("[" * 100_000)


TEXTS = [Attempt(**{**vars(a), "prepare": deep_tokenizer}) if a.name == "text-tokenizer-deep" else a for a in TEXTS]

# Images in folders


def image(mode: str, size: tuple[int, int], form: str) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    picture = Image.frombytes("L", size, random.Random(size[0]).randbytes(size[0] * size[1]))
    (
        picture.convert("RGB").convert(mode)
        if mode in ("CMYK", "LAB", "P", "RGBA", "RGB")
        else Image.new(mode, size, 1)
    ).save(out, form)
    return out.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces so many pixels, and has a few bytes of them."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
        + chunk(b"IEND", b"")
    )


def png_bomb(side: int) -> bytes:
    """A sound PNG of side x side black pixels, of a few kilobytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    packer, packed = zlib.compressobj(9), []
    for _ in range(side):
        packed.append(packer.compress(bytes(1 + side // 8)))
    packed.append(packer.flush())
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"".join(packed)) + chunk(b"IEND", b"")


def folder(make: Callable[[], dict[str | bytes, bytes]]) -> Callable[[Path], None]:
    """Return what writes a folder of 16 sound images in two classes, and these files in train/a."""

    def prepare(here: Path) -> None:
        sound = [image("RGB", (40 + n, 40), "JPEG") for n in range(16)]
        for split in ("train", "val"):
            for label in ("a", "b"):
                (here / "data" / split / label).mkdir(parents=True)
                for number in range(8 if split == "train" else 2):
                    (here / "data" / split / label / f"{number}.jpg").write_bytes(sound[number + 8 * (label == "b")])
        for name, content in make().items():
            with open(os.path.join(os.fsencode(here), b"data/train/a", os.fsencode(name)), "wb") as file:  # noqa: PTH118, PTH123
                file.write(content)

    return prepare


def images(name: str, what: str, make: Callable[[], dict[str | bytes, bytes]], code: int = 0, says: str = "", flags: str = "--max-corrupt 4",
           before: str = "", **more) -> Attempt:  # fmt: skip
    command = f"{before}{IMAGENET} data {flags}"
    return Attempt(f"image-{name}", "hostile images", what, command, code, says, prepare=folder(make), **more)


def several_frames(form: str) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue", "green")]
    frames[0].save(out, form, save_all=True, append_images=frames[1:])
    return out.getvalue()


IMAGES = [
    images("bomb-header", "a PNG that announces 2 billion x 2 billion pixels", lambda: {"x.png": png_header(2**31 - 1, 2**31 - 1)}, says="skipped"),
    images("bomb", "a sound PNG of 30,000 x 30,000 pixels (900 MB of them)", lambda: {"x.png": png_bomb(30_000)}, (0), limit=120),
    images("large", "a sound PNG of 12,000 x 12,000 pixels", lambda: {"x.png": png_bomb(12_000)}, limit=120),
    images("truncated", "half a JPEG", lambda: {"x.jpg": image("RGB", (400, 400), "JPEG")[:400]}, says="skipped"),
    images("text", "a text called .jpg", lambda: {"x.jpg": b"not an image"}, says="skipped"),
    images("empty", "an empty file", lambda: {"x.jpg": b""}, says="skipped"),
    images("one-pixel", "images of 1 x 1, 1 x 3000 and 3000 x 1 pixels",
           lambda: {f"x{w}-{h}.png": image("RGB", (w, h), "PNG") for w, h in ((1, 1), (1, 3000), (3000, 1))}, flags=""),
    images("16-bit", "16-bit, floating-point, CMYK, LAB, palette, 1-bit images", lambda: {
        "a.png": image("I;16", (40, 40), "PNG"), "b.tif": image("F", (40, 40), "TIFF"), "c.jpg": image("CMYK", (40, 40), "JPEG"),
        "d.tif": image("LAB", (40, 40), "TIFF"), "e.png": image("P", (40, 40), "PNG"), "f.png": image("1", (40, 40), "PNG"),
        "g.png": image("LA", (40, 40), "PNG"), "h.webp": image("RGBA", (40, 40), "WEBP")}, flags=""),
    images("other-form", "a GIF called .jpg, a PNG called .bmp", lambda: {"a.jpg": image("P", (20, 20), "GIF"), "b.bmp": image("RGB", (9, 9), "PNG")}, flags=""),
    images("animated", "an animated WebP, GIF and multi-page TIFF", lambda: {"a.webp": several_frames("WEBP"), "b.tif": several_frames("TIFF"), "c.jpg": several_frames("GIF")}, flags=""),
    images("all-damaged", "every image of a class is damaged", lambda: {f"{n}.jpg": b"x" for n in range(8)}, 2, "samples cannot be read", flags=""),
    images("all-damaged-allowed", "every image is damaged, and all are allowed to be", lambda: {f"{n}.jpg": b"x" for n in range(8)},
           flags="--max-corrupt 1000", before="for i in 0 1 2 3 4 5 6 7; do echo x > data/train/b/$i.jpg; done; ", code=(0, 1, 2)),
    images("names", "names with a line break, not UTF-8, with an escape code", lambda: {b"new\nline.jpg": b"x", b"\xff\xfe.jpg": b"x", b"\x1b[2J.jpg": b"x"},
           says="skipped", unsaid="\x1b"),
    images("pipe", "a FIFO called .jpg", lambda: {}, says="", code=(0, 2), before="mkfifo data/train/a/x.jpg; ", limit=90),
    images("zero", "a link to /dev/zero called .jpg", lambda: {}, code=(0, 2), before="ln -s /dev/zero data/train/a/x.jpg; ulimit -v 30000000; ", limit=90),
    images("link-loop", "an image that is a link to itself, and a class that is a link to another", lambda: {}, code=(0, 2), before="ln -s x.jpg data/train/a/x.jpg; ln -s a data/train/c; ln -s a data/val/c; ", limit=90),
    images("class-missing", "a class that is only in val/", lambda: {}, 2, "only in val", before="mkdir data/val/c; cp data/val/a/0.jpg data/val/c; "),
    images("class-newline", "a class whose name has a line break and an escape code, only in val/", lambda: {}, 2, "only in val",
           before="mkdir data/val/$'c\\n\\e[2J'; cp data/val/a/0.jpg data/val/$'c\\n\\e[2J'/; ", unsaid="\x1b"),
    images("removed", "the folder is removed while it trains", lambda: {}, 2, "cannot be read",
           flags="--max-corrupt 4 --epochs 400", before="(sleep 1; until grep -qs train out/metrics.jsonl; do sleep 0.1; done; rm -r data) & "),
    images("unreadable", "a class that an ordinary user may not read", lambda: {}, 2, "no valid file for the classes a",
           before="chmod 0 data/train/a; setpriv --bounding-set -dac_override,-dac_read_search --inh-caps -all ", needs=("root", "setpriv")),
]  # fmt: skip

# Shards


def tar(
    members: list[tuple[str, bytes]],
    form: int = tarfile.GNU_FORMAT,
    change: Callable[[tarfile.TarInfo], None] = lambda info: None,
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            change(info)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def sound_members(count: int = 8) -> list[tuple[str, bytes]]:
    jpegs = [image("RGB", (40 + n, 40), "JPEG") for n in range(count)]
    return [
        member for n, jpeg in enumerate(jpegs) for member in ((f"{n}.jpg", jpeg), (f"{n}.cls", str(n % 2).encode()))
    ]


def patched(data: bytes, at: int, size: bytes) -> bytes:
    """Return a tar file whose member at `at` announces another size, with a right checksum."""
    head = bytearray(data[at : at + 512])
    head[124:136] = size
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return data[:at] + bytes(head) + data[at + 512 :]


def base256(number: int) -> bytes:
    return b"\xff" + number.to_bytes(11, "big", signed=True) if number < 0 else b"\x80" + number.to_bytes(11, "big")


def shards(
    name: str,
    what: str,
    make: Callable[[], bytes],
    code: int = 0,
    says: str = "",
    flags: str = "--max-corrupt 100",
    before: str = "",
    **more,
) -> Attempt:
    def prepare(here: Path) -> None:
        for split in ("train", "val"):
            (here / "data" / split).mkdir(parents=True)
            (here / "data" / split / "0.tar").write_bytes(tar(sound_members()))
        (here / "data" / "train" / "1.tar").write_bytes(make())

    command = f"{before}{IMAGENET} data --dataset shards {flags}"
    return Attempt(f"shard-{name}", "hostile shards", what, command, code, says, prepare=prepare, **more)  # fmt: skip


def linked(info: tarfile.TarInfo) -> None:
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"


def header_bomb() -> bytes:
    """A pax header of 64 MiB, before a sound member."""
    return tar([("x", b"x" * (64 << 20))], change=lambda info: setattr(info, "type", tarfile.XHDTYPE)) + tar(
        sound_members(1)
    )


EITHER = (0, 2)
SHARDS = [
    shards("size-8-eib", "a member that announces 8 EiB", lambda: patched(tar(sound_members()), 1024 * 0, base256(2**63 - 1)), EITHER),
    shards("size-negative", "a member of size -512: a reader that believes it goes in a circle", lambda: patched(tar(sound_members()), 0, base256(-512)), EITHER, limit=90),
    shards("size-garbage", "a size that is not a number", lambda: patched(tar(sound_members()), 0, b"99999999999\0"), EITHER),
    shards("names", "names with .., absolute, with line breaks and escape codes", lambda: tar([(f"{prefix}{n}.{end}", body) for n in range(4) for prefix in
           ("../../", "/etc/", "a\nb", "\x1b[2J") for end, body in (("jpg", b"not an image"), ("cls", b"1"))]), says="skipped", unsaid="\x1b"),
    shards("truncated", "cut in the middle of a member", lambda: tar(sound_members())[:3000], EITHER, "skipped|cannot be read|unexpected end"),
    shards("empty-file", "an empty file", lambda: b"", EITHER),
    shards("zeros", "a file of zeros", lambda: bytes(10240), EITHER),
    shards("noise", "random bytes", lambda: zlib.compress(bytes(range(256)) * 99) * 50, EITHER),
    shards("gzip-bomb", "a gzip bomb called .tar", lambda: gzip.compress(bytes(1 << 28)), EITHER, limit=90),
    shards("pax-bomb", "a pax header of 64 MiB", header_bomb, EITHER, limit=90),
    shards("pax-path", "a pax header with a path of 1 MB", lambda: tar([("d/" * 500_000 + f"{n}.{e}", b) for n in range(2) for e, b in (("jpg", b"x"), ("cls", b"0"))], tarfile.PAX_FORMAT), EITHER),
    shards("many-members", "100,000 empty members", lambda: tar([(f"{n}.txt", b"") for n in range(100_000)]), EITHER, limit=120),
    shards("links", "members that are links to /etc/passwd", lambda: tar([(f"{n}.{e}", b"") for n in range(4) for e in ("jpg", "cls")],
           change=linked), EITHER),
    shards("devices", "members that are devices, directories, FIFOs", lambda: tar([(f"{n}.jpg", b"") for n in range(4)],
           change=lambda info: setattr(info, "type", {"0": tarfile.CHRTYPE, "1": tarfile.DIRTYPE, "2": tarfile.FIFOTYPE, "3": tarfile.GNUTYPE_SPARSE}[info.name[0]])), EITHER),
    shards("classes-odd", "classes -1, 10^30, 1e3, empty, NUL, of 1 MB", lambda: tar([m for n, c in enumerate((b"-1", b"1" + b"0" * 30, b"1e3", b"", b"\0", b"1" * 10**6, "٣".encode()))
           for m in ((f"{n}.jpg", image("RGB", (9, 9), "JPEG")), (f"{n}.cls", c))]), EITHER),
    shards("class-large", "class 2,000,000,000: the head of the model would have as many rows", lambda: tar([("0.jpg", image("RGB", (9, 9), "JPEG")), ("0.cls", b"2000000000")]), says="class 2000000000 of 1000"),
    shards("same-names", "the same sample twice", lambda: tar(sound_members(2) * 2), EITHER),
    shards("directory", "a directory called 2.tar", lambda: tar(sound_members()), EITHER, before="mkdir data/train/2.tar; "),
    shards("pipe", "a FIFO called 2.tar", lambda: tar(sound_members()), EITHER, before="mkfifo data/train/2.tar; ", limit=60),
    shards("zero", "a link to /dev/zero called 2.tar", lambda: tar(sound_members()), EITHER, before="ln -s /dev/zero data/train/2.tar; ", limit=60),
    shards("index-of-another", "the index of another shard of the same size and time", lambda: tar(sound_members()),
           before=f"{IMAGENET} data --dataset shards > /dev/null; rm -r out; cd data/train; touch -r 0.tar 1.tar; cp 0.tar.index 1.tar.index; cd ../..; "),
    shards("index-pipe", "a FIFO and a directory as indices", lambda: tar(sound_members()), before="mkfifo data/train/0.tar.index; mkdir data/train/1.tar.index; ", limit=60),
    shards("index-zero", "a link to /dev/zero as index", lambda: tar(sound_members()), before="ln -s /dev/zero data/train/0.tar.index; ", limit=60),
    shards("sizes-deep", "sizes.json of 100,000 brackets, classes.json a FIFO", lambda: tar(sound_members()), EITHER,
           before="head -c 100000 /dev/zero | tr '\\0' '[' > data/train/sizes.json; mkfifo data/train/classes.json; ", limit=60),
    shards("sizes-huge", "sizes.json with a number of 5,000 digits", lambda: tar(sound_members()), 2, "sizes.json",
           before="echo {\\\"0.tar\\\": $(printf '9%.0s' $(seq 5000))} > data/train/sizes.json; "),
    shards("cut-during", "a shard is cut while it is read", lambda: tar(sound_members()), 2, "cannot be read|read",
           flags="--max-corrupt 4 --epochs 400", before="(sleep 1; until grep -qs train out/metrics.jsonl; do sleep 0.1; done; : > data/train/1.tar; : > data/train/0.tar) & "),
    shards("replaced-during", "a shard is replaced by another of the same size while it is read", lambda: tar(sound_members()), 2, "read",
           flags="--max-corrupt 4 --epochs 400", before="(sleep 1; until grep -qs train out/metrics.jsonl; do sleep 0.1; done; "
           "head -c $(stat -c %s data/train/1.tar) /dev/zero > z; mv z data/train/1.tar; head -c $(stat -c %s data/train/0.tar) /dev/zero > data/train/0.tar) & "),
    shards("pattern-odd", "patterns with a bracket that stays open, of a million files", lambda: b"", 2, flags="--train-shards 'data/{0..' --test-shards data/val/0.tar", limit=60),
    shards("pattern-million", "a pattern of ten million files", lambda: b"", 2, flags="--train-shards 'data/train/{0..9999999}.tar' --test-shards data/val/0.tar", says="more than 1,000,000 names", limit=60),
    shards("pipe-command", "pipe: of a command that fails, of one that never ends", lambda: b"", 2,
           flags="--train-shards 'pipe:exit 7' --test-shards data/val/0.tar --train-samples 8 --classes 2", limit=120),
]  # fmt: skip

# MNIST's files, and mirrors of them


def mnist(
    name: str, what: str, spoil: str, code: int | tuple[int, ...] = 2, says: str = "train-images", **more
) -> Attempt:
    command = f"mkdir data; cd data; f=train-images-idx3-ubyte; {spoil}; cd ..; python -m hvdtrain.mnist --engine serial --dataset mnist --data-dir data --no-progress"
    return Attempt(f"mnist-{name}", "hostile MNIST files and mirrors", what, command, code, says,
                   prepare=lambda here: {"https_proxy": "http://127.0.0.1:9"}, **more)  # fmt: skip


REST = "for g in train-labels-idx1-ubyte t10k-images-idx3-ubyte t10k-labels-idx1-ubyte; do echo x > $g; done"
FILES = [
    mnist("gz-of-gz", "a gzip file in a gzip file", f"{REST}; echo x | gzip | gzip > $f.gz"),
    mnist("gz-bomb", "a gzip bomb of 10 GB in 10 MB", f"{REST}; head -c 300000000 /dev/zero | gzip -1 > $f.gz", limit=120),
    mnist("gz-empty", "an empty file called .gz", f"{REST}; : > $f.gz"),
    mnist("header-lies", "a header that announces 4 billion images", f"{REST}; printf '\\0\\0\\10\\3\\377\\377\\377\\377\\0\\0\\0\\34\\0\\0\\0\\34' > $f"),
    mnist("pipe", "a FIFO in the place of a file", f"{REST}; mkfifo $f", says="lacks|download", limit=60),
    mnist("zero", "a link to /dev/zero", f"{REST}; ln -s /dev/zero $f", says="lacks|download", limit=60),
    mnist("sparse", "a sparse file of 1 TB", f"{REST}; truncate -s 1T $f", limit=60),
    mnist("loop", "a link to itself, and MNIST/raw, too", f"{REST}; ln -s $f $f; ln -s . MNIST; ln -s . raw", says="lacks|download"),
    mnist("case", "the names in capitals and .GZ", "echo x > TRAIN-IMAGES-IDX3-UBYTE.GZ", says="no MNIST|download"),
    mnist("swapped", "labels where images belong", f"{REST}; head -c 60008 /dev/zero > $f"),
]  # fmt: skip

# The mirror of this program answers as `answer` (a function of a socket) does. The limits are a tenth of the real ones.
MIRROR = """
import socket, sys, threading, time
from hvdtrain.data import download, idx, published
download.SCHEMES, download.TOTAL_SECONDS, download.ANSWER_SECONDS, download.SILENCE_SECONDS = ("http",), 4.0, 1.0, 1.0
listener = socket.create_server(("127.0.0.1", 0))
here = f"http://127.0.0.1:{listener.getsockname()[1]}/"
def answer(s):
%s
def serve():
    while True:
        s, _ = listener.accept()
        def one(s=s):
            try:
                s.recv(9999)
                answer(s)
                s.close()
            except OSError:
                pass
        threading.Thread(target=one, daemon=True).start()
threading.Thread(target=serve, daemon=True).start()
held = published.PUBLISHED["mnist"]
published.PUBLISHED["mnist"] = type(held)(held.name, held.title, held.folder, (here,), held.files)
began = time.monotonic()
from hvdtrain.launching.exit_codes import run
def main():
    try:
        print(idx.load("auto").reason)
    finally:
        assert time.monotonic() - began < 15, "not limited"
    return 0
run(main)
"""


def mirror(name: str, what: str, answer: str, says: str) -> Attempt:
    def prepare(here: Path) -> dict[str, str]:
        body = "\n".join(f"    {line}" for line in answer.splitlines())
        (here / "mirror.py").write_text(MIRROR % body)
        return {"no_proxy": "127.0.0.1"}

    return Attempt(
        f"mirror-{name}",
        "hostile MNIST files and mirrors",
        what,
        "python mirror.py",
        0,
        f"embedded digits.*{says}",
        prepare=prepare,
        limit=60,
    )


OK = r's.sendall(b"HTTP/1.1 200 OK\r\n'
MIRRORS = [
    mirror("drip", "a byte of the body every 0.2 s", OK + 'Content-Length: 9999999\\r\\n\\r\\n")\nwhile True:\n    s.sendall(b"x")\n    time.sleep(0.2)', "not done after"),
    mirror("drip-headers", "a byte of the headers every 0.2 s", OK + 'X: ")\nwhile True:\n    s.sendall(b"x")\n    time.sleep(0.2)', "no answer|download failed"),
    mirror("headers", "headers without an end", OK + '")\nwhile True:\n    s.sendall(b"X: y\\r\\n" * 1000)', "download failed"),
    mirror("header-long", "one header of 100 MB", OK + 'X: ")\nwhile True:\n    s.sendall(b"x" * 99999)', "download failed"),
    mirror("redirects", "redirects in a circle", 's.sendall(b"HTTP/1.1 302 Found\\r\\nLocation: /x\\r\\nContent-Length: 0\\r\\n\\r\\n")', "redirect|download failed"),
    mirror("redirect-new", "redirects, each to another URL", 's.sendall(b"HTTP/1.1 302 Found\\r\\nLocation: /" + str(time.time()).encode() + b"\\r\\nContent-Length: 0\\r\\n\\r\\n")', "redirect|download failed"),
    mirror("redirect-file", "a redirect to file:///etc/passwd", 's.sendall(b"HTTP/1.1 302 Found\\r\\nLocation: file:///etc/passwd\\r\\n\\r\\n")', "not allowed"),
    mirror("redirect-odd", "a redirect to http://[ with escape codes", 's.sendall(b"HTTP/1.1 302 Found\\r\\nLocation: http://[\\x1b[2J\\r\\n\\r\\n")', "download failed"),
    mirror("chunks", "chunked without an end", OK + 'Transfer-Encoding: chunked\\r\\n\\r\\n")\nwhile True:\n    s.sendall(b"1\\r\\nx\\r\\n" * 1000)', "sent more than|not done"),
    mirror("chunk-odd", "a chunk of size -1 and one of zzz", OK + 'Transfer-Encoding: chunked\\r\\n\\r\\n-1\\r\\nzzz\\r\\n")', "download failed"),
    mirror("length-negative", "Content-Length: -5", OK + 'Content-Length: -5\\r\\n\\r\\nabc")', "download failed"),
    mirror("not-http", "an SSH banner instead of HTTP", 's.sendall(b"SSH-2.0-OpenSSH_9\\r\\n")', "download failed"),
    mirror("reset", "a reset in the middle of the body", OK + 'Content-Length: 99999\\r\\n\\r\\nabc")\nimport struct\ns.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))', "download failed"),
    mirror("continues", "100 Continue without an end", 'while True:\n    s.sendall(b"HTTP/1.1 100 Continue\\r\\n\\r\\n" * 100)', "no answer|download failed"),
    mirror("reason", "a reason with escape codes", 's.sendall(b"HTTP/1.1 500 \\x1b[2J\\x1b]0;x\\x07 oh\\r\\n\\r\\n")', "HTTP 500"),
]  # fmt: skip

DATA = [*TEXTS, *IMAGES, *SHARDS, *FILES, *MIRRORS]
