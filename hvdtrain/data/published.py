"""The published files of MNIST and Fashion-MNIST, and diagnosis of files that differ."""

import gzip
import hashlib
import io
import os
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

from hvdtrain.data import cache
from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError

SIDE = 28  # pixels


@dataclass(frozen=True)
class File:
    """One of the four files of a published dataset."""

    name: str  # uncompressed
    count: int  # images or labels
    sha256: str  # of the uncompressed content

    @property
    def shape(self) -> tuple[int, ...]:
        """[count, 28, 28] for images, [count] for labels."""
        return (self.count, SIDE, SIDE) if "images" in self.name else (self.count,)

    @property
    def header(self) -> int:
        """Size of the header: two zero bytes, 8 (unsigned bytes), number of dimensions, then 4 bytes per dimension."""
        return 4 + 4 * len(self.shape)

    @property
    def size(self) -> int:
        """Size of the uncompressed file in bytes."""
        return self.header + prod(self.shape)


@dataclass(frozen=True)
class Published:
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


class BadFile(UserError):
    """A file that exists but has the wrong content."""


def content_of(published: Published, file: File, path: Path) -> tuple[bytes, os.stat_result]:
    """Return the verified, uncompressed content of `path`, and the file's stat result. Raises BadFile.

    Memory use is limited by the size of the published content, even for malicious files.
    """
    try:
        with files.opened(path) as stream:
            stat = os.fstat(stream.fileno())
            if path.suffix == ".gz":
                # Limit the read: compressed data can be only slightly larger than the content.
                content, problem = gunzip(stream.read(file.size + file.size // 100 + 4096), file.size + 1)
            else:
                content, problem = stream.read(file.size + 1), ""
            if cache.identity(os.fstat(stream.fileno())) != cache.identity(stat):
                problem = "changed while it was read"
    except OSError as error:
        raise BadFile(f"{show(path)} cannot be read ({error.strerror or error}): check it, or remove it") from None
    problem = problem or problem_of(published, file, content)
    if not problem:
        return content, stat
    raise BadFile(f"{show(path)} {problem}: replace it by {published.title}'s {file.name}, or remove it")


def gunzip(packed: bytes, limit: int) -> tuple[bytes, str]:
    """Return at most `limit` bytes of unpacked content (to stop gzip bombs), and a description of the problem or ""."""
    try:
        with gzip.open(io.BytesIO(packed)) as file:
            content = file.read(limit)
        return content, "" if content else "is empty"
    except EOFError:
        return b"", "is truncated: the gzip file ends too early"
    except (OSError, zlib.error) as error:
        return b"", f"is damaged: not a valid gzip file ({error})"


def problem_of(published: Published, file: File, content: bytes) -> str:
    """Return what is wrong with `content` (truncated to the expected size + 1), or "" if it is the published one."""
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 == file.sha256:
        return ""
    for other in PUBLISHED.values():
        for candidate in other.files:
            if candidate.sha256 == sha256:
                return f"is {other.title}'s {candidate.name}, not {published.title}'s {file.name}"
    if not content:
        return "is empty"
    if content[:2] == b"\x1f\x8b":
        return "is compressed but its name does not end in .gz"
    if len(content) != file.size:
        size = f"{len(content):,}" if len(content) < file.size else "more"
        return f"is not {published.title}'s {file.name}: {size} bytes, not {file.size:,}"
    return f"is damaged or changed: its content has sha256 {sha256[:12]}..., the published one {file.sha256[:12]}..."


def show(path: Path | None) -> str:
    """Return a path for use in a one-line message."""
    return str(path) if str(path).isprintable() else repr(str(path))
