"""Bytes of a picture's file to pixels of the size that an encoder takes: Pillow, no torch. Safe to call from threads.

Where decoders differ, this follows llama.cpp's: transparency is dropped, no rotation by EXIF, the first frame of an animation.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from base64 import b64decode
from binascii import Error
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pyspec.errors import ConfigError, PyspecError, RequestError
from pyspec.ranges import printable
from pyspec.vision.picture import Picture
from pyspec.vision.projector import ASPECT, Projector

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
DATA = re.compile(r"\s*data:([a-z]+)/[^;,]{1,80}(?:;[^;,]{1,80})*;\s*base64,", re.IGNORECASE)
"""The head of a data URL, and the first word of its media type."""


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """Limits of a picture's file. n_byte: bytes of the file; n_pixel: width times height; aspect: longest side over shortest"""

    n_byte: int = 20_000_000
    n_pixel: int = 64_000_000
    aspect: int = ASPECT


LIMITS = PictureLimits()


@cache
def pillow() -> ModuleType:
    """Pillow's `Image`. ConfigError if it is missing: a load with a projector calls this first."""
    try:
        from PIL import Image
    except ImportError as e:
        raise ConfigError(f"images need Pillow: pip install Pillow ({e})") from None
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # sizes are checked here
    return Image


def from_base64(text: str) -> bytes:
    """The bytes that a text stands for, with or without spaces, line ends and padding. Raises RequestError."""
    digits = "".join(text.split()).rstrip("=")
    try:
        return b64decode(digits + "=" * (-len(digits) % 4), validate=True)
    except (Error, ValueError):
        raise RequestError("it is not base64") from None


def size_from_header(data: bytes, limits: PictureLimits = LIMITS) -> tuple[int, int]:
    """(width, height) of a picture's file, from its header: nothing is decoded. RequestError if it is no picture or beyond a limit."""
    with _opened(data, limits) as image:
        width, height = image.size
        return width, height


def prepared(projector: Projector, source: bytes | Image, limits: PictureLimits = LIMITS) -> Picture:
    """The picture in a file's bytes, or one of Pillow's, decoded and scaled to the size that the encoder takes.

    Holds up to 12 bytes for each pixel of the file's picture while it runs. Raises RequestError that names the fault.
    """
    with _opened(source, limits) as image:
        width, height = projector.size_of(*image.size)
        pixels = fit_into(_colours(image), width, height, projector.kind.how)
    nx, ny = projector.grid(width, height)
    digest = sha256(projector.digest + width.to_bytes(4, "little") + height.to_bytes(4, "little"))
    digest.update(pixels.data)
    return Picture(digest.digest(), pixels, nx, ny, projector.n_row(width, height))


def fit_into(image: Image, width: int, height: int, how: str) -> NDArray[np.uint8]:
    """[height, width, 3] of an RGB picture: as it is if it has this size, else scaled to fit and centred on black."""
    if image.size == (width, height):
        return np.array(image)
    f32, by = np.float32, pillow().Resampling[how]
    w, h = image.size
    scale = min(f32(width) / f32(w), f32(height) / f32(h))
    new_w, new_h = (min(math.ceil(f32(n) * scale), most) for n, most in ((w, width), (h, height)))
    # two calls: one may take the height first, and rounds otherwise
    small = image.resize((new_w, h), by).resize((new_w, new_h), by)
    out = np.zeros((height, width, 3), np.uint8)
    x, y = (width - new_w) // 2, (height - new_h) // 2
    out[y : y + new_h, x : x + new_w] = np.asarray(small)
    return out


def _colours(image: Image) -> Image:
    """The frame as RGB: the colours under transparency, the high bytes of 16-bit grey."""
    image.load()
    if image.mode.startswith("I;16"):  # Pillow would clip these to 255
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return pillow().fromarray(grey).convert("RGB")
    if image.format == "GIF" and image.mode in ("L", "P"):
        return _first_of_gif(image)
    if "transparency" in image.info:
        image = image.copy()  # it may be the caller's
        del image.info["transparency"]
    return image.convert("RGB")


def _first_of_gif(image: Any) -> Image:
    """The first frame as llama.cpp's decoder gives it: transparent pixels are black. What a smaller frame leaves has the background's colour, red
    and blue exchanged, but the first colour of the palette is black there."""
    index, at = np.asarray(image), image.info.get("background", 0)
    table = image.global_palette.palette if image.global_palette else bytes(i // 3 for i in range(768))
    rgb = np.array(image.convert("RGB"))
    left = np.ones(index.shape, bool)
    x0, y0, x1, y1 = image.dispose_extent
    left[y0:y1, x0:x1] = False
    rgb[index == image.info.get("transparency", -1)] = 0
    rgb[left] = [*table[3 * at :][2::-1]] if 0 < at < len(table) // 3 else 0
    return pillow().fromarray(rgb)


@contextmanager
def _opened(source: Any, limits: PictureLimits) -> Iterator[Image]:
    """A picture whose header is within the limits; its pixels are not yet read. Pillow's errors inside become RequestError."""
    module = pillow()
    has_bytes = isinstance(source, bytes)
    if has_bytes and not source:
        raise RequestError("the image is empty")
    if has_bytes and len(source) > limits.n_byte:
        raise RequestError(f"the image has {len(source)} bytes; at most {limits.n_byte} are read")
    try:
        with (
            module.open(io.BytesIO(source), formats=FORMATS) if has_bytes else nullcontext(source)
        ) as image:
            _check_size(image.width, image.height, limits)
            yield image
    except PyspecError:
        raise
    except module.UnidentifiedImageError:
        raise RequestError(
            f"the image is none of {', '.join(FORMATS)}, or its header is damaged"
        ) from None
    except (module.DecompressionBombError, module.DecompressionBombWarning):
        raise RequestError(f"the image has more than {limits.n_pixel} pixels by its header") from None
    except Exception as e:  # noqa: BLE001 - decoders raise a dozen kinds of errors for damaged files
        raise RequestError(f"the image can not be decoded: {printable(str(e), 200)}") from None


def _check_size(width: int, height: int, limits: PictureLimits) -> None:
    said = f"the image has {width} x {height} pixels by its header"
    if width < 1 or height < 1:
        raise RequestError(f"{said}: none")
    if width * height > limits.n_pixel:
        raise RequestError(f"{said}; at most {limits.n_pixel} in all are read")
    if max(width, height) > limits.aspect * min(width, height):
        raise RequestError(f"{said}; one side may be {limits.aspect} times the other at most")
