"""Loads MNIST, Fashion-MNIST or the embedded digits into memory.

    from hvdtrain.datasets import mnist_data
    data = mnist_data.load_dataset("auto", data_dir=None)
    print(data.reason)

The content of every MNIST and Fashion-MNIST file is compared with its published SHA-256; a file that differs is an error.
Therefore ranks on different hosts only need to compare `name`. Of the ranks of a host, one calls this before the others: it
downloads what is missing.
"""

import gzip
import hashlib
import io
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hvdtrain.engines import atomic, files
from hvdtrain.engines.errors import UserError, one_line, why

DATASET_NAMES = ("auto", "mnist", "fashion-mnist", "digits")
SIDE = 28  # pixels
UNSOUND = (OSError, EOFError, ValueError, zlib.error)  # what reading and `unpacked_file` may raise
# Of a mirror, without a byte; also for its first answer, with name resolution, connection and TLS.
DOWNLOAD_SILENCE_SECONDS = 5.0
TOTAL_SECONDS = 120.0  # for all files together


@dataclass(frozen=True)
class File:
    """One of the four files of a published dataset."""

    name: str  # uncompressed
    count: int  # images or labels
    sha256: str  # of the uncompressed content

    @property
    def shape(self) -> tuple[int, ...]:
        """[count, 1, 28, 28] for images, [count] for labels."""
        return (self.count, 1, SIDE, SIDE) if "images" in self.name else (self.count,)

    @property
    def header(self) -> int:
        """Size of the header: two zero bytes, 8 (unsigned bytes), number of dimensions, then 4 bytes per dimension."""
        return 16 if "images" in self.name else 8

    @property
    def most_bytes(self) -> int:
        """Size of the file in bytes, compressed or not, at most: gzip adds little to what cannot be compressed."""
        size = self.header + prod(self.shape)
        return size + size // 100 + 4096


class Published(NamedTuple):
    """A published dataset."""

    name: str
    title: str
    folder: str  # the directory name that torchvision uses
    mirrors: tuple[str, ...]
    files: tuple[File, ...]  # in the order of Dataset's tensors


# torchvision's mirrors if they support https. Its Fashion-MNIST mirror does not; the publisher's repository does.
PUBLISHED = {
    "mnist": Published(
        "mnist", "MNIST", "MNIST",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        (
            File("train-images-idx3-ubyte", 60000, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
            File("train-labels-idx1-ubyte", 60000, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
            File("t10k-images-idx3-ubyte", 10000, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
            File("t10k-labels-idx1-ubyte", 10000, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
        ),
    ),
    # Labels: hashed from the publisher's repository. Images: as four independent projects publish them.
    "fashion-mnist": Published(
        "fashion-mnist", "Fashion-MNIST", "FashionMNIST",
        ("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
         "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"),
        (
            File("train-images-idx3-ubyte", 60000, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
            File("train-labels-idx1-ubyte", 60000, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
            File("t10k-images-idx3-ubyte", 10000, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
            File("t10k-labels-idx1-ubyte", 10000, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
        ),
    ),
}  # fmt: skip


class Dataset(NamedTuple):
    """A complete dataset."""

    name: str  # "mnist", "fashion-mnist" or "digits", never "auto"
    reason: str  # one line: which data this is, and why it was chosen
    train_images: Tensor  # uint8 [n, 1, 28, 28]
    train_labels: Tensor  # int64 [n], 0 to 9
    test_images: Tensor  # uint8 [m, 1, 28, 28]
    test_labels: Tensor  # int64 [m]


class NotThere(Exception):
    """The dataset was not found and could not be downloaded. The message is one line without a remedy."""


def load_dataset(
    name: str = "auto",
    data_dir: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Dataset:
    """Find or download, verify and read the dataset `name`, one of NAMES. Needs no engine.

    data_dir: the only directory to search and to download to. Default: search ./data, then the cache directory, and
    download to the cache. "auto" uses MNIST if available, otherwise the embedded digits; a damaged file is an error.
    say: called with one line when a download begins; pass it on the rank that prints.

    Raises UserError. Takes a few seconds without a network, at most about TOTAL_SECONDS with a slow one.
    """
    if name not in DATASET_NAMES:
        raise UserError(f"there is no dataset {name!r}: choose one of {', '.join(DATASET_NAMES)}")
    root = None if data_dir is None else _named_directory(data_dir)
    because = "as asked"
    if name != "digits":
        published = PUBLISHED["mnist" if name == "auto" else name]
        try:
            return _load(published, root, download, say)
        except NotThere as error:
            if name != "auto":
                remedy = f"give the directory that has {published.title}'s four files with --data-dir"
                raise UserError(f"{error}; {remedy}, or use --dataset digits") from None
            because = f"because MNIST is missing: {error}"
    return Dataset("digits", f"embedded digits (1,797 scans from the UCI set), {because}", *load_digits())


def _named_directory(data_dir: str | os.PathLike[str]) -> Path:
    remedy = "name the directory that has the data, or leave it out"
    if not os.fspath(data_dir):
        raise UserError(f"--data-dir is empty: {remedy}")
    root = Path(os.path.expanduser(data_dir))  # noqa: PTH111 # the shell does not expand --data-dir=~/x
    if not os.path.isdir(root):  # noqa: PTH112 (Path's own raises where the name is too long)
        problem = "is not a directory" if os.path.lexists(root) else "does not exist"
        raise UserError(f"--data-dir: {root} {problem}: {remedy}")
    if not os.access(root, os.R_OK | os.X_OK):
        raise UserError(f"--data-dir: {root} is not readable: check its permissions")
    return root


def _load(published: Published, root: Path | None, may_download: bool, say: Callable[[str], None]) -> Dataset:
    """Return the dataset. Raises NotThere, and UserError for a damaged file."""
    shared = files.cache_directory(published.name)
    given = Path("data") if root is None else root
    places = [given, given / published.folder / "raw"]  # torchvision's
    target = places[1] if root is not None else shared
    if root is None and shared is not None:
        places.append(shared)
    found = _find(published, places)
    if missing := [file for file in published.files if file not in found]:
        lacks = f"no {published.title} in {'./data or the cache' if root is None else root}"
        if found:
            names = ", ".join(file.name for file in missing)
            lacks = f"{given} lacks {names} (plain or .gz, there or in {published.folder}/raw)"
        if not may_download:
            raise NotThere(f"{lacks}, and downloads are off")
        if target is None:
            remedy = "XDG_CACHE_HOME can name one that is writable"
            raise NotThere(f"{lacks}, and there is no directory to download to ({remedy})")
        say(f"{lacks}: downloading it to {target}, one process per host")
        try:
            target.mkdir(parents=True, exist_ok=True)
            atomic.remove_partial(target, atomic.STALE_SECONDS)
            _download(published, missing, target)
        except OSError as error:
            raise NotThere(f"{lacks}, and {target} cannot be written ({why(error)})") from None
        except NotThere as error:
            raise NotThere(f"{lacks}, and the download failed ({error})") from None
        found = _find(published, places)
        if len(found) < len(published.files):
            raise NotThere(f"files in {target} were removed right after they were downloaded")
    bodies = [_read(published, file, found[file]) for file in published.files]
    where = ", ".join(dict.fromkeys(str(found[file].parent) for file in published.files))
    reason = f"{published.title} from {where} (content verified)"
    return Dataset(published.name, reason, bodies[0], bodies[1].long(), bodies[2], bodies[3].long())


def _find(published: Published, places: Sequence[Path]) -> dict[File, Path]:
    """Return the paths of the files that are there. Uncompressed files are preferred. Only regular files are considered."""
    found = {}
    for file, place, form in product(published.files, places, ("", ".gz")):
        path = place / (file.name + form)
        if file not in found and os.path.isfile(path):  # noqa: PTH113 (Path's own raises where a parent may not be read)
            found[file] = path
    return found


def _read(published: Published, file: File, path: Path) -> Tensor:
    """Return the images or labels of a file, uint8. Raises UserError for a file that is not the published one."""
    try:
        with files.opened_for_reading(path) as stream:
            content = bytearray(unpacked_file(published, file, stream.read(file.most_bytes)))
    except UNSOUND as error:
        raise UserError(f"{path} cannot be used ({why(error)}): check it, replace it, or remove it") from None
    return torch.frombuffer(content, dtype=torch.uint8, offset=file.header).view(file.shape)


def unpacked_file(published: Published, file: File, packed: bytes) -> bytes:
    """Return the published content of `packed`, which may be compressed. Raises UNSOUND if it is not the published one."""
    content, size = packed, file.header + prod(file.shape)
    if packed.startswith(b"\x1f\x8b"):
        with gzip.open(io.BytesIO(packed)) as stream:
            # One byte more than the published size: a small file may unpack to any number.
            content = stream.read(size + 1)
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != file.sha256:
        known = {each.sha256: f"{one.title}'s {each.name}" for one in PUBLISHED.values() for each in one.files}
        has = f"{len(content):,}" if len(content) <= size else "more"
        found = known.get(sha256, f"{has} bytes, of {size:,}, with sha256 {sha256[:12]}...")
        raise ValueError(f"not {published.title}'s {file.name} but {found}")
    return content


def _download(published: Published, missing: Sequence[File], target: Path) -> None:
    """Download files, as FILE.gz. The mirrors are tried in order; one that fails is not used again. Raises NotThere with
    each mirror and its error, and OSError if a file cannot be written."""
    from http.client import HTTPException  # importing http and ssl takes longer than loading cached data
    from urllib.parse import urlsplit

    deadline, left, problems = time.monotonic() + TOTAL_SECONDS, list(missing), []
    for mirror in published.mirrors:
        while left:
            try:
                packed = get(f"{mirror}{left[0].name}.gz", left[0].most_bytes, deadline)
                unpacked_file(published, left[0], packed)
            except (HTTPException, *UNSOUND) as error:  # HTTPException: a damaged chunk
                problems.append(f"{urlsplit(mirror).netloc}: {one_line(error)}")
                break
            atomic.write_atomically(target / f"{left.pop(0).name}.gz", packed)
    if left:
        raise NotThere("; ".join(problems))


def get(url: str, limit: int, deadline: float) -> bytes:
    """Return the body at `url`. Raises ValueError for more than `limit` bytes, TimeoutError after `deadline`
    (time.monotonic) or in a long silence, and what urllib raises."""
    import urllib.request

    body, problems = bytearray(), list[Exception]()
    over = threading.Event()

    def transfer() -> None:
        try:
            # Takes proxies from the environment. A redirect to http does no harm: the content is verified.
            request = urllib.request.Request(url, headers={"User-Agent": "hvdtrain"})
            with urllib.request.urlopen(request, timeout=DOWNLOAD_SILENCE_SECONDS) as answer:
                while len(body) <= limit and not over.is_set() and (part := answer.read1(1 << 18)):
                    body.extend(part)
        except Exception as error:
            problems.append(error)

    # urllib's timeout applies to each address of a host separately, and not to name resolution. Only a separate thread,
    # which is abandoned after the time limit, bounds the total.
    thread = threading.Thread(target=transfer, daemon=True, name="download")
    thread.start()
    received = -1  # bytes, when it was last looked
    while thread.is_alive() and received < len(body) and (left := deadline - time.monotonic()) > 0:
        received = len(body)
        thread.join(min(left, DOWNLOAD_SILENCE_SECONDS))
    over.set()
    if thread.is_alive():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not done after {TOTAL_SECONDS:.0f} seconds in total")
        raise TimeoutError(f"no answer in {DOWNLOAD_SILENCE_SECONDS:.2g} seconds")
    if problems:
        raise problems[0]
    if len(body) > limit:
        raise ValueError(f"sent more than the {limit:,} bytes that are possible")
    return bytes(body)


# The embedded digits: 1,797 scans from the UCI repository, for use without a network. Source, citation and licence (CC BY
# 4.0) are in digits.txt.
DIGITS_FILE = Path(__file__).with_name("digits.gz")
DIGITS_SHA256 = "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2"  # of the content
DIGITS, DIGIT_ROW = 1797, 65  # a row has 64 pixels from 0 to 16, then the label
LARGE_SIDE, MARGIN = 24, 2  # pixels: 8 x 8 is enlarged to 24 x 24, and padded to 28 x 28 like MNIST

# The rows are ordered by form, about 130 rows each. With a random split, the same handwriting would be in both sets: 98 %
# accuracy instead of 95 % for new handwriting. Therefore the last three forms, 382 rows, are the test set.
TRAIN_DIGITS = 1415


def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images, uint8 [1415, 1, 28, 28], training labels, int64 [1415], and 382 test images and labels.

    Raises UserError if the file in the package is damaged.
    """
    try:
        with gzip.open(DIGITS_FILE) as file:
            content = file.read(DIGITS * DIGIT_ROW + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{DIGITS_FILE} cannot be read ({error}): install hvdtrain again") from None
    if hashlib.sha256(content).hexdigest() != DIGITS_SHA256:
        raise UserError(f"{DIGITS_FILE} is not the file that hvdtrain came with: install hvdtrain again")
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(DIGITS, DIGIT_ROW)
    images = enlarge(rows[:, :64].view(DIGITS, 8, 8)).unsqueeze(1)
    labels = rows[:, 64].long()
    return images[:TRAIN_DIGITS], labels[:TRAIN_DIGITS], images[TRAIN_DIGITS:], labels[TRAIN_DIGITS:]


def enlarge(small: Tensor) -> Tensor:
    """Return uint8 [n, 8, 8] images (0 to 16) enlarged to uint8 [n, 28, 28] (0 to 255). Bilinear, align_corners=False.

    The weights are multiples of 1/6, computed as integers. All values stay below 2^24, so float32 is exact, and the result
    is the same on any processor and with any number of threads.
    """
    weights = torch.zeros(LARGE_SIDE, 8)
    for i in range(LARGE_SIDE):  # center of pixel i, in sixths of a small pixel: 2i - 2
        whole, sixths = divmod(min(max(2 * i - 2, 0), 42), 6)
        weights[i, whole] = 6 - sixths
        if sixths:
            weights[i, whole + 1] = sixths
    large = (weights @ small.float() @ weights.T).int()  # 0 to 16 * 36
    scaled = ((large * 255 + 288) // 576).to(torch.uint8)  # + 288: rounds to nearest
    return torch.nn.functional.pad(scaled, (MARGIN, MARGIN, MARGIN, MARGIN))
