"""Decodes an image and cuts what is trained on from it, as torchvision's transforms do, in less time."""

import contextlib
import functools
import importlib
import io
import math
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

LARGEST_IMAGE = 2**26  # pixels; larger JPEG images are decoded at 1/2, 1/4 or 1/8 of their width and height
# A reduced decode keeps at least this many times the wanted pixels in each direction: the filters of libjpeg and of
# torchvision's resize differ, in the mean by 5 grey levels with 1.0, by 0.9 with 2.25 (of the image in test_images.py).
# Pillow's Image.thumbnail has 2.0 (reducing_gap).
GAP = 2.25
# Of the endings of a folder's files. Trap: without a list, Pillow goes by the content alone, whatever the ending, and runs
# the program `gs` for PostScript; a JPEG 2000 of 829 bytes takes 0.9 GB.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
DEEP = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")  # Pillow's modes of grey images with more than 8 bits
AREA, RATIO = [0.08, 1.0], [3 / 4, 4 / 3]  # of a random part: torchvision's defaults (Szegedy et al. 2014)


class Prepare:
    """Converts the bytes of an image file to uint8 [3, side, side].

    Training: torchvision's RandomResizedCrop and RandomHorizontalFlip, with torch's global generator. Test: a center crop of
    7/8 of the shorter side.

    reduced: decode a JPEG image at 1/2, 1/4 or 1/8 of its size if what is cropped from it is still GAP times `side` pixels.
    """

    def __init__(self, side: int, *, train: bool, reduced: bool = False):
        self.side, self.train, self.reduced = side, train, reduced

    def __call__(self, content: bytes) -> Tensor:
        """Return the prepared image. Raises the decoder's exception if `content` is not an image."""
        size = jpeg_size(content) if self.reduced else None
        if not self.train:
            return self._middle(decode(content, scale_of(size, min(size), self._test_side()) if size else 1))
        if size is None:
            image = decode(content)
            return self._part(image, random_box(image.shape[1], image.shape[2]))
        top, left, height, width = random_box(*size)
        scale = scale_of(size, min(height, width), self.side)
        box = top // scale, left // scale, max(1, height // scale), max(1, width // scale)  # 1: of a very large image
        return self._part(decode(content, scale), box)

    def _part(self, image: Tensor, box: tuple[int, int, int, int]) -> Tensor:
        from torchvision.transforms.v2 import functional

        # Copying the crop to contiguous memory and resizing the copy is faster than resizing the view.
        part = functional.crop(image, *box).clone()
        resized: Tensor = functional.resize(part, [self.side, self.side], antialias=True)
        return functional.horizontal_flip(resized) if torch.rand(()) < 0.5 else resized

    def _middle(self, image: Tensor) -> Tensor:
        from torchvision.transforms.v2 import functional

        resized = functional.resize(image, [self._test_side()], antialias=True)
        center: Tensor = functional.center_crop(resized, [self.side, self.side])
        return center

    def _test_side(self) -> int:
        """Return the length in pixels to which the shorter side is resized for testing: 256 for 224."""
        return self.side * 8 // 7


def random_box(height: int, width: int) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random part."""
    from torchvision.transforms import RandomResizedCrop

    top, left, *size = RandomResizedCrop.get_params(torch.empty(3, height, width, device="meta"), AREA, RATIO)
    return top, left, size[0], size[1]


def scale_of(size: tuple[int, int], length: int, side: int) -> int:
    """Return 1, 2, 4 or 8: the divisor of the (height, width) `size` with which to decode a JPEG image, of which a part of
    `length` pixels is resized to `side`. The part keeps GAP * side pixels, unless the image is too large otherwise."""
    wanted = next(scale for scale in (8, 4, 2, 1) if scale == 1 or length >= scale * GAP * side)
    return max(wanted, least_scale(*size))


def least_scale(height: int, width: int) -> int:
    """Return 1, 2, 4 or 8: the least divisor of height and width that leaves at most LARGEST_IMAGE pixels, or 8."""
    return next(s for s in (1, 2, 4, 8) if s == 8 or math.ceil(width / s) * math.ceil(height / s) <= LARGEST_IMAGE)


def jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Return (height, width) of a JPEG image, or None if it is of another format. Raises the decoder's exception."""
    if not content.startswith(b"\xff\xd8"):
        return None
    simplejpeg = fast_decoder()
    if simplejpeg is not None:
        with contextlib.suppress(ValueError):  # for Pillow's better message
            height, width, *_ = simplejpeg.decode_jpeg_header(content)
            return height, width
    with opened_image(content) as image:
        return image.height, image.width


def decode(content: bytes, scale: int = 1) -> Tensor:
    """Return the decoded image as RGB, uint8 [3, height, width]. Raises ValueError or the decoder's exception.

    scale: 1, 2, 4 or 8; a JPEG image is decoded at 1 / scale of its height and width, rounded up.
    """
    # simplejpeg and Pillow both use libjpeg-turbo and give the same pixels, but Pillow copies them two more times.
    # torchvision.io is not used: it is deprecated in torchvision 0.29.
    simplejpeg = fast_decoder()
    if simplejpeg is not None:
        with contextlib.suppress(ValueError):  # try Pillow, which supports more formats or has a better message
            height, width, *_ = simplejpeg.decode_jpeg_header(content)
            if height * width <= LARGEST_IMAGE:
                # The least of its scales with at least these numbers of rows and columns, which is `scale`.
                least = dict(min_height=-(-height // scale), min_width=-(-width // scale)) if scale > 1 else {}
                return torch.from_numpy(simplejpeg.decode_jpeg(content, **least)).permute(2, 0, 1)
    from torchvision.transforms.v2.functional import pil_to_tensor

    with opened_image(content) as image:
        width, height = image.size
        scale = max(scale, least_scale(height, width))  # crops are resized further
        if scale > 1:
            image.draft("RGB", (width // scale, height // scale))  # without effect on other formats than JPEG
        if image.width * image.height > LARGEST_IMAGE:
            megapixels = image.width * image.height / 1e6
            raise ValueError(
                f"{megapixels:.0f} megapixels in {image.format}: at most {LARGEST_IMAGE / 1e6:.0f}: make it smaller"
            )
        if image.mode in DEEP:
            return grey_in_8_bits(pil_to_tensor(image)).expand(3, -1, -1).contiguous()
        pixels: Tensor = pil_to_tensor(image.convert("RGB"))
        return pixels


def grey_in_8_bits(image: Tensor) -> Tensor:
    """Return a grey image of 16 bits, or of numbers from 0 to 1, as uint8. Raises ValueError for other values."""
    values = image.double()
    most = 1.0 if image.is_floating_point() else 65535.0
    if values.min() < 0 or values.max() > most:
        raise ValueError(f"grey values from {values.min():g} to {values.max():g}: at most 0 to {most:g}: scale them")
    # Pillow's own conversion makes grey images of 16 bits white, or black.
    return (values * (255 / most)).round().byte()


def opened_image(content: bytes) -> "Image.Image":
    """Return a Pillow image whose pixels are not yet decoded. Raises ValueError if it has none of the FORMATS, or Pillow's
    exception."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"not an image of a known format: {', '.join(FORMATS)}") from error


@functools.cache
def fast_decoder() -> ModuleType | None:
    """Return simplejpeg, or None if it is not installed. Cached, so that the import is tried only once."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None
