"""Pictures of bodies: where they may come from, their limits, and their pixels. All of it runs on text threads."""

from __future__ import annotations

import hashlib
import re
import stat
import threading
import time
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from urllib.parse import unquote

from pyspec.errors import NotSupported, RequestError
from pyspec.request import EngineInfo
from pyspec.server.fetch import fetched
from pyspec.server.settings import ServerSettings
from pyspec.vision.picture import Picture
from pyspec.vision.pixels import DATA, LIMITS, from_base64, prepared, size_from_header
from pyspec.vision.projector import Projector, read_projector

SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]{0,20}):")
FILE = "file://"
KEPT_BYTES = 128 << 20  # of pixels: agents send the pictures of a conversation again with each turn
LARGE = (
    16 << 20
)  # pixels of a file: of these one is decoded at a time, because each takes 12 bytes while it is


class Media:
    """Reads pictures for one projector. Safe to use from several threads."""

    def __init__(self, projector: Projector, settings: ServerSettings) -> None:
        self.projector, self.limits = projector, settings.limits
        self._hosts, self._folder = settings.media_hosts, settings.media_path
        self._large = threading.Lock()
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()
        self._lock = threading.Lock()

    def content(self, url: str, until: float) -> bytes:
        """The bytes of a picture: a data URL, base64, or a URL if the settings allow it. until: time.monotonic() of the deadline.

        Raises RequestError, NotSupported.
        """
        if (data := DATA.match(url)) is not None:
            if data[1].lower() in ("audio", "video"):
                raise NotSupported(f"{data[1].lower()} input is out of scope")
            if data[1].lower() != "image":
                raise RequestError("want data:image/...;base64,...")
            return self._decoded(url[data.end() :])
        scheme = found[1].lower() if (found := SCHEME.match(url)) else ""
        if scheme in ("http", "https"):
            if not self._hosts:
                raise NotSupported(
                    "pictures are not fetched from URLs: send them as data:image/...;base64, or name hosts with --media-hosts"
                )
            left = min(self.limits.fetch_s, until - time.monotonic())
            return fetched(url, self._hosts, self.limits.fetch_bytes, left)
        if scheme == "file":
            return self._of_file(url[len(FILE) :] if url.startswith(FILE) else "")
        if scheme:
            raise RequestError("want data:image/...;base64,..., or base64 alone")
        return self._decoded(url)

    def _decoded(self, text: str) -> bytes:
        if len(text) > 4 * (LIMITS.n_byte // 3 + 1) + 1024:
            raise self._too_large()
        content = from_base64(text)
        if len(content) > LIMITS.n_byte:
            raise self._too_large()
        return content

    def _too_large(self) -> RequestError:
        return RequestError(f"an image may have {LIMITS.n_byte} bytes")

    def _of_file(self, name: str) -> bytes:
        """A file below the folder of --media-path; a relative name is taken from there."""
        if not self._folder:
            raise NotSupported("files are read only below the folder of --media-path")
        missing = RequestError("there is no such file below the folder of --media-path")
        try:
            root = Path(self._folder).resolve(strict=True)
            path = (root / unquote(name)).resolve(strict=True)
            if not path.is_relative_to(root) or not stat.S_ISREG(path.stat().st_mode):
                raise missing
            with path.open("rb") as file:
                content = file.read(LIMITS.n_byte + 1)
        except (OSError, ValueError, RuntimeError):
            raise missing from None
        if len(content) > LIMITS.n_byte:
            raise self._too_large()
        return content

    def n_row(self, content: bytes) -> int:
        """Rows that a picture gives to a prompt, by its size alone. Raises RequestError."""
        return self.projector.n_row(*self.projector.size_of(*size_from_header(content)))

    def picture(self, content: bytes) -> Picture:
        """A picture's pixels, ready to be encoded. Raises RequestError."""
        key = hashlib.sha256(content).digest()
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        width, height = size_from_header(content)
        with self._large if width * height > LARGE else nullcontext():
            made = prepared(self.projector, content)
        with self._lock:
            self._kept[key] = made
            while sum(one.pixels.nbytes for one in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return made


def media_of(info: EngineInfo, settings: ServerSettings) -> Media | None:
    """The reader of pictures for an engine; None if its model sees none. Raises ModelError for a projector that can not be read."""
    if not info.sees:
        return None
    low, high = info.image_min_tokens or None, info.image_max_tokens or None
    return Media(read_projector(Path(info.mmproj), low, high), settings)
