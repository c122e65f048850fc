"""Images in folders, `train/CLASS/*.jpg` and `val/CLASS/*.jpg`, as for torchvision's ImageFolder: an ordinary data set.

Only rank 0 lists the folders, and sends the list to the other ranks. Listing a million files on every rank at once would
overload a shared file system, and a single list cannot differ between ranks.
"""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.datasets.decoding import Prepare
from hvdtrain.engines import files, lines
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError, one_line, why
from hvdtrain.engines.portable import flattened, unflattened

UNREADABLE = -100  # the default ignore_index of torch's cross-entropy
GREY = 118  # of 255: the mean of ImageNet's pixels


class Images(Dataset[tuple[Tensor, int]], ABC):
    """Prepared images, uint8 [3, side, side], a quarter of the size of float32, and their classes.

    In place of one that cannot be read stands a grey one of class UNREADABLE.
    """

    def __init__(self, prepare: Prepare):
        self.prepare = prepare

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @abstractmethod
    def read(self, index: int) -> tuple[bytes, int]:
        """Return an image file and its class. Raises any exception."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return where an image is, for messages."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            content, label = self.read(index)
            return self.prepare(content), label
        except Exception as error:  # any exception of a decoder
            lines.warn_once(one_line(f"skipped: {self.name(index)}: {why(error)}"))
            # Batches keep their sizes, so that ranks need not tell each other. The class has no part in a loss.
            return torch.full((3, self.prepare.side, self.prepare.side), GREY, dtype=torch.uint8), UNREADABLE


class Listing(NamedTuple):
    """The files of one folder, as tensors."""

    names: Tensor  # uint8: the concatenated paths relative to the folder, in UTF-8
    ends: Tensor  # int64 [n]: the end of each path in `names`
    labels: Tensor  # int64 [n]

    def name(self, index: int) -> str:
        """Return the path of file `index`, relative to the folder."""
        start = int(self.ends[index - 1]) if index else 0
        return bytes(self.names[start : int(self.ends[index])].numpy()).decode(errors="surrogateescape")


class Folder(Images):
    """The images of one folder."""

    def __init__(self, root: Path, listing: Listing, prepare: Prepare):
        super().__init__(prepare)
        self.root, self.listing = root, listing

    def __len__(self) -> int:
        return len(self.listing.labels)

    def read(self, index: int) -> tuple[bytes, int]:
        return files.read_bytes(self.root / self.listing.name(index)), int(self.listing.labels[index])

    def name(self, index: int) -> str:
        return str(self.root / self.listing.name(index))


def open_folders(
    engine: Engine, data_dir: Path | None, side: int, *, reduced: bool = False
) -> tuple[Images, Images, int]:
    """Return the training and test sets in `data_dir`, and the number of classes. A collective. Raises UserError on every
    rank. reduced: see Prepare."""
    listed: object = None
    with engine.raising_together("folder"):
        if data_dir is None:
            message = "--dataset folder needs --data-dir: the directory that has train/ and val/"
            raise UserError(message, everywhere=True)
        for directory in (data_dir, data_dir / "train", data_dir / "val"):
            if not directory.is_dir():
                problem = "is not a directory" if directory.exists() else "does not exist"
                raise UserError(f"--data-dir: {directory} {problem}: name the directory that has train/ and val/")
        if engine.rank == 0:
            names, train = list_folder(data_dir / "train")
            test_names, test = list_folder(data_dir / "val")
            refuse_other_classes(names, test_names)
            listed = [len(names), *train, *test]
    classes, *parts = unflattened(*engine.broadcast_packed(*flattened(listed), "folder"))
    training = Folder(data_dir / "train", Listing(*parts[:3]), Prepare(side, train=True, reduced=reduced))
    return training, Folder(data_dir / "val", Listing(*parts[3:]), Prepare(side, train=False, reduced=reduced)), classes


def list_folder(root: Path) -> tuple[list[str], Listing]:
    """Return the class names and the files, in ImageFolder's order. Raises UserError if a class has no images."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    try:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        paths = [files_of_class(f"{root}/{name}", IMG_EXTENSIONS) for name in classes]
    except OSError as error:
        raise UserError(f"--data-dir: {error.filename} cannot be read ({error.strerror})") from error
    if not classes:
        shards = ": --dataset shards reads its tar files" * any(root.glob("*.tar"))
        raise UserError(f"--data-dir: {root} has no directory for each class{shards}")
    if empty := [name for name, those in zip(classes, paths, strict=True) if not those]:
        supported = f"Supported extensions are: {', '.join(IMG_EXTENSIONS)}"
        raise UserError(f"--data-dir: Found no valid file for the classes {', '.join(empty)}. {supported}")
    names = [path[len(str(root)) + 1 :].encode(errors="surrogateescape") for those in paths for path in those]
    ends = torch.tensor([len(name) for name in names]).cumsum(0)
    labels = torch.tensor([label for label, those in enumerate(paths) for _ in those])
    # As tensors, whose memory workers share: Python strings would be copied to each of them.
    return classes, Listing(torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8), ends, labels)


def files_of_class(directory: str, endings: tuple[str, ...]) -> list[str]:
    """Return the image files of one class, also those in directories below and behind links, in ImageFolder's order.

    Raises OSError, and UserError if a link leads to a directory above it.
    """
    found = []
    above: dict[str, set[tuple[int, int]]] = {}  # path of a directory -> devices and inodes of those above it
    # A link to a directory above is refused: torchvision follows it for 40 levels, and two of them 2**40 times.
    for path, names, in_it in os.walk(directory, followlinks=True):
        entry = Path(path).stat()
        place = entry.st_dev, entry.st_ino
        those = above.pop(path, set())
        if place in those:
            raise UserError(f"--data-dir: {path} leads to a directory above it: remove the link")
        above |= {f"{path}/{name}": those | {place} for name in names}
        found.append((path, [name for name in sorted(in_it) if name.lower().endswith(endings)]))
    return [f"{path}/{name}" for path, in_it in sorted(found) for name in in_it]


def refuse_other_classes(train: list[str], test: list[str]) -> None:
    """Raise UserError if the training and test sets have different classes."""
    for ours, theirs, where in ((train, test, "train"), (test, train, "val")):
        only = sorted(set(ours) - set(theirs))
        if only:
            more = f" and {len(only) - 1} more" if len(only) > 1 else ""
            raise UserError(
                f"--data-dir: train/ has {len(train)} classes, val/ has {len(test)}: {only[0]!r}{more} is only in {where}/"
            )
