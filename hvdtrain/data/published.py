"""The published files of MNIST and Fashion-MNIST, and what is wrong with a file that is none of them."""

import gzip
import hashlib
import io
import zlib
from dataclasses import dataclass
from math import prod

SIDE = 28  # pixels
GZIP = b"\x1f\x8b"  # the first bytes of a gzip file
UNSOUND = (OSError, EOFError, ValueError, zlib.error)  # what `unpacked`, and reading a file before it, may raise


class DownloadFailed(Exception):
    """The download failed. The message is one line with each mirror and its error."""


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
    def size(self) -> int:
        """Size of the uncompressed file in bytes."""
        return self.header + prod(self.shape)

    @property
    def most_bytes(self) -> int:
        """Size of the file in bytes, compressed or not, at most: gzip adds little to what cannot be compressed."""
        return self.size + self.size // 100 + 4096


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


def unpacked(published: Published, file: File, packed: bytes) -> bytes:
    """Return the published content of `packed`, which may be compressed. Raises UNSOUND if it is not the published one.

    At most one byte more than the published size is unpacked.
    """
    content = packed
    if packed.startswith(GZIP):
        with gzip.open(io.BytesIO(packed)) as stream:
            content = stream.read(file.size + 1)
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != file.sha256:
        known = {each.sha256: f"{one.title}'s {each.name}" for one in PUBLISHED.values() for each in one.files}
        size = f"{len(content):,}" if len(content) <= file.size else "more"
        found = known.get(sha256, f"{size} bytes, of {file.size:,}, with sha256 {sha256[:12]}...")
        raise ValueError(f"not {published.title}'s {file.name} but {found}")
    return content
