"""Rows of pictures among a slot's tokens: ids outside every vocabulary, and where they stand. No torch here.

An id of 64 bits is IMAGE + handle ROWS + i for row i of a picture. A handle stands for a digest (SHA-256) as long as the process lives, so
equal ids are equal rows and the prefix tree compares pictures as it compares tokens. A handle means nothing to another process: files and
events name digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from threading import Lock

from pyspec.vision.picture import Placed

IMAGE = 1 << 32
ROWS = 1 << 16  # ids of one picture
STORED = 0xFFFFFFFF  # what stands for the row of a picture where ids have 32 bits: in files, and where texts are hashed


def is_image(token: int) -> bool:
    """True for the id of a picture's row."""
    return token >= IMAGE


def image_id(handle: int, i: int) -> int:
    """The id of row `i` of a picture."""
    return IMAGE + handle * ROWS + i


def handle_of(token: int) -> int:
    """The handle of the picture whose row this id is."""
    return (token - IMAGE) // ROWS


def index_of(token: int) -> int:
    """The row of its picture that this id is."""
    return (token - IMAGE) % ROWS


@dataclass(frozen=True, slots=True)
class KnownImage:
    """A picture by its digest, which names the same rows everywhere, with its rows, and columns and rows of its tokens."""

    digest: bytes
    n_row: int
    nx: int
    ny: int


class Handles:
    """A small number for each picture that this process has seen. Safe to call from any thread."""

    def __init__(self) -> None:
        self._handles: dict[KnownImage, int] = {}
        self._images: list[KnownImage] = []
        self._lock = Lock()

    def of(self, digest: bytes, n_row: int, nx: int, ny: int) -> int:
        """The handle of a picture, the same at every call."""
        image = KnownImage(digest, n_row, nx, ny)
        with self._lock:
            if image not in self._handles:
                self._handles[image] = len(self._images)
                self._images.append(image)
            return self._handles[image]

    def image(self, handle: int) -> KnownImage:
        """The picture of a handle."""
        return self._images[handle]

    def digest(self, handle: int) -> bytes:
        """The digest of a handle."""
        return self._images[handle].digest


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """A picture in a slot's tokens, in plain integers.

    handle  of the picture
    first   the slot's row where it begins
    n_row   its rows
    nx, ny  columns and rows of its tokens: text behind it goes on max(nx, ny) positions after its first, where positions have three axes
    """

    handle: int
    first: int
    n_row: int
    nx: int
    ny: int

    @property
    def end(self) -> int:
        """The row behind its last."""
        return self.first + self.n_row

    @property
    def shift(self) -> int:
        """Rows that it has more than positions."""
        return self.n_row - max(self.nx, self.ny)


def shift_before(spans: Iterable[ImageSpan], row: int) -> int:
    """Rows less positions of a text row, by the pictures before it."""
    return sum(span.shift for span in spans if span.end <= row)


def spans_of(images: Iterable[Placed], handles: Handles) -> tuple[ImageSpan, ...]:
    """The pictures of a prompt as plain integers."""
    found = ((p.first, p.picture.n_row, p.picture.nx, p.picture.ny, p.picture.digest) for p in images)
    return tuple(
        ImageSpan(handles.of(digest, n_row, nx, ny), first, n_row, nx, ny)
        for first, n_row, nx, ny, digest in found
    )


def with_ids(tokens: Sequence[int], spans: Iterable[ImageSpan]) -> tuple[int, ...]:
    """The tokens of a text with the ids of its pictures' rows."""
    filled = list(tokens)
    for span in spans:
        first = image_id(span.handle, 0)
        filled[span.first : span.end] = range(first, first + span.n_row)
    return tuple(filled)


def routed(tokens: Sequence[int], images: Sequence[Placed]) -> Sequence[int]:
    """A prompt as those compare it who choose an engine: numbers below 2^20 for rows of pictures, which depend on their digests."""
    if not images:
        return tokens
    filled = list(tokens)
    for placed in images:
        words = [0x80000 + int.from_bytes(placed.picture.digest[i : i + 2]) for i in range(0, 32, 2)]
        end = placed.first + placed.picture.n_row
        filled[placed.first : end] = islice(cycle(words), placed.picture.n_row)
    return filled


def has_images(tokens: Sequence[int]) -> bool:
    """True if any of these ids is a picture's row."""
    return len(tokens) > 0 and max(tokens) >= IMAGE


def runs_of(tokens: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The pictures in a piece of a text: (place of the first row here, handle, index of that row in its picture)."""
    if not has_images(tokens):
        return
    before = 0
    for at, token in enumerate(tokens):
        if is_image(token) and (token != before + 1 or index_of(token) == 0):
            yield at, handle_of(token), index_of(token)
        before = token


def named(tokens: Sequence[int], handles: Handles) -> bytes:
    """What tells the pictures in a piece of a text from others, for digests of that piece: the digest of each, and which of its rows is the
    first one here, as 32 bits. Empty without pictures."""
    return b"".join(handles.digest(h) + i.to_bytes(4, "little") for _, h, i in runs_of(tokens))


def without_ids(tokens: Sequence[int]) -> list[int]:
    """The ids of a piece of a text in 32 bits: STORED for each row of a picture."""
    return [STORED if is_image(t) else t for t in tokens] if has_images(tokens) else list(tokens)
